"""The Protocols through which the engine uses the training framework;
`moe_ckpt.megatron` implements them.

Also two values that hold them: a rank's place in the job, and the adapter, which is all
of its training. No behaviour is defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.collectives import Ranks
from moe_ckpt.engine.token_account import TokenRate
from moe_ckpt.events import CapacityBoosted
from moe_ckpt.mirror.plan import BucketPlace, MirroredSums
from moe_ckpt.snapshot.adam_update import AdamStep, Gradients
from moe_ckpt.snapshot.boundary_log import BoundaryLog, LoggedEnds
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import Piece
from moe_ckpt.snapshot.codec import PartKey, ShardIdentity
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.types import ExpertCounts, OperatorTable, ReadyGradients, RunIdentity


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagePlace:
    """The place of this rank: its run and shard, all ranks, the ranks of its stage, and
    its neighbours in the pipeline.

    `host_ranks` are all ranks again, for tensors in host memory; `ranks` communicate on
    `device`. `previous_rank` and `next_rank` are global ranks of the same replica, None
    at the ends of the pipeline.
    """

    identity: RunIdentity
    shard: ShardIdentity
    ranks: Ranks
    stage_ranks: Ranks
    host_ranks: Ranks
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
        """Gather the table of a new generation, in which ranks of the stage may have
        been replaced.

        Collective in the stage.
        """
        ...

    def pieces(self, full: Collection[int], compute: Collection[int]) -> list[Piece]:
        """Return this rank's pieces of these operators: whole state (`full`) or compute
        weights. Tensors are live.
        """
        ...

    def buffer_pieces(self, positions: Collection[int]) -> list[Piece]:
        """Return the buffers of these operators, which change in the forward pass
        already.
        """
        ...

    def log_step(self, iteration: int, gradients: ReadyGradients) -> None:
        """The step of `iteration` follows."""
        ...

    def gradients(self, full: Collection[int], iteration: int) -> Gradients | None:
        """Return the gradients of these operators' step of `iteration`, live until the
        next step; None if unknown.
        """
        ...

    def reduced_gradients(self) -> Mapping[PartKey, torch.Tensor]:
        """Return the gradients of this rank's pieces, unscaled and not clipped, live
        until the step.

        Keys are those of the master weights; tensors are flat float32, in the order of
        `pieces`. Pieces that take no step are left out.
        """
        ...

    def steps_taken(self, iteration: int) -> Mapping[PartKey, AdamStep]:
        """Return Adam's step of `iteration` for each piece, by the same keys; empty if
        the step was skipped.
        """
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
        """Write pieces back, on all ranks of the stage together, and gather the
        weights.
        """
        ...

    def digests(self) -> Mapping[str, str]:
        """Return a hash of this rank's pieces of each operator, by the operator's name."""
        ...

    def freeze(self, frozen: Collection[str]) -> None:
        """Skip the weight gradients of these operators, and compute those of all
        others.
        """
        ...


class Mirror(Protocol):
    """The reductions of this rank's gradients, which servers capture from a mirror
    port.
    """

    places: Mapping[PartKey, BucketPlace]
    """By master weight: the place of a gradient that is captured; all others are
    tapped.
    """

    def mark(self) -> None:
        """Let servers find the groups' streams: following reductions can be captured.

        Collective in the groups.
        """
        ...

    def sums(self) -> tuple[MirroredSums, ...]:
        """Return the reductions since the last call, or since the mark: those of one
        iteration.
        """
        ...


class Stage(Protocol):
    """One rank's part of its stage, iteration by iteration."""

    def begin(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return the state that `iteration` starts from beside parameters and moments.

        Buffers are remembered internally.
        """
        ...

    def restore_start(
        self, start: Mapping[str, torch.Tensor], *, undo: int | None = None
    ) -> None:
        """Restore the state that an iteration started from.

        To undo iteration `undo`, also restore its remembered buffers.
        """
        ...

    def record(self, iteration: int, gradients: ReadyGradients) -> StepRecord:
        """Return the facts of an iteration whose gradients are ready."""
        ...

    def replay(
        self,
        record: StepRecord,
        start: Mapping[str, torch.Tensor],
        ends: LoggedEnds,
        *,
        whole_model: bool,
        before_update: Callable[[], None],
    ) -> None:
        """Run an iteration again, from the state before it.

        Calls `before_update` before parameters change; until then `restore_start` can
        undo the iteration.
        """
        ...

    def require_same_samples(self) -> None:
        """Raise DataError if a replay since the last call has read other samples than
        its iteration had read.
        """
        ...

    def abandon_pass(self) -> None:
        """A pass over a batch was cut off: drop everything that it left behind outside
        the state.
        """
        ...

    def update(self, gradients: ReadyGradients) -> None:
        """Take the step with complete gradients, on this rank alone."""
        ...

    def gather(self) -> None:
        """Gather the weights after a step. Collective in the stage; may be repeated."""
        ...


class Counts(Protocol):
    """Counts the tokens that the router sends to the experts of the stage."""

    def begin(self) -> None:
        """Count from zero."""
        ...

    def end(self) -> ExpertCounts:
        """Stop, and return what this rank has counted."""
        ...


class Boost(Protocol):
    """Raises the capacity of experts that have lost tokens. Arrays are int64 [MoE
    layers of the stage, experts].
    """

    @property
    def deficit(self) -> npt.NDArray[np.int64]:
        """The tokens still to be made up, over all ranks of the stage."""
        ...

    def recover(self, deficit: npt.NDArray[np.int64]) -> None:
        """Set the deficit to these tokens."""
        ...

    def begin_iteration(self) -> None:
        """Drop the counts of an abandoned attempt."""
        ...

    def end_iteration(self) -> npt.NDArray[np.int64]:
        """Return the extra tokens that this rank's experts have processed in the
        iteration.
        """
        ...

    def make_up(self, extra: npt.NDArray[np.int64]) -> None:
        """Subtract the extra tokens of all ranks of the stage from the deficit."""
        ...

    def boosted(self, iteration: int) -> CapacityBoosted | None:
        """Return the capacities that the last iteration gave to experts, or None."""
        ...


class FaultInjector(Protocol):
    """Overwrites this rank's training state on purpose."""

    def wipe(self) -> None:
        """Overwrite all parameters, optimizer state and counts."""
        ...

    def arm(self, phase: str, callback: Callable[[], None]) -> None:
        """Call back once in the middle of the next forward or backward pass."""
        ...


class Communicator(Protocol):
    """Carries activations and gradients between stages. The engine sets both attributes
    as it opens host memory.
    """

    log: BoundaryLog | None
    """The log of all tensors that this rank sends to other stages; None: nothing is
    logged.
    """

    bubbles: PipelineBubbles | None
    """The bubbles, to be opened while this rank waits for other stages; None: no copy
    waits for bubbles.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankAdapter:
    """One rank's training, as the adapter of a training framework presents it to the
    engine.

    Lifetime: that of the process. Only the operator table changes with a generation.
    """

    place: StagePlace
    """The rank's position in the job, and its groups of ranks."""

    stage: Stage
    """The rank's part of its stage: runs, records, replays and undoes iterations."""

    operators: Operators
    """The state of the stage by operator."""

    communicator: Communicator
    """Transfers between stages, which the boundary log records."""

    injector: FaultInjector
    """Loses the rank's state on purpose."""

    counts: Callable[[], Counts]
    """Returns the counts of the router's tokens. Called once, when the operator table
    of the whole stage is known.
    """

    tokens: TokenRate
    """Tokens of one iteration of the whole job."""

    num_micro_batches: int
    """The most micro-batches of an iteration."""

    boundary_log_bytes: int
    """The most bytes that this rank sends to neighbour stages in an iteration."""

    step_log_bytes: int
    """Bytes that an iteration adds to this rank's step log."""

    tied_gradient_bytes: int
    """Bytes of the tied embeddings' gradient in a record of the step log, which no
    other rank has; 0 without one.
    """

    boost: Boost | None = None
    """Makes up lost tokens by higher capacity; None: lost tokens are not made up."""

    mirror: Mirror | None = None
    """Reductions that servers capture from a mirror port; None: no server does."""

    notes: Sequence[str] = ()
    """Lines for the log at the start."""
