"""`moe-ckpt prove` of commands without an attachment: runs and verdicts.

One of the commands is a user's own script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.prove.__main__ import main
from launcher.prove.resumed import ResumeProof
from launcher.prove.runs import (
    DIFFERENT,
    EXACT,
    NOT_PROVEN,
    Ended,
    RunFailedError,
    run_to_end,
)
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import EventLog, StateDigest, TensorDigests, WorkerStarted
from moe_ckpt.observation import Order, read_order
from scripts.fetch_megatron_lm import FOLDER, TAGS, sources_of
from tests.harness.jobs.attached_jobs import ARGUMENTS

ROOT = Path(__file__).parents[2]
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
NUM_ITERS = 8
COMMAND = ("torchrun", "train.py", "--save={run}")


def tensors(iteration: int, **changed: str) -> dict[str, str]:
    """Return the digests of the state after an iteration.

    Args:
        iteration: The iteration.
        **changed: Digests that replace the usual ones, by tensor.
    """
    return {"weight": f"w{iteration}", "rng": f"r{iteration}"} | changed


@dataclass
class Runs:
    """A stand-in for a command with one rank, whose digests change in some runs."""

    saved: int = 2
    """Iteration of the newest checkpoint at the kill."""

    changed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Digests that replace the usual ones, by the name of the run and by tensor.

    A replaced digest holds after all iterations that the last start of the run trains.
    """

    changed_before: Mapping[str, str] = field(default_factory=dict)
    """Digests that replace the usual ones before the kill, by tensor."""

    is_cut_off: bool = False
    """Whether the rank ends before it has logged the iteration of the kill."""

    loaded: Mapping[str, str] = field(default_factory=dict)
    """Digests that replace the usual ones of the loaded state, by tensor."""

    observes: bool = True
    """Whether the ranks of the command log digests."""

    statuses: tuple[int, ...] = (-9, 0)
    """Exit statuses of the two starts of a run with a kill."""

    starts: list[str] = field(default_factory=list)
    """Names of the logs of all starts, in order."""

    def execute(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> Ended:
        order = read_order(environment)
        assert order is not None
        assert command == ["torchrun", "train.py", f"--save={order.run}/own"]
        self.starts.append(log.stem)
        log.write_text("the last line\n")
        is_again = order.killed.exists()
        if self.observes:
            self._train(order, is_again=is_again)
        if order.kill_rank is None:
            return Ended(status=0, log=log)
        order.killed.touch()
        return Ended(status=self.statuses[is_again], log=log)

    def _train(self, order: Order, *, is_again: bool) -> None:
        run = Path(order.run)
        (run / "run.json").write_text('{"world_size": 1}')
        events = EventLog(
            run / "events" / "rank0000.jsonl", global_rank=0, clock_origin_unix_s=0.0
        )
        events.append(
            WorkerStarted(pid=1, host="h", incarnation=int(is_again), device="")
        )
        first, last = 1, NUM_ITERS
        changed = self.changed.get(run.name, {})
        if order.kill_rank is not None and not is_again:
            last, changed = order.kill_iteration - self.is_cut_off, self.changed_before
        if is_again:
            first = self.saved + 1
            events.append(
                TensorDigests(
                    iteration=self.saved, digests=tensors(self.saved, **self.loaded)
                )
            )
        for iteration in range(first, last + 1):
            is_sound = order.spoil_after_resume and iteration == first
            digests = tensors(iteration, **({} if is_sound else changed))
            events.append(StateDigest(iteration=iteration, digest=str(digests)))
            events.append(TensorDigests(iteration=iteration, digests=digests))
        events.close()


SPOILT = {"control": {"weight": "spoilt"}}
RNG = {"rng": "other"}


@pytest.mark.parametrize(
    ("runs", "status", "last"),
    [
        (
            Runs(changed=SPOILT),
            EXACT,
            (
                "exact: two runs are equal, and so is the resumed one, all 8 digests;"
                " the contr"
            ),
        ),
        (
            Runs(),
            NOT_PROVEN,
            "not proven: a resumed state that was changed had the same digests, too",
        ),
        (
            Runs(changed={"second": {"weight": "x"}}),
            DIFFERENT,
            (
                "different: two runs of the command, without a fault, differ after"
                " iteration 1, rank 0: weight"
            ),
        ),
        (
            Runs(changed={"killed": {"weight": "x", "rng": "y"}}, loaded=RNG),
            DIFFERENT,
            (
                "different: the resumed run differs after iteration 3, rank 0: weight\n"
                "as loaded, after iteration 2: rng (from rank 0)\n"
                "tensors that differ after any iteration, on any rank: rng, weight"
            ),
        ),
        (
            Runs(changed={"killed": RNG}),
            DIFFERENT,
            (
                "different: the resumed run differs after iteration 3, rank 0: rng\n"
                "tensors that differ after any iteration, on any rank: rng"
            ),
        ),
        (
            Runs(changed={"killed": RNG, **SPOILT}, changed_before=RNG),
            DIFFERENT,
            (
                "different: two runs of the command, before the kill, differ after"
                " iteration 1, rank 0: rng"
            ),
        ),
        # a rank that ends early has not logged the iteration that its checkpoint has
        (
            Runs(saved=4, is_cut_off=True, changed=SPOILT),
            EXACT,
            "exact: two runs are equal",
        ),
        (
            Runs(saved=0, changed=SPOILT),
            NOT_PROVEN,
            (
                "not proven: the command began anew after the kill, wanted a checkpoint"
                " from before iteration 4 ended"
            ),
        ),
    ],
)
def test_the_verdict_is_the_last_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    runs: Runs,
    status: int,
    last: str,
) -> None:
    assert ResumeProof(COMMAND, tmp_path, runs.execute).run() == status
    lines = capsys.readouterr().out.splitlines()
    assert "\n".join(lines[-last.count("\n") - 1 :]).startswith(last)


