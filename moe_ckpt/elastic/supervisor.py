"""The supervisor of one rank: forks the worker, and replaces the worker when it dies.

torchrun starts the supervisor. Owns: the life of one worker after another, and of all
processes that a worker starts; the distinction of a death, a hang and an error. The
supervisor imports all slow modules, stays single-threaded, and does not touch CUDA, so
that a replacement is a fork of milliseconds. Must not: train, or touch a process group.

A worker that dies of a signal, or fails by a hardware fault (`elastic.failures`), is
replaced. A worker that fails with any other exit status ends the job, as torchrun's
users expect. A supervisor that is asked to stop ends its worker and its daemon, lets a
child process bring their windows from shared memory to disk, and ends with REQUEUE: a
scheduler that gives notice can start the job again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from moe_ckpt.agent import agent_pid, die_with_parent
from moe_ckpt.elastic.failures import WORKER_FAULT, Failure
from moe_ckpt.elastic.generations import (
    DAEMON_DIED,
    FENCED,
    STARTED_AGAIN,
    STORE_LOST,
    SUPERVISOR,
    Generations,
)
from moe_ckpt.elastic.orphans import adopt_orphans, end_orphans, reap_ended, watching
from moe_ckpt.elastic.process_failure import Death, FaultClass
from moe_ckpt.elastic.sick_place import SickPlaceRules, check_health, reason_of_deaths
from moe_ckpt.elastic.standby import Standby
from moe_ckpt.elastic.starvation import Silence, read_threads
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.elastic.stopped import StoppedProcesses
from moe_ckpt.elastic.waiting_worker import WaitingWorker
from moe_ckpt.errors import StoreLostError
from moe_ckpt.linux import children_of, signal_name, signals_held
from moe_ckpt.types import Phase

_log = logging.getLogger(__name__)
_WATCH_EVERY_S = 0.05
_LOOK_FOR_NOTICE_S = 1.0
_LOOKS_FOR_STOPPED = 4  # in the time for which a process may be stopped
# the kernel frees all memory of a killed process in less time, unless a driver or a
# disk does not answer
_END_S = 30.0
_FAILED = 1
_STANDBY = "process that waits to replace the worker"
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# not SIGINT, which comes from a user who waits at a terminal
_GIVES_NOTICE = tuple(number for number in _STOPPING if number != signal.SIGINT)

REQUEUE = 99
"""Exit status of a supervisor that was asked to stop: the job can be started again.
Grid Engine requeues a job with this status.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorLimits:
    """Limits by which a supervisor judges its worker."""

    heartbeat_s: float
    """Seconds without a heartbeat after which a worker counts as hung. CPU starvation
    of worker or supervisor does not count.
    """

    progress_s: float
    """Seconds without progress after which a worker that does not wait counts as hung.
    CPU starvation of worker or supervisor does not count.
    """

    max_deaths: int
    """Number of deaths in a row, without progress in the iteration, at which the
    supervisor gives up.
    """

    stop_save_s: float = 0.0
    """Time limit of the last save, in seconds; 0: no save."""

    sick: SickPlaceRules = field(default_factory=SickPlaceRules)
    """Rules by which no replacement is started in a sick place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorHooks:
    """The work of a supervisor beside its worker."""

    start_daemon: Callable[[], int] | None = None
    """Forks the process that keeps the rank's copies, and returns its pid. Called again
    when that process dies. None: no daemon.
    """

    take_failure: Callable[[], Failure | None] | None = None
    """Returns the exception of a worker that ended with WORKER_FAULT; None if the
    worker left none.
    """

    save_last: Callable[[], int] | None = None
    """Saves the windows, in a separate process after worker and daemon have ended, and
    returns the exit status of that process. None: no last save.
    """

    begin_waiting: Callable[[int], int | None] = lambda _: None
    """Lets a waiting process become the first worker, with an incarnation, and returns
    its pid; None if there is none.
    """

    warm_up: Callable[[], bool] | None = None
    """The generic first work of a process that waits to replace the worker. Returns
    whether the process then waits. None: no process waits.
    """

    notice: Path | None = None
    """File whose appearance asks the job to stop; None: no such file."""

    leave: Callable[[], None] | None = None
    """Makes the node leave the job, after the save, if the rank's place is sick. None:
    the node stays.
    """

    free_memory: Callable[[int], None] = lambda _: None
    """Called with the exit status when no process of the rank uses the rank's memory
    any more.
    """

    node_processes: Callable[[], Mapping[int, str]] = dict
    """Returns the names, by pid, of processes that serve all ranks of the node."""


class Supervisor:
    """Watches one rank.

    Attributes:
        has_left: Whether this supervisor has made the node leave the job.
    """

    def __init__(
        self,
        global_rank: int,
        page: StatusPage,
        generations: Generations,
        worker: Callable[[int], int],
        limits: SupervisorLimits,
        hooks: SupervisorHooks | None = None,
        *,
        why_again: str = STARTED_AGAIN,
    ) -> None:
        """Prepare to supervise a rank.

        Args:
            global_rank: The rank.
            page: The status page of the rank's workers.
            generations: The protocol of generations, over the job's store.
            worker: Called with the incarnation in each forked process. Returns the exit
                status of the process.
            limits: The limits by which the worker is judged.
            hooks: The work beside the worker.
            why_again: Why this supervisor continues the work of an earlier one, if
                there was one.
        """
        self.has_left = False
        self._why_again = why_again
        self._global_rank = global_rank
        self._page = page
        self._generations = generations
        self._worker = worker
        self._limits = limits
        self._hooks = hooks or SupervisorHooks()
        self._last_failure: Failure | None = None
        self._pid = 0
        self._daemon_pid = 0
        self._standby = Standby(
            self._start_waiting if self._hooks.warm_up else None,
            limits.max_deaths,
            lambda how: complain(
                f"rank {global_rank}: the {_STANDBY} (runtime.standby) {how}"
            ),
        )
        self._beside: set[int] = set()
        self._incarnation = 0
        self._worker_deaths = _Budget(limits.max_deaths)
        self._daemon_deaths = _Budget(limits.max_deaths)
        self._deaths_here_s: list[float] = []
        self._is_sick = False
        self._watched_s = time.monotonic()
        self._looked_s = 0.0
        self._look_for_stopped_s = 0.0
        self._stopped = StoppedProcesses(limits.heartbeat_s)
        self._heartbeat = Silence(limits.heartbeat_s, lambda: read_threads(self._pid))
        self._progress = Silence(limits.progress_s, lambda: read_threads(self._pid))
        self._user_handler: Any = signal.SIG_DFL  # handler of SIGUSR1, for workers

    def run(self) -> int:
        """Supervise the rank until the job is done or has failed.

        Returns:
            The exit status of this process.
        """
        try:
            status = self._supervise()
        except StoreLostError as error:
            # without the store, nothing can be agreed with other ranks any more
            complain(f"error: rank {self._global_rank}: {error}")
            status = STORE_LOST
        except Exception:
            self._save_last()  # an error of this process loses no iteration
            self._free_memory(_FAILED)
            raise
        # the successor of a fenced worker may be writing the same folder
        if status not in (0, FENCED):
            self._save_last()  # an error of the program loses no iteration
        # after the save: once the agent has ended, shared memory is about to be removed
        if self._is_sick and self._hooks.leave:
            self.has_left = True
            self._hooks.leave()
        self._free_memory(status)
        if status == FENCED:
            self._restore_signals()  # this process may supervise another rank
        return status

    def _supervise(self) -> int:
        """Start workers, one after another, until the job is done or may not go on.

        Returns:
            The exit status of this process.
        """
        for number in _STOPPING:
            before = signal.signal(number, self._stop)
            if number == signal.SIGUSR1:
                self._user_handler = before or signal.SIG_DFL
        signal.signal(signal.SIGCONT, functools.partial(self._say_stopped, os.getpid()))
        # after the handlers: if the agent has ended already, the signal comes at once
        die_with_parent(signal.SIGTERM, parent=agent_pid())
        # all later children are the daemon, a worker, and processes that a worker
        # leaves
        self._beside = set(children_of(os.getpid()))
        adopt_orphans()
        self._take_over_rank()
        if self._hooks.start_daemon:
            self._daemon_pid = self._hooks.start_daemon()
        while True:
            self._spawn()
            hung = self._watch()
            pid, status = os.waitpid(self._pid, 0)
            self._pid = 0  # from now on the pid may belong to another process
            # a writer that stays would write beside its successor's writer
            end_orphans(self._own)
            failure = self._failure(status)
            if os.WIFEXITED(status) and failure is None:
                return os.WEXITSTATUS(status)
            name = signal_name(os.WTERMSIG(status)) if failure is None else ""
            why = hung or (
                f"died of {name}" if failure is None else f"failed by {failure.error}"
            )
            # another worker would wait for ranks that have ended
            if self._generations.has_finished(self._page.generation):
                return self._status_after_training(why, is_killed=failure is None)
            if failure and self._is_repeated(failure):
                return _FAILED
            death = self._death(pid, name, why, _fault_of(failure, hung))
            # before `_may_replace`: other ranks must not wait for a health command,
            # which takes up to runtime.health_s
            if not self._end_generation(death):
                return self._status_after_training(why, is_killed=failure is None)
            if not self._may_replace(death):
                return _FAILED
            self._incarnation += 1
            # before the fork: a worker whose incarnation is not in the store yet would
            # end like a replaced worker
            if not self._generations.claim(self._global_rank, self._incarnation):
                return FENCED

    @property
    def _own(self) -> set[int]:
        """The children that no worker has started."""
        of_rank = {self._pid, self._daemon_pid}
        if self._standby.pid:
            of_rank.add(self._standby.pid)
        # a watcher that this process has started again is its child
        return self._beside | of_rank | set(self._hooks.node_processes())

    def _failure(self, status: int) -> Failure | None:
        """Return the exception of a worker that ended by a hardware fault."""
        # a script may end with WORKER_FAULT by itself, but then leaves no failure file
        is_fault = os.WIFEXITED(status) and os.WEXITSTATUS(status) == WORKER_FAULT
        return (
            self._hooks.take_failure()
            if is_fault and self._hooks.take_failure
            else None
        )

    def _is_repeated(self, failure: Failure) -> bool:
        """Return whether the worker before failed in the same way.

        If so, print a message with the traceback.
        """
        earlier, self._last_failure = self._last_failure, failure
        if not failure.repeats(earlier):
            return False
        complain(
            f"error: rank {self._global_rank} failed again in iteration"
            f" {failure.iteration} at the same place: this is an error of the program"
            f" and not of the hardware\n{failure.traceback}"
        )
        return True

    def _status_after_training(self, why: str, *, is_killed: bool) -> int:
        """Return the exit status for a worker's death after the end of training.

        The status is success, unless the worker still worked.
        """
        if is_killed and self._page.phase is Phase.DONE:
            return 0
        complain(
            f"error: rank {self._global_rank} {why} after the last iteration, in the"
            " script's own work"
        )
        return _FAILED

    def _restore_signals(self) -> None:
        for number in (*_STOPPING, signal.SIGCONT):
            signal.signal(
                number,
                self._user_handler if number == signal.SIGUSR1 else signal.SIG_DFL,
            )

    def _take_over_rank(self) -> None:
        """Claim the rank, and release workers that wait for an earlier incarnation.

        There is an earlier incarnation if torchrun has restarted this rank, or a spare
        node has taken it.
        """
        rank = self._global_rank
        self._incarnation = self._generations.incarnation(rank) + 1
        # again: a supervisor on a node that was given up may still claim
        while not self._generations.claim(rank, self._incarnation):
            self._incarnation = self._generations.incarnation(rank) + 1
        # after the claim: an earlier worker that is cut off but not dead must not join
        # the generation that begins now
        if self._incarnation > 0:
            self._generations.begin_anew(
                f"{SUPERVISOR} of rank {rank} {self._why_again}"
            )

    def _spawn(self) -> None:
        self._page.reset()
        # a handler must find the pid of the new worker
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        self._pid = (
            self._standby.begin(self._incarnation)
            # a second call returns None
            or self._hooks.begin_waiting(self._incarnation)
            or self._fork(lambda: self._worker(self._incarnation))
        )
        # from now on not one of the processes that are there before every worker
        self._beside.discard(self._pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)

    def _start_waiting(self) -> WaitingWorker:
        assert self._hooks.warm_up is not None
        return WaitingWorker(
            self._hooks.warm_up,
            lambda incarnation: self._worker(int(incarnation)),
            self._fork,
        )

    def _fork(self, main: Callable[[], int]) -> int:
        """Fork a process that lives at most as long as this one, and return its pid.

        Args:
            main: The work of the process. Returns the exit status.
        """
        # the child has a copy of the buffers, and would write their text again
        sys.stdout.flush()
        sys.stderr.flush()
        supervisor_pid = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        pid = os.fork()
        if pid == 0:
            for number in _STOPPING:
                # while the signals are blocked: `_stop` would end the process with a
                # status, as an error of the program does
                signal.signal(
                    number,
                    self._user_handler if number == signal.SIGUSR1 else signal.SIG_DFL,
                )
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            die_with_parent(signal.SIGKILL, parent=supervisor_pid)
            run_and_exit(main)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _watch(self) -> str | None:
        """Return when the worker is dead, or about to be.

        Returns:
            The reason if this supervisor has killed the worker, else None.
        """
        with watching([self._pid]) as ended:
            while not ended(_WATCH_EVERY_S):
                self._watched_s = time.monotonic()
                self._replace_dead_daemon()
                # a free pid may become that of a process that a worker leaves, which
                # must be ended
                reaped = reap_ended({self._pid, self._daemon_pid})
                self._beside -= reaped.keys()
                self._standby.keep(self._page, reaped)
                self._heed_notice()
                self._look_for_stopped()
                hung = self._hang()
                if hung:
                    # SIGKILL works on a stopped process, too
                    os.kill(self._pid, signal.SIGKILL)
                    if not ended(_END_S):
                        self._give_up_unended(hung)
                    return hung
        return None

    def _give_up_unended(self, hung: str) -> NoReturn:
        """End although the worker has not ended.

        No successor can use the worker's device until the worker has ended.
        """
        reason = (
            f"it has not ended in {_END_S:g} seconds: a driver or a disk of"
            f" {socket.gethostname()} does not answer"
        )
        complain(f"error: rank {self._global_rank} {hung}, but {reason}")
        self._exit(_FAILED)

    def _replace_dead_daemon(self) -> None:
        """Start another daemon if the daemon has died.

        All ranks then meet again, and find the address of the new daemon.
        """
        if not self._daemon_pid or os.waitpid(self._daemon_pid, os.WNOHANG) == (0, 0):
            return
        assert self._hooks.start_daemon is not None
        self._daemon_pid = 0  # first: `_exit` kills the process with this pid
        if not self._daemon_deaths.allows_another(self._page.iteration):
            complain(
                f"error: the daemon of rank {self._global_rank} died"
                f" {self._daemon_deaths}, giving up"
            )
            self._exit(_FAILED)
        self._daemon_pid = self._hooks.start_daemon()
        if self._page.generation:
            self._generations.end(
                self._page.generation,
                f"{SUPERVISOR} of rank {self._global_rank}: {DAEMON_DIED}",
            )

    def _hang(self) -> str | None:
        now_s = time.monotonic()
        if self._heartbeat.exceeds_limit(self._page.heartbeat_s, now_s):
            return (
                "hung: no heartbeat for"
                f" runtime.heartbeat_s={self._limits.heartbeat_s:g} seconds, killed"
            )
        # a rank that hangs stops all other ranks: only the rank that waits for no rank
        # is killed
        if not self._page.waiting and self._progress.exceeds_limit(
            self._page.progress_s, now_s
        ):
            return (
                f"hung: no progress for runtime.progress_s={self._limits.progress_s:g}"
                " seconds, killed"
            )
        return None

    def _end_generation(self, death: Death) -> bool:
        """End the generation of a dead worker.

        Returns:
            False if all ranks have finished meanwhile.
        """
        generation = self._page.generation
        # first: ranks that join the next generation read the deaths of this generation
        self._generations.record_death(generation or self._generations.current(), death)
        if generation:
            return self._generations.end(generation, str(death))
        complain(f"{death}, before it had met the others")
        return True

    def _may_replace(self, death: Death) -> bool:
        """Return whether another worker is allowed.

        The budget of deaths, and the health of this place, decide.
        """
        if not self._worker_deaths.allows_another(death.iteration):
            complain(
                f"error: rank {self._global_rank} died {self._worker_deaths}, giving"
                f" up; the last time: {death}"
            )
            return False
        self._deaths_here_s.append(time.monotonic())
        sick = reason_of_deaths(self._limits.sick, self._deaths_here_s) or check_health(
            self._limits.sick
        )
        self._is_sick = sick is not None
        if sick:
            place = f"{socket.gethostname()}, the place of rank {self._global_rank},"
            complain(
                f"error: {place} is sick, no worker is started there again: {sick}; the"
                f" last time: {death}"
            )
            if self._hooks.leave:
                complain(
                    "runtime.sick_place=leave: this node leaves the job to a spare one"
                )
        return sick is None

    def _death(self, pid: int, name: str, why: str, fault: FaultClass) -> Death:
        # the page has monotonic times, which mean nothing on the machines of other
        # ranks
        offset_s = time.time() - time.monotonic()
        return Death(
            fault=fault,
            global_rank=self._global_rank,
            pid=pid,
            signal=name,
            why=why,
            iteration=self._page.iteration,
            phase=self._page.phase.name.lower(),
            last_seen_unix_s=self._page.heartbeat_s + offset_s,
            found_unix_s=time.time(),
        )

    def _stop(self, number: int, _: object) -> None:
        """Handle a signal to stop: end, with a last save if the signal gives notice.

        A scheduler or torchrun ends the job, or torchrun has ended itself.
        """
        if (
            number in _GIVES_NOTICE
            and self._hooks.save_last
            and os.getppid() == agent_pid()
        ):
            self._exit(REQUEUE)
        # no save: without the agent, shared memory is about to be removed
        self._pid = _end(self._pid)
        end_orphans(self._own)
        if os.getppid() == agent_pid():
            self._free_memory(128 + number)
        os._exit(128 + number)

    def _heed_notice(self) -> None:
        """Stop once the file of a maintenance notice exists."""
        notice, now_s = self._hooks.notice, time.monotonic()
        if notice is None or now_s - self._looked_s < _LOOK_FOR_NOTICE_S:
            return
        self._looked_s = now_s
        if notice.exists():
            complain(
                f"rank {self._global_rank}: runtime.notice_file={notice} asks to stop"
            )
            self._exit(REQUEUE)

    def _look_for_stopped(self) -> None:
        """Send SIGCONT to the daemon and to the node's processes that are stopped."""
        now_s = time.monotonic()
        if now_s < self._look_for_stopped_s:
            return
        self._look_for_stopped_s = now_s + self._limits.heartbeat_s / _LOOKS_FOR_STOPPED
        names = {self._daemon_pid: "daemon", **self._hooks.node_processes()}
        if self._standby.pid:
            names[self._standby.pid] = _STANDBY
        for pid in self._stopped.look(pid for pid in names if pid):
            complain(
                f"rank {self._global_rank}: the {names[pid]} (process {pid}) was"
                " stopped, and goes on"
            )

    def _say_stopped(self, supervisor_pid: int, _number: int, _frame: object) -> None:
        """Report that this process was stopped for long.

        The limit is the time after which a worker would be killed.
        """
        stopped_s = time.monotonic() - self._watched_s
        # processes that the supervisor has forked inherit this handler
        is_forked = os.getpid() != supervisor_pid
        if stopped_s >= self._limits.heartbeat_s and not is_forked:
            stopped = f"was stopped for {stopped_s:.0f} s, and goes on"
            complain(
                f"rank {self._global_rank}: the supervisor (process {supervisor_pid})"
                f" {stopped}"
            )

    def _exit(self, status: int) -> NoReturn:
        """End after a last save, and after the worker has ended.

        The worker's successor may need the worker's resources.
        """
        self._save_last()
        self._free_memory(status)
        os._exit(status)

    def _free_memory(self, status: int) -> None:
        self._daemon_pid = _end(self._daemon_pid)
        self._standby.end()
        self._hooks.free_memory(status)

    def _save_last(self) -> None:
        """End worker and daemon, and bring their windows to disk.

        The save takes `stop_save_s` seconds at most.
        """
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)  # two saves would write the same files
        # before the save: two processes must not write to one folder
        self._pid = _end(self._pid)
        end_orphans(self._own)
        self._daemon_pid = _end(self._daemon_pid)
        if self._hooks.save_last is None or not self._limits.stop_save_s:
            return
        pid = start_beside(self._hooks.save_last)
        with watching([pid]) as ended:
            if not ended(self._limits.stop_save_s):
                # do not wait for the end: a process that waits for a disk ends when the
                # disk answers
                os.kill(pid, signal.SIGKILL)
                limit = f"runtime.stop_save_s={self._limits.stop_save_s:g} seconds"
                complain(
                    f"rank {self._global_rank}: not saved within {limit}: the next"
                    " start uses an older state"
                )


