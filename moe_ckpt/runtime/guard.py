"""The guard of one rank: the process that torchrun starts, which forks the trainer and replaces it when it dies.

Owns: the life of one trainer after another, and telling a death from a hang from an error. It imports what is slow and
stays single-threaded and away from CUDA, so that a replacement is a fork of milliseconds. Must not: train, or touch a
process group. A trainer that fails with an exit status ends the job, as torchrun's users expect; signals are repaired.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from moe_ckpt.runtime.death import Death
from moe_ckpt.runtime.membership import Generations
from moe_ckpt.runtime.page import Page

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_WATCH_EVERY_MS = 50
_FAILED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardLimits:
    """When a trainer counts as hung, in seconds, and how many deaths in a row, without progress, are one too many."""

    heartbeat_s: float
    progress_s: float
    max_deaths: int


class Guard:
    """Watches one rank. `trainer(life)` is called in each forked process and returns its exit status."""

    def __init__(
        self,
        global_rank: int,
        world_size: int,
        page: Page,
        generations: Generations,
        trainer: Callable[[int], int],
        limits: GuardLimits,
    ) -> None:
        self._global_rank = global_rank
        self._world_size = world_size
        self._page = page
        self._generations = generations
        self._trainer = trainer
        self._limits = limits
        self._pid = 0
        self._life = 0
        self._deaths = 0
        self._furthest = 0

    def run(self) -> int:
        """Guard until the job is done or has failed; return this process's exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        die_with_parent(signal.SIGTERM)
        while True:
            self._spawn()
            hung = self._watch()
            _, status = os.waitpid(self._pid, 0)
            if os.WIFEXITED(status):
                return os.WEXITSTATUS(status)
            if self._generations.all_done(self._world_size):
                return 0
            if not self._may_replace(os.WTERMSIG(status), hung):
                return _FAILED
            self._life += 1

    def _spawn(self) -> None:
        self._generations.set_life(self._global_rank, self._life)
        self._page.reset()
        sys.stdout.flush()
        sys.stderr.flush()
        guard_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL, parent=guard_pid)
            run_and_exit(lambda: self._trainer(self._life))

    def _watch(self) -> str | None:
        """Return when the trainer is dead, or about to be: then why this guard has killed it."""
        pidfd = os.pidfd_open(self._pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            while not poll.poll(_WATCH_EVERY_MS):
                hung = self._hang()
                if hung:
                    os.kill(self._pid, signal.SIGKILL)  # works on a stopped process, too
                    return hung
        finally:
            os.close(pidfd)
        return None

    def _hang(self) -> str | None:
        now_s = time.monotonic()
        if now_s - self._page.heartbeat_s > self._limits.heartbeat_s:
            return f"hung: no heartbeat for runtime.heartbeat_s={self._limits.heartbeat_s:g} seconds, killed"
        if not self._page.waiting and now_s - self._page.progress_s > self._limits.progress_s:
            return f"hung: no progress for runtime.progress_s={self._limits.progress_s:g} seconds, killed"
        return None

    def _may_replace(self, number: int, hung: str | None) -> bool:
        """End the generation of a dead trainer; return whether the budget of deaths allows another."""
        death = self._death(number, hung)
        if self._page.generation:
            self._generations.record_death(self._page.generation, death)
            self._generations.end(self._page.generation, str(death))
        self._deaths = 1 if death.iteration > self._furthest else self._deaths + 1
        self._furthest = max(self._furthest, death.iteration)
        if self._deaths < self._limits.max_deaths:
            return True
        print(
            f"error: rank {self._global_rank} died {self._deaths} times in a row without progress "
            f"(runtime.max_deaths={self._limits.max_deaths}), giving up; the last time: {death}",
            file=sys.stderr,
            flush=True,
        )
        return False

    def _death(self, number: int, hung: str | None) -> Death:
        offset_s = time.time() - time.monotonic()
        name = signal.Signals(number).name
        return Death(
            global_rank=self._global_rank,
            pid=self._pid,
            signal=name,
            why=hung or f"died of {name}",
            iteration=self._page.iteration,
            phase=self._page.phase.name.lower(),
            last_seen_unix_s=self._page.heartbeat_s + offset_s,
            found_unix_s=time.time(),
        )

    def _stop(self, number: int, _: object) -> None:
        """Torchrun ends the job, or is gone itself: end with it."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        os._exit(128 + number)


def die_with_parent(number: signal.Signals, *, parent: int | None = None) -> None:
    """Let the kernel send this process a signal when its parent dies; at once if that was dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def run_and_exit(main: Callable[[], int]) -> None:
    """Run what a forked process is there for, and end the process: nothing of its parent's may run in it."""
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
