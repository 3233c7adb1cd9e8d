"""Supervisors replace, give up or kill workers, and no worker outlives its supervisor.

The supervisors and workers are real processes.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_ckpt.elastic import orphans, supervisor
from moe_ckpt.elastic.generations import FENCED, STORE_LOST, Generations
from moe_ckpt.elastic.process_failure import Death, FaultClass
from moe_ckpt.elastic.sick_place import SickPlaceRules
from moe_ckpt.elastic.status_page import StatusPage, start_heartbeat
from moe_ckpt.elastic.supervisor import (
    REQUEUE,
    Supervisor,
    SupervisorHooks,
    SupervisorLimits,
    die_with_parent,
    start_beside,
)
from moe_ckpt.errors import StoreLostError
from moe_ckpt.linux import is_alive, is_stopped
from moe_ckpt.types import Phase
from tests.harness.gloo.processes import Child, Watch
from tests.harness.gloo.workers import open_store, wait_until
from tests.waits import WAIT_S

HANG_S = 1.0
PATIENT = SupervisorLimits(heartbeat_s=WAIT_S, progress_s=WAIT_S, max_deaths=3)
Act = Callable[[StatusPage], int | None]


def supervisor_main(
    connection: Connection,
    folder: str,
    limits: SupervisorLimits,
    hooks: SupervisorHooks | None = None,
    kind: Callable[[dist.Store], Generations] = Generations,
) -> None:
    """Supervise the only rank of a job; all processes write stderr to file `said`."""
    fd = os.open(Path(folder) / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, sys.stderr.fileno())
    page, generations = StatusPage(Path(folder) / "page"), kind(open_store(folder))
    sys.exit(
        Supervisor(
            0,
            page,
            generations,
            lambda incarnation: train(incarnation, page, connection),
            limits,
            hooks,
        ).run()
    )


def train(incarnation: int, page: StatusPage, connection: Connection) -> int:
    """Act as a worker: carry out the acts that the test sends, on the status page.

    The worker ends with the first exit status that an act returns.
    """
    start_heartbeat(page)
    connection.send((incarnation, os.getpid(), os.getppid()))
    while True:
        act: Act = connection.recv()
        status = act(page)
        if isinstance(status, int):
            return status
        connection.send("done")


join_first_generation = methodcaller("join", 1)


def return_three(page: StatusPage) -> int:
    return 3


def return_fenced(page: StatusPage) -> int:
    return FENCED


def return_zero(page: StatusPage) -> int:
    return 0


def fail(page: StatusPage) -> None:
    raise ValueError("the user's own error")


class Guarded(Child):
    """A supervisor, and control over its workers, which use the same connection."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        limits: SupervisorLimits,
        main: Callable[..., None],
    ) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(stack, main, str(folder), limits)
        self.folder = folder
        self.generations = Generations(open_store(str(folder)))
        self.page = StatusPage(folder / "page")
        self.meet_worker()

    def meet_worker(self) -> None:
        """Wait for the next worker."""
        self.incarnation, self.worker_pid, self.supervisor_pid = self.hear()
        self.worker = Watch(self.stack, self.worker_pid)

    def do(self, act: Act) -> None:
        """Let the worker carry out an act, and wait for the end of the act."""
        self.tell(act)
        assert self.hear() == "done"

    def kill_worker(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.worker_pid, number)

    def said(self) -> str:
        return (self.folder / "said").read_text()

    @property
    def has_no_successor(self) -> bool:
        """Whether no other worker has begun. Call once the supervisor has ended."""
        try:
            return not self.connection.recv()
        except EOFError:
            return self.generations.incarnation(0) == self.incarnation


