"""The step log: the small facts of an iteration that a stage cannot recompute alone.

Owns: for each iteration its start and the numbers that crossed stages in it. Must not: know Megatron; the
tensors in a record are opaque, named, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.types import ReadyGradients

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRecord:
    """The facts that the update of `iteration` needs beside this stage's gradients.

    `tied_gradient` is this rank's piece of the gradient that first and last stage share, where they tie embeddings.
    """

    iteration: int
    gradients: ReadyGradients
    tied_gradient: torch.Tensor | None


class StepPublisher(Protocol):
    """Told of all that is logged and dropped, to keep it elsewhere as well."""

    def add_start(self, iteration: int, start: Mapping[str, torch.Tensor]) -> None: ...

    def add_record(self, record: StepRecord) -> None: ...

    def drop_steps(self, starts: Iterable[int], records: Iterable[int]) -> None: ...


class StepLog:
    """One rank's log, by iteration: what each started from (generators, scalers, schedule), and its record."""

    def __init__(self, daemon: StepPublisher | None = None) -> None:
        self._daemon = daemon
        self._starts: dict[int, Mapping[str, torch.Tensor]] = {}
        self._records: dict[int, StepRecord] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors that are logged."""
        tensors = [tensor for start in self._starts.values() for tensor in start.values()]
        tied = [record.tied_gradient for record in self._records.values()]
        return sum(tensor.nbytes for tensor in [*tensors, *tied] if tensor is not None)

    @property
    def gradients(self) -> Mapping[int, ReadyGradients]:
        """The part of records that all ranks of the job share, by iteration."""
        return {iteration: record.gradients for iteration, record in self._records.items()}

    def adopt(self, starts: Mapping[int, Mapping[str, torch.Tensor]], records: Mapping[int, StepRecord]) -> None:
        """Take over what an earlier process had logged, and its daemon has."""
        self._starts |= starts
        self._records |= records

    def fill(self, facts: Mapping[int, ReadyGradients]) -> None:
        """Add records of iterations that there are none of."""
        for iteration, gradients in facts.items():
            if iteration not in self._records:
                self.add(StepRecord(iteration=iteration, gradients=gradients, tied_gradient=None))

    def clear(self) -> None:
        """Drop everything."""
        self._drop(lambda _: True)

    def note_start(self, iteration: int, small_state: Mapping[str, torch.Tensor]) -> None:
        """Log the start of `iteration`, in place of an earlier one."""
        self._starts[iteration] = small_state
        if self._daemon:
            self._daemon.add_start(iteration, small_state)

    def add(self, record: StepRecord) -> None:
        """Log a record, in place of an older one of the same iteration."""
        self._records[record.iteration] = record
        if self._daemon:
            self._daemon.add_record(record)

    def has_start(self, iteration: int) -> bool:
        """Return whether it is logged what an iteration starts from."""
        return iteration in self._starts

    def start(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return what an iteration started from. Raises CheckpointLoadError if that is not logged."""
        return _found(self._starts, iteration)

    def record(self, iteration: int) -> StepRecord:
        """Return an iteration's record. Raises CheckpointLoadError if there is none."""
        return _found(self._records, iteration)

    def reaches(self, first: int) -> int:
        """Return the last iteration to which, from `first` on, all can be run again; `first` - 1 for none.

        Of `first` it must be logged what it starts from, or nothing can: then `first` - 2.
        """
        if first not in self._starts:
            return first - 2
        last = first - 1
        while last + 1 in self._starts and last + 1 in self._records:
            last += 1
        return last

    def drop_up_to(self, iteration: int) -> None:
        """Drop `iteration` and all before it."""
        self._drop(lambda logged: logged <= iteration)

    def drop_after(self, iteration: int) -> None:
        """Drop all after `iteration`: a rollback has led there, and what came next is to happen again."""
        self._drop(lambda logged: logged > iteration)

    def _drop(self, is_dropped: Callable[[int], bool]) -> None:
        starts, records = ([i for i in logged if is_dropped(i)] for logged in (self._starts, self._records))
        for old in starts:
            del self._starts[old]
        for old in records:
            del self._records[old]
        if self._daemon and (starts or records):
            self._daemon.drop_steps(starts, records)


def _found(logged: Mapping[int, T], iteration: int) -> T:
    if iteration not in logged:
        raise CheckpointLoadError(f"step log: no iteration {iteration}, got {sorted(logged)}")
    return logged[iteration]
