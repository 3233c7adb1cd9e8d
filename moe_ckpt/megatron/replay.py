"""Replays one iteration of one stage through the schedule of training.

The stage replays alone or with its neighbours (MoEvement, 3.3, 3.4).

Owns: the start of an iteration, the values that cross stages in an iteration beside
activations and gradients, and the update with logged facts in place of collectives over
all stages. Must not: decide which iterations run, or fetch their inputs.

    begin       generators, loss scalers, schedule,      -> restored if the iteration
                buffers                                     is undone
    gradients   forward, backward, reduced; sums over    -> logged, or taken from the
                stages                                      log
    finish      norm, overflow                           -> logged, or taken from the
                                                            log
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from moe_ckpt.errors import DataError
from moe_ckpt.megatron.groups import shared_embedding
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.overlapped import (
    forget_communication,
    mark_gathered,
)
from moe_ckpt.megatron.pipeline import StageCommunicator
from moe_ckpt.megatron.read_batches import ReadBatches
from moe_ckpt.megatron.state import (
    TrainingState,
    buffers,
    restore_buffers,
    restore_small_state,
    small_state,
)
from moe_ckpt.megatron.step import (
    advance_scalers,
    advance_schedule,
    apply_update,
    clear_gradients,
    gather_late_parameters,
    gather_parameters,
    unscale_gradients,
)
from moe_ckpt.megatron.transformer_engine import forget_pass
from moe_ckpt.snapshot.boundary_log import LoggedEnds
from moe_ckpt.snapshot.host_transfers import PendingCopy
from moe_ckpt.snapshot.step_codec import under
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.types import ReadyGradients

_BUFFER = "buffer."
"""In front of the names of buffers in the state after a pass."""


class StageReplay:
    """Implements `engine.interfaces.Stage`: records an iteration's facts, and replays.

    Args:
        state: This rank's training state.
        operators: The operators of this rank.
        communicator: Carries the transfers between stages.
        forward_backward: Runs the loop's schedule over the batch of an iteration, with
            `communicator`, and shows `batches` the micro-batches.
        batches: Hashes the micro-batches that a pass reads.
    """

    def __init__(
        self,
        state: TrainingState,
        operators: RankOperators,
        communicator: StageCommunicator,
        forward_backward: Callable[[int], object],
        batches: ReadBatches,
    ) -> None:
        self._state = state
        self._communicator = communicator
        self._forward_backward = forward_backward
        self._batches = batches
        # iterations whose replays have read other samples than training
        self._read_others: list[int] = []
        self._operators = operators
        self._sums = _StageSums(state, operators)
        self._began: int | None = None
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._modes: Sequence[bool] = ()  # of all modules

    @property
    def tied_gradient_bytes(self) -> int:
        """The bytes of a shared embedding's gradient in an iteration's record."""
        return self._sums.tied_bytes

    def begin(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return the state from which `iteration` starts, except the large tensors.

        Parameters and moments are left out. Buffers and the modes of modules are
        remembered in this object.
        """
        self._began, self._buffers = iteration, buffers(self._state)
        self._modes = [module.training for _, module in self._state.modules]
        return small_state(self._state)

    def restore_start(
        self, start: Mapping[str, torch.Tensor], *, undo: int | None = None
    ) -> None:
        """Restore the start of an iteration.

        Args:
            start: A result of `begin`.
            undo: The last iteration that began, to restore the buffers that the
                iteration has changed as well; None: buffers stay as they are.
        """
        restore_small_state(self._state, start)
        if undo is not None:
            assert self._began == undo, (
                f"asked for the buffers before iteration {undo}, got those of"
                f" {self._began}"
            )
            # forward changes buffers (counts of tokens, FP8 histories), and the
            # iteration will run again
            restore_buffers(self._state, self._buffers)

    def record(self, iteration: int, gradients: ReadyGradients) -> StepRecord:
        """Return the facts of an iteration whose gradients are ready."""
        complete = replace(gradients, num_tokens=self._sums.num_tokens)
        return StepRecord(
            iteration=iteration,
            gradients=complete,
            tied_gradient=self._sums.tied_gradient,
            batches=self._batches.hash(),
        )

    def replay(
        self,
        record: StepRecord,
        start: Mapping[str, torch.Tensor],
        ends: LoggedEnds,
        *,
        whole_model: bool,
        before_update: Callable[[], None],
    ) -> None:
        """Run the record's iteration again, from the state before the iteration.

        Collective over the stages that replay together.

        Args:
            record: The facts of the iteration.
            start: The start of the iteration.
            ends: The logs of neighbours that do not replay.
            whole_model: Whether all stages replay. Then only the facts of the update
                come from a log.
            before_update: Called once gradients are complete. Until then only buffers
                and generators have changed.
        """
        restore_small_state(self._state, start)
        clear_gradients(self._state)
        mark_gathered(self._state.model)
        config: Any = cast("Any", self._state.model[0]).config
        # timers may wait for all ranks of the job
        timers, config.timers = config.timers, None
        gather, config.param_sync_func = config.param_sync_func, None
        try:
            with (
                self._communicator.replaying(ends),
                self._sums.replaying(None if whole_model else record),
            ):
                self._batches.begin()
                self._forward_backward(record.iteration)
            if record.batches is not None and self._batches.hash() != record.batches:
                self._read_others.append(record.iteration)
            unscale_gradients(self._state)
            # after unscaling, in which Megatron makes the optimizer's gradients from
            # the model's, also for frozen operators
            self._operators.drop_frozen_gradients()
            before_update()
            self.update(record.gradients)
            self.gather()
        finally:
            config.timers, config.param_sync_func = timers, gather
        # last, because forward and unscaling use the scale before the step
        advance_scalers(self._state, record.gradients)

    def after_pass(self) -> Mapping[str, torch.Tensor]:
        """Return the state between pass and step that no snapshot of a step has.

        The state is that of generators, scalers, schedule, and all buffers.
        """
        named = buffers(self._state).items()
        return {
            **small_state(self._state),
            **{f"{_BUFFER}{name}": buffer for name, buffer in named},
        }

    def step_again(self, record: StepRecord) -> None:
        """Take the step of an iteration again, on this rank alone.

        The optimizer has the gradients by then. Buffers stay as they are.

        Args:
            record: The facts of the iteration, with the state after its pass.
        """
        assert record.after_pass is not None, record.iteration
        # the loss scaler has its new scale by then: Megatron adapts the scale as it
        # looks for overflows
        restore_small_state(self._state, record.after_pass)
        self.update(record.gradients)

    def restore_buffers(self, record: StepRecord) -> None:
        """Restore the buffers as the pass of an iteration has left them.

        Args:
            record: The facts of the iteration, with the state after its pass.
        """
        assert record.after_pass is not None, record.iteration
        restore_buffers(self._state, under(_BUFFER, record.after_pass))

    def require_same_samples(self) -> None:
        """Check that replays since the last call have read the samples of training.

        Raises:
            DataError: A replay has read other samples than its iteration had read.
        """
        iterations, self._read_others = self._read_others, []
        if iterations:
            raise DataError(
                f"data: the replay of iterations {iterations} has read other samples"
                " than training had, wanted the same: the data, or the way to read"
                " them, have changed"
            )

    def abandon_pass(self) -> None:
        """Clean up Megatron's globals and modules after a pass that was cut off.

        A pass that was cut off may leave modules in evaluation mode.
        """
        # there are no modes before the first iteration has begun
        for (_, module), training in zip(
            self._state.modules, self._modes, strict=False
        ):
            module.training = training
        forget_communication(self._state.model)
        forget_shared_experts(self._state.model)
        forget_pass()
        # Megatron sets and unsets a flag around code that is recomputed later
        tensor_parallel.random._unset_checkpointing()

    def update(self, gradients: ReadyGradients) -> None:
        """Take the step with complete gradients, on this rank alone."""
        apply_update(self._state, gradients)
        advance_schedule(self._state, gradients)

    def gather(self) -> None:
        """Gather the weights after a step. Collective in the stage; may be repeated."""
        gather_parameters(self._state)
        gather_late_parameters(self._state)