@pytest.fixture
def supervised(stack: ExitStack, tmp_path: Path) -> Callable[..., Guarded]:
    """Return a function that starts a supervisor with the given limits.

    All other limits are those of PATIENT.
    """

    def start(
        main: Callable[..., None] = supervisor_main,
        folder: Path | None = None,
        **limits: Any,
    ) -> Guarded:
        folder = folder or tmp_path / f"supervisor{len(list(tmp_path.iterdir()))}"
        return Guarded(stack, folder, replace(PATIENT, **limits), main)

    return start


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGRTMIN + 1, "signal 35"),
    ],
)
def test_a_worker_killed_by_a_signal_is_replaced_by_its_next_life(
    supervised, number: int, name: str
) -> None:
    rank = supervised()
    assert (
        rank.incarnation,
        rank.generations.incarnation(0),
        rank.generations.current(),
    ) == (0, 0, 1)
    rank.do(join_first_generation)
    rank.do(methodcaller("enter", Phase.BACKWARD, 7))
    dead = rank.worker_pid
    rank.kill_worker(number)
    rank.meet_worker()
    assert (
        rank.incarnation,
        rank.generations.incarnation(0),
        rank.worker_pid != dead,
    ) == (1, 1, True)
    assert (rank.page.generation, rank.page.iteration, rank.page.phase) == (
        0,
        0,
        Phase.BUILD,
    )
    [death] = rank.generations.deaths(1)
    assert (death.global_rank, death.pid, death.signal, death.why) == (
        0,
        dead,
        name,
        f"died of {name}",
    )
    assert (death.iteration, death.phase, death.fault) == (
        7,
        "backward",
        FaultClass.SIGNAL,
    )
    assert 0 <= death.detect_s < WAIT_S
    assert rank.generations.current() == 2
    assert rank.generations.wait_for_end(1) == str(death)


def test_a_death_before_joining_ends_no_generation(supervised) -> None:
    rank = supervised()
    rank.generations.current()
    rank.kill_worker()
    rank.meet_worker()
    assert (rank.incarnation, rank.generations.current()) == (1, 1)
    assert "died of SIGKILL in build" in rank.said()


@pytest.mark.parametrize(
    ("act", "status"), [(return_zero, 0), (return_three, 3), (fail, 1)]
)
def test_an_exit_status_is_passed_on_and_not_repaired(
    supervised, act: Act, status: int
) -> None:
    rank = supervised()
    rank.do(join_first_generation)
    rank.tell(act)
    assert rank.exit_status() == status
    assert rank.has_no_successor
    assert rank.generations.current() == 1
    assert ("ValueError: the user's own error" in rank.said()) == (act is fail)


@pytest.mark.parametrize(
    ("limits", "iterations", "says"),
    [
        (
            {},
            (4, 4, 4),
            (
                "error: rank 0 died 3 times in a row without progress"
                " (runtime.max_deaths=3), giving up; the"
            ),
        ),
        (
            {"sick": SickPlaceRules(deaths=3, within_s=1000.0)},
            (1, 2, 4),
            (
                "the place of rank 0, is sick, no worker is started there again: 3"
                " deaths within"
            ),
        ),
    ],
    ids=["without progress", "at one place"],
)
def test_many_deaths_are_given_up(
    supervised, limits: dict[str, Any], iterations: Sequence[int], says: str
) -> None:
    rank = supervised(**limits)
    for incarnation, iteration in enumerate(iterations):
        assert rank.incarnation == incarnation
        rank.do(methodcaller("enter", Phase.STEP, iteration))
        rank.kill_worker()
        if incarnation < 2:
            rank.meet_worker()
    assert rank.exit_status() == 1
    assert rank.has_no_successor
    assert says in rank.said()
    assert (
        f"the last time: rank 0 (pid {rank.worker_pid}) died of SIGKILL in step of"
        " iteration 4" in rank.said()
    )


def test_a_place_that_is_well_is_left_by_no_end_of_a_job(supervised) -> None:
    rank = begin_to_save(
        supervised(supervisor_that_saves, max_deaths=1, stop_save_s=WAIT_S)
    )
    rank.kill_worker()
    assert rank.exit_status() == 1
    assert ((rank.folder / "saved").exists(), (rank.folder / "left").exists()) == (
        True,
        False,
    )


