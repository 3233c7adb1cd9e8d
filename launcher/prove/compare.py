"""Digests of two runs, or of one run before and after its recoveries, and the first
place at which they differ.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.promise import exactness_of
from moe_ckpt.elastic.live_workers import read_world_size
from moe_ckpt.events import (
    Event,
    Rejoined,
    StateDigest,
    StateResumed,
    TensorDigests,
    WorkerStarted,
    read_events,
)
from moe_ckpt.exactness import BITWISE


@dataclass(frozen=True, kw_only=True, slots=True)
class Return:
    """A rank has come back to an iteration after which the rank had logged its state
    before.

    `before` has the digests of tensors after the iterations up to this one, the newest
    last.
    """

    iteration: int
    rank: int
    tensors: Mapping[str, str]
    before: Sequence[Mapping[str, str]]

    def changed(self, *, may_be_older: bool) -> str | None:
        """Return the first tensor that is not as it was; `may_be_older`: as it was
        after any of the iterations.
        """
        known = self.before if may_be_older else self.before[-1:]
        for name, digest in self.tensors.items():
            if all(digest != each.get(name) for each in known):
                return name
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """The digests of a run by (iteration, rank), over all incarnations: of whole
    states, and of their tensors.
    """

    num_ranks: int
    exactness: str = BITWISE
    states: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    tensors: dict[tuple[int, int], list[dict[str, str]]] = field(default_factory=dict)
    returns: list[Return] = field(default_factory=list)
    loaded: dict[int, TensorDigests] = field(default_factory=dict)
    """By rank: the state with which a rank that was started again went on; without
    tensors where a script logs its state after iterations only.
    """

    @property
    def iterations(self) -> list[int]:
        return sorted({iteration for iteration, _ in self.states})

    @property
    def resumed_after(self) -> int:
        """The iteration after which ranks that were started again went on; -1 if none
        did.
        """
        return min((each.iteration for each in self.loaded.values()), default=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first state of a run that is not the other's; `tensor` is the first in it
    that differs.
    """

    iteration: int
    rank: int
    tensor: str

    def __str__(self) -> str:
        return f"after iteration {self.iteration}, rank {self.rank}: {self.tensor}"


def read_digests(run: Path) -> Digests:
    """Return the digests in a run's event files. Raises FileNotFoundError where there
    is no run.
    """
    logs = [
        [
            logged.event
            for logged in read_events(run / "events" / f"rank{rank:04d}.jsonl")
        ]
        for rank in range(read_world_size(run))
    ]
    found = Digests(num_ranks=len(logs), exactness=exactness_of(logs[0]) or BITWISE)
    for rank, events in enumerate(logs):
        found.returns.extend(_returns(rank, events))
        if loaded := _loaded(events):
            found.loaded[rank] = loaded
        after: StateDigest | None = None
        for event in events:
            if isinstance(event, StateDigest):
                # all, not the last: a wrong state that a later recovery has left would
                # go unnoticed
                found.states.setdefault((event.iteration, rank), set()).add(
                    event.digest
                )
                after = event
            # else of a state that was loaded
            elif (
                isinstance(event, TensorDigests)
                and after
                and after.iteration == event.iteration
            ):
                found.tensors.setdefault((event.iteration, rank), []).append(
                    event.digests
                )
                after = None
    return found


def without(digests: Digests, names: Collection[str]) -> Digests:
    """Return digests as if states had no tensors of these names."""

    def kept(tensors: Mapping[str, str]) -> dict[str, str]:
        return {name: digest for name, digest in tensors.items() if name not in names}

    tensors = {
        key: [kept(each) for each in logged] for key, logged in digests.tensors.items()
    }
    return replace(
        digests,
        tensors=tensors,
        states={
            key: {json.dumps(each) for each in logged}
            for key, logged in tensors.items()
        },
        loaded={
            rank: replace(each, digests=kept(each.digests))
            for rank, each in digests.loaded.items()
        },
    )


