"""Replays one iteration of one stage, alone or with its neighbours, through the same schedule (MoEvement, 3.3, 3.4).

Owns: the start of an iteration, the values that cross stages in it beside activations and gradients, and the update
with logged facts in place of collectives over all stages. Must not: decide which iterations run, or fetch their inputs.

    begin       generators, loss scalers, schedule position, buffers          -> restored if the iteration is undone
    gradients   forward, backward, reduced; tied embeddings' shared gradient  -> logged, or taken from the log
    finish      norm, overflow                                                -> logged, or taken from the log
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from moe_ckpt.config import require
from moe_ckpt.megatron.operators import OwnedParameter, RankOperators, bare_model
from moe_ckpt.megatron.pipeline import StageCommunicator
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
    gather_parameters,
    unscale_gradients,
)
from moe_ckpt.megatron.transformer_engine import forget_pass
from moe_ckpt.snapshot.boundary_log import LoggedEnds
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.types import ReadyGradients


class StageReplay:
    """Records the facts that this rank's stage needs to replay an iteration, and replays it.

    `forward_backward` runs the loop's schedule over the batch of an iteration, with the communicator given here.
    """

    def __init__(
        self,
        state: TrainingState,
        operators: RankOperators,
        communicator: StageCommunicator,
        forward_backward: Callable[[int], object],
    ) -> None:
        self._state = state
        self._communicator = communicator
        self._forward_backward = forward_backward
        self._operators = operators
        self._tied = _TiedEmbedding(state, operators)
        self._began: int | None = None
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._modes: Mapping[torch.nn.Module, bool] = {}

    @property
    def tied_gradient_bytes(self) -> int:
        """The bytes of a shared embedding's gradient in an iteration's record."""
        return self._tied.size_bytes

    def begin(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return the state that `iteration` starts from beside parameters and moments; buffers are remembered here."""
        self._began, self._buffers = iteration, buffers(self._state)
        self._modes = {module: module.training for chunk in self._state.model for module in chunk.modules()}
        return small_state(self._state)

    def restore_start(self, start: Mapping[str, torch.Tensor], *, undo: int | None = None) -> None:
        """Restore the start of an iteration; with `undo`, also the buffers that this iteration has changed since."""
        restore_small_state(self._state, start)
        if undo is not None:
            assert self._began == undo, f"asked for the buffers before iteration {undo}, got those of {self._began}"
            restore_buffers(self._state, self._buffers)

    def record(self, iteration: int, gradients: ReadyGradients) -> StepRecord:
        """Return the facts of an iteration whose gradients are ready."""
        return StepRecord(iteration=iteration, gradients=gradients, tied_gradient=self._tied.observed)

    def replay(
        self,
        record: StepRecord,
        start: Mapping[str, torch.Tensor],
        ends: LoggedEnds,
        *,
        whole_model: bool,
        before_update: Callable[[], None],
    ) -> None:
        """Run the record's iteration again, from the state before it. Collective over the stages that replay together.

        `whole_model`: all stages replay; then only the update's facts come from a log. `before_update` is called once
        gradients are complete: only buffers and generators have changed until then.
        """
        restore_small_state(self._state, start)
        clear_gradients(self._state)
        config: Any = cast("Any", self._state.model[0]).config
        timers, config.timers = config.timers, None  # they may wait for all ranks of the job
        tied = None if whole_model else record.tied_gradient
        try:
            with self._communicator.replaying(ends), self._tied.replaying(tied):
                self._forward_backward(record.iteration)
            unscale_gradients(self._state)
            self._operators.drop_frozen_gradients()
            before_update()
            self.update(record.gradients)
            self.gather()
        finally:
            config.timers = timers
        advance_scalers(self._state, record.gradients)

    def abandon_pass(self) -> None:
        """Clean up after a pass that was cut off: Megatron's globals, and modules in evaluation mode."""
        for module, training in self._modes.items():
            module.training = training
        forget_pass()
        tensor_parallel.random._unset_checkpointing()  # it sets and unsets a flag around what it recomputes later

    def update(self, gradients: ReadyGradients) -> None:
        """Take the step with complete gradients, on this rank alone."""
        apply_update(self._state, gradients)
        advance_schedule(self._state, gradients)

    def gather(self) -> None:
        """Gather the weights after a step. Collective in the stage; may be repeated."""
        gather_parameters(self._state)