def test_no_worker_is_started_where_the_health_command_fails(
    supervised, tmp_path: Path
) -> None:
    """The job saves, as at any error that ends a job.

    While the place is healthy, the command lets replacements begin.
    """
    sick = tmp_path / "is_sick"
    rank = supervised(
        supervisor_that_saves,
        stop_save_s=WAIT_S,
        sick=SickPlaceRules(health=f"! test -e {sick}", health_s=30),
    )
    rank.kill_worker()
    rank.meet_worker()
    begin_to_save(rank)
    sick.touch()
    rank.kill_worker()
    assert rank.exit_status() == 1
    assert rank.has_no_successor
    assert (
        f"runtime.health='! test -e {sick}' ended with status 1; the last time: rank 0"
        in rank.said()
    )
    assert (rank.folder / "left").read_text() == "True", (
        "the node leaves the job, after the save"
    )


def test_progress_lets_the_count_of_deaths_begin_anew(supervised) -> None:
    rank = supervised(max_deaths=3)
    for iteration in (1, 2, 5, 6, 3):
        rank.do(methodcaller("enter", Phase.STEP, iteration))
        rank.kill_worker()
        rank.meet_worker()
    # a repeated iteration is no progress
    rank.do(methodcaller("enter", Phase.STEP, 4))
    rank.kill_worker()
    assert rank.exit_status() == 1
    assert "died 3 times in a row" in rank.said()


def test_a_stopped_worker_is_killed_and_replaced(supervised) -> None:
    rank = supervised(heartbeat_s=HANG_S)
    rank.do(join_first_generation)
    rank.kill_worker(signal.SIGSTOP)
    rank.meet_worker()
    [death] = rank.generations.deaths(1)
    wanted = (
        "SIGKILL",
        f"hung: no heartbeat for runtime.heartbeat_s={HANG_S:g} seconds, killed",
        FaultClass.HANG,
    )
    assert (death.signal, death.why, death.fault) == wanted
    assert death.detect_s >= HANG_S


def test_a_wedged_worker_is_killed_but_not_one_that_waits_for_others(
    supervised,
) -> None:
    waiting = supervised(progress_s=HANG_S)
    waiting.do(join_first_generation)
    waiting.do(methodcaller("wait", True))
    # started later: when this hang is found, the other worker has waited for longer
    wedged = supervised(progress_s=HANG_S)
    wedged.do(join_first_generation)
    wedged.meet_worker()
    [death] = wedged.generations.deaths(1)
    assert (
        death.why
        == f"hung: no progress for runtime.progress_s={HANG_S:g} seconds, killed"
    )
    assert death.detect_s < HANG_S, "its heart was beating"
    waiting.do(methodcaller("enter", Phase.STEP, 9))
    assert waiting.incarnation == 0
    waiting.do(methodcaller("wait", False))
    waiting.meet_worker()
    [death] = waiting.generations.deaths(1)
    assert (death.iteration, death.why[:17]) == (9, "hung: no progress")


@pytest.mark.parametrize(
    ("phase", "status"),
    [(Phase.DONE, 0), (Phase.BUILD, 1)],
    ids=["done", "in own work"],
)
def test_a_death_after_the_jobs_end_is_replaced_by_none(
    supervised, phase: Phase, status: int
) -> None:
    """A script's own work after the last iteration fails with its worker.

    No rank is left to repeat the work.
    """
    rank = supervised()
    rank.do(join_first_generation)
    rank.do(methodcaller("enter", phase, 9))
    rank.generations.done(1, 1)
    rank.kill_worker()
    assert rank.exit_status() == status
    assert rank.has_no_successor
    assert rank.generations.current() == 1


LINGERING = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
if os.fork() == 0:
    os.setsid()
    print(os.getppid(), os.getpid(), flush=True)
    if "stopped" in sys.argv:
        os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""


