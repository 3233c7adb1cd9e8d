"""A supervised job that ends leaves no process and no shared memory.

A job that fails prints its error once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.fault_classes import count_faults_in
from launcher.loop import StagePasses
from moe_ckpt.events import StateResumed, WorkerStarted
from moe_ckpt.types import Phase
from tests.harness.jobs.elastic_job import ElasticJob
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import events_of
from tests.modes import let_others_in, open_to_others
from tests.scenarios import PP2, ROOT

LONG = (*PP2, "train.iterations=100000", "ckpt.window=2")


def _kill_the_agent(job: ElasticJob) -> None:
    os.kill(job.agent_pid, signal.SIGKILL)


def _interrupt_all(job: ElasticJob) -> None:
    """Interrupt all processes of a job, as Ctrl-C in a terminal does."""
    for pid in job.processes():
        # processes that received the signal first may have ended others already
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


def _end_the_agent(job: ElasticJob) -> None:
    os.kill(job.agent_pid, signal.SIGTERM)


def _kill_a_supervisor(job: ElasticJob) -> None:
    os.kill(job.worker(1).supervisor_pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "end", [_kill_the_agent, _interrupt_all, _end_the_agent, _kill_a_supervisor]
)
def test_nothing_is_left_of_a_job_that_was_ended(
    end: Callable[[ElasticJob], None], tmp_path: Path
) -> None:
    with ElasticJob(2, tmp_path, *LONG) as job:
        job.wait_until(1, 3)
        end(job)
        job.wait_for_failure()  # fails if anything is left


def test_nothing_is_left_where_the_agent_dies_during_a_recovery(tmp_path: Path) -> None:
    with ElasticJob(2, tmp_path, *LONG) as job:
        job.order(1, Phase.BACKWARD, iteration=4)
        job.hold(1, Phase.RECOVERY, incarnation=1)
        os.kill(job.agent_pid, signal.SIGKILL)
        job.wait_for_failure()


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nobody(
    tmp_path: Path,
) -> None:
    training = (*PP2, "train.iterations=10")
    settings = ("ckpt.window=2", "run.digest_every_iters=3")
    with ElasticJob(2, tmp_path, *training, *settings, setup=let_others_in) as job:
        held = job.hold(0, Phase.FORWARD, iteration=3)
        assert open_to_others(job.shared) == open_to_others(job.run) == []
        with ElasticJob(2, tmp_path / "second", *LONG, f"run.dir={job.run}") as second:
            said = second.wait_for_failure()
        os.kill(held, signal.SIGCONT)
        result = job.wait()
    assert open_to_others(job.run) == []
    assert said.count("error: run.dir: got ") == 1, said
    assert "wanted a folder of its own for every run" in said
    outcome, expected = outcome_of(job.run, result), uninterrupted(2, *training)
    assert outcome == expected
    assert outcome.digests == {
        iteration: expected.digests[iteration] for iteration in (3, 6, 9)
    }


def _let_rank_one_fail(error: Exception) -> None:
    train_on = StagePasses.train_on

    def failing(self: StagePasses, iteration: int) -> object:
        if (iteration, os.environ["RANK"]) == (4, "1"):
            raise error
        return train_on(self, iteration)

    StagePasses.train_on = failing  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("error", "says", "lives"),
    [
        (ZeroDivisionError("of the user"), "\nZeroDivisionError: of the user", 1),
        (
            RuntimeError("CUDA error: unspecified launch failure"),
            "error: rank 1 failed again in iteration 4 at the",
            2,
        ),
    ],
    ids=["of the program", "of a device, again"],
)
def test_an_error_in_training_ends_the_job(
    error: Exception, says: str, lives: int, tmp_path: Path
) -> None:
    with ElasticJob(
        2, tmp_path, *LONG, setup=functools.partial(_let_rank_one_fail, error)
    ) as job:
        said = job.wait_for_failure()
    assert said.count(says) == 1, said
    assert f"\n{type(error).__name__}: {error}" in said, "its traceback"
    assert [len(events_of(job.run, WorkerStarted, rank)) for rank in range(2)] == [
        1,
        lives,
    ]
    assert count_faults_in(job.run) == (
        {"error": 1} if lives == 1 else {"exception": 1, "error": 1}
    )


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "parallel.pp=3",
            "parallel.pp * parallel.tp: got 3, wanted a divisor of 2 processes",
        ),
        (
            "ckpt.network_interface=eth77",
            "ckpt.network_interface: got 'eth77', wanted one of",
        ),
        pytest.param(
            "ckpt.tls={certificate: /nowhere/a.pem, key: /nowhere/a.key, authority:"
            " /nowhere/all.pem}",
            "ckpt.tls.certificate: got '/nowhere/a.pem', wanted a file that can be read"
            " (No such file or directory)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_setting_that_cannot_be_is_one_error(
    setting: str, says: str, tmp_path: Path
) -> None:
    with ElasticJob(2, tmp_path, *LONG, setting) as job:
        said = job.wait_for_failure()
    assert (said.count(f"error: {says}"), said.count("error: ")) == (1, 1), said


def test_data_that_change_while_a_job_runs_end_it_and_lose_no_iteration(
    tmp_path: Path,
) -> None:
    """Needs processes: only a worker that is forked later reads the file again."""
    text, run = tmp_path / "text", tmp_path / "run"
    text.write_bytes((ROOT / "LICENSE").read_bytes())
    training = (*PP2, "train.iterations=16", "data=text", f"data.path={text}")
    settings = (*training, "ckpt.window=2", f"run.dir={run}")
    with ElasticJob(2, tmp_path / "start1", *settings) as job:
        job.run = run
        job.wait_until(1, 7)
        with text.open("ab") as file:
            file.write(b"one line more\n")
        job.kill(1)
        said = job.wait_for_failure()
    assert (said.count("error: data.path: got "), said.count("error: ")) == (1, 1), said
    [safe] = re.findall(
        r"safe to kill at iteration (\d+): all 2 ranks have it on disk", said
    )
    with ElasticJob(2, tmp_path / "start2", *settings) as job:
        said = job.wait_for_failure()
    assert said.count("\n  data.path: got ") == 1, said
    text.write_bytes((ROOT / "LICENSE").read_bytes())
    with ElasticJob(2, tmp_path / "start3", *settings) as job:
        job.run = run
        result = job.wait()
    assert [event.iteration for event in events_of(run, StateResumed)] == [int(safe)]
    assert outcome_of(run, result) == uninterrupted(2, *training)


@pytest.mark.full
def test_a_sick_place_ends_the_job_which_goes_on_elsewhere(tmp_path: Path) -> None:
    """Rank 0 is replaced, because the health command finds the place of rank 0 healthy.

    Then rank 1 dies at a sick place.
    """
    training = (
        *PP2,
        "train.iterations=24",
        "ckpt.window=2",
        f"run.dir={tmp_path / 'run'}",
    )
    with ElasticJob(
        2, tmp_path / "start1", *training, 'runtime.health="test $RANK != 1"'
    ) as job:
        job.run = tmp_path / "run"
        job.order(0, Phase.BACKWARD, iteration=5)
        job.wait_until(1, 9)
        job.kill(1)
        said = job.wait_for_failure()
    assert (
        "the place of rank 1, is sick, no worker is started there again:"
        " runtime.health='test $RANK != 1'" in said
    )
    assert [len(events_of(job.run, WorkerStarted, rank)) for rank in range(2)] == [2, 1]
    with ElasticJob(2, tmp_path / "start2", *training) as job:
        job.run = tmp_path / "run"
        result = job.wait()
    (resumed,) = events_of(job.run, StateResumed, 0)
    assert (resumed.source, resumed.iteration >= 6) == ("local disk", True)
    assert outcome_of(job.run, result) == uninterrupted(2, *PP2, "train.iterations=24")