class _TiedEmbedding:
    """The gradient of a word embedding that first and last stage share, which Megatron sums over both.

    It is summed after each stage has reduced its own, in the function that Megatron's schedules call at the end of all
    micro-batches: that function is wrapped here.
    """

    def __init__(self, state: TrainingState, operators: RankOperators) -> None:
        self.observed: torch.Tensor | None = None
        self._owned = _tied_parameter(state, operators)
        self._logged: torch.Tensor | None = None
        if self._owned is not None:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            config = cast("Any", state.model[0]).config
            self._finalize = config.finalize_model_grads_func
            config.finalize_model_grads_func = self._finalize_observed

    @property
    def size_bytes(self) -> int:
        return 0 if self._owned is None else self._gradient().nbytes

    @contextlib.contextmanager
    def replaying(self, logged: torch.Tensor | None) -> Iterator[None]:
        """Within the context, take the sum from a log and do not communicate with the other stage; None: no change."""
        self._logged = logged
        try:
            yield
        finally:
            self._logged = None

    def _finalize_observed(
        self, model: Any, num_tokens: Any = None, *, pg_collection: Any = None, **options: Any
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        if self._logged is None:
            self._finalize(model, num_tokens, pg_collection=groups, **options)
        else:
            groups = copy.copy(groups)
            groups.embd = cast("dist.ProcessGroup", self._alone)
            self._finalize(model, num_tokens, pg_collection=groups, **options)
            self._gradient().copy_(self._logged)
        self.observed = self._gradient().detach().to("cpu", copy=True)

    def _gradient(self) -> torch.Tensor:
        """Return the part of the reduced gradient that this rank's optimizer uses, flattened."""
        assert self._owned is not None
        gradient = cast("Any", self._owned.parameter).main_grad.view(-1)
        return gradient[self._owned.start : self._owned.end] if self._owned.is_sharded else gradient


def _tied_parameter(state: TrainingState, operators: RankOperators) -> OwnedParameter | None:
    """Return this rank's copy of the word embedding if another stage holds one, too."""
    group: Any = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or group.size() == 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return None
    for chunk in state.model:
        model: Any = bare_model(chunk)
        weight = model.shared_embedding_or_output_weight() if _shares_embedding(model) else None
        for owned in operators.parameters:
            if owned.parameter is weight:
                return owned
    return None


def _shares_embedding(model: Any) -> bool:
    return model.share_embeddings_and_output_weights or bool(getattr(model.config, "mtp_num_layers", None))


def require_replayable(state: TrainingState) -> None:
    """Raise ConfigError for options that cross stages, or change state, in a way that no log here covers."""
    config = cast("Any", state.model[0]).config
    ddp_config = cast("Any", state.model[0]).ddp_config
    require(
        len(state.model) == 1, "snapshots in memory: model chunks a stage", len(state.model), "1: no virtual stages"
    )
    unsupported = [
        (config, "calculate_per_token_loss"),  # sums tokens over stages
        (config, "variable_seq_lengths"),
        (config, "mtp_standalone"),
        (ddp_config, "use_megatron_fsdp"),
        (ddp_config, "overlap_param_gather"),  # weights that the next forward gathers
        *((config, name) for name in ("fp4", "fp8_param", "fp8_dot_product_attention", "fp8_multi_head_attention")),
        *((config, name) for name in ("enable_cuda_graph", "external_cuda_graph")),
        (config, "tp_comm_overlap"),  # user buffers that belong to one communicator, which a generation replaces
        (ddp_config, "nccl_ub"),
        (ddp_config, "fp8_param_gather"),
        *((optimizer.config, "optimizer_cpu_offload") for optimizer in state.inner_optimizers),
    ]
    for owner, name in unsupported:
        require(not getattr(owner, name, False), f"snapshots in memory: {name}", getattr(owner, name, None), "False")
    if getattr(config, "fp8", None):
        recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
        is_known = recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")
        require(is_known, "snapshots in memory: fp8_recipe", recipe, "delayed, tensorwise, blockwise or mxfp8")
    captured = getattr(config, "cuda_graph_impl", "none")
    require(captured == "none", "snapshots in memory: cuda_graph_impl", captured, "none")
    dispatcher = getattr(config, "moe_token_dispatcher_type", "alltoall")  # DeepEP and HybridEP key buffers by group
    known = dispatcher in ("alltoall", "allgather")
    require(known, "snapshots in memory: moe_token_dispatcher_type", dispatcher, "alltoall or allgather")
    num_instances = getattr(ddp_config, "num_distributed_optimizer_instances", 1)
    require(num_instances == 1, "snapshots in memory: num_distributed_optimizer_instances", num_instances, "1")
    _require_plain_tensors(state)


def _require_plain_tensors(state: TrainingState) -> None:
    """Refuse weights and generators whose bytes are not those of one tensor: a copy of them would lose a part.

    A quantized weight says that its type is the one that it is computed in, and keeps its scale elsewhere; a generator
    for captured graphs is a handle.
    """
    for chunk in state.model:
        for name, parameter in chunk.named_parameters():
            kind = type(parameter.data)
            require(kind is torch.Tensor, f"snapshots in memory: {name}", kind.__name__, "plain tensors")
    for name, generator in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        is_plain = torch.is_tensor(generator)
        require(is_plain, "snapshots in memory: generators for captured graphs", name, "none: use_cudagraphable_rng")