def leave_processes(page: StatusPage, folder: Path, how: str) -> None:
    """Start a process that starts another one in a new session; wait for both starts.

    The file `left` gets both pids.

    Args:
        page: The status page, as for every act.
        folder: The folder of the file `left`.
        how: `deaf`: both processes ignore SIGTERM; `stopped`: the second process stops
            itself; empty: neither.
    """
    command = [sys.executable, "-S", "-c", LINGERING, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    (folder / "left").write_text(process.stdout.readline())


def left_by(rank: Guarded, how: str = "") -> list[Watch]:
    rank.do(functools.partial(leave_processes, folder=rank.folder, how=how))
    return [
        Watch(rank.stack, int(pid))
        for pid in (rank.folder / "left").read_text().split()
    ]


@pytest.mark.parametrize("how", ["", "deaf", "stopped"])
def test_a_worker_is_replaced_once_its_processes_have_ended(
    supervised, how: str
) -> None:
    rank = supervised()
    left = left_by(rank, how)
    rank.kill_worker()
    rank.meet_worker()
    for process in left:
        process.wait_for_end(0.0)
    assert rank.incarnation == 1


@pytest.mark.parametrize("end", [return_zero, fail, signal.SIGTERM])
def test_no_process_of_a_worker_outlives_its_job(
    supervised, end: Act | signal.Signals
) -> None:
    rank = supervised(supervisor_with_daemons)
    left = left_by(rank)
    if isinstance(end, signal.Signals):
        os.kill(rank.supervisor_pid, end)
    else:
        rank.tell(end)
    rank.exit_status()
    for process in left:
        process.wait_for_end(0.0)


def test_an_end_of_a_workers_processes_spares_the_daemon(supervised) -> None:
    rank = supervised(supervisor_with_daemons)
    store = open_store(str(rank.folder))
    left_by(rank)
    rank.kill_worker()
    rank.meet_worker()
    rank.do(join_first_generation)
    assert store.get("daemons") == b"1"
    assert is_alive(int(store.get("daemon/1")))


def pause_for_ever() -> int:
    while True:
        signal.pause()


def supervisor_with_processes(
    connection: Connection, folder: str, limits: SupervisorLimits
) -> None:
    """Supervise with a daemon and a janitor, whose pids are in files.

    When memory is freed, the file `freed` gets the exit status, and whether the daemon
    lives.
    """
    root = Path(folder)

    def start(name: str) -> int:
        pid = start_beside(pause_for_ever)
        (root / name).write_text(str(pid))
        return pid

    def free_memory(status: int) -> None:
        daemon = int((root / "daemon").read_text())
        (root / "freed").write_text(
            f"{status}, daemon is {'alive' if is_alive(daemon) else 'dead'}"
        )

    janitor = start("janitor")
    hooks = SupervisorHooks(
        start_daemon=lambda: start("daemon"),
        node_processes=lambda: {janitor: "janitor of the node's memory"},
        free_memory=free_memory,
        save_last=lambda: 0,
    )
    supervisor_main(connection, folder, limits, hooks)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("daemon", "the daemon (process {})"),
        ("janitor", "the janitor of the node's memory (process {})"),
    ],
)
def test_a_process_beside_the_worker_that_was_stopped_goes_on(
    supervised, name: str, said: str
) -> None:
    rank = supervised(supervisor_with_processes, heartbeat_s=HANG_S)
    pid = int((rank.folder / name).read_text())
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(pid))
    assert wait_until(rank.said)
    assert not is_stopped(pid)
    rank.do(join_first_generation)
    assert rank.said() == f"rank 0: {said.format(pid)} was stopped, and goes on\n"


def stop_for(seconds: float, pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda pid=pid: is_stopped(pid))
    stopped_s = time.monotonic()
    assert wait_until(lambda: time.monotonic() - stopped_s > seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def processes_of(rank: Guarded) -> list[int]:
    return [
        rank.supervisor_pid,
        rank.worker_pid,
        int((rank.folder / "daemon").read_text()),
    ]


def test_a_supervisor_that_was_stopped_for_long_says_so_and_none_of_its_processes(
    supervised,
) -> None:
    rank = supervised(supervisor_with_processes, heartbeat_s=HANG_S)
    stop_for(HANG_S, processes_of(rank))
    assert wait_until(rank.said)
    rank.do(join_first_generation)
    wanted = (
        rf"rank 0: the supervisor \(process {rank.supervisor_pid}\) was stopped for \d+"
        r" s, and goes on\n"
    )
    assert re.fullmatch(wanted, rank.said())


def test_a_short_stop_is_not_reported(supervised) -> None:
    rank = supervised(supervisor_with_processes)
    # as a fault injector does, while it inflicts the loss of a node
    stop_for(0.0, processes_of(rank))
    rank.tell(return_zero)
    assert rank.exit_status() == 0
    assert not rank.said()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (return_zero, 0),
        (return_three, 3),
        (signal.SIGTERM, REQUEUE),
        (signal.SIGINT, 128 + signal.SIGINT),
    ],
)
def test_memory_is_freed_once_no_process_uses_it(
    supervised, end: Act | signal.Signals, status: int
) -> None:
    rank = supervised(supervisor_with_processes, stop_save_s=WAIT_S)
    if isinstance(end, signal.Signals):
        os.kill(rank.supervisor_pid, end)
    else:
        rank.tell(end)
    assert rank.exit_status() == status
    assert (rank.folder / "freed").read_text() == f"{status}, daemon is dead"


