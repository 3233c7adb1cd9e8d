"""Generations: ranks end one set of process groups, and form the next one.

Owns: the protocol of generations, in a store that outlives every rank. No rank is
special: any rank that notices a loss ends the generation, all ranks leave through the
same key, and the next generation begins when all ranks have arrived, replacements
included. Must not: know the work of a generation, or recover state.

    join g -- all here: go -- form groups -- train --+
    +------------------------------------------------+
    |
    +-- end(g) by any rank -- cut, leave -- join g + 1
    +-- all ranks done, unless g has ended: finished, for good
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
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
from moe_ckpt.errors import (
    PeersLostError,
    RanksMissingError,
    StoreLostError,
    causes_of,
)

_log = logging.getLogger(__name__)
_FOR_EVER = timedelta(days=365)
_GO, _STOP = "go", "stop"
_ENDED, _FINISHED = "ended: ", "finished"
_END_SEEN_S = 2.0
_LATE_S = 0.5  # an error may come earlier than the news of the death behind the error
_MOST_FRUITLESS = 5

SUPERVISOR = "supervisor"
"""First word of the reason if a supervisor ends a generation in which no worker has
died.
"""

DAEMON_DIED, STARTED_AGAIN = "its daemon died", "was started again"
NODE_REPLACED = "runs on another node, as its node was lost"
"""Last words of a reason that begins with `SUPERVISOR`."""

_DEATHS = msgspec.json.Decoder(Death)

STORE_LOST, FENCED = 75, 76
"""Exit statuses of a worker that cannot continue: the store is gone (`STORE_LOST`), or
another incarnation has replaced the worker (`FENCED`).
"""


class Generations:
    """The keys of the protocol in the store, for supervisors and workers.

    Generations count from 1.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def current(self) -> int:
        """Return the newest generation."""
        return int(self._store.compare_set("generation", "", "1"))

    def end(self, generation: int, reason: str) -> bool:
        """End a generation, unless the generation has ended or finished before.

        Any process may call this method.

        Args:
            generation: The generation.
            reason: The reason for the end. Only the first reason counts.

        Returns:
            False if the generation has finished, else True.
        """
        # `done` swaps the same key, so that the job either finishes or continues,
        # decided once for all ranks. The key holds the reason: ranks that wait for this
        # key end the generation as well, and may be the first to publish the end
        outcome = self._store.compare_set(
            f"{generation}/outcome", "", _ENDED + reason
        ).decode()
        if outcome == _FINISHED:
            return False
        # the counter before the news of the end: otherwise a rank that leaves at once
        # would join the ended generation again
        self._store.compare_set("generation", str(generation), str(generation + 1))
        # frees ranks that still wait for other ranks to arrive
        self._store.compare_set(f"{generation}/decision", "", _STOP)
        self._store.compare_set(f"{generation}/end", "", outcome.removeprefix(_ENDED))
        return True

    def begin_anew(self, reason: str) -> None:
        """Make ranks that torchrun has started again meet in a new generation.

        Args:
            reason: The reason for the end of the newest generation.
        """
        generation = self.current()
        if not self.end(generation, reason):
            # the newest generation has finished, but a script failed in its own work
            # after the last iteration, and torchrun has started all ranks again
            self._store.compare_set("generation", str(generation), str(generation + 1))

    def record_death(self, generation: int, death: Death) -> None:
        """Record the death of a rank's process.

        Call before `end`: all ranks of the next generation can then read the death
        before that generation begins.

        Args:
            generation: The generation in which the process died.
            death: The record.
        """
        record, number = msgspec.json.encode(death), 1
        # one request takes the number and writes the record: otherwise readers would
        # wait for a number without a record
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
        """Return the recorded deaths of a generation."""
        written = takewhile(
            lambda key: self._store.check([key]),
            (_death(generation, n) for n in count(1)),
        )
        return [_DEATHS.decode(self._store.get(key)) for key in written]

    def wait_for_end(self, generation: int) -> str:
        """Block until a generation has ended, without limit, and return the reason."""
        self._store.wait([f"{generation}/end"], _FOR_EVER)
        return self._store.get(f"{generation}/end").decode()

    def arrive(self, generation: int, world_size: int) -> None:
        """Count one more arrived rank. The last rank lets the generation begin."""
        if self._store.add(f"{generation}/arrived", 1) == world_size:
            # a swap: if the generation has ended meanwhile, `stop` stays
            self._store.compare_set(f"{generation}/decision", "", _GO)

    def sign_in(self, generation: int, global_rank: int) -> None:
        """Record by name that a rank arrives, for `missing`."""
        self._store.set(f"{generation}/here/{global_rank}", "here")

    def missing(self, generation: int, world_size: int) -> list[int]:
        """Return the ranks that have not signed in."""
        return [
            rank
            for rank in range(world_size)
            if not self._store.check([f"{generation}/here/{rank}"])
        ]

    def goes(
        self, generation: int, timeout_s: float, *, join_s: float | None = None
    ) -> bool:
        """Wait until all ranks have arrived, or the generation has ended.

        Args:
            generation: The generation.
            timeout_s: The time limit, in seconds.
            join_s: The time limit of the whole wait, for the error; None: `timeout_s`.

        Returns:
            Whether all ranks have arrived.

        Raises:
            RanksMissingError: Neither has happened in time.
        """
        key = f"{generation}/decision"
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            arrived = self._store.add(f"{generation}/arrived", 0)
            raise RanksMissingError(
                f"generation {generation}: got {arrived} ranks in"
                f" runtime.join_s={join_s or timeout_s:g} seconds, wanted all"
            ) from error
        return self._store.get(key) == _GO.encode()

    def claim(self, global_rank: int, incarnation: int) -> bool:
        """Allow only this incarnation of a rank to join from now on.

        Args:
            global_rank: The rank.
            incarnation: The incarnation after the one that may join at present.

        Returns:
            False if another process has claimed this incarnation, or a later one.
        """
        key, current = f"incarnation/{global_rank}", self._claim(global_rank)
        if int(current.split()[0]) != incarnation - 1:
            return False
        # with a name: two supervisors may claim the same number at the same time, if
        # one of them runs on a node that was given up
        wanted = f"{incarnation} {uuid.uuid4().hex}"
        return self._store.compare_set(key, current, wanted) == wanted.encode()

    def incarnation(self, global_rank: int) -> int:
        """Return the incarnation of a rank that may join; -1 before the first one."""
        return int(self._claim(global_rank).split()[0])

    def _claim(self, global_rank: int) -> str:
        return self._store.compare_set(f"incarnation/{global_rank}", "", "-1").decode()

    def done(self, generation: int, world_size: int) -> None:
        """Count one more rank that has no work left.

        With the last rank the generation has finished, unless the generation has ended.
        """
        if self._store.add(f"{generation}/done", 1) == world_size:
            self._store.compare_set(f"{generation}/outcome", "", _FINISHED)

    def finishes(self, generation: int) -> bool:
        """Block, without limit, until a generation has finished or ended.

        Returns:
            Whether the generation has finished.
        """
        self._store.wait([f"{generation}/outcome"], _FOR_EVER)
        return self.has_finished(generation)

    def has_finished(self, generation: int) -> bool:
        """Return whether all ranks were done in a generation, which is final."""
        key = f"{generation}/outcome"
        return self._store.check([key]) and self._store.get(key) == _FINISHED.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A rank that joins generations."""

    global_rank: int
    """The rank in the job."""

    world_size: int
    """Number of ranks of the job."""

    incarnation: int
    """Number of workers of the rank before this one, in this job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Late:
    """What a rank does while other ranks are late."""

    after_s: float
    """Seconds of the wait after which the other ranks are late.

    Less than the time limit of the wait.
    """

    act: Callable[[Sequence[int]], None]
    """Called then, in the training thread, with the ranks that have not arrived."""


