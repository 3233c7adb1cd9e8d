"""`moe-ckpt prove` of attached commands: its runs, found differences and verdicts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.prove.__main__ import main
from launcher.prove.attached import AttachedProof, plan_faults
from launcher.prove.commands import MOMENTS, CheckedCommand, Variation, parse_command
from launcher.prove.compare import (
    Digests,
    first_changed,
    first_difference,
    read_digests,
)
from launcher.prove.runs import DIFFERENT, EXACT, NOT_PROVEN
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import (
    EventLog,
    ModelBuilt,
    Rejoined,
    StateDigest,
    StateResumed,
    TensorDigests,
    WorkerStarted,
)
from moe_ckpt.exactness import STATE
from moe_ckpt.faults.schedule import Kill, StateLoss
from moe_ckpt.run_settings import parse_run
from scripts.fetch_megatron_lm import FOLDER
from tests.harness.jobs.attached_jobs import ARGUMENTS, EXAMPLE
from tests.harness.jobs.training import fast

ROOT = Path(__file__).parents[2]
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
LOSS = StateLoss(iteration=9, stage=0, phase="step")
LAUNCHED = ("torchrun", "--nproc-per-node=2", "launcher/train.py")
ATTACHED = ("torchrun", "--nproc-per-node=2", "-m", "moe_ckpt.run")
SETTINGS = ["run.dir=there", "run.digest_every_iters=1", "run.digest_tensors=true"]


def parsed(words: Sequence[str], variable: str = "") -> CheckedCommand:
    """Parse a command with an attachment."""
    command = parse_command(words, variable)
    assert command is not None
    return command


def test_a_command_without_an_attachment_is_none_of_these() -> None:
    assert parse_command(["torchrun", "pretrain_gpt.py"]) is None


@pytest.mark.parametrize(
    "start", [LAUNCHED, ("moe-ckpt", "train", "--nproc-per-node=2")]
)
def test_the_launcher_gets_overrides_and_no_faults_of_its_own(
    start: tuple[str, ...],
) -> None:
    command = parsed(
        [
            *start,
            "+ckpt=moevement",
            "ckpt.window=2",
            "runtime.guard=true",
            "fault=none",
            "train.iterations=12",
        ]
    )
    assert command.loses_state
    assert command.varied(Variation(run=Path("there"), is_plain=True)) == [
        *(
            *start,
            "train.iterations=12",
            "ckpt=none",
            *SETTINGS,
            "run.leave_out=nothing",
        ),
    ]
    assert command.varied(
        Variation(run=Path("there"), losses=(LOSS,), leave_out=MOMENTS)
    ) == [
        *(
            *start,
            "+ckpt=moevement",
            "ckpt.window=2",
            "runtime.guard=true",
            "train.iterations=12",
            *SETTINGS,
        ),
        *(
            "run.leave_out=moments",
            "fault=state_loss",
            "fault.at=[{iteration: 9, stage: 0, phase: step, dp_rank: null}]",
        ),
    ]


@pytest.mark.parametrize("start", [ATTACHED, ("moe-ckpt", "run", "--nproc-per-node=2")])
def test_an_attached_run_gets_options_before_its_script(start: tuple[str, ...]) -> None:
    command = parsed(
        [*start, "--ckpt", "gemini", "--set", "every_iters=2", "train.py", "--set", "x"]
    )
    ours = [f"--set={setting}" for setting in (*SETTINGS, "run.leave_out=nothing")]
    own = ("--ckpt=gemini", "--set=every_iters=2")
    assert not command.loses_state
    wanted = [*start, *own, *ours, "--plain", "--", "train.py", "--set", "x"]
    assert command.varied(Variation(run=Path("there"), is_plain=True)) == wanted
    losing = command.varied(Variation(run=Path("there"), losses=(LOSS,)))
    assert (
        "--set=run.lose=[{iteration: 9, stage: 0, phase: step, dp_rank: null}]"
        in losing
    )
    assert parse_run(losing[len(start) :]).job.losses == (LOSS,)


def test_the_variable_gets_the_options_of_each_run() -> None:
    words = ["torchrun", "train.py", "--x"]
    command = parsed(words, "moevement --set window=2")
    ours = " ".join(
        f"--set={setting}" for setting in (*SETTINGS, "run.leave_out=nothing")
    )
    value = f"MOE_CKPT=--ckpt=moevement --set=window=2 {ours} --plain"
    assert command.loses_state
    assert command.varied(Variation(run=Path("there"), is_plain=True)) == [
        "env",
        value,
        *words,
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*ATTACHED, "--ckpt", "none", "--", "x.py"],
            "COMMAND: policy: got 'none', wanted one that recovers",
        ),
        ([*ATTACHED, "--"], "SCRIPT: got 'nothing', wanted the program that trains"),
        (
            [*LAUNCHED, "ckpt=none"],
            "COMMAND: policy: got 'none', wanted one whose supervisors replace",
        ),
        ([*LAUNCHED, "ckpt=genimi"], "In 'config': Could not find 'ckpt/genimi'"),
    ],
)
def test_a_command_that_cannot_be_proven_is_one_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--", *words]) == NOT_PROVEN
    out = capsys.readouterr()
    assert out.err.startswith(f"error: {message}")
    assert "Traceback" not in out.err


def test_kills_come_before_the_loss_of_state() -> None:
    plain = Digests(
        num_ranks=4, states={(iteration, 0): {"d"} for iteration in range(5, 17)}
    )
    faults = plan_faults(plain, loses_state=True)
    assert faults.kills == (
        Kill(rank=3, iteration=9, phase="forward"),
        Kill(rank=0, iteration=11, phase="backward"),
    )
    assert faults.losses == (StateLoss(iteration=14, stage=0, phase="step"),)
    assert plan_faults(plain, loses_state=False).losses == ()


def write_returns(
    run: Path, *logged: tuple[int, dict[str, str]], exactness: str = STATE
) -> None:
    """Write the events of a one-rank run that logs these digests one after another."""
    (run / "events").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"world_size": 1}))
    log = EventLog(
        run / "events" / "rank0000.jsonl", global_rank=0, clock_origin_unix_s=0.0
    )
    log.append(ModelBuilt(seconds=1.0, exactness=exactness))
    newest = 0
    for iteration, digests in logged:
        if iteration <= newest:
            log.append(
                StateResumed(
                    iteration=iteration,
                    source="a checkpoint",
                    seconds=1.0,
                    passed_over=[],
                )
            )
        newest = iteration
        log.append(StateDigest(iteration=iteration, digest="".join(digests.values())))
        log.append(TensorDigests(iteration=iteration, digests=digests))
    log.close()


REJOINED = Rejoined(
    generation=2,
    iteration=0,
    joined_unix_s=0.0,
    deaths=[],
    detect_s=0.0,
    rebuild_s=0.0,
    fetch_s=0.0,
    replay_s=0.0,
    fetched_bytes=0,
    executed_iters=0,
    classes=[],
)
A, B = {"weight": "a", "bias": "x"}, {"weight": "b", "bias": "y"}
OLDER, OTHER_BIAS = {"weight": "b", "bias": "x"}, {"weight": "b", "bias": "z"}


@pytest.mark.parametrize(
    ("logged", "count", "whole", "partial"),
    [
        # kernels may give the iteration after the recovery another result than before
        # the fault
        ([(1, A), (2, B), (3, A), (2, B), (3, OLDER), (4, A)], 1, "None", "None"),
        # a second recovery is compared with digests logged since the first recovery,
        # not with older digests
        ([(1, A), (2, B), (1, A), (2, A), (2, A)], 2, "None", "None"),
        (
            [(1, A), (2, B), (1, A), (2, A), (2, B)],
            2,
            "after iteration 2, rank 0: weight",
            "after iteration 2, rank 0",
        ),
        # if a policy saves some experts at a time, a tensor may be older than the rest,
        # but its digest must have been logged
        (
            [(1, A), (2, B), (3, A), (2, OLDER)],
            1,
            "after iteration 2, rank 0: bias",
            "None",
        ),
        (
            [(1, A), (2, B), (2, OTHER_BIAS)],
            1,
            "after iteration 2, rank 0: bias",
            "after iteration 2, rank 0: bias",
        ),
        # the rank dies before it logs the iteration
        ([(1, A), (2, B)], 0, "None", "None"),
    ],
)
def test_a_state_after_a_recovery_is_one_that_the_rank_had(
    tmp_path: Path,
    logged: list[tuple[int, dict[str, str]]],
    count: int,
    whole: str,
    partial: str,
) -> None:
    write_returns(tmp_path / "run", *logged)
    digests = read_digests(tmp_path / "run")
    assert (digests.exactness, len(digests.returns)) == (STATE, count)
    assert str(first_changed(digests, may_be_older=False)) == whole
    assert str(first_changed(digests, may_be_older=True)).startswith(partial)


def test_an_iteration_that_is_trained_again_is_no_recovery(tmp_path: Path) -> None:
    """All ranks may go back to the beginning, or begin anew.

    The state at the beginning has no digest.
    """
    began = WorkerStarted(pid=1, host="h", incarnation=0, device="cpu")
    other = TensorDigests(iteration=1, digests=B)
    write_returns(tmp_path / "run", (1, A))
    log = EventLog(
        tmp_path / "run" / "events" / "rank0000.jsonl",
        global_rank=0,
        clock_origin_unix_s=0.0,
    )
    for event in (
        replace(REJOINED, iteration=0),
        other,
        began,
        other,
        replace(REJOINED, iteration=1),
        other,
    ):
        log.append(event)
    log.close()
    assert len(read_digests(tmp_path / "run").returns) == 1
    assert first_changed(read_digests(tmp_path / "run"), may_be_older=False) is None


BACK, LACKING = [(1, A), (2, B), (2, B)], [(1, A), (2, B), (2, A)]


@pytest.mark.parametrize(
    ("faulty", "control", "status", "last"),
    [
        (
            BACK,
            LACKING,
            EXACT,
            "exact: all 1 digests under faults are those that the ranks had",
        ),
        (
            BACK,
            BACK,
            NOT_PROVEN,
            (
                "not proven: a recovery without Adam's first moments had digests that"
                " were those"
            ),
        ),
        (
            BACK[:2],
            LACKING,
            NOT_PROVEN,
            "not proven: no rank came back to an iteration whose digests it had logged",
        ),
        (
            LACKING,
            LACKING,
            DIFFERENT,
            "the rank had logged another digest of this tensor; logs and events: ",
        ),
    ],
)
def test_the_promise_of_states_has_a_verdict_of_its_own(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    faulty: list[tuple[int, dict[str, str]]],
    control: list[tuple[int, dict[str, str]]],
    status: int,
    last: str,
) -> None:
    """The plain run is not compared, because its kernels alone give other digests."""
    rest = [(iteration, A) for iteration in range(3, 9)]
    runs = {
        "plain": [(iteration, B) for iteration in range(1, 9)],
        "faults": faulty,
        "control": control,
    }

    def execute(command: Sequence[str], run: Path, kills: Sequence[Kill]) -> None:
        write_returns(run, *runs[command[0]], *(rest if command[0] != "plain" else []))

    assert AttachedProof(Command(), tmp_path, execute).run() == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


Values = Mapping[tuple[int, int], str]


def write_run(
    run: Path, changed: Values, num_ranks: int = 2, num_iters: int = 8
) -> None:
    """Write the event files of a run.

    Args:
        run: The folder of the run.
        changed: Digests of `weight` and `rng` that differ from `w`, by (iteration,
            rank).
        num_ranks: Number of ranks.
        num_iters: Number of iterations.
    """
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"world_size": num_ranks}))
    (run / "events").mkdir()
    for rank in range(num_ranks):
        log = EventLog(
            run / "events" / f"rank{rank:04d}.jsonl",
            global_rank=rank,
            clock_origin_unix_s=0.0,
        )
        for iteration in range(1, num_iters + 1):
            value = changed.get((iteration, rank), "w")
            log.append(StateDigest(iteration=iteration, digest=value))
            log.append(
                TensorDigests(
                    iteration=iteration,
                    digests={"bias": "b", "weight": value, "rng": value},
                )
            )
        log.close()


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, "None"),
        ({(5, 1): "x", (6, 0): "x"}, "after iteration 5, rank 1: weight"),
        ({(6, 0): "x", (6, 1): "x"}, "after iteration 6, rank 0: weight"),
    ],
)
def test_the_first_tensor_that_differs_is_named(
    tmp_path: Path, changed: Values, found: str
) -> None:
    write_run(tmp_path / "plain", {})
    write_run(tmp_path / "other", changed)
    plain, other = read_digests(tmp_path / "plain"), read_digests(tmp_path / "other")
    assert str(first_difference(plain, other)) == found


def test_a_digest_of_a_later_incarnation_counts_and_a_missing_one_too(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "plain", {})
    plain = read_digests(tmp_path / "plain")
    write_run(tmp_path / "short", {}, num_iters=7)
    missing = first_difference(plain, read_digests(tmp_path / "short"))
    assert str(missing) == "after iteration 8, rank 0: no digest in the compared run"
    write_run(tmp_path / "mended", {(3, 1): "x"})
    again = EventLog(
        tmp_path / "mended" / "events" / "rank0001.jsonl",
        global_rank=1,
        clock_origin_unix_s=0.0,
    )
    again.append(StateDigest(iteration=3, digest="w"))
    again.close()
    assert (
        str(first_difference(plain, read_digests(tmp_path / "mended")))
        == "after iteration 3, rank 1: weight"
    )


class Command:
    """A stand-in for a command, whose runs leave event files."""

    loses_state = True
    loses_tokens = False

    def varied(self, variation: Variation) -> list[str]:
        return [variation.run.name]


def leaving(values: Mapping[str, Values], num_iters: int = 8) -> Callable[..., None]:
    def execute(command: Sequence[str], run: Path, kills: Sequence[Kill]) -> None:
        write_run(run, values.get(command[0], {}), num_iters=num_iters)

    return execute


OTHER = {(5, 1): "x"}


@pytest.mark.parametrize(
    ("values", "status", "last"),
    [
        (
            {"control": OTHER},
            EXACT,
            (
                "exact: all 16 digests under faults are those of the plain run; the"
                " control's are"
            ),
        ),
        (
            {},
            NOT_PROVEN,
            (
                "not proven: a recovery without Adam's first moments had digests that"
                " were those of the plain run, too"
            ),
        ),
        (
            {"faults": OTHER, "control": OTHER},
            DIFFERENT,
            "two plain runs are equal, so the recovery is not exact; log",
        ),
        (
            {"faults": OTHER, "plain-again": {(2, 0): "y"}},
            NOT_PROVEN,
            (
                "the command is not deterministic: two plain runs differ after"
                " iteration 2, rank 0: weight"
            ),
        ),
    ],
)
def test_the_verdict_is_the_last_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: Mapping[str, Values],
    status: int,
    last: str,
) -> None:
    assert AttachedProof(Command(), tmp_path, leaving(values)).run() == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(last)
    assert len(lines) <= 5
    assert ("different: after iteration 5, rank 1: weight" in lines) == (
        "faults" in values
    )


def test_a_run_that_is_too_short_for_faults_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^COMMAND: got 5 iterations, wanted at least 6"
    ):
        AttachedProof(Command(), tmp_path, leaving({}, num_iters=5)).run()


def test_a_command_that_fails_is_an_error_with_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "launcher" / "train.py"
    script.parent.mkdir()
    script.write_text("raise SystemExit('no device')\n")
    command = [sys.executable, str(script), "ckpt=gemini"]
    assert main(["-o", str(tmp_path / "out"), "--", *command]) == NOT_PROVEN
    error = capsys.readouterr().err
    assert error.startswith("error: plain: ended with status 1; log: ")
    assert error.endswith("\nno device\n")


@pytest.mark.full
def test_a_run_of_the_launcher_is_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    settings = [setting for setting in fast() if not setting.startswith("run.")]
    command = [
        TORCHRUN,
        "--standalone",
        "--nproc-per-node=2",
        "launcher/train.py",
        "+ckpt=moevement",
        *settings,
    ]
    status = main(
        [
            "-o",
            str(tmp_path / "out"),
            "--",
            *command,
            "train.iterations=12",
            "parallel.pp=2",
        ]
    )
    assert (status, capsys.readouterr().err) == (EXACT, "")


@pytest.mark.full
@pytest.mark.skipif(
    not FOLDER.exists(),
    reason="get it by: .venv/bin/python scripts/fetch_megatron_lm.py",
)
def test_an_attached_run_is_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (FOLDER, ROOT))))
    options = (
        "--ckpt",
        "moevement",
        "--set",
        "window=2",
        "--set",
        "runtime.heartbeat_s=30",
    )
    command = [
        TORCHRUN,
        "--standalone",
        "--nproc-per-node=4",
        "-m",
        "moe_ckpt.run",
        *options,
        "--",
        str(EXAMPLE),
    ]
    status = main(
        ["-o", str(tmp_path / "out"), "--", *command, *ARGUMENTS, "--train-iters", "12"]
    )
    assert (status, capsys.readouterr().err) == (EXACT, "")