def supervisor_with_standby(
    connection: Connection, folder: str, limits: SupervisorLimits, ends: str = ""
) -> None:
    """Supervise with a process that waits to replace the worker.

    Args:
        connection: As for `supervisor_main`.
        folder: As for `supervisor_main`. The pids of processes that wait are added to
            the file `waiting`.
        limits: As for `supervisor_main`.
        ends: How a process ends instead of waiting, `declines` or `fails`; empty: it
            waits.
    """

    def warm_up() -> bool:
        with (Path(folder) / "waiting").open("a") as file:
            file.write(f"{os.getpid()}\n")
        if ends == "fails":
            raise RuntimeError("CUDA error: out of memory")
        return not ends

    supervisor_main(connection, folder, limits, SupervisorHooks(warm_up=warm_up))


def started_to_wait(rank: Guarded) -> list[int]:
    """Return the pids of all processes that were started to replace workers."""
    file = rank.folder / "waiting"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def train_until_one_waits(rank: Guarded, number: int, first: int = 7) -> int:
    """Let the worker begin iterations until a process waits, and return its pid.

    Args:
        rank: The rank.
        number: How many processes were started to wait by then.
        first: The first iteration.
    """
    iterations = itertools.count(first)

    def train() -> bool:
        rank.do(methodcaller("enter", Phase.FORWARD, next(iterations)))
        return len(started_to_wait(rank)) >= number

    wait_until(train)
    pids = started_to_wait(rank)
    assert len(pids) == number
    return pids[-1]


def look_while(rank: Guarded, phase: Phase) -> None:
    """Let the supervisor look several times while iterations are in a phase."""
    until_s = time.monotonic() + 1.0
    iterations = itertools.count(7)

    def go_on() -> bool:
        rank.do(methodcaller("enter", phase, next(iterations)))
        return time.monotonic() > until_s

    wait_until(go_on)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_waits_replaces_the_worker_and_gets_a_successor(
    supervised, number: signal.Signals
) -> None:
    rank = supervised(supervisor_with_standby)
    for incarnation in range(3):
        assert rank.incarnation == incarnation
        rank.do(methodcaller("join", rank.generations.current()))
        waiting = train_until_one_waits(rank, incarnation + 1, 100 * incarnation)
        rank.kill_worker(number)
        rank.meet_worker()
        assert rank.worker_pid == waiting
    rank.tell(return_three)
    assert rank.exit_status() == 3


def test_no_process_waits_before_the_worker_trains(supervised) -> None:
    """A replacement that recovers has the device for itself."""
    rank = supervised(supervisor_with_standby)
    rank.do(join_first_generation)
    look_while(rank, Phase.RECOVERY)
    rank.kill_worker()
    rank.meet_worker()
    assert (rank.incarnation, started_to_wait(rank)) == (1, [])


@pytest.mark.parametrize(
    ("end", "status"),
    [(return_zero, 0), (fail, 1), (signal.SIGTERM, 128 + signal.SIGTERM)],
)
def test_a_process_that_waits_ends_with_the_job(
    supervised, stack: ExitStack, end: Act | signal.Signals, status: int
) -> None:
    rank = supervised(supervisor_with_standby)
    waiting = Watch(stack, train_until_one_waits(rank, 1))
    if isinstance(end, signal.Signals):
        os.kill(rank.supervisor_pid, end)
    else:
        rank.tell(end)
    assert rank.exit_status() == status
    waiting.wait_for_end(WAIT_S)


