r"""Generations: the protocol by which ranks end one set of process groups and form the
next, over a shared store.

Owns: the protocol, in the store that outlives every rank. No rank is special: any rank
that notices a loss ends the generation, all leave it through the same key, and the next
begins when all ranks have arrived, replacements included. Must not: know the work of a
generation, or recover state.

    join g ... all here: go ---- form groups ---- train ---- end(g) by any rank --- cut, leave ---- join g + 1
                                                        \--- all done, unless it has ended: finished, for good
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, takewhile
from typing import NoReturn

import msgspec
import torch.distributed as dist

from moe_ckpt.elastic.checked_store import CheckedStore
from moe_ckpt.elastic.process_failure import Death, FaultClass
from moe_ckpt.elastic.process_groups import ElasticGroups
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.errors import PeersLostError, StoreLostError, causes_of

_log = logging.getLogger(__name__)
_FOR_EVER = timedelta(days=365)
_GO, _STOP = "go", "stop"
_ENDED, _FINISHED = "ended: ", "finished"
_END_SEEN_S = 2.0
_LATE_S = 0.5  # an error may come before the news of the death that caused it
_MOST_FRUITLESS = 5

SUPERVISOR = "supervisor"
"""The first word of the reason if a supervisor ends a generation in which no worker has
died.
"""

DAEMON_DIED, STARTED_AGAIN = "its daemon died", "was started again"
"""The last words of such a reason."""

_DEATHS = msgspec.json.Decoder(Death)

STORE_LOST, FENCED = 75, 76
"""Exit statuses of a worker that cannot continue: the store is gone, or another
incarnation has replaced it.
"""


class Generations:
    """The keys of the protocol, for supervisors and workers alike. Generations count
    from 1.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def current(self) -> int:
        """Return the newest generation."""
        return int(self._store.compare_set("generation", "", "1"))

    def end(self, generation: int, reason: str) -> bool:
        """End a generation unless it has ended; return False if it has finished. Any
        process may call it.
        """
        # the same swap as in `done`: a job either finishes or goes on, decided once for
        # all ranks with the reason: ranks that this key lets go end the generation,
        # too, and may be the first to publish the end
        outcome = self._store.compare_set(
            f"{generation}/outcome", "", _ENDED + reason
        ).decode()
        if outcome == _FINISHED:
            return False
        # the counter before the news of the end: a rank that leaves at once would join
        # the ended generation again
        self._store.compare_set("generation", str(generation), str(generation + 1))
        # frees ranks that still wait for others to arrive
        self._store.compare_set(f"{generation}/decision", "", _STOP)
        self._store.compare_set(f"{generation}/end", "", outcome.removeprefix(_ENDED))
        return True

    def begin_anew(self, reason: str) -> None:
        """Let ranks that torchrun has started again meet in another generation than the
        newest one.
        """
        generation = self.current()
        if not self.end(generation, reason):
            # a script failed in its own work after the last iteration: all its ranks
            # are started again
            self._store.compare_set("generation", str(generation), str(generation + 1))

    def record_death(self, generation: int, death: Death) -> None:
        """Record the death of a rank's process: all ranks of the next generation can
        read it before that begins.
        """
        record, number = msgspec.json.encode(death), 1
        # one request takes the number and writes the record: readers would wait for a
        # number without one
        while (
            self._store.compare_set(_death(generation, number), "", record.decode())
            != record
        ):
            number += 1
        self._store.add("deaths", 1)

    def num_deaths(self) -> int:
        """Return the number of processes that have died so far, in all generations."""
        return self._store.add("deaths", 0)

    def deaths(self, generation: int) -> list[Death]:
        """Return the deaths in a generation."""
        written = takewhile(
            lambda key: self._store.check([key]),
            (_death(generation, n) for n in count(1)),
        )
        return [_DEATHS.decode(self._store.get(key)) for key in written]

    def wait_for_end(self, generation: int) -> str:
        """Block until a generation has ended, without limit; return the reason."""
        self._store.wait([f"{generation}/end"], _FOR_EVER)
        return self._store.get(f"{generation}/end").decode()

    def arrive(self, generation: int, world_size: int) -> None:
        """Count one more arrived rank; the last one decides that the generation begins."""
        if self._store.add(f"{generation}/arrived", 1) == world_size:
            # a swap: if the generation has ended meanwhile, `stop` stays
            self._store.compare_set(f"{generation}/decision", "", _GO)

    def goes(self, generation: int, timeout_s: float) -> bool:
        """Wait until all ranks have arrived or the generation has ended; return whether
        all have arrived.

        Raises PeersLostError if neither happens in time.
        """
        key = f"{generation}/decision"
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            arrived = self._store.add(f"{generation}/arrived", 0)
            raise PeersLostError(
                f"generation {generation}: got {arrived} ranks in"
                f" runtime.join_s={timeout_s:g} seconds, wanted all"
            ) from error
        return self._store.get(key) == _GO.encode()

    def set_incarnation(self, global_rank: int, incarnation: int) -> None:
        """From now on only this incarnation of a rank may join."""
        self._store.set(f"incarnation/{global_rank}", str(incarnation))
        # `set` has no answer: another connection could still read the old one
        self._store.get(f"incarnation/{global_rank}")

    def incarnation(self, global_rank: int) -> int:
        """Return the incarnation of a rank that may join; -1 before the first."""
        return int(self._store.compare_set(f"incarnation/{global_rank}", "", "-1"))

    def done(self, generation: int, world_size: int) -> None:
        """Count one more rank without work left; with the last one the generation has
        finished, unless it has ended.
        """
        if self._store.add(f"{generation}/done", 1) == world_size:
            self._store.compare_set(f"{generation}/outcome", "", _FINISHED)

    def finishes(self, generation: int) -> bool:
        """Block until a generation has finished or ended, without limit; return whether
        it has finished.
        """
        self._store.wait([f"{generation}/outcome"], _FOR_EVER)
        return self.has_finished(generation)

    def has_finished(self, generation: int) -> bool:
        """Return whether all ranks were done in a generation: that is final."""
        key = f"{generation}/outcome"
        return self._store.check([key]) and self._store.get(key) == _FINISHED.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A rank that joins, with its incarnation, from 0."""

    global_rank: int
    world_size: int
    incarnation: int


class Membership:
    """One worker's way through the generations. All methods belong to the training
    thread.

    `store` serves that thread; `watched` serves another thread that always waits in it,
    and needs its own connection.
    """

    def __init__(
        self,
        member: Member,
        store: dist.Store,
        watched: dist.Store,
        groups: ElasticGroups,
        page: StatusPage,
        *,
        join_s: float,
        grace_s: float,
    ) -> None:
        self.member = member
        self.page = page
        self.generation = 0
        self.num_formed_groups = self.num_kept_groups = 0
        # forming groups is a wait as a whole, and uses it from several threads
        self._store = CheckedStore(store)
        self._generations = Generations(CheckedStore(store, page.waits))
        # without `page.waits`: this thread always waits, which must not excuse a
        # training thread that hangs
        self._watched = Generations(CheckedStore(watched))
        self._groups = groups
        self._join_s = join_s
        self._grace_s = grace_s
        self._left = threading.Event()
        self._ended = threading.Event()
        self._reason = ""
        self._reported = 0  # deaths in generations before this one
        self._furthest = 0
        self._fruitless = 0
        self._at_end: list[Callable[[], None]] = []

    def at_end(self, action: Callable[[], None]) -> None:
        """Run `action`, which must not wait, in the watching thread at each end of a
        generation.
        """
        self._at_end.append(action)

    def join(self) -> int:
        """Wait for all other ranks, form the groups with them, and return the
        generation that begins.

        Raises PeersLostError if ranks do not arrive in time, or connections break
        repeatedly without a death. A worker that has been replaced meanwhile ends here.
        Raises StoreLostError, as all methods that use the store.
        """
        while True:
            generation = self._generations.current()
            # after that: a new incarnation is announced first, and then its supervisor
            # ends the generation read above
            if (
                self._generations.incarnation(self.member.global_rank)
                != self.member.incarnation
            ):
                _exit(FENCED, "another process has taken this rank's place")
            self.generation = generation
            # before the arrival: if this worker dies after it, its supervisor ends the
            # generation that the page names
            self.page.join(generation)
            self._generations.arrive(generation, self.member.world_size)
            goes = self._generations.goes(generation, self._join_s)
            if goes:
                self._require_progress()
            if goes and self._form(generation):
                return generation

    def lost(self, error: BaseException) -> bool:
        """Return whether an error means that the generation has ended.

        An error of communication ends it. Any other error is the caller's own, unless
        the generation has just ended: then it may come from the contents of tensors of
        an operation that was cut off.
        """
        # groups live as long as a frame of a traceback refers to them
        for cause in causes_of(error):
            traceback.clear_frames(cause.__traceback__)
        if any(isinstance(cause, PeersLostError) for cause in causes_of(error)):
            return self._generations.end(
                self.generation, f"rank {self.member.global_rank}: {error}"
            )
        return self._ended.wait(_LATE_S)

    def deaths(self) -> list[Death]:
        """Return the deaths since the last generation that all ranks entered."""
        # a new worker has entered none: the death of its forerunner ended the
        # generation before
        first = self._reported or self.generation - 1
        return [
            death
            for generation in range(first, self.generation)
            for death in self._generations.deaths(generation)
        ]

    def entered(self) -> None:
        """All ranks have reached one state in this generation."""
        self._reported = self.generation

    def num_deaths(self) -> int:
        """Return the number of processes of the job that have died so far."""
        return self._generations.num_deaths()

    def leave(self) -> str:
        """Leave a generation that has ended; return the reason for its end."""
        self._ended.wait(_END_SEEN_S)  # the watching thread reads the reason
        self._groups.leave()
        # after that: until then the watching thread cuts connections that are opened
        # late
        self._left.set()
        self._watcher.join()
        return self._reason

    def finish(self) -> None:
        """Return when all ranks have finished: until then a recovery may need every
        rank.

        Raises PeersLostError if a rank is lost meanwhile.
        """
        self._generations.done(self.generation, self.member.world_size)
        if not self._generations.finishes(self.generation):
            raise PeersLostError("other ranks were lost before all had finished")
        # the store may end before this process: the watching thread takes that for no
        # loss
        self._left.set()

    def _require_progress(self) -> None:
        """Raise PeersLostError if several generations in a row end without a death or a
        new iteration.
        """
        # a supervisor's reason has a cause, too, though no death is recorded for it
        died = self._reason.startswith(SUPERVISOR) or self._generations.deaths(
            self.generation - 1
        )
        fruitless = self._reason and not died and self.page.iteration <= self._furthest
        self._fruitless = self._fruitless + 1 if fruitless else 0
        self._furthest = max(self._furthest, self.page.iteration)
        if self._fruitless >= _MOST_FRUITLESS:
            often = f"{self._fruitless} times in a row though no rank died"
            raise PeersLostError(
                f"connections were lost {often}, the last time: {self._reason}"
            )

    def _form(self, generation: int) -> bool:
        self._left = threading.Event()
        self._ended = threading.Event()
        arguments = (generation, self._left, self._ended)
        self._watcher = threading.Thread(
            target=self._watch, args=arguments, name="generation-watch", daemon=True
        )
        # before the groups: a loss while they are formed must cut them, too
        self._watcher.start()
        self.page.wait(True)
        try:
            self._groups.form(
                self._store,
                generation,
                lambda reason: self._fail(generation, reason),
            )
        except PeersLostError as error:
            if not self._generations.end(
                generation, f"rank {self.member.global_rank}: {error}"
            ):
                raise  # it has finished: no rank waits for its end, nor leaves it
            self.leave()
            return False
        finally:
            self.page.wait(False)
        self.num_formed_groups, self.num_kept_groups = (
            self._groups.num_formed,
            self._groups.num_kept,
        )
        return True

    def _fail(self, generation: int, reason: str) -> None:
        """End a generation, in a thread that watches the device: the training thread
        may be blocked there.
        """
        with contextlib.suppress(StoreLostError):  # the training thread meets it, too
            Generations(self._store).end(
                generation, f"rank {self.member.global_rank}: {reason}"
            )

    def _watch(
        self, generation: int, left: threading.Event, ended: threading.Event
    ) -> None:
        """Wait for the end of a generation; then interrupt the training thread."""
        try:
            self._reason = self._watched.wait_for_end(generation)
        except RuntimeError as error:
            if left.is_set():
                return
            _exit(STORE_LOST, str(error))
        ended.set()
        for action in self._at_end:
            action()
        abandon_s = time.monotonic() + self._grace_s
        while not left.is_set():
            # again and again: connections are opened, and operations begin, after the
            # first cut
            self._groups.cut()
            if time.monotonic() >= abandon_s:
                self._groups.abandon()
            left.wait(0.02)


def _death(generation: int, number: int) -> str:
    return f"{generation}/death/{number}"


def fault_of_end(reason: str) -> FaultClass:
    """Return the class of a fault that ended a generation without the death of a
    worker.

    `reason`: why this worker left the generation; empty in a worker that was not in it.
    """
    if reason.endswith(DAEMON_DIED):
        return FaultClass.DAEMON
    return (
        FaultClass.RESTART
        if not reason or reason.endswith(STARTED_AGAIN)
        else FaultClass.CONNECTION
    )


def _exit(status: int, reason: str) -> NoReturn:
    _log.error("worker ends: %s", reason)
    os._exit(status)  # `sys.exit` would end the watching thread alone
