"""The step log: small facts of each iteration that a stage cannot recompute alone.

Owns: the start of each iteration, and the numbers that crossed stages in the iteration.
Must not: depend on Megatron. The tensors in a record are opaque, named, and on the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot.blob_keys import start_key, step_key
from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.types import ReadyGradients

T = TypeVar("T")


def window_steps(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return the keys of the entries that lead from a window's snapshots to its end.

    A step is an iteration's record together with the iteration's start. A start alone
    belongs to the iteration after a snapshot of the whole state.

    Slots of the iterations 4 to 6 need step-5 and step-6, whose replay leads to the
    start of 7. One slot, of iteration 4, needs start-5.

    Args:
        snapshots: Snapshots of the window, by slot. Units of a partial checkpoint have
            no replay, and need no entries.
    """
    if not snapshots or snapshots[0].header.unit is not None:
        return []
    replayed = window_replay(snapshots)
    return [*map(step_key, replayed)] or [start_key(replayed.start)]


def window_replay(snapshots: Sequence[Snapshot]) -> range:
    """Return the iterations that lead from a window's first snapshot to its last one.

    Args:
        snapshots: Snapshots of the window, by slot.
    """
    if not snapshots:
        return range(0)
    first, last = snapshots[0].header, snapshots[-1].header
    return range(first.window_start + 1, last.iteration + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """How far the logs of a rank lead from a window of the rank."""

    last: int
    """Last iteration that can be reached."""

    branches: tuple[int, ...] = ()
    """Branches in which the iterations from the window's last snapshot to `last` were
    trained. Empty where results repeat, and branches make no difference.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRecord:
    """Facts that the update of an iteration needs beside this stage's gradients."""

    iteration: int
    """Iteration of the update."""

    gradients: ReadyGradients
    """Facts that all ranks of the job share."""

    tied_gradient: torch.Tensor | None
    """This rank's piece of the gradient that first and last stage share if they tie
    embeddings. None if the rank has no such piece, and in a record made from facts of
    other ranks.
    """

    batches: str | None = None
    """Hash of the micro-batches that this rank has read. None if the hash is unknown,
    as in a record made from facts of other ranks.
    """

    after_pass: Mapping[str, torch.Tensor] | None = None
    """State between the pass and the step of the iteration, without parameters,
    moments and gradients. None unless gradients are logged, and in a record made from
    facts of other ranks.
    """

    gradients_checksum: int | None = None
    """Checksum of the logged gradients of the same pass; None if there are none."""

    branch: int = 0
    """Branch of the run in which the iteration is trained (`engine.step_state`)."""

    follows: int = 0
    """Branch in which the iteration before was trained."""


class StepPublisher(Protocol):
    """Stores the entries of a step log elsewhere as well.

    A new entry takes the place of an earlier entry of the same iteration.
    """

    def add_start(self, iteration: int, start: Mapping[str, torch.Tensor]) -> None:
        """Store a start alone."""
        ...

    def add_step(
        self, record: StepRecord, start: Mapping[str, torch.Tensor] | None
    ) -> None:
        """Store a record with the start of its iteration.

        Args:
            record: Record of the iteration.
            start: Start of the iteration; None if the start is not logged.
        """
        ...

    def drop_steps(self, starts: Iterable[int], steps: Iterable[int]) -> None:
        """Drop the starts and the steps of these iterations."""
        ...


class StepLog:
    """One rank's log by iteration: the start and the record of each iteration.

    A start holds the state of generators, scalers and the schedule. The daemon receives
    one entry per iteration, with the record. A start is published alone where no replay
    leads to the start: after a snapshot of the whole state.
    """

    def __init__(self, publisher: StepPublisher | None = None) -> None:
        self._publisher = publisher
        self._starts: dict[int, Mapping[str, torch.Tensor]] = {}
        self._records: dict[int, StepRecord] = {}
        self._published: set[int] = set()  # iterations whose starts are published alone

    @property
    def size_bytes(self) -> int:
        """Bytes of all logged tensors."""
        tensors = [
            tensor for start in self._starts.values() for tensor in start.values()
        ]
        for record in self._records.values():
            tensors += (record.after_pass or {}).values()
            if record.tied_gradient is not None:
                tensors.append(record.tied_gradient)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def gradients(self) -> Mapping[int, ReadyGradients]:
        """Part of each record that all ranks of the job share, by iteration."""
        return {
            iteration: record.gradients for iteration, record in self._records.items()
        }

    @property
    def oldest_start(self) -> int | None:
        """Oldest iteration whose start is logged; None without any start."""
        return min(self._starts, default=None)

    def adopt(
        self,
        starts: Mapping[int, Mapping[str, torch.Tensor]],
        records: Mapping[int, StepRecord],
    ) -> None:
        """Take over the entries of an earlier process from its publisher."""
        self._starts |= starts
        self._records |= records
        # some starts came with a record: dropping such a start twice does no harm
        self._published |= starts.keys()

    def fill(self, facts: Mapping[int, ReadyGradients]) -> None:
        """Add the records of iterations that have none.

        Args:
            facts: Facts that all ranks share, by iteration.
        """
        for iteration, gradients in facts.items():
            # a record of this rank has the tied gradient, which the facts of other
            # ranks lack
            if iteration not in self._records:
                self.add(
                    StepRecord(
                        iteration=iteration, gradients=gradients, tied_gradient=None
                    )
                )

    def clear(self) -> None:
        """Drop everything."""
        self._drop(lambda _: True)

    def log_start(
        self, iteration: int, small_state: Mapping[str, torch.Tensor]
    ) -> None:
        """Log the start of `iteration`, in place of an earlier start."""
        self._starts[iteration] = small_state
        # published anew: the contents may differ
        if self._publisher and iteration in self._published:
            self._publisher.add_start(iteration, small_state)

    def publish_start(self, iteration: int) -> None:
        """Publish a logged start, unless the same contents are published already."""
        if self._publisher and iteration not in self._published:
            self._publisher.add_start(iteration, self._starts[iteration])
        self._published.add(iteration)

    def add(self, record: StepRecord) -> None:
        """Log a record, in place of an earlier record of the same iteration."""
        self._records[record.iteration] = record
        if self._publisher:
            self._publisher.add_step(record, self._starts.get(record.iteration))

    def has_start(self, iteration: int) -> bool:
        """Return whether the start of an iteration is logged."""
        return iteration in self._starts

    def start(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return the start of an iteration.

        Raises:
            CheckpointLoadError: The start is not logged.
        """
        return _found(self._starts, iteration)

    def record(self, iteration: int) -> StepRecord:
        """Return the record of an iteration.

        Raises:
            CheckpointLoadError: The record is not logged.
        """
        return _found(self._records, iteration)

    def reaches(self, first: int) -> int | None:
        """Return how far a replay leads from the state before an iteration.

        A replay needs the start of `first`, and only the records of later iterations:
        where a start is not logged, the replay of the iteration before has led to that
        start.

        Returns:
            The last iteration up to which all iterations from `first` on can be
            replayed; `first` - 1 if there are none. None without the start of `first`:
            then not even the state before `first` can be restored.
        """
        if first not in self._starts:
            return None
        last = first - 1
        while last + 1 in self._records:
            last += 1
        return last

    def drop_up_to(self, iteration: int) -> None:
        """Drop `iteration` and all earlier ones."""
        self._drop(lambda logged: logged <= iteration)

    def drop_after(self, iteration: int) -> None:
        """Drop all entries after `iteration`.

        A rollback leads to `iteration`, and later iterations run again.
        """
        self._drop(lambda logged: logged > iteration)

    def _drop(self, is_dropped: Callable[[int], bool]) -> None:
        starts, records = (
            [i for i in logged if is_dropped(i)]
            for logged in (self._starts, self._records)
        )
        for old in starts:
            del self._starts[old]
        for old in records:
            del self._records[old]
        published = self._published.intersection(starts)
        self._published -= published
        if self._publisher and (published or records):
            self._publisher.drop_steps(sorted(published), records)


def reach_by_replay(steps: StepLog, snapshots: Sequence[Snapshot]) -> Reach | None:
    """Return how far replays lead from a window.

    Args:
        steps: The rank's step log.
        snapshots: Snapshots of the window, by slot.

    Returns:
        The last iteration that can be replayed; None without the start of the first
        one.
    """
    last = steps.reaches(snapshots[0].header.iteration + 1)
    return None if last is None else Reach(last=last)


def _found(logged: Mapping[int, T], iteration: int) -> T:
    if iteration not in logged:
        raise CheckpointLoadError(
            f"step log: no iteration {iteration}, got {sorted(logged)}"
        )
    return logged[iteration]