def test_a_process_that_waits_and_is_killed_has_a_successor(supervised) -> None:
    rank = supervised(supervisor_with_standby)
    os.kill(train_until_one_waits(rank, 1), signal.SIGKILL)
    wait_until(lambda: "(runtime.standby) died of SIGKILL" in rank.said())
    second = train_until_one_waits(rank, 2, 100)
    rank.kill_worker()
    rank.meet_worker()
    assert rank.worker_pid == second


def test_a_process_that_waits_and_is_killed_again_and_again_has_no_successor(
    supervised,
) -> None:
    rank = supervised(supervisor_with_standby, max_deaths=2)
    for number in (1, 2):
        os.kill(train_until_one_waits(rank, number, 100 * number), signal.SIGKILL)
        wait_until(lambda n=number: rank.said().count("died of SIGKILL") == n)
    look_while(rank, Phase.FORWARD)
    assert len(started_to_wait(rank)) == 2
    assert "died of SIGKILL: workers are replaced without one" in rank.said()
    rank.kill_worker()
    rank.meet_worker()


@pytest.mark.parametrize(
    ("ends", "said"),
    [("declines", ""), ("fails", "failed: workers are replaced without one")],
)
def test_a_process_that_cannot_wait_is_not_started_again(
    supervised, ends: str, said: str
) -> None:
    rank = supervised(functools.partial(supervisor_with_standby, ends=ends))
    waiting = train_until_one_waits(rank, 1)
    wait_until(lambda: not is_alive(waiting))
    rank.kill_worker()
    rank.meet_worker()
    look_while(rank, Phase.FORWARD)
    assert started_to_wait(rank) == [waiting]
    assert rank.worker_pid != waiting
    assert said in rank.said()


class FinishesMeanwhile(Generations):
    """The last rank is done right after a supervisor has checked for the job's end."""

    def has_finished(self, generation: int) -> bool:
        before = super().has_finished(generation)
        self.done(generation, 1)
        return before


def test_a_worker_that_dies_as_the_job_finishes_is_replaced_by_none(supervised) -> None:
    rank = supervised(functools.partial(supervisor_main, kind=FinishesMeanwhile))
    rank.do(join_first_generation)
    rank.do(methodcaller("enter", Phase.DONE, 9))
    rank.kill_worker()
    assert rank.exit_status() == 0
    assert rank.has_no_successor


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_supervisor_that_is_told_to_stop_stops_its_worker(
    supervised, number: signal.Signals
) -> None:
    rank = supervised()
    os.kill(rank.supervisor_pid, number)
    assert rank.exit_status() == 128 + number
    rank.worker.wait_for_end(0.0)
    assert rank.has_no_successor


def supervisor_that_saves(
    connection: Connection, folder: str, limits: SupervisorLimits
) -> None:
    """Supervise with a last save, and a node that leaves the job if its place is sick.

    The save writes to the file `saved` whether the worker lives. While the file `slow`
    exists, the save does not end. When the node leaves, the file `left` gets whether
    the save came before.
    """
    root = Path(folder)

    def save_last() -> int:
        while (root / "slow").exists():
            signal.pause()
        [pid] = (root / "worker").read_text().split()
        (root / "saved").write_text(
            f"worker is {'alive' if is_alive(int(pid)) else 'dead'}"
        )
        return 0

    def leave() -> None:
        (root / "left").write_text(str((root / "saved").exists()))

    supervisor_main(
        connection,
        folder,
        limits,
        SupervisorHooks(save_last=save_last, notice=root / "notice", leave=leave),
    )


def begin_to_save(rank: Guarded) -> Guarded:
    (rank.folder / "worker").write_text(str(rank.worker_pid))
    return rank


@pytest.mark.parametrize(
    ("end", "status", "is_saved"),
    [
        (signal.SIGTERM, REQUEUE, True),
        (signal.SIGUSR1, REQUEUE, True),
        (signal.SIGHUP, REQUEUE, True),
        (signal.SIGINT, 128 + signal.SIGINT, False),
        (return_three, 3, True),
        (return_zero, 0, False),
        (return_fenced, FENCED, False),
    ],
)
def test_a_job_that_has_to_end_saves_without_the_worker(
    supervised, end: Act | signal.Signals, status: int, is_saved: bool
) -> None:
    """An interrupted job ends at once, and a job that is done has nothing to save.

    The successor of a fenced worker may be writing the same folder, so no save follows
    a fenced worker.
    """
    rank = begin_to_save(supervised(supervisor_that_saves, stop_save_s=WAIT_S))
    if isinstance(end, signal.Signals):
        rank.kill_worker(signal.SIGSTOP)
        os.kill(rank.supervisor_pid, end)
    else:
        rank.tell(end)
    assert rank.exit_status() == status
    saved = rank.folder / "saved"
    assert (saved.exists() and saved.read_text()) == (
        "worker is dead" if is_saved else False
    )


