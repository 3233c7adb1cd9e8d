"""Guards as real processes: who is replaced, who is given up, who is killed for hanging, and what goes with a guard."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.runtime.guard import Guard, GuardLimits, die_with_parent
from moe_ckpt.runtime.heartbeat import start_heartbeat
from moe_ckpt.runtime.membership import Generations
from moe_ckpt.runtime.page import Page
from moe_ckpt.types import Phase
from tests.ranks import _CONTEXT
from tests.runtime.trainers import WAIT_S, open_store
from tests.waits import START_S

HANG_S = 1.0
PATIENT = GuardLimits(heartbeat_s=WAIT_S, progress_s=WAIT_S, max_deaths=3)
Act = Callable[[Page], int | None]


def guard_main(
    connection: Connection, folder: str, limits: GuardLimits, start_keeper: Callable[[], int] | None = None
) -> None:
    """Guard the only rank of a job; what guard and trainers say goes to a file."""
    fd = os.open(Path(folder) / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, sys.stderr.fileno())
    page = Page(Path(folder) / "page")
    generations = Generations(open_store(folder))
    sys.exit(Guard(0, page, generations, lambda life: train(life, page, connection), limits, start_keeper).run())


def train(life: int, page: Page, connection: Connection) -> int:
    """Do with the page what the test tells, and nothing else; end with the status that one of these acts returns."""
    start_heartbeat(page)
    connection.send((life, os.getpid(), os.getppid()))
    while True:
        act: Act = connection.recv()
        status = act(page)
        if isinstance(status, int):
            return status
        connection.send("done")


def join_first_generation(page: Page) -> None:
    page.join(1)


def return_three(page: Page) -> int:
    return 3


def return_zero(page: Page) -> int:
    return 0


def fail(page: Page) -> None:
    raise ValueError("the user's own error")


class Guarded:
    """A guard, and the hand on its trainers."""

    def __init__(self, folder: Path, limits: GuardLimits, main: Callable[..., None] = guard_main) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.generations = Generations(open_store(str(folder)))
        self.page = Page(folder / "page")
        self._said = folder / "said"
        self._connection, theirs = _CONTEXT.Pipe()
        self.guard = _CONTEXT.Process(target=main, args=(theirs, str(folder), limits))
        self.guard.start()
        theirs.close()
        self._pidfd = 0
        self.meet_trainer()

    def meet_trainer(self) -> None:
        """Wait for the next trainer."""
        if self._pidfd:
            os.close(self._pidfd)
        self.life, self.pid, self.guard_pid = self._hear()
        self._pidfd = os.pidfd_open(self.pid)

    def tell(self, act: Act) -> None:
        """Let the trainer do something; wait until it has."""
        self._connection.send(act)
        assert self._hear() == "done"

    def tell_last(self, act: Act) -> None:
        """Let the trainer do something that ends it."""
        self._connection.send(act)

    def kill_trainer(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait_for_trainers_end(self, timeout_s: float = WAIT_S) -> None:
        wait_for_end(self._pidfd, timeout_s)

    def exit_status(self) -> int | None:
        self.guard.join(WAIT_S)
        return self.guard.exitcode

    def said(self) -> str:
        return self._said.read_text()

    @property
    def has_no_successor(self) -> bool:
        """Whether, now that the guard has ended, no other trainer had begun."""
        try:
            return not self._connection.recv()
        except EOFError:
            return self.generations.life(0) == self.life

    def end(self) -> None:
        self.guard.kill()
        self.wait_for_trainers_end()
        os.close(self._pidfd)
        self.guard.join()
        self.guard.close()
        self._connection.close()

    def _hear(self) -> Any:
        assert self._connection.poll(START_S), f"a trainer says nothing: {self.said()}"
        return self._connection.recv()


def wait_for_end(pidfd: int, timeout_s: float = WAIT_S) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(1000 * timeout_s), "a process lives on"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    """Start a guard with these limits, else those that no test reaches."""
    with ExitStack() as stack:

        def start(main: Callable[..., None] = guard_main, folder: Path | None = None, **limits: float) -> Guarded:
            folder = folder or tmp_path / f"guard{len(list(tmp_path.iterdir()))}"
            guarded = Guarded(folder, replace(PATIENT, **limits), main)
            stack.callback(guarded.end)
            return guarded

        yield start


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_trainer_killed_by_a_signal_is_replaced_by_its_next_life(guarded, number: signal.Signals) -> None:
    rank = guarded()
    assert (rank.life, rank.generations.life(0), rank.generations.current()) == (0, 0, 1)
    rank.tell(join_first_generation)
    rank.tell(methodcaller("enter", Phase.BACKWARD, 7))
    dead = rank.pid
    rank.kill_trainer(number)
    rank.meet_trainer()
    assert (rank.life, rank.generations.life(0), rank.pid != dead) == (1, 1, True)
    assert (rank.page.generation, rank.page.iteration, rank.page.phase) == (0, 0, Phase.BUILD)
    [death] = rank.generations.deaths(1)
    assert (death.global_rank, death.pid, death.signal, death.why) == (0, dead, number.name, f"died of {number.name}")
    assert (death.iteration, death.phase) == (7, "backward")
    assert 0 <= death.detect_s < WAIT_S
    assert rank.generations.current() == 2
    assert rank.generations.wait_for_end(1) == str(death)


def test_a_death_before_joining_ends_nobodys_generation(guarded) -> None:
    rank = guarded()
    rank.generations.current()
    rank.kill_trainer()
    rank.meet_trainer()
    assert (rank.life, rank.generations.current(), rank.generations.has_ended(1)) == (1, 1, False)
    assert "died of SIGKILL in build" in rank.said()


@pytest.mark.parametrize(("act", "status"), [(return_zero, 0), (return_three, 3), (fail, 1)])
def test_an_exit_status_is_passed_on_and_not_repaired(guarded, act: Act, status: int) -> None:
    rank = guarded()
    rank.tell(join_first_generation)
    rank.tell_last(act)
    assert rank.exit_status() == status
    assert rank.has_no_successor
    assert not rank.generations.has_ended(1)
    assert ("ValueError: the user's own error" in rank.said()) == (act is fail)


def test_too_many_deaths_without_progress_are_given_up(guarded) -> None:
    rank = guarded(max_deaths=3)
    for life in range(3):
        assert rank.life == life
        rank.tell(methodcaller("enter", Phase.STEP, 4))
        rank.kill_trainer()
        if life < 2:
            rank.meet_trainer()
    assert rank.exit_status() == 1
    assert rank.has_no_successor
    wanted = "error: rank 0 died 3 times in a row without progress (runtime.max_deaths=3), giving up; the last time: "
    assert f"{wanted}rank 0 (pid {rank.pid}) died of SIGKILL in step of iteration 4" in rank.said()


def test_progress_lets_the_count_of_deaths_begin_anew(guarded) -> None:
    rank = guarded(max_deaths=3)
    for iteration in (1, 2, 5, 6, 3):
        rank.tell(methodcaller("enter", Phase.STEP, iteration))
        rank.kill_trainer()
        rank.meet_trainer()
    rank.tell(methodcaller("enter", Phase.STEP, 4))  # what was done before is no progress
    rank.kill_trainer()
    assert rank.exit_status() == 1
    assert "died 3 times in a row" in rank.said()


def test_a_stopped_trainer_is_killed_and_replaced(guarded) -> None:
    rank = guarded(heartbeat_s=HANG_S)
    rank.tell(join_first_generation)
    rank.kill_trainer(signal.SIGSTOP)
    rank.meet_trainer()
    [death] = rank.generations.deaths(1)
    assert death.signal == "SIGKILL"
    assert death.why == "hung: no heartbeat for runtime.heartbeat_s=1 seconds, killed"
    assert death.detect_s >= HANG_S


def test_a_wedged_trainer_is_killed_but_not_one_that_waits_for_others(guarded) -> None:
    waiting = guarded(progress_s=HANG_S)
    waiting.tell(join_first_generation)
    waiting.tell(methodcaller("wait", True))
    wedged = guarded(progress_s=HANG_S)  # later: when it is found, the other has waited for longer
    wedged.tell(join_first_generation)
    wedged.meet_trainer()
    [death] = wedged.generations.deaths(1)
    assert death.why == f"hung: no progress for runtime.progress_s={HANG_S:g} seconds, killed"
    assert death.detect_s < HANG_S, "its heart was beating"
    waiting.tell(methodcaller("enter", Phase.STEP, 9))
    assert waiting.life == 0
    waiting.tell(methodcaller("wait", False))
    waiting.meet_trainer()
    [death] = waiting.generations.deaths(1)
    assert (death.iteration, death.why[:17]) == (9, "hung: no progress")


def test_a_death_after_the_jobs_end_is_none(guarded) -> None:
    rank = guarded()
    rank.tell(join_first_generation)
    rank.generations.done(1, 1)
    rank.kill_trainer()
    assert rank.exit_status() == 0
    assert rank.has_no_successor
    assert not rank.generations.has_ended(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_guard_that_is_told_to_stop_stops_its_trainer(guarded, number: signal.Signals) -> None:
    rank = guarded()
    os.kill(rank.guard_pid, number)
    assert rank.exit_status() == 128 + number
    rank.wait_for_trainers_end(0.0)
    assert rank.has_no_successor


@pytest.mark.parametrize("stopped", [False, True])
def test_a_trainer_does_not_outlive_a_killed_guard(guarded, stopped: bool) -> None:
    rank = guarded()
    if stopped:
        rank.kill_trainer(signal.SIGSTOP)
    os.kill(rank.guard_pid, signal.SIGKILL)
    rank.wait_for_trainers_end()


def agent_main(connection: Connection, folder: str, limits: GuardLimits) -> None:
    """Start a guard as torchrun's agent does."""
    pid = os.fork()
    if pid == 0:
        guard_main(connection, folder, limits)
    os.waitpid(pid, 0)


