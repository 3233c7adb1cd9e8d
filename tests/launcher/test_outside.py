"""Kills from outside strike the planned workers once each, and no other process.

The workers are child processes that write event files.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.faults.log import read_faults
from launcher.faults.outside import inject_from_outside
from moe_ckpt.events import WorkerStarted
from moe_ckpt.faults.schedule import Kill
from tests.report_runs import committed, line_of


class Children:
    """Sleeping child processes of two ranks, and the event files of the ranks."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        (run / "events").mkdir()

    def start(self, rank: int, incarnation: int = 0) -> None:
        process = self.processes[rank, incarnation] = subprocess.Popen(["sleep", "100"])
        self.write(
            rank,
            line_of(
                1.0,
                rank,
                WorkerStarted(
                    pid=process.pid, host="here", incarnation=incarnation, device="cpu"
                ),
            ),
        )

    def commit(self, rank: int, iteration: int) -> None:
        self.write(rank, line_of(1.0, rank, committed(iteration)))

    def write(self, rank: int, text: str) -> None:
        with (self.run / "events" / f"rank{rank:04d}.jsonl").open("a") as file:
            file.write(text)

    def ended(self) -> dict[tuple[int, int], int]:
        """Return the exit statuses of ended processes, by rank and incarnation.

        Waits for the end of each process that was sent a signal.
        """
        for fault in read_faults(self.run):
            next(
                each for each in self.processes.values() if each.pid == fault.pid
            ).wait(10)
        return {
            incarnation: each.returncode
            for incarnation, each in self.processes.items()
            if each.poll() is not None
        }

    def inject(
        self, kills: Sequence[Kill], *done: Callable[[], object], **settings: Any
    ) -> list[str]:
        """Inflict kills while actions happen; return the kills that are left.

        Args:
            kills: The kills.
            *done: Actions, one before each look at the job. The job ends after the last
                one.
            **settings: Arguments of `inject_from_outside`, in place of the defaults
                here.
        """
        left = list(done)

        def goes_on() -> bool:
            if not left:
                return False
            left.pop(0)()
            return True

        given: dict[str, Any] = {"parent_pid": os.getpid(), "world_size": 1} | settings
        return [
            str(fault)
            for fault in inject_from_outside(kills, self.run, goes_on=goes_on, **given)
        ]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path)
    yield started
    for process in started.processes.values():
        process.kill()
        process.wait(10)


def nothing() -> None:
    """Do nothing, so that the injector looks at the job once more."""


def test_a_kill_in_an_iteration_comes_once_the_one_before_is_committed(
    children: Children,
) -> None:
    seen: list[dict[tuple[int, int], int]] = []
    left = children.inject(
        [Kill(rank=1, iteration=3)],
        lambda: (children.start(0), children.start(1)),
        lambda: (children.commit(1, 1), children.commit(0, 2)),
        lambda: seen.append(children.ended()),
        lambda: children.commit(1, 2),
        world_size=2,
    )
    assert (left, seen, children.ended()) == ([], [{}], {(1, 0): -signal.SIGKILL})
    (fault,) = read_faults(children.run)
    assert (fault.rank, fault.iteration, fault.ordered) == (1, 3, False)


def test_no_incarnation_is_killed_twice(children: Children) -> None:
    left = children.inject(
        [Kill(rank=0, after_s=0.0), Kill(rank=0, after_s=0.0, signal="TERM")],
        lambda: children.start(0),
        nothing,
        children.ended,
        lambda: children.start(0, incarnation=1),
        nothing,
    )
    assert (left, children.ended()) == (
        [],
        {(0, 0): -signal.SIGKILL, (0, 1): -signal.SIGTERM},
    )


def test_times_count_from_the_first_worker(children: Children) -> None:
    times_s = [100.0, 100.0, 104.0, 106.0]
    clock = iter(times_s)
    done = (nothing, lambda: children.start(0), nothing, nothing)
    children.inject([Kill(rank=0, after_s=5.0)], *done, clock=lambda: next(clock))
    assert children.ended() == {(0, 0): -signal.SIGKILL}
    assert list(clock) == [], "it takes all of them until 5 s have passed"


def test_kills_that_could_not_be_carried_out_are_told(children: Children) -> None:
    left = children.inject(
        [Kill(rank=0, iteration=9)], lambda: children.start(0), nothing
    )
    assert (left, children.ended()) == (["SIGKILL to rank 0 at once"], {})


def test_a_process_of_another_parent_is_left_alone(children: Children) -> None:
    kills = [Kill(rank=0, after_s=0.0)]
    children.inject(
        kills, lambda: children.start(0), nothing, parent_pid=os.getpid() + 1
    )
    assert children.ended() == {}


def test_a_half_written_line_is_read_when_it_is_whole(children: Children) -> None:
    line = line_of(1.0, 0, committed(1))
    left = children.inject(
        [Kill(rank=0, iteration=2)],
        lambda: children.start(0),
        lambda: children.write(0, line[:40]),
        lambda: children.write(0, line[40:]),
    )
    assert (left, children.ended()) == ([], {(0, 0): -signal.SIGKILL})