def test_a_file_of_a_maintenance_notice_stops_the_job(supervised) -> None:
    rank = begin_to_save(supervised(supervisor_that_saves, stop_save_s=WAIT_S))
    (rank.folder / "notice").touch()
    assert rank.exit_status() == REQUEUE
    assert (rank.folder / "saved").exists()
    assert (
        f"rank 0: runtime.notice_file={rank.folder}/notice asks to stop" in rank.said()
    )


def test_a_save_that_takes_too_long_is_cut_off(supervised) -> None:
    rank = begin_to_save(supervised(supervisor_that_saves, stop_save_s=HANG_S))
    (rank.folder / "slow").touch()
    os.kill(rank.supervisor_pid, signal.SIGTERM)
    assert rank.exit_status() == REQUEUE
    assert (
        "not saved within runtime.stop_save_s=1 seconds: the next start uses an older"
        " state" in rank.said()
    )
    assert not (rank.folder / "saved").exists()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_does_not_outlive_a_killed_supervisor(
    supervised, stopped: bool
) -> None:
    rank = supervised()
    if stopped:
        rank.kill_worker(signal.SIGSTOP)
    os.kill(rank.supervisor_pid, signal.SIGKILL)
    rank.worker.wait_for_end()


def agent_main(connection: Connection, folder: str, limits: SupervisorLimits) -> None:
    """Start a supervisor as torchrun's agent does."""
    pid = os.fork()
    if pid == 0:
        supervisor_main(connection, folder, limits)
    os.waitpid(pid, 0)


def test_nothing_outlives_a_killed_agent(supervised, stack: ExitStack) -> None:
    rank = supervised(agent_main)
    assert rank.supervisor_pid != rank.pid
    supervisor = Watch(stack, rank.supervisor_pid)
    rank.kill()
    rank.worker.wait_for_end()
    supervisor.wait_for_end()


class NotesTheLife(Generations):
    """Records which incarnation may join when a generation ends."""

    def end(self, generation: int, reason: str) -> bool:
        self._store.set("incarnation at the end", str(self.incarnation(0)))
        return super().end(generation, reason)


def test_a_supervisor_that_is_started_again_goes_on_with_the_next_life(
    supervised,
) -> None:
    """The supervisor announces the next incarnation before the end of the generation.

    Otherwise an earlier worker that is cut off would join the next generation.
    """
    notes = functools.partial(supervisor_main, kind=NotesTheLife)
    earlier = supervised(notes)
    earlier.generations.current()
    os.kill(earlier.supervisor_pid, signal.SIGTERM)
    assert earlier.exit_status() == 128 + signal.SIGTERM
    later = supervised(notes, folder=earlier.folder)
    assert (
        later.incarnation,
        later.generations.incarnation(0),
        later.generations.current(),
    ) == (1, 1, 2)
    assert later.generations.wait_for_end(1) == "supervisor of rank 0 was started again"
    assert open_store(str(later.folder)).get("incarnation at the end") == b"1"


def supervisor_with_daemons(
    connection: Connection, folder: str, limits: SupervisorLimits
) -> None:
    """Supervise with daemons that only live, and whose pids are in the store."""
    supervisor_pid = os.getpid()

    def start_daemon() -> int:
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL, parent=supervisor_pid)
            while True:
                signal.pause()
        store = open_store(folder)
        store.set(f"daemon/{store.add('daemons', 1)}", str(pid))
        return pid

    supervisor_main(
        connection, folder, limits, SupervisorHooks(start_daemon=start_daemon)
    )


