"""Generations: how the ranks of a job end one life of their process groups and begin the next, over a shared store.

Owns: the protocol, in the store that outlives every rank. Nobody is special: whoever notices a loss ends the
generation, all leave it through the same key, and the next begins when all ranks have arrived, replacements included.
Must not: know what is done in a generation, or recover anything.

    join g ... all here: go ---- form groups ---- train ---- end(g) by anybody ---- cut, leave ---- join g + 1
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from moe_ckpt.errors import PeersLostError
from moe_ckpt.runtime.death import Death, death_from_json
from moe_ckpt.runtime.groups import ElasticGroups
from moe_ckpt.runtime.page import Page

_log = logging.getLogger(__name__)
_FOR_EVER = timedelta(days=365)
_GO, _STOP, _FINISHED = "go", "stop", "finished"
_END_SEEN_S = 2.0

STORE_LOST, FENCED = 75, 76
"""Exit statuses of a trainer that cannot go on: the store is gone, or another life has taken its place."""


class Generations:
    """The keys of the protocol, for guards and trainers alike. Generations count from 1."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def current(self) -> int:
        """Return the newest generation."""
        return int(self._store.compare_set("generation", "", "1"))

    def end(self, generation: int, reason: str) -> None:
        """End a generation, if it has not ended yet. For anybody, at any time."""
        self._store.compare_set("generation", str(generation), str(generation + 1))  # first: who leaves joins that one
        self._store.compare_set(f"{generation}/decision", "", _STOP)
        self._store.compare_set(f"{generation}/end", "", reason)

    def record_death(self, generation: int, death: Death) -> None:
        """A rank's process died in a generation: before the next one goes, everybody who joins it can know."""
        number = self._store.add(f"{generation}/deaths", 1)
        self._store.set(f"{generation}/death/{number}", death.to_json())

    def deaths(self, generation: int) -> list[Death]:
        """Return who died in a generation."""
        numbers = range(1, 1 + self._store.add(f"{generation}/deaths", 0))
        return [death_from_json(self._store.get(f"{generation}/death/{number}").decode()) for number in numbers]

    def has_ended(self, generation: int) -> bool:
        """Return whether somebody has ended it."""
        return self._store.check([f"{generation}/end"])

    def wait_for_end(self, generation: int) -> str:
        """Block until a generation has ended, however long; return why."""
        self._store.wait([f"{generation}/end"], _FOR_EVER)
        return self._store.get(f"{generation}/end").decode()

    def arrive(self, generation: int, world_size: int) -> None:
        """One more rank is here; the last one lets all go."""
        if self._store.add(f"{generation}/arrived", 1) == world_size:
            self._store.compare_set(f"{generation}/decision", "", _GO)

    def goes(self, generation: int, timeout_s: float) -> bool:
        """Wait until all ranks have arrived or the generation has ended; return whether it was the former.

        Raises PeersLostError when neither happens in time.
        """
        key = f"{generation}/decision"
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            arrived = self._store.add(f"{generation}/arrived", 0)
            raise PeersLostError(
                f"generation {generation}: got {arrived} ranks in runtime.join_s={timeout_s:g} seconds, wanted all"
            ) from error
        return self._store.get(key) == _GO.encode()

    def set_life(self, global_rank: int, life: int) -> None:
        """From now on only this life of a rank may join."""
        self._store.set(f"life/{global_rank}", str(life))

    def life(self, global_rank: int) -> int:
        """Return which life of a rank may join."""
        return int(self._store.get(f"life/{global_rank}"))

    def done(self, global_rank: int) -> None:
        """This rank has nothing left to do."""
        self._store.set(f"done/{global_rank}", "")

    def wait_until_done(self, world_size: int, timeout_s: float) -> None:
        """Block until no rank has anything left to do. Raises torch's DistStoreError when that takes longer."""
        self._store.wait([f"done/{rank}" for rank in range(world_size)], timedelta(seconds=timeout_s))

    def all_done(self, world_size: int) -> bool:
        """Return whether no rank has anything left to do."""
        return self._store.check([f"done/{rank}" for rank in range(world_size)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Who joins: a life of a rank, from 0."""

    global_rank: int
    world_size: int
    life: int


class Membership:
    """One trainer's way through the generations. All methods belong to the thread that trains.

    `store` serves that thread, `watched` another one that always waits in it: it needs a connection of its own.
    """

    def __init__(
        self,
        member: Member,
        store: dist.Store,
        watched: dist.Store,
        groups: ElasticGroups,
        page: Page,
        *,
        join_s: float,
        grace_s: float,
    ) -> None:
        self.member = member
        self.page = page
        self.generation = 0
        self._store = store
        self._generations = Generations(store)
        self._watched = Generations(watched)
        self._groups = groups
        self._join_s = join_s
        self._grace_s = grace_s
        self._left = threading.Event()
        self._reason: str | None = None

    def join(self) -> int:
        """Wait for all other ranks, form the groups with them, and return the generation that begins.

        Raises PeersLostError when some do not come in time. A rank that has been replaced meanwhile ends here.
        """
        while True:
            generation = self._generations.current()
            if self._generations.life(self.member.global_rank) != self.member.life:
                _exit(FENCED, "another process has taken this rank's place")
            self.generation = generation
            self.page.join(generation)
            self._generations.arrive(generation, self.member.world_size)
            self.page.wait(True)
            goes = self._generations.goes(generation, self._join_s)
            self.page.wait(False)
            if goes and self._form(generation):
                return generation

    def lost(self, error: BaseException) -> bool:
        """Return whether an error means that the generation has ended, and with it what was being done.

        An error of communication ends it. Any other error is the caller's own, unless the generation has just ended:
        then it may come from what an operation that was cut left in its tensors.
        """
        _forget_frames(error)
        if isinstance(error, PeersLostError):
            self._generations.end(self.generation, f"rank {self.member.global_rank}: {error}")
            return True
        return self._generations.has_ended(self.generation)

    def deaths(self) -> list[Death]:
        """Return who died in the generation before this one."""
        return self._generations.deaths(self.generation - 1)

    def leave(self) -> str:
        """Leave a generation that has ended; return why it has."""
        self._ended.wait(_END_SEEN_S)
        self._groups.leave()
        self._left.set()
        self._watcher.join()
        return self._reason or "unknown"

    def finish(self) -> None:
        """Return when all ranks have finished: until then a death can still need them all.

        Raises PeersLostError if others were lost meanwhile.
        """
        self._generations.done(self.member.global_rank)
        self.page.wait(True)
        while not self._generations.all_done(self.member.world_size):
            if self._ended.wait(0.01):
                raise PeersLostError("other ranks were lost before all had finished")
        self.page.wait(False)
        self._left.set()

    def _form(self, generation: int) -> bool:
        self._left = threading.Event()
        self._ended = threading.Event()
        arguments = (generation, self._left, self._ended)
        self._watcher = threading.Thread(target=self._watch, args=arguments, name="generation-watch", daemon=True)
        self._watcher.start()
        try:
            self._groups.form(self._store, generation)
        except PeersLostError as error:
            self._generations.end(generation, f"rank {self.member.global_rank}: {error}")
            self.leave()
            return False
        return True

    def _watch(self, generation: int, left: threading.Event, ended: threading.Event) -> None:
        """Wait for the end of a generation; then get the training thread out of it."""
        try:
            self._reason = self._watched.wait_for_end(generation)
        except (RuntimeError, OSError) as error:
            if left.is_set():
                return
            _exit(STORE_LOST, f"the store of torchrun does not answer any more: {error}")
        ended.set()
        abandon_s = time.monotonic() + self._grace_s
        while not left.is_set():
            self._groups.cut()
            if time.monotonic() >= abandon_s:
                self._groups.abandon()
            left.wait(0.02)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames hold that an error went through: groups live as long as anything names them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _exit(status: int, reason: str) -> NoReturn:
    _log.error("trainer ends: %s", reason)
    os._exit(status)