def _loaded(events: Iterable[Event]) -> TensorDigests | None:
    """Return the digests with which a rank went on after it was started again."""
    is_new = False
    for event in events:
        if isinstance(event, WorkerStarted):
            is_new = event.incarnation > 0
        elif is_new and isinstance(event, TensorDigests):
            return event
        elif is_new and isinstance(event, StateDigest):  # of its first iteration
            return TensorDigests(iteration=event.iteration - 1, digests={})
    return None


def _returns(rank: int, events: Iterable[Event]) -> Iterable[Return]:
    """Yield the returns of a rank, whose digests were logged after each iteration and
    after each recovery.
    """
    history: list[TensorDigests] = []
    back: int | None = None
    is_new = False
    for event in events:
        if isinstance(event, WorkerStarted):
            is_new = True
        elif isinstance(event, Rejoined | StateResumed):
            # later iterations happen again, and may end in other states
            back, is_new = event.iteration, False
            history = [each for each in history if each.iteration <= back]
        elif isinstance(event, TensorDigests):
            if is_new:  # nothing was loaded: training has begun anew
                history, is_new = [], False
            if history and event.iteration == back == history[-1].iteration:
                before = [each.digests for each in history]
                yield Return(
                    iteration=event.iteration,
                    rank=rank,
                    tensors=event.digests,
                    before=before,
                )
                history.pop()
            back = None
            history.append(event)


def first_changed(got: Digests, *, may_be_older: bool) -> Difference | None:
    """Return the first state after a recovery, by iteration and then by rank, that its
    rank did not have before.
    """
    for each in sorted(got.returns, key=lambda each: (each.iteration, each.rank)):
        name = each.changed(may_be_older=may_be_older)
        if name is not None:
            return Difference(iteration=each.iteration, rank=each.rank, tensor=name)
    return None


def loaded_otherwise(first: Digests, resumed: Digests) -> list[Difference]:
    """Return the tensors that ranks loaded in another state than the first run had, by
    rank.
    """
    found = []
    for rank, loaded in sorted(resumed.loaded.items()):
        [before, *_] = first.tensors.get((loaded.iteration, rank), [{}])
        found += [
            Difference(iteration=loaded.iteration, rank=rank, tensor=name)
            for name in (before | loaded.digests if loaded.digests else {})
            if before.get(name) != loaded.digests.get(name)
        ]
    return found


def names_that_differ(wanted: Digests, got: Digests) -> set[str]:
    """Return the names of all tensors that differ after any iteration that both runs
    logged.
    """
    names: set[str] = set()
    for key in wanted.tensors.keys() & got.tensors.keys():
        [first, *_] = wanted.tensors[key]
        for other in got.tensors[key]:
            names |= {
                name
                for name in {**first, **other}
                if first.get(name) != other.get(name)
            }
    return names


def first_difference(wanted: Digests, got: Digests) -> Difference | None:
    """Return the first place, by iteration and then by rank, at which a run lacks a
    digest or has another one.
    """
    for iteration, rank in sorted({*wanted.states, *got.states}):
        if wanted.states.get((iteration, rank)) != got.states.get((iteration, rank)):
            tensor = _first_tensor(wanted, got, iteration, rank)
            return Difference(iteration=iteration, rank=rank, tensor=tensor)
    return None


def _first_tensor(wanted: Digests, got: Digests, iteration: int, rank: int) -> str:
    for name, run in (("first run", wanted), ("compared run", got)):
        if (iteration, rank) not in run.tensors:
            return f"no digest in the {name}"
    first, *others = [*wanted.tensors[iteration, rank], *got.tensors[iteration, rank]]
    for other in others:
        names = [
            name for name in {**first, **other} if first.get(name) != other.get(name)
        ]
        if names:
            return names[0]
    return "no tensor, but the digest of the whole"