def test_a_dead_daemon_is_replaced_but_not_for_ever(supervised) -> None:
    rank = supervised(supervisor_with_daemons, max_deaths=3)
    rank.generations.current()
    rank.do(join_first_generation)
    store = open_store(str(rank.folder))
    for number in (1, 2, 3):
        os.kill(int(store.get(f"daemon/{number}")), signal.SIGKILL)
        if number == 1:
            assert (
                rank.generations.wait_for_end(1)
                == "supervisor of rank 0: its daemon died"
            )
    rank.worker.wait_for_end()
    assert rank.exit_status() == 1
    assert rank.incarnation == rank.generations.incarnation(0) == 0
    assert (
        "error: the daemon of rank 0 died 3 times in a row without progress"
        " (runtime.max_deaths=3)" in rank.said()
    )
    assert store.get("daemons") == b"3"


class CutOff(Generations):
    """The network to the store is cut as a worker dies."""

    error: Exception = StoreLostError(
        "the store of the job at node0:29500 does not answer"
    )

    def record_death(self, generation: int, death: Death) -> None:
        raise self.error


class TooSlow(CutOff):
    """The store answers, and lacks a key for too long."""

    error = dist.DistStoreError("wait timeout after 300000ms")


def supervisor_that_is_cut_off(
    connection: Connection,
    folder: str,
    limits: SupervisorLimits,
    *,
    kind: type[CutOff] = CutOff,
) -> None:
    supervisor_main(connection, folder, limits, hooks_that_save(folder), kind)


def hooks_that_save(folder: str) -> SupervisorHooks:
    return SupervisorHooks(
        save_last=lambda: int(not (Path(folder) / "saved").write_bytes(b"1"))
    )


@pytest.mark.parametrize(("kind", "status"), [(CutOff, STORE_LOST), (TooSlow, 1)])
def test_a_supervisor_that_is_cut_off_saves_and_ends(
    supervised, kind: type[CutOff], status: int
) -> None:
    rank = supervised(
        functools.partial(supervisor_that_is_cut_off, kind=kind), stop_save_s=WAIT_S
    )
    rank.do(join_first_generation)
    rank.kill_worker()
    assert rank.exit_status() == status
    assert rank.has_no_successor
    assert (rank.folder / "saved").exists()
    if kind is CutOff:
        assert (
            rank.said()
            == "error: rank 0: the store of the job at node0:29500 does not answer\n"
        )
    else:
        assert "DistStoreError: wait timeout" in rank.said()


def supervisor_that_ends_no_process(
    connection: Connection, folder: str, limits: SupervisorLimits
) -> None:
    """Supervise on a kernel whose driver does not answer: no signal ends a process."""
    os.kill = lambda pid, number: None
    supervisor._END_S = orphans.GRACE_S = HANG_S
    supervisor_main(connection, folder, limits, hooks_that_save(folder))


@pytest.mark.parametrize("is_told", [False, True], ids=["hung", "told to stop"])
def test_a_worker_that_cannot_be_ended_keeps_no_supervisor(
    supervised, is_told: bool
) -> None:
    limits = {} if is_told else {"heartbeat_s": HANG_S}
    rank = supervised(supervisor_that_ends_no_process, stop_save_s=WAIT_S, **limits)
    rank.do(join_first_generation)
    rank.kill_worker(signal.SIGSTOP)
    if is_told:
        os.kill(rank.supervisor_pid, signal.SIGTERM)
    assert rank.exit_status() == (REQUEUE if is_told else 1)
    assert rank.has_no_successor
    assert (rank.folder / "saved").exists()
    assert (
        ("hung: no heartbeat" in rank.said())
        == ("it has not ended in 1 seconds" in rank.said())
        == (not is_told)
    )


def fork_as_a_signal_comes(connection: Connection) -> None:
    said: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: said.append("handled"))
    os.register_at_fork(
        before=lambda: os.kill(os.getpid(), signal.SIGTERM),
        after_in_parent=lambda: said.append("forked"),
    )
    os.waitpid(start_beside(lambda: 0), 0)
    connection.send(said)


def test_a_signal_is_handled_after_a_fork_and_not_within_it(
    start: Callable[..., Child],
) -> None:
    assert start(fork_as_a_signal_comes).hear() == ["forked", "handled"]
