"""The step log: the small facts of an iteration that a stage cannot recompute alone.

Owns: one record an iteration of what it started from and what crossed the stages in it. Must not: know Megatron; the
tensors in a record are opaque, named, on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.types import ReadyGradients

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRecord:
    """What the update of iteration `iteration` needs beside this stage's gradients.

    `tied_gradient` is this rank's piece of the gradient that first and last stage share, where they tie embeddings.
    """

    iteration: int
    gradients: ReadyGradients
    tied_gradient: torch.Tensor | None


class StepLog:
    """One rank's log, by iteration: what each started from (generators, scalers, schedule), and its record."""

    def __init__(self) -> None:
        self._starts: dict[int, Mapping[str, torch.Tensor]] = {}
        self._records: dict[int, StepRecord] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors that are logged."""
        tensors = [tensor for start in self._starts.values() for tensor in start.values()]
        tied = [record.tied_gradient for record in self._records.values()]
        return sum(tensor.nbytes for tensor in [*tensors, *tied] if tensor is not None)

    def note_start(self, iteration: int, small_state: Mapping[str, torch.Tensor]) -> None:
        """Log what `iteration` starts from, in place of what was noted before."""
        self._starts[iteration] = small_state

    def add(self, record: StepRecord) -> None:
        """Log a record, in place of an older one of the same iteration."""
        self._records[record.iteration] = record

    def start(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return what an iteration started from. Raises CheckpointLoadError if that is not logged."""
        return _found(self._starts, iteration)

    def record(self, iteration: int) -> StepRecord:
        """Return an iteration's record. Raises CheckpointLoadError if there is none."""
        return _found(self._records, iteration)

    def covers(self, first: int, last: int) -> bool:
        """Return whether iterations `first` to `last` can be run again, and the one after them can start."""
        iterations = range(first, last + 1)
        return last + 1 in self._starts and all(i in self._starts and i in self._records for i in iterations)

    def drop_up_to(self, iteration: int) -> None:
        """Drop `iteration` and all before it."""
        for logged in (self._starts, self._records):
            for old in [i for i in logged if i <= iteration]:
                del logged[old]


def _found(logged: Mapping[int, T], iteration: int) -> T:
    if iteration not in logged:
        raise CheckpointLoadError(f"step log: no iteration {iteration}, got {sorted(logged)}")
    return logged[iteration]