def _end(pid: int) -> int:
    """Kill a child, if there is one, and wait up to `_END_S` seconds for its end.

    Args:
        pid: The child; 0: no child.

    Returns:
        0, the pid of no child.
    """
    if pid:
        with (
            contextlib.suppress(ProcessLookupError, ChildProcessError),
            watching([pid]) as ended,
        ):
            os.kill(pid, signal.SIGKILL)
            if ended(_END_S):
                os.waitpid(pid, 0)
    return 0


class _Budget:
    """The budget of deaths in a row without progress in the iteration."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._deaths = 0
        self._furthest = 0

    def allows_another(self, iteration: int) -> bool:
        """Count a death in an iteration; return whether another worker may follow."""
        # progress renews the budget, as faults exceed any fixed number over a long job
        self._deaths = 1 if iteration > self._furthest else self._deaths + 1
        self._furthest = max(self._furthest, iteration)
        return self._deaths < self._max_deaths

    def __str__(self) -> str:
        return (
            f"{self._deaths} times in a row without progress"
            f" (runtime.max_deaths={self._max_deaths})"
        )


def _fault_of(failure: Failure | None, hung: str | None) -> FaultClass:
    """Return the class of a worker's death.

    Args:
        failure: The exception that ended the worker, if one did.
        hung: Why the supervisor killed the worker, if it did.
    """
    if failure:
        return FaultClass.EXCEPTION
    return FaultClass.HANG if hung else FaultClass.SIGNAL


def complain(text: str) -> None:
    """Print a message for users on standard error."""
    print(text, file=sys.stderr, flush=True)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run the work of a forked process, and end the process.

    None of the parent's code may run in the forked process.

    Args:
        main: The work. Returns the exit status.
    """
    status = _FAILED
    try:
        status = main()
    except BaseException:  # the top of a process
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def start_beside(main: Callable[[], int]) -> int:
    """Start a process that lives at most as long as this supervisor.

    Args:
        main: The work of the process. Returns the exit status.

    Returns:
        The pid of the process.
    """
    supervisor_pid = os.getpid()
    # a handler that forks within a fork would wait for locks that the outer fork holds
    with signals_held():
        pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL, parent=supervisor_pid)
        run_and_exit(main)
    return pid
