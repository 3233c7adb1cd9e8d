"""The Protocols through which the engine uses the training framework.

`moe_ckpt.megatron` implements the Protocols. The module also defines two values that
hold implementations: `RankPosition`, the position of a rank in the job, and
`RankAdapter`, all of a rank's training. No behaviour is defined here.
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
from moe_ckpt.snapshot.adam_update import AdamStep, Gradients
from moe_ckpt.snapshot.boundary_log import BoundaryLog, LoggedEnds
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import Piece
from moe_ckpt.snapshot.codec import PartKey, ShardIdentity
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.types import ExpertCounts, OperatorTable, ReadyGradients, RunIdentity


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankPosition:
    """A rank's position in the job: run, shard, groups of ranks and neighbours."""

    identity: RunIdentity
    """Run id, model fingerprint and parallel layout of the run."""

    shard: ShardIdentity
    """Index of this rank on every axis of parallelism."""

    ranks: Ranks
    """All ranks of the job. Collectives take tensors on `device`."""

    stage_ranks: Ranks
    """The ranks that train this rank's pipeline stage."""

    host_ranks: Ranks
    """All ranks of the job, for tensors in host memory."""

    previous_rank: int | None
    """Global rank of the neighbour in the previous stage, of the same replica. None on
    the first stage.
    """

    next_rank: int | None
    """Global rank of the neighbour in the next stage, of the same replica. None on the
    last stage.
    """

    device: torch.device
    """The device on which this rank trains."""

    @property
    def stage(self) -> int:
        return self.shard.pp_rank

    @property
    def num_stages(self) -> int:
        return self.identity.layout.pp


class Operators(Protocol):
    """The operators of the stage, by position in `table` or by name."""

    table: OperatorTable
    """The operators of the stage group, and the bytes of each rank."""

    def meet(self) -> None:
        """Gather `table` anew as a generation begins. Collective in the stage.

        Ranks of the stage may have been replaced since the last generation.
        """
        ...

    def pieces(self, full: Collection[int], compute: Collection[int]) -> list[Piece]:
        """Return this rank's pieces of these operators. The tensors are live.

        Args:
            full: Positions of operators of which the whole state is returned.
            compute: Positions of operators of which only compute weights are returned.
        """
        ...

    def buffer_pieces(self, positions: Collection[int]) -> list[Piece]:
        """Return the buffers of these operators.

        The forward pass already changes buffers, before any step.

        Args:
            positions: Positions of the operators in `table`.
        """
        ...

    def log_step(self, iteration: int, gradients: ReadyGradients) -> None:
        """Note the gradients with which the step of `iteration` is taken next."""
        ...

    def gradients(self, full: Collection[int], iteration: int) -> Gradients | None:
        """Return the gradients with which these operators took the step of `iteration`.

        Args:
            full: Positions of the operators in `table`.
            iteration: The iteration of the step.

        Returns:
            Gradients that stay live until the next step. None if the gradients are not
            known.
        """
        ...

    def reduced_gradients(self) -> Mapping[PartKey, torch.Tensor]:
        """Return the gradients of this rank's pieces, unscaled and not clipped.

        Returns:
            Gradients by the key of their master weights, flat float32, in the order of
            `pieces`. Pieces that take no step are left out. The tensors are live until
            the step.
        """
        ...

    def steps_taken(self, iteration: int) -> Mapping[PartKey, AdamStep]:
        """Return Adam's step of `iteration` for each piece.

        Returns:
            Steps by the keys of `reduced_gradients`. Empty if the step was skipped.
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
        """Write pieces back into the training state and gather the weights.

        Collective in the stage.

        Args:
            parts: The contents of the pieces.
            full: Names of operators whose whole state is written.
            compute: Names of operators of which only compute weights are written.
            adam_steps: Step count of each inner optimizer.
        """
        ...

    def gradient_pieces(self) -> list[Piece]:
        """Return the gradients with which this rank's pieces take the next step.

        Returns:
            Live tensors: unscaled and not clipped, in the type that the optimizer
            reads.

        Raises:
            CheckpointSaveError: A piece has no gradient.
        """
        ...

    def set_gradients(
        self, gradients: Mapping[PartKey, torch.Tensor], updated: Collection[str]
    ) -> None:
        """Give the optimizer logged gradients for its next step.

        Args:
            gradients: Tensors in host memory, by the keys of `gradient_pieces`.
            updated: Names of the operators that take the step; all others do not.

        Raises:
            CheckpointLoadError: A gradient is missing, or has another size or type.
        """
        ...

    def load_own(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        adam_steps: Sequence[float],
    ) -> None:
        """Write this rank's pieces back, as `load` does, on this rank alone.

        Args:
            parts: The contents of the pieces.
            full: Names of operators whose whole state is written.
            adam_steps: Step count of each inner optimizer.
        """
        ...

    def make_whole(self) -> None:
        """Give each rank all pieces of the state that ranks share. Collective.

        Ranks that have the state keep it. Weights of sharded optimizers are left to
        `Stage.gather`.
        """
        ...

    def digests(self) -> Mapping[str, str]:
        """Return a hash of this rank's pieces of each operator, by operator name."""
        ...

    def freeze(self, frozen: Collection[str]) -> None:
        """Skip the weight gradients of these operators, and compute all others.

        Args:
            frozen: Names of the operators.
        """
        ...