class Membership:
    """One worker's way through the generations.

    All methods belong to the training thread. Methods that use the store raise
    StoreLostError if the store is gone.

    Attributes:
        member: The rank of the worker.
        page: The worker's status page.
        generation: The generation that the worker joined last; 0 before the first one.
        num_formed_groups: Number of inner groups that this generation has formed.
        num_kept_groups: Number of inner groups that this generation has kept from an
            earlier one.
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
        late: Late | None = None,
    ) -> None:
        """Prepare to join the first generation.

        Args:
            member: The rank of the worker.
            store: The job's store, for the training thread.
            watched: The job's store over a separate connection, for a thread that
                always waits in the store.
            groups: The process groups of the worker.
            page: The worker's status page.
            join_s: Time limit for the arrival of all ranks, in seconds.
            grace_s: Seconds after the end of a generation until threads that still wait
                for an operation are woken.
            late: What to do if ranks are late; None: nothing.
        """
        self.member = member
        self.page = page
        self.generation = 0
        # without `page.waits`: forming groups counts as one wait, and uses this store
        # from several threads
        self._store = CheckedStore(store)
        self._generations = Generations(CheckedStore(store, page.waits))
        # without `page.waits`: the watching thread always waits, which must not excuse
        # a training thread that hangs
        self._watched = Generations(CheckedStore(watched))
        self._groups = groups
        self._join_s = join_s
        self._grace_s = grace_s
        self._late = late
        self._left = threading.Event()
        self._ended = threading.Event()
        self._reason = ""
        self._reported = 0  # deaths in generations before this one are reported
        self._furthest = 0
        self._fruitless = 0
        self._at_end: list[Callable[[], None]] = []

    @property
    def num_formed_groups(self) -> int:
        """Process groups of this rank that the generation has formed."""
        return self._groups.num_formed

    @property
    def num_kept_groups(self) -> int:
        """Process groups of this rank that an earlier generation has formed."""
        return self._groups.num_kept

    def at_end(self, action: Callable[[], None]) -> None:
        """Run an action in the watching thread at each end of a generation.

        Args:
            action: The action, which must not wait.
        """
        self._at_end.append(action)

    def join(self) -> int:
        """Wait for all other ranks, and form the groups with them.

        A worker that has been replaced meanwhile ends here, with exit status FENCED.

        Returns:
            The generation that begins.

        Raises:
            RanksMissingError: Ranks do not arrive in time.
            PeersLostError: Connections break repeatedly without a death.
            StoreLostError: The store is gone.
        """
        while True:
            generation = self._generations.current()
            # after the generation is read: a supervisor announces a new incarnation
            # first, and then ends the generation that was read above
            if (
                self._generations.incarnation(self.member.global_rank)
                != self.member.incarnation
            ):
                _exit(FENCED, "another process has taken this rank's place")
            self.generation = generation
            # before the arrival: if this worker dies after its arrival, the supervisor
            # ends the generation that the page names
            self.page.join(generation)
            if self._late:
                self._generations.sign_in(generation, self.member.global_rank)
            self._generations.arrive(generation, self.member.world_size)
            goes = self._goes(generation)
            if goes:
                self._require_progress()
            if goes and self._form(generation):
                return generation

    def lost(self, error: BaseException) -> bool:
        """Return whether an error means that the generation has ended.

        An error of communication ends the generation. Any other error is the caller's
        own, unless the generation has just ended: then the contents of tensors of an
        operation that was cut off may have caused the error.

        Args:
            error: The error. The frames of its tracebacks are cleared.
        """
        # groups live as long as a frame of a traceback refers to the groups
        for cause in causes_of(error):
            traceback.clear_frames(cause.__traceback__)
        if any(isinstance(cause, PeersLostError) for cause in causes_of(error)):
            return self._generations.end(
                self.generation, f"rank {self.member.global_rank}: {error}"
            )
        return self._ended.wait(_LATE_S)

    def deaths(self) -> list[Death]:
        """Return the deaths since the last generation that all ranks entered."""
        # a new worker has entered no generation: the death of its forerunner ended the
        # generation before this one
        first = self._reported or self.generation - 1
        return [
            death
            for generation in range(first, self.generation)
            for death in self._generations.deaths(generation)
        ]

    def entered(self) -> None:
        """Note that all ranks have reached one state in this generation."""
        self._reported = self.generation

    def num_deaths(self) -> int:
        """Return the number of processes of the job that have died so far."""
        return self._generations.num_deaths()

    def leave(self) -> str:
        """Leave a generation that has ended, and return the reason for its end."""
        self._ended.wait(_END_SEEN_S)  # the watching thread reads the reason
        self._groups.leave()
        # after the groups have left: until then the watching thread cuts connections
        # that are opened late
        self._left.set()
        self._watcher.join()
        return self._reason

    def finish(self) -> None:
        """Wait until all ranks have finished.

        Until then a recovery may need every rank.

        Raises:
            PeersLostError: A rank was lost before all ranks had finished.
        """
        self._generations.done(self.generation, self.member.world_size)
        if not self._generations.finishes(self.generation):
            raise PeersLostError("other ranks were lost before all had finished")
        # the store may end before this process, which the watching thread must not take
        # for a loss
        self._left.set()

    def _goes(self, generation: int) -> bool:
        """Wait for all ranks, as `Generations.goes` does."""
        late, left_s = self._late, self._join_s
        # ranks meet for the first time once all have built their models
        if late and generation > 1:
            try:
                return self._generations.goes(generation, late.after_s)
            except RanksMissingError:
                late.act(self._generations.missing(generation, self.member.world_size))
            left_s -= late.after_s
        return self._generations.goes(generation, left_s, join_s=self._join_s)

    def _require_progress(self) -> None:
        """Check that generations do not end in vain, again and again.

        Raises:
            PeersLostError: Several generations in a row have ended without a death or a
                new iteration.
        """
        # a supervisor's reason has a cause as well, although no death is recorded
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
        # before the groups: a loss while groups are formed must cut these groups, too
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
                raise  # it has finished: no rank waits for its end or leaves
            self.leave()
            return False
        finally:
            self.page.wait(False)
        return True

    def _fail(self, generation: int, reason: str) -> None:
        """End a generation from a thread that watches the device.

        The training thread may be blocked in the device.
        """
        # the training thread meets a lost store, too
        with contextlib.suppress(StoreLostError):
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
            # repeatedly: connections may be opened, and operations may begin, after the
            # first cut
            self._groups.cut()
            if time.monotonic() >= abandon_s:
                self._groups.abandon()
            left.wait(0.02)


def _death(generation: int, number: int) -> str:
    return f"{generation}/death/{number}"


def fault_of_end(reason: str) -> FaultClass:
    """Return the class of a fault that ended a generation without a worker's death.

    Args:
        reason: Why this worker left the generation; empty if the worker was not in the
            generation.
    """
    if reason.endswith(DAEMON_DIED):
        return FaultClass.DAEMON
    if reason.endswith(NODE_REPLACED):
        return FaultClass.NODE
    return (
        FaultClass.RESTART
        if not reason or reason.endswith(STARTED_AGAIN)
        else FaultClass.CONNECTION
    )


def _exit(status: int, reason: str) -> NoReturn:
    _log.error("worker ends: %s", reason)
    os._exit(status)  # `sys.exit` would end only the watching thread