class _StageSums:
    """The sums over stages that complete an iteration's gradients.

    The sums are the gradient of a word embedding that first and last stage share, and
    the number of tokens by which a loss per token divides all gradients.
    """

    def __init__(self, state: TrainingState, operators: RankOperators) -> None:
        self._copied: PendingCopy | None = None
        self._tokens: torch.Tensor | None = None
        weight, _ = shared_embedding(state.model) or (None, None)
        tied = (
            owned
            for owned in operators.parameters
            if owned.parameter is weight and owned.is_trained
        )
        self._owned = next(tied, None)
        self._logged: StepRecord | None = None
        config = cast("Any", state.model[0]).config
        if self._owned is not None or config.calculate_per_token_loss:
            # Schedules call this function once, after all micro-batches. The function
            # reduces a stage's own gradients, then sums over stages
            self._finalize = config.finalize_model_grads_func
            config.finalize_model_grads_func = self._finalize_observed

    @property
    def num_tokens(self) -> int | None:
        """The tokens of all ranks' batches; None if tokens do not divide gradients."""
        return None if self._tokens is None else int(self._tokens)

    @property
    def tied_gradient(self) -> torch.Tensor | None:
        """The shared gradient of the last pass, on the host; None if there is none."""
        return None if self._copied is None else self._copied.result()

    @property
    def tied_bytes(self) -> int:
        return 0 if self._owned is None else self._gradient().nbytes

    @contextlib.contextmanager
    def replaying(self, logged: StepRecord | None) -> Iterator[None]:
        """Take the sums from a record within the context, without other stages.

        Args:
            logged: The record; None: the sums are computed as in training.
        """
        self._logged = logged
        try:
            yield
        finally:
            self._logged = None

    def _finalize_observed(
        self,
        model: Any,
        num_tokens: torch.Tensor | None = None,
        *,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        if self._logged is None:
            self._finalize(model, num_tokens, pg_collection=groups, **options)
            self._tokens = num_tokens  # Megatron sums them in place
        else:
            # a copy, because the caller keeps its groups
            self._finalize_logged(model, self._logged, copy.copy(groups), **options)
        if self._owned is not None:
            # the gradient may have hundreds of MB, and the device has not computed the
            # gradient yet
            self._copied = PendingCopy(self._gradient())

    def _finalize_logged(
        self, model: Any, logged: StepRecord, groups: Any, **options: Any
    ) -> None:
        if self._owned is not None:
            # Megatron skips a group of one, for which nothing has to be formed. With
            # None Megatron would use the job's group
            groups.embd = cast("Any", dist.ProcessGroup)(0, 1)
        # no tokens, because Megatron would fetch the number from the last stage, which
        # may not take part
        self._finalize(model, None, pg_collection=groups, **options)
        num_tokens = logged.gradients.num_tokens
        # in Megatron's types and order of operations, to get the same bits
        if num_tokens is not None:
            self._tokens = torch.tensor(
                num_tokens, dtype=torch.int, device=torch.cuda.current_device()
            )
            for chunk in model:
                chunk.scale_gradients(1.0 / torch.clamp(self._tokens, min=1))
        if self._owned is not None:
            # after the division, because the logged gradient is divided already
            mine = self._gradient()
            # if empty, this rank's shard of the optimizer has no part of the embedding,
            # and the record has no gradient
            if mine.numel():
                assert logged.tied_gradient is not None, logged.iteration
                mine.copy_(logged.tied_gradient)

    def _gradient(self) -> torch.Tensor:
        """Return the reduced gradient that this rank's optimizer uses, flattened.

        A sharded optimizer uses a part of the gradient.
        """
        assert self._owned is not None
        gradient = cast("Any", self._owned.parameter).main_grad.view(-1)
        return (
            gradient[self._owned.start : self._owned.end]
            if self._owned.is_sharded
            else gradient
        )


def forget_shared_experts(chunks: Iterable[torch.nn.Module]) -> None:
    """Reset shared experts that overlap with the dispatcher.

    Call after a pass was cut off, possibly in such an expert.
    """
    for module in (
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, SharedExpertMLP)
    ):
        for name in [name for name in vars(module) if name.startswith("cached_")]:
            setattr(module, name, None)
        state: Any = getattr(module, "_overlap_state", None)
        if state is not None:  # newer than megatron-core 0.16
            module._overlap_state = type(state).IDLE