class Stage(Protocol):
    """One rank's part of its stage, iteration by iteration."""

    def begin(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return the state from which `iteration` starts, and remember buffers.

        The returned state excludes parameters and moments. The implementation remembers
        the buffers internally.
        """
        ...

    def restore_start(
        self, start: Mapping[str, torch.Tensor], *, undo: int | None = None
    ) -> None:
        """Restore the state from which an iteration started.

        Args:
            start: The result of `begin`.
            undo: The iteration to undo: the buffers that `begin` remembered for this
                iteration are restored too. None: buffers stay as they are.
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
        """Run an iteration again, from the state before that iteration.

        Args:
            record: The facts of the iteration.
            start: The start of the iteration, as `begin` returned it.
            ends: The logged tensors from the neighbours of the replaying stages.
            whole_model: Whether all stages replay together.
            before_update: Called before parameters change. Until then `restore_start`
                can undo the iteration.
        """
        ...

    def after_pass(self) -> Mapping[str, torch.Tensor]:
        """Return the state between pass and step that no snapshot of a step has.

        Returns:
            Copies on the host: generators, scalers, schedule, and all buffers.
        """
        ...

    def step_again(self, record: StepRecord) -> None:
        """Take the step of an iteration again, on this rank alone.

        The optimizer has the gradients by then. Buffers stay as they are.

        Args:
            record: The facts of the iteration, with the state after its pass.
        """
        ...

    def restore_buffers(self, record: StepRecord) -> None:
        """Restore the buffers as the pass of an iteration has left them.

        Args:
            record: The facts of the iteration, with the state after its pass.
        """
        ...

    def require_same_samples(self) -> None:
        """Check the samples that replays have read since the last call.

        Raises:
            DataError: A replay has read other samples than the original iteration.
        """
        ...

    def abandon_pass(self) -> None:
        """Drop everything that an aborted pass over a batch left outside the state."""
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
        """Stop counting, and return this rank's counts."""
        ...


class Boost(Protocol):
    """Raises the capacity of experts that have lost tokens.

    Arrays are int64 [MoE layers of the stage, experts].
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
        """Return the extra tokens that this rank's experts have processed.

        The extra tokens are those of the current iteration.
        """
        ...

    def make_up(self, extra: npt.NDArray[np.int64]) -> None:
        """Subtract the extra tokens of all ranks of the stage from the deficit."""
        ...

    def boosted(self, iteration: int) -> CapacityBoosted | None:
        """Return the capacities of experts in the last iteration, or None."""
        ...


class FaultInjector(Protocol):
    """Overwrites this rank's training state on purpose."""

    def wipe(self) -> None:
        """Overwrite all parameters, optimizer state and counts."""
        ...

    def arm(self, phase: str, callback: Callable[[], None]) -> None:
        """Call `callback` once, in the middle of the next pass.

        Args:
            phase: `forward` or `backward`.
            callback: Loses the state.
        """
        ...


class Communicator(Protocol):
    """Carries activations and gradients between stages.

    The engine sets both attributes when the engine opens host memory.
    """

    log: BoundaryLog | None
    """Log of all tensors that this rank sends to other stages. None: nothing is logged.
    """

    bubbles: PipelineBubbles | None
    """Bubbles to open while this rank waits for other stages. None: copies do not wait
    for bubbles.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankAdapter:
    """One rank's training, as the adapter of a framework presents it to the engine.

    Lifetime: that of the process. Only the operator table changes with a generation.
    """

    position: RankPosition
    """The rank's position in the job, and the groups of ranks."""

    stage: Stage
    """The rank's part of its stage: runs, records, replays and undoes iterations."""

    operators: Operators
    """The state of the stage by operator."""

    communicator: Communicator
    """Transfers between stages, which the boundary log records."""

    injector: FaultInjector
    """Loses the rank's state on purpose."""

    counts: Callable[[], Counts]
    """Creates the counter of the router's tokens. Called once, when the operator table
    of the whole stage is known.
    """

    tokens: TokenRate
    """Tokens of one iteration of the whole job."""

    num_micro_batches: int
    """Maximum number of micro-batches in an iteration."""

    boundary_log_bytes: int
    """Maximum number of bytes that this rank sends to neighbour stages in an iteration.
    """

    step_log_bytes: int
    """Bytes that each iteration adds to this rank's step log."""

    gradient_bytes: int
    """Bytes of the gradients with which this rank takes a step. 0 unless the policy
    logs gradients.
    """

    tied_gradient_bytes: int
    """Bytes of the tied embeddings' gradient in a record of the step log. No other rank
    has this gradient. 0: the record has none.
    """

    boost: Boost | None = None
    """Makes up lost tokens by higher capacity. None: lost tokens are not made up."""

    notes: Sequence[str] = ()
    """Lines for the log at the start."""