def test_a_launcher_that_restarts_its_ranks_is_not_started_again(
    tmp_path: Path,
) -> None:
    runs = Runs(statuses=(0, 0), changed=SPOILT)

    def execute(
        command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> Ended:
        ended = runs.execute(command, log, environment)
        order = read_order(environment)
        return (
            runs.execute(command, log, environment)
            if order and order.kill_rank == 0
            else ended
        )

    assert ResumeProof(COMMAND, tmp_path, execute).run() == EXACT
    assert runs.starts == ["first", "second", "killed", "killed", "control", "control"]


@pytest.mark.parametrize("status", [-9, 1, 0])
def test_a_command_that_the_kill_ended_is_started_again(
    tmp_path: Path, status: int
) -> None:
    """A shell may hide the status of all programs but its last one."""
    runs = Runs(changed=SPOILT, statuses=(status, 0))
    assert ResumeProof(COMMAND, tmp_path, runs.execute).run() == EXACT
    assert runs.starts == [
        "first",
        "second",
        "killed",
        "killed-resumed",
        "control",
        "control-resumed",
    ]


def test_named_tensors_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(changed={"killed": RNG, **SPOILT}, loaded=RNG)
    assert (
        ResumeProof(COMMAND, tmp_path / "a", runs.execute, ignored=["rng"]).run()
        == EXACT
    )
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("exact, except for rng: two runs are equal")
    )
    with pytest.raises(ConfigError, match=r"^--except: got 'rgn', wanted a name as"):
        ResumeProof(COMMAND, tmp_path / "b", runs.execute, ignored=["rgn"]).run()


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (
            Runs(observes=False),
            (
                r"^COMMAND: got no digests \(.*run.json\), wanted the loop of"
                r" Megatron-LM, Megatron-B"
            ),
        ),
        (
            Runs(statuses=(-9, 1)),
            r"^killed: ended with status 1; log: .*killed-resumed.log\nthe last line",
        ),
    ],
)
def test_a_run_that_fails_by_itself_is_an_error(
    tmp_path: Path, runs: Runs, message: str
) -> None:
    with pytest.raises(RunFailedError, match=message):
        ResumeProof(COMMAND, tmp_path, runs.execute).run()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND: got 'nothing', wanted the command that trains"),
        (
            ["torchrun", "train.py"],
            (
                "COMMAND: got 'torchrun train.py', wanted the folder of its checkpoints"
                " as {run} (-"
            ),
        ),
        (
            ["no-such-program", "{run}"],
            "COMMAND: got 'no-such-program', wanted a program",
        ),
    ],
)
def test_a_command_that_cannot_be_proven_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["-o", str(tmp_path / "out"), "--", *words]) == NOT_PROVEN
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert "Traceback" not in error


