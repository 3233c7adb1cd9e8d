"""The commands of the README, as a new user types them: real torchrun, real kills."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.prove.compare import first_changed, read_digests
from moe_ckpt.events import IterationCommitted, StateResumed, WorkerStarted
from tests.harness.jobs.references import Outcome, uninterrupted
from tests.harness.jobs.training import events_of, fast
from tests.scenarios import PP2, ROOT
from tests.waits import JOB_S

TORCHRUN = Path(sys.executable).with_name("torchrun")
FASTER = tuple(setting for setting in fast() if setting != "run.progress=none")
TWENTY = ("train.iterations=20",)
FORTY = ("train.iterations=40",)
"""Enough iterations for a script to start before the job ends, on a busy machine."""


def _start(*arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE")
    }
    return subprocess.Popen(
        arguments,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=JOB_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def _run(*arguments: str) -> tuple[int, str, str]:
    return _finish(_start(*arguments))


def _wait_for_iteration(
    folder: Path, iteration: int, process: subprocess.Popen[str]
) -> None:
    path = folder / "events" / "rank0000.jsonl"
    while process.poll() is None:
        if path.exists() and any(
            e.iteration >= iteration for e in events_of(folder, IterationCommitted)
        ):
            return
        time.sleep(0.02)  # only the file shows another process's progress
    raise AssertionError(_finish(process))


def _done(result: Outcome) -> str:
    """Return the end of the last line that a run with this outcome prints."""
    digests = chr(10).join(result.digest_per_rank)
    return f"digest {hashlib.sha256(digests.encode()).hexdigest()}\n"


def _wait_for_run_folder(work_dir: Path, process: subprocess.Popen[str]) -> Path:
    while process.poll() is None and not (work_dir / "outputs" / "latest").exists():
        time.sleep(0.02)  # only the file shows another process's progress
    return (work_dir / "outputs" / "latest").resolve()


def _check_run_folder(
    work_dir: Path, latest: Path, choice: str, iterations: int
) -> None:
    assert [
        path.name for path in (work_dir / "outputs").iterdir() if path.name != "latest"
    ] == [latest.parent.name]
    assert list(latest.parent.iterdir()) == [latest]
    assert re.fullmatch(r"\d\d-\d\d-\d\d-tiny", latest.name)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", latest.parent.name)
    described = json.loads((latest / "run.json").read_text())
    assert described["packages"]["torch"]
    assert described["packages"]["megatron-core"]
    assert choice in described["command"]
    assert f"iterations: {iterations}" in (latest / "config.yaml").read_text()
    assert {path.name for path in (latest / "events").iterdir()} == {
        "rank0000.jsonl",
        "rank0001.jsonl",
    }


def test_a_rank_killed_by_the_script_is_replaced_with_the_same_result(
    tmp_path: Path,
) -> None:
    command = (
        str(TORCHRUN),
        "--nproc-per-node=2",
        str(ROOT / "launcher" / "train.py"),
        *FASTER,
        *PP2,
        *FORTY,
    )
    process = _start(*command, "+ckpt=moevement", cwd=tmp_path)
    latest = _wait_for_run_folder(tmp_path, process)
    _wait_for_iteration(latest, 2, process)
    code, said, err = _run("scripts/inject_fault.sh", "--run", str(latest))
    assert code == 0, err
    struck = re.fullmatch(
        r"killed rank (\d) \(pid (\d+)\) of \S+ in generation 1, iteration \d+, \w+\n",
        said,
    )
    assert struck, said
    code, out, err = _finish(process)

    assert code == 0, err
    assert out.endswith(_done(uninterrupted(2, *PP2, *FORTY)))
    assert f"rank {struck[1]} (pid {struck[2]}) died of SIGKILL" in out + err
    assert [len(events_of(latest, WorkerStarted, rank)) for rank in range(2)] == [
        1 + (str(rank) == struck[1]) for rank in range(2)
    ]
    assert json.loads((latest / "result.json").read_text())["faults_survived"] == 1
    _check_run_folder(tmp_path, latest, "+ckpt=moevement", 40)


@pytest.mark.full
def test_killed_ranks_are_restarted_in_one_folder_with_the_same_result(
    tmp_path: Path,
) -> None:
    command = (
        str(TORCHRUN),
        "--nproc-per-node=2",
        "--max-restarts=1",
        str(ROOT / "launcher" / "train.py"),
        *FASTER,
    )
    process = _start(
        *command, "ckpt=dense", "ckpt.every_iters=5", *TWENTY, cwd=tmp_path
    )
    latest = _wait_for_run_folder(tmp_path, process)
    _wait_for_iteration(latest, 7, process)
    for rank in range(2):
        os.kill(events_of(latest, WorkerStarted, rank)[-1].pid, signal.SIGKILL)
    code, out, err = _finish(process)

    assert code == 0, err
    assert out.startswith("done: ")
    assert out.endswith(_done(uninterrupted(2, *TWENTY)))
    assert out.count("\n") == 1
    assert [event.incarnation for event in events_of(latest, WorkerStarted)] == [0, 1]
    assert [event.iteration >= 5 for event in events_of(latest, StateResumed)] == [True]
    assert json.loads((latest / "result.json").read_text())["faults_survived"] == 1
    _check_run_folder(tmp_path, latest, "ckpt=dense", 20)


NOISY_TRAIN = f"""
import runpy
import sys

sys.path.insert(0, {str(ROOT)!r})
from tests.harness.jobs.noise import add_noise

add_noise()
runpy.run_path({str(ROOT / "launcher" / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.full
def test_killed_ranks_are_restarted_with_a_state_from_before(tmp_path: Path) -> None:
    """Needs processes of torchrun: a restart is a new attempt in the same store."""
    script, run = tmp_path / "noisy_train.py", tmp_path / "run"
    script.write_text(NOISY_TRAIN)
    process = _start(
        *(str(TORCHRUN), "--nproc-per-node=2", "--max-restarts=1", str(script)),
        *(*FASTER, "ckpt=dense", "ckpt.every_iters=5", *TWENTY, f"run.dir={run}"),
        *("run.exactness=state", "run.digest_every_iters=1", "run.digest_tensors=true"),
    )
    _wait_for_iteration(run, 7, process)
    os.kill(events_of(run, WorkerStarted, 1)[-1].pid, signal.SIGKILL)
    code, _, err = _finish(process)

    assert code == 0, err
    assert [len(events_of(run, WorkerStarted, rank)) for rank in range(2)] == [2, 2]
    digests = read_digests(run)
    assert digests.exactness == "state"
    resumed = [event.iteration for event in events_of(run, StateResumed)]
    assert [each.iteration for each in digests.returns] == resumed * 2
    assert first_changed(digests, may_be_older=False) is None


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
