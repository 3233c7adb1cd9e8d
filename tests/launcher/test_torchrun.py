"""The commands of the README, as a newcomer types them: real torchrun, real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_ckpt.events import IterationCommitted, StateResumed, TrainerStarted
from tests.training import FAST, events_of

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(sys.executable).with_name("torchrun")
FASTER = tuple(setting for setting in FAST if setting != "run.progress=none")


def _start(*arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        arguments, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(process: subprocess.Popen[str], timeout_s: float = 120.0) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def _run(*arguments: str) -> tuple[int, str, str]:
    return _finish(_start(*arguments))


def _wait_for_iteration(folder: Path, iteration: int, process: subprocess.Popen[str]) -> None:
    path = folder / "events" / "rank0000.jsonl"
    while process.poll() is None:
        if path.exists() and any(e.iteration >= iteration for e in events_of(folder, IterationCommitted)):
            return
        time.sleep(0.02)  # the only signal another process gives is its file
    raise AssertionError(_finish(process))


def test_all_ranks_killed_torchrun_restarts_them_and_the_result_is_the_same(tmp_path: Path) -> None:
    command = (str(TORCHRUN), "--nproc-per-node=4", "--max-restarts=1", "launcher/train.py", *FASTER)
    settings = ("+ckpt=dense", "ckpt.every_iters=5", "train.iterations=30")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, out, err = _run(*command, *settings, f"run.dir={whole}")
    assert code == 0, err

    process = _start(*command, *settings, f"run.dir={killed}")
    _wait_for_iteration(killed, 12, process)
    for rank in range(4):
        os.kill(events_of(killed, TrainerStarted, rank)[-1].pid, signal.SIGKILL)
    code, killed_out, err = _finish(process)

    assert code == 0, err
    assert killed_out == out, "the last line names the digest"
    assert re.fullmatch(r"done: .* digest [0-9a-f]{64}\n", out)
    assert [event.life for event in events_of(killed, TrainerStarted)] == [0, 1]
    assert [event.iteration >= 10 for event in events_of(killed, StateResumed)] == [True]
    result, expected = (json.loads((folder / "result.json").read_text()) for folder in (killed, whole))
    assert result["digest_per_rank"] == expected["digest_per_rank"]
    assert (result["faults_survived"], expected["faults_survived"]) == (1, 0)


def test_a_rank_killed_by_the_script_is_replaced_and_the_result_is_the_same(tmp_path: Path) -> None:
    command = (str(TORCHRUN), "--nproc-per-node=4", "launcher/train.py", *FASTER, "train.iterations=20")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, out, err = _run(*command, f"run.dir={whole}")
    assert code == 0, err

    process = _start(*command, "+ckpt=moevement", f"run.dir={killed}")
    _wait_for_iteration(killed, 8, process)
    code, said, err = _run("scripts/inject_fault.sh", "--run", str(killed))
    assert code == 0, err
    struck = re.fullmatch(r"killed rank (\d) \(pid (\d+)\) of \S+ in generation 1, iteration \d+, \w+\n", said)
    assert struck, said
    code, killed_out, err = _finish(process)

    assert code == 0, err
    assert killed_out.splitlines()[-1] == out.splitlines()[-1], "the last line names the digest"
    assert f"rank {struck[1]} (pid {struck[2]}) died of SIGKILL" in killed_out + err
    assert [len(events_of(killed, TrainerStarted, rank)) for rank in range(4)] == [
        1 + (str(rank) == struck[1]) for rank in range(4)
    ]


def test_one_folder_for_all_ranks_and_lives_with_everything_in_it(tmp_path: Path) -> None:
    command = (str(TORCHRUN), "--nproc-per-node=2", "--max-restarts=1", str(ROOT / "launcher" / "train.py"), *FASTER)
    process = _start(*command, "ckpt=dense", "ckpt.every_iters=5", "train.iterations=20", cwd=tmp_path)
    while process.poll() is None and not (tmp_path / "outputs" / "latest").exists():
        time.sleep(0.02)
    latest = (tmp_path / "outputs" / "latest").resolve()
    _wait_for_iteration(latest, 7, process)
    os.kill(events_of(latest, TrainerStarted, 1)[-1].pid, signal.SIGKILL)
    code, _, err = _finish(process)

    assert code == 0, err
    assert [path.name for path in (tmp_path / "outputs").iterdir() if path.name != "latest"] == [latest.parent.name]
    assert list(latest.parent.iterdir()) == [latest]
    assert re.fullmatch(r"\d\d-\d\d-\d\d-tiny", latest.name)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", latest.parent.name)
    described = json.loads((latest / "run.json").read_text())
    assert described["packages"]["torch"]
    assert described["packages"]["megatron-core"]
    assert "ckpt=dense" in described["command"]
    assert "every_iters: 5" in (latest / "config.yaml").read_text()
    assert {path.name for path in (latest / "events").iterdir()} == {"rank0000.jsonl", "rank0001.jsonl"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train.itres=5",), "train.itres: no such setting, wanted one of the keys adam_beta1"),
        (("parallel.pp=3",), "parallel.pp * parallel.tp: got 3, wanted a divisor of 2 processes"),
        (("data=text", "data.path=/nowhere"), "data.path: got '/nowhere', wanted an existing file or folder"),
        (("run.dir=/proc/nowhere",), "run.dir: got '/proc/nowhere', wanted a folder that can be written"),
    ],
)
def test_bad_input_is_one_clear_error_and_a_failure_of_torchrun(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = _run(str(TORCHRUN), "--nproc-per-node=2", "launcher/train.py", *FASTER, *arguments)
    assert code != 0
    assert out == ""
    assert [line for line in err.splitlines() if line.startswith("error:")] == [
        line for line in err.splitlines() if message in line
    ]
    assert err.count(message) == 1


def test_without_torchrun_the_error_says_how_to_start() -> None:
    code, _, err = _run(sys.executable, "launcher/train.py")
    assert code != 0
    assert "torchrun --nproc-per-node=4 launcher/train.py" in err


def test_help_works_without_torchrun() -> None:
    code, out, err = _run(sys.executable, "launcher/train.py", "--help")
    assert code == 0, err
    assert "model: " in out
    assert "torchrun" in out
    assert "global_batch_size" in out