OWN_SCRIPT = """
import sys
from pathlib import Path

import torch

from moe_ckpt.observe import observe


def train(folder, forgotten):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    parts = {"model": model, "optimizer": optimizer}
    file, done = Path(folder, "checkpoint.pt"), 0
    if file.exists():
        saved = torch.load(file)
        done = saved["iteration"]
        for name, part in parts.items():
            if name != forgotten:
                part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])
    for iteration in range(done + 1, 9):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        observe(iteration, **parts)
        if iteration % 2 == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(states | {"iteration": iteration, "rng": torch.get_rng_state()}, file)


train(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("forgotten", "status", "last"),
    [
        (
            "nothing",
            EXACT,
            "exact: two runs are equal, and so is the resumed one, all 8 digests",
        ),
        pytest.param(
            "optimizer",
            DIFFERENT,
            "different: the resumed run differs after iteration 3, rank 0:"
            " model.0.weight",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_script_of_ones_own_is_proven(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    forgotten: str,
    status: int,
    last: str,
) -> None:
    """Needs processes: only they show that Python starts observed.

    Only processes also show that a kill ends a run, and that a second start follows.
    """
    script = tmp_path / "train.py"
    script.write_text(OWN_SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, str(script), "{run}", forgotten]
    assert main(["-o", str(tmp_path / "out"), "--", *command]) == status
    out = capsys.readouterr().out.splitlines()
    assert any(line.startswith(last) for line in out)
    assert out[2].startswith(
        "killed: rank 0 killed after iteration 4, resumed after iteration 2 (8"
        " iterations, 1 ranks"
    )


NEWEST = sources_of(TAGS[0])
SAVING = (
    "--save",
    "{run}",
    "--load",
    "{run}",
    "--save-interval",
    "2",
    "--ckpt-format",
    "torch_dist",
)


@pytest.mark.full
@pytest.mark.skipif(
    not NEWEST.exists(),
    reason=f"get it by: .venv/bin/python scripts/fetch_megatron_lm.py {TAGS[0]}",
)
@pytest.mark.parametrize(
    ("own", "options", "status", "found"),
    [
        (
            (),
            (),
            DIFFERENT,
            [
                "different: the resumed run differs after iteration 3, rank 0: rng.cpu",
                # a checkpoint has one rank's generators for all ranks with the same
                # dense weights
                (
                    "as loaded, after iteration 2: rng.cpu (from rank 0),"
                    " rng.expert-parallel-rng (from rank 1)"
                ),
                (
                    "tensors that differ after any iteration, on any rank: rng.cpu,"
                    " rng.expert-parallel-rng"
                ),
            ],
        ),
        (
            ("--except=rng.cpu", "--except=rng.expert-parallel-rng"),
            (),
            EXACT,
            [
                "exact, except for rng.cpu, rng.expert-parallel-rng: two runs are"
                " equal, and so is the resumed one"
            ],
        ),
        (
            (),
            ("--no-load-optim",),
            DIFFERENT,
            [
                "different: the resumed run differs after iteration 3, rank 0: model0.",
                (
                    "as loaded, after iteration 2: optimizer0.0.lr (from rank 0),"
                    " optimizer0.0.0.exp_avg (from rank 0)"
                ),
            ],
        ),
    ],
)
def test_megatron_lms_own_script_resumes_all_but_two_generators(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[str, ...],
    options: tuple[str, ...],
    status: int,
    found: list[str],
) -> None:
    """Needs processes: only they show whether Megatron-LM's own resume is exact."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, NEWEST, FOLDER))))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    # no dropout, because dropout on a CPU draws from the CPU's generator; no sharded
    # optimizer, because Megatron-Core cannot load a sharded optimizer of torch's Adam,
    # which a CPU has
    arguments = [word for word in ARGUMENTS if word != "--use-distributed-optimizer"]
    arguments += [
        "--train-iters",
        "8",
        "--eval-interval",
        "100",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
    ]
    command = [
        TORCHRUN,
        "--standalone",
        "--nproc-per-node=4",
        str(NEWEST / "pretrain_gpt.py"),
        *arguments,
        *SAVING,
    ]
    assert main(["-o", str(tmp_path / "out"), *own, "--", *command, *options]) == status
    lines = capsys.readouterr().out.splitlines()
    assert [
        start for start in found if not any(line.startswith(start) for line in lines)
    ] == []


def test_a_late_command_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    """Needs processes: only the kernel shows which processes of a shell are left."""
    pid = tmp_path / "pid"
    command = ["bash", "-c", f"sleep 1000 & echo $! > {pid}; wait"]
    with pytest.raises(RunFailedError, match=r"^--limit-s: got 0\.5, wanted more: "):
        run_to_end(command, tmp_path / "log", limit_s=0.5)
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
