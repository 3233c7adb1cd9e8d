"""Kills from outside: children that write event files are struck where the plan says, once each, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.faults.log import read_faults
from launcher.faults.outside import strike_from_outside
from moe_ckpt.events import TrainerStarted
from moe_ckpt.faults import Kill
from tests.report_runs import committed, line_of


class Children:
    """Processes of two ranks that do nothing, and their event files."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        (run / "events").mkdir()

    def start(self, rank: int, life: int = 0) -> None:
        process = self.processes[rank, life] = subprocess.Popen(["sleep", "100"])
        self.write(rank, TrainerStarted(pid=process.pid, host="here", life=life, device="cpu"))

    def commit(self, rank: int, iteration: int) -> None:
        self.write(rank, committed(iteration))

    def write(self, rank: int, event: object, end: str = "") -> None:
        with (self.run / "events" / f"rank{rank:04d}.jsonl").open("a") as file:
            file.write(line_of(1.0, rank, event) + end)

    def ended(self) -> dict[tuple[int, int], int]:
        """Return who has ended, waiting for those that were sent a signal, and of what."""
        for fault in read_faults(self.run):
            next(each for each in self.processes.values() if each.pid == fault.pid).wait(10)
        return {who: each.returncode for who, each in self.processes.items() if each.poll() is not None}


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path)
    yield started
    for process in started.processes.values():
        process.kill()
        process.wait(10)


def steps(*done: Callable[[], object]) -> Callable[[], bool]:
    """Return what lets one thing happen each time that it is asked whether the job goes on, and then ends it."""
    left = list(done)

    def goes_on() -> bool:
        if left:
            left.pop(0)()
            return True
        return False

    return goes_on


def test_a_kill_in_an_iteration_comes_once_the_one_before_is_committed(children: Children) -> None:
    seen: list[dict[tuple[int, int], int]] = []
    goes_on = steps(
        lambda: (children.start(0), children.start(1)),
        lambda: (children.commit(1, 1), children.commit(0, 2)),
        lambda: seen.append(children.ended()),
        lambda: children.commit(1, 2),
    )
    left = strike_from_outside(
        [Kill(rank=1, iteration=3)], children.run, world_size=2, parent_pid=os.getpid(), goes_on=goes_on
    )
    assert left == []
    assert seen == [{}]
    assert children.ended() == {(1, 0): -signal.SIGKILL}
    (fault,) = read_faults(children.run)
    assert (fault.rank, fault.iteration, fault.ordered) == (1, 3, False)


def test_no_life_is_struck_twice(children: Children) -> None:
    kills = [Kill(rank=0, after_s=0.0), Kill(rank=0, after_s=0.0, signal="TERM")]
    goes_on = steps(
        lambda: children.start(0),
        lambda: None,
        lambda: children.ended(),
        lambda: children.start(0, life=1),
        lambda: None,
    )
    left = strike_from_outside(kills, children.run, world_size=1, parent_pid=os.getpid(), goes_on=goes_on)
    assert left == []
    assert children.ended() == {(0, 0): -signal.SIGKILL, (0, 1): -signal.SIGTERM}


def test_times_count_from_the_first_trainer(children: Children) -> None:
    clock = iter([100.0, 100.0, 104.0, 106.0])
    goes_on = steps(lambda: None, lambda: children.start(0), lambda: None, lambda: None)
    struck_at: list[float] = []
    kills = [Kill(rank=0, after_s=5.0)]

    def now() -> float:
        struck_at.append(next(clock))
        return struck_at[-1]

    strike_from_outside(kills, children.run, world_size=1, parent_pid=os.getpid(), goes_on=goes_on, clock=now)
    assert children.ended() == {(0, 0): -signal.SIGKILL}
    assert struck_at[-1] == 106.0


def test_what_could_not_be_done_is_told(children: Children) -> None:
    goes_on = steps(lambda: children.start(0), lambda: None)
    left = strike_from_outside(
        [Kill(rank=0, iteration=9)], children.run, world_size=1, parent_pid=os.getpid(), goes_on=goes_on
    )
    assert [str(strike) for strike in left] == ["SIGKILL to rank 0 at once"]
    assert children.ended() == {}


def test_a_process_of_somebody_else_is_left_alone(children: Children) -> None:
    goes_on = steps(lambda: children.start(0), lambda: None)
    strike_from_outside(
        [Kill(rank=0, after_s=0.0)], children.run, world_size=1, parent_pid=os.getpid() + 1, goes_on=goes_on
    )
    assert children.ended() == {}


def test_a_half_written_line_is_read_when_it_is_whole(children: Children) -> None:
    path = children.run / "events" / "rank0000.jsonl"
    line = line_of(1.0, 0, committed(1))
    goes_on = steps(
        lambda: children.start(0),
        lambda: path.write_text(path.read_text() + line[:40]),
        lambda: path.write_text(path.read_text() + line[40:]),
    )
    left = strike_from_outside(
        [Kill(rank=0, iteration=2)], children.run, world_size=1, parent_pid=os.getpid(), goes_on=goes_on
    )
    assert left == []
    assert children.ended() == {(0, 0): -signal.SIGKILL}