def test_nothing_outlives_a_killed_agent(guarded) -> None:
    rank = guarded(agent_main)
    assert rank.guard_pid != rank.guard.pid
    guard = os.pidfd_open(rank.guard_pid)
    rank.guard.kill()
    rank.wait_for_trainers_end()
    wait_for_end(guard)
    os.close(guard)


def test_a_guard_that_is_started_again_goes_on_with_the_next_life(guarded) -> None:
    earlier = guarded()
    earlier.generations.current()
    os.kill(earlier.guard_pid, signal.SIGTERM)
    assert earlier.exit_status() == 128 + signal.SIGTERM
    later = guarded(folder=earlier.folder)
    assert (later.life, later.generations.life(0), later.generations.current()) == (1, 1, 2)
    assert later.generations.wait_for_end(1) == "guard of rank 0 was started again"


def guard_with_keepers(connection: Connection, folder: str, limits: GuardLimits) -> None:
    """Guard with keepers that do nothing but say their pid."""
    guard_pid = os.getpid()

    def start_keeper() -> int:
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL, parent=guard_pid)
            while True:
                signal.pause()
        store = open_store(folder)
        store.set(f"keeper/{store.add('keepers', 1)}", str(pid))
        return pid

    guard_main(connection, folder, limits, start_keeper)


def test_a_dead_keeper_is_replaced_but_not_for_ever(guarded) -> None:
    rank = guarded(guard_with_keepers, max_deaths=3)
    rank.generations.current()
    rank.tell(join_first_generation)
    store = open_store(str(rank.folder))
    for number in (1, 2, 3):
        os.kill(int(store.get(f"keeper/{number}")), signal.SIGKILL)
        if number == 1:
            assert rank.generations.wait_for_end(1) == "guard of rank 0: its keeper died"
    rank.wait_for_trainers_end()
    assert rank.exit_status() == 1
    assert rank.life == rank.generations.life(0) == 0
    assert "error: the keeper of rank 0 died 3 times in a row without progress (runtime.max_deaths=3)" in rank.said()
    assert store.get("keepers") == b"3"
