"""The Protocols through which the engine uses the training framework; `moe_ckpt.megatron` implements them.

Also where a rank stands in the job. Nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.collectives import Ranks
from moe_ckpt.events import CapacityBoosted
from moe_ckpt.snapshot.adam_update import AdamStep, Gradients
from moe_ckpt.snapshot.boundary_log import LoggedEnds
from moe_ckpt.snapshot.capture import Piece
from moe_ckpt.snapshot.codec import PartKey, ShardIdentity
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.types import ExpertCounts, OperatorTable, ReadyGradients, RunIdentity


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagePlace:
    """Where this rank stands: its run and shard, all ranks, those of its stage, and its neighbours in the pipeline.

    `previous_rank` and `next_rank` are global ranks of the same replica, None at the ends of the pipeline.
    """

    identity: RunIdentity
    shard: ShardIdentity
    ranks: Ranks
    stage_ranks: Ranks
    previous_rank: int | None
    next_rank: int | None
    device: torch.device

    @property
    def stage(self) -> int:
        return self.shard.pp_rank

    @property
    def num_stages(self) -> int:
        return self.identity.layout.pp


class Operators(Protocol):
    """The operators of the stage, by position in `table` or by name."""

    table: OperatorTable

    def meet(self) -> None:
        """Gather the table of a new generation, in which other ranks of the stage may be new. Collective in it."""
        ...

    def pieces(self, full: Collection[int], compute: Collection[int]) -> list[Piece]:
        """Return what this rank takes of them: whole state, or compute weights; tensors are live."""
        ...

    def buffer_pieces(self, positions: Collection[int]) -> list[Piece]:
        """Return their buffers, which change in forward already."""
        ...

    def note_step(self, iteration: int, gradients: ReadyGradients) -> None:
        """The step of `iteration` is about to be taken."""
        ...

    def gradients(self, full: Collection[int], iteration: int) -> Gradients | None:
        """Return what these took the step of `iteration` with, live until the next one; None if not known."""
        ...

    def reduced_gradients(self) -> Mapping[PartKey, torch.Tensor]:
        """Return the gradients of this rank's pieces, unscaled and not clipped, live until the step.

        By the master weights, flattened, float32, in the order of `pieces`; without those that take no step.
        """
        ...

    def steps_taken(self, iteration: int) -> Mapping[PartKey, AdamStep]:
        """Return the steps that followed in `iteration`, by the same keys; none where it was skipped."""
        ...

    def adam_steps(self) -> tuple[float, ...]:
        """Return the step count of each inner optimizer."""
        ...

    def load(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        compute: Collection[str],
        adam_steps: Sequence[float],
    ) -> None:
        """Put pieces back, on all ranks of the stage together, and make all copies whole."""
        ...

    def digests(self) -> Mapping[str, str]:
        """Return a hash of this rank's pieces of each operator, by the operator's name."""
        ...

    def freeze(self, frozen: Collection[str]) -> None:
        """Let these skip weight gradients, and all others compute them."""
        ...


class Stage(Protocol):
    """One rank's part of its stage, iteration by iteration."""

    def begin(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return what `iteration` starts from beside parameters and moments; buffers are remembered inside."""
        ...

    def restore_start(self, start: Mapping[str, torch.Tensor], *, undo: int | None = None) -> None:
        """Put back what an iteration started from; to undo one also the buffers that `begin` remembered of it."""
        ...

    def record(self, iteration: int, gradients: ReadyGradients) -> StepRecord:
        """Return the facts of an iteration whose gradients are ready."""
        ...

    def replay(
        self, record: StepRecord, start: Mapping[str, torch.Tensor], ends: LoggedEnds, *, whole_model: bool
    ) -> None:
        """Run an iteration again, from the state before it."""
        ...

    def abandon_pass(self) -> None:
        """A pass over a batch was cut off and comes to nothing: forget what it left behind outside the state."""
        ...

    def update(self, gradients: ReadyGradients) -> None:
        """Take the step whose gradients are there, on this rank alone."""
        ...

    def gather(self) -> None:
        """Make the weights whole after a step. Collective in the stage; may be repeated."""
        ...


class Counts(Protocol):
    """Tokens that experts of the stage are given."""

    def begin(self) -> None:
        """Count from zero."""
        ...

    def end(self) -> ExpertCounts:
        """Stop, and return what this rank has counted."""
        ...


class Boost(Protocol):
    """Lets experts make up for lost tokens. Arrays are int64 [MoE layers of the stage, experts]."""

    @property
    def deficit(self) -> npt.NDArray[np.int64]:
        """Tokens yet to be made up, over all ranks of the stage."""
        ...

    def recover(self, deficit: npt.NDArray[np.int64]) -> None:
        """Make up for these tokens, in place of the tokens that were left."""
        ...

    def begin_iteration(self) -> None:
        """Drop the counts of an abandoned attempt."""
        ...

    def end_iteration(self) -> npt.NDArray[np.int64]:
        """Return what this rank has made up since."""
        ...

    def make_up(self, extra: npt.NDArray[np.int64]) -> None:
        """Take what all ranks of the stage have made up off the deficit."""
        ...

    def boosted(self, iteration: int) -> CapacityBoosted | None:
        """Return what the iteration that ended last has given experts."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Training:
    """One rank's training, as snapshots in host memory see it.

    `counts` is None where the policy does not use popularity, `boost` where lost tokens stay lost.
    """

    stage: Stage
    operators: Operators
    counts: Counts | None
    boost: Boost | None = None


class FaultInjector(Protocol):
    """Loses this rank's training state."""

    def wipe(self) -> None:
        """Overwrite everything that is trained or counted."""
        ...

    def arm(self, phase: str, callback: Callable[[], None]) -> None:
        """Call back once in the middle of the next forward or backward pass."""
        ...
