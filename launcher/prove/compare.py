"""Compares digests of two runs, or of one run before and after its recoveries.

Owns: reading the digests of a run, and the differences between digests.
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
    """The return of a rank to an iteration whose state the rank had logged before."""

    iteration: int
    """The iteration to which the rank has returned."""

    rank: int
    """Global rank."""

    tensors: Mapping[str, str]
    """Digests after the recovery, by the names of tensors."""

    before: Sequence[Mapping[str, str]]
    """Earlier digests, by the names of tensors, after the iterations up to this one,
    the newest last.
    """

    def changed(self, *, may_be_older: bool) -> str | None:
        """Return the first tensor that differs from its earlier digest.

        Args:
            may_be_older: Whether a tensor may be as after any of the earlier
                iterations.

        Returns:
            The name of the tensor; None if no tensor differs.
        """
        known = self.before if may_be_older else self.before[-1:]
        for name, digest in self.tensors.items():
            if all(digest != each.get(name) for each in known):
                return name
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """The digests of a run, over all processes of each rank."""

    num_ranks: int
    """Number of ranks."""

    exactness: str = BITWISE
    """Promise of the run: `bitwise` or `state`."""

    states: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """Digests of whole states, by iteration and rank."""

    tensors: dict[tuple[int, int], list[dict[str, str]]] = field(default_factory=dict)
    """Digests by the names of tensors, one mapping for each record, by iteration and
    rank.
    """

    returns: list[Return] = field(default_factory=list)
    """Returns of ranks to iterations that the ranks had logged."""

    loaded: dict[int, TensorDigests] = field(default_factory=dict)
    """State with which a restarted rank continued, by rank. Without tensors if a script
    logs its state only after iterations.
    """

    @property
    def iterations(self) -> list[int]:
        """The iterations with a digest, in order."""
        return sorted({iteration for iteration, _ in self.states})

    @property
    def resumed_after(self) -> int:
        """The iteration after which restarted ranks continued; -1 if no rank did."""
        return min((each.iteration for each in self.loaded.values()), default=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first state of a run that differs from the other run."""

    iteration: int
    """The iteration after which the state differs."""

    rank: int
    """Global rank."""

    tensor: str
    """Name of the first tensor that differs, or a text if no tensor can be named."""

    def __str__(self) -> str:
        return f"after iteration {self.iteration}, rank {self.rank}: {self.tensor}"


def read_digests(run: Path) -> Digests:
    """Read the digests from a run's event files.

    Args:
        run: The run folder.

    Raises:
        FileNotFoundError: There is no run in the folder.
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
                # all digests, not only the last: otherwise a wrong state that a later
                # recovery has left would go unnoticed
                found.states.setdefault((event.iteration, rank), set()).add(
                    event.digest
                )
                after = event
            # other digests of tensors are of a loaded state
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
    """Return digests as if states had no tensors of certain names.

    Args:
        digests: The digests of a run.
        names: The names of the tensors to leave out.
    """

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
    """Return the digests with which a restarted rank continued."""
    is_new = False
    for event in events:
        if isinstance(event, WorkerStarted):
            is_new = event.incarnation > 0
        elif is_new and isinstance(event, TensorDigests):
            return event
        elif is_new and isinstance(event, StateDigest):  # after the first iteration
            return TensorDigests(iteration=event.iteration - 1, digests={})
    return None


def _returns(rank: int, events: Iterable[Event]) -> Iterable[Return]:
    """Yield the returns of a rank.

    A rank logs digests after each iteration and after each recovery.
    """
    history: list[TensorDigests] = []
    back: int | None = None
    is_new = False
    for event in events:
        if isinstance(event, WorkerStarted):
            is_new = True
        elif isinstance(event, Rejoined | StateResumed):
            # later iterations run again, and may end in other states
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
    """Return the first state after a recovery that its rank did not have before.

    States are ordered by iteration, then by rank.

    Args:
        got: The digests of a run.
        may_be_older: Whether a tensor may be as after any earlier iteration.
    """
    for each in sorted(got.returns, key=lambda each: (each.iteration, each.rank)):
        name = each.changed(may_be_older=may_be_older)
        if name is not None:
            return Difference(iteration=each.iteration, rank=each.rank, tensor=name)
    return None


def loaded_otherwise(first: Digests, resumed: Digests) -> list[Difference]:
    """Return the tensors that ranks loaded in another state than the first run had.

    Args:
        first: The digests of the first run.
        resumed: The digests of the resumed run.

    Returns:
        The differences, by rank.
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
    """Return the names of all tensors that differ after any iteration.

    Only iterations that both runs logged are compared.
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
    """Return the first state at which a run lacks a digest or has another one.

    States are ordered by iteration, then by rank.
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
