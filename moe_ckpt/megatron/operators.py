"""The operators of one rank's Megatron-Core GPT: their places, and reading and writing the pieces this rank owns.

Owns: the operator of each parameter and buffer (by global layer and expert), the piece of each that this rank
snapshots, and loading pieces so that all copies are whole again. If several ranks hold a parameter, each snapshots the
piece whose master weights it keeps (the distributed optimizer's own shard), or an even share if the optimizer is not
sharded: every byte is taken once. Must not: copy to host memory, or decide when a piece is taken.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from moe_ckpt.config import require
from moe_ckpt.errors import CheckpointLoadError, ConfigError
from moe_ckpt.megatron import fp8_linear, fp8_parameters
from moe_ckpt.megatron.buffers import named_buffers
from moe_ckpt.megatron.fp8_parameters import Shard, is_fp8_parameter
from moe_ckpt.megatron.gradients import AdamSteps, repeats_on_a_host
from moe_ckpt.megatron.merging import merge
from moe_ckpt.megatron.optimizer_state import (
    derives_compute,
    master_values,
    step_count,
    stored_state,
    updated_tensor,
    write_step_count,
)
from moe_ckpt.megatron.overlapped import gathers_in_forward
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.megatron.transformer_engine import is_scaling
from moe_ckpt.packed import pack_rows, unpack_rows
from moe_ckpt.snapshot.adam_update import AdamStep, Gradients
from moe_ckpt.snapshot.capture import Piece
from moe_ckpt.snapshot.codec import BUFFER, COMPUTE, MASTER, MOMENTS, PartKey, ShardIdentity, scale_of, scaled_role
from moe_ckpt.snapshot.device_hash import hashes_of
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable, ReadyGradients

_EDGES = {
    "embedding": OperatorKind.EMBEDDING,
    "rotary_pos_emb": OperatorKind.EMBEDDING,
    "output_layer": OperatorKind.OUTPUT,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP = re.compile(r"mtp\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)")
_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.linear_fc[12]\.(?:weight|bias)(\d+)$")
_SECTIONS = (OperatorKind.EMBEDDING, OperatorKind.BLOCK, OperatorKind.FINAL_NORM, OperatorKind.OUTPUT)


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedParameter:
    """A parameter of this rank and the range of its flattened elements that this rank snapshots (may be empty).

    One that the script has frozen has no optimizer: its state is its compute weights.
    """

    operator: OperatorId
    name: str
    parameter: torch.nn.Parameter
    optimizer: MegatronOptimizer | None
    optimizer_index: int | None
    start: int
    end: int
    replicas: dist.ProcessGroup
    is_gathered_later: bool = False

    @property
    def is_trained(self) -> bool:
        return self.optimizer is not None

    @property
    def trained_by(self) -> MegatronOptimizer:
        assert self.optimizer is not None, f"{self.name} is frozen"
        return self.optimizer

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.optimizer, DistributedOptimizer)

    @property
    def derives_compute(self) -> bool:
        """Whether compute weights follow from the stored master weights: snapshots in full leave them out then."""
        has_history = fp8_parameters.has_history(self.parameter)
        return self.optimizer is not None and derives_compute(self.optimizer) and not has_history

    def weights(self) -> torch.Tensor:
        """Return all compute weights, flattened; of an FP8 parameter, the payload."""
        if is_fp8_parameter(self.parameter):
            return fp8_parameters.payload_of(self.parameter)
        return self.parameter.data.view(-1)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's master weights and moments, flattened, by role: its shard, or all of them."""
        if self.optimizer is None or (self.is_sharded and self.start == self.end):
            return {}
        return stored_state(self.optimizer, self.parameter)

    def pieces(self, *, full: bool) -> Iterator[Piece]:
        """Yield the owned piece of the whole state, or of the compute weights.

        The whole state includes compute weights if they are not the rounding of the stored master weights.
        """
        if full:
            yield from self._state_pieces()
        if not full or not self.derives_compute:
            yield from self._compute_pieces()

    def load(self, parts: Mapping[PartKey, torch.Tensor], steps: float | None) -> None:
        """Load the owned piece of a snapshot: the whole state, after so many steps, or the compute weights.

        FP8 parameters that follow from masters are left to `cast_masters`, which needs all ranks. Raises
        CheckpointLoadError for a part that is missing or differs in size.
        """
        full = steps is not None
        if full:
            for key, tensor, _ in self._state_pieces():
                _copy_part(parts, key, tensor)
        state = self.optimizer_state() if full and self.derives_compute else {}
        if not full or not self.derives_compute:
            self._load_compute(parts)
        elif state and not is_fp8_parameter(self.parameter):
            self.weights()[self.start : self.end].copy_(master_values(state)[self._held()])
        if steps is not None and self.optimizer_state():
            write_step_count(self.trained_by, self.parameter, steps)

    def _load_compute(self, parts: Mapping[PartKey, torch.Tensor]) -> None:
        loaded = {key.role: torch.empty_like(tensor) for key, tensor, _ in self._compute_pieces()}
        for role, tensor in loaded.items():
            _copy_part(parts, self.key(role), tensor)
        weights, scale = self.weights()[self.start : self.end], loaded.get(scale_of(COMPUTE))
        if is_fp8_parameter(self.parameter):
            scales = fp8_parameters.scales_of(self.parameter)
            scales.copy_(loaded[scale_of(COMPUTE)].view(scales.shape))
            weights.copy_(loaded[COMPUTE])
        elif scale is None:
            weights.copy_(loaded[COMPUTE])
        else:
            owned = slice(self.start, self.end)
            weights.copy_(fp8_linear.read_rounded(self.parameter, loaded[COMPUTE], scale, owned))

    def shard(self) -> Shard:
        """Return this rank's part of the master weights of an FP8 parameter."""
        state = self.optimizer_state()
        return Shard(self.parameter, state[MASTER] if state else None, self.start if state else None)

    def gradient(self, steps: Mapping[int, AdamStep]) -> tuple[torch.Tensor, AdamStep] | None:
        """Return the gradient of the owned piece, and its step, if that is one of `steps` and repeats on a host."""
        if self.optimizer is None:
            return None
        master = updated_tensor(self.optimizer, self.parameter)
        if id(master) not in steps or master.grad is None or master.grad.dtype != torch.float32:
            return None
        if not self.derives_compute:  # another process would have the new masters, and the old compute weights
            return None
        if not repeats_on_a_host(master):
            return None
        return master.grad.view(-1)[self._held()], steps[id(master)]

    def reduced_gradient(self) -> torch.Tensor | None:
        """Return the gradient of the owned piece, float32, flattened; None if there is none."""
        if self.optimizer is None or self.start == self.end:  # with a sharded optimizer only another rank knows it
            return None
        master = updated_tensor(self.optimizer, self.parameter)
        if master.grad is None:
            return None
        assert master.grad.dtype == torch.float32, master.grad.dtype
        return master.grad.view(-1)[self._held()]

    def clipped_by(self, total_norm: float | None) -> float:
        """Return the factor by which Megatron multiplies the gradient before the step, for a norm over all ranks."""
        most = self.trained_by.config.clip_grad
        scale = most / (total_norm + 1.0e-6) if total_norm is not None and most > 0.0 else 1.0
        return scale if scale < 1.0 else 1.0

    def forward_tensors(self) -> list[torch.Tensor]:
        """Return the weights with which forward passes compute, flattened; of an FP8 parameter, payload and scales.

        Of weights that the next pass gathers, the shard: the others are still those of an earlier step.
        """
        found = [tensor.reshape(-1) for tensor in fp8_linear.forward_tensors(self.parameter).values()]
        return [tensor[self.start : self.end] for tensor in found] if self.is_gathered_later else found

    def _held(self) -> slice:
        """Return the range of the owned piece within this rank's part of the optimizer's state."""
        return slice(None) if self.is_sharded else slice(self.start, self.end)

    def _state_pieces(self) -> Iterator[Piece]:
        for role, tensor in self.optimizer_state().items():
            if role != scaled_role(role):
                yield self.key(role), tensor, (0, 1)
            else:
                yield self.key(role), tensor[self._held()], (self.start, self.end)

    def _compute_pieces(self) -> Iterator[Piece]:
        owned = (self.start, self.end)
        if is_fp8_parameter(self.parameter):
            payload, scale = self.weights(), fp8_parameters.scales_of(self.parameter)
        elif fp8_linear.is_fp8(self.parameter):
            payload, scale = fp8_linear.rounded(self.parameter)
        else:
            payload, scale = self.weights(), None
        yield self.key(COMPUTE), payload.view(-1)[slice(*owned)], owned
        if scale is not None:
            yield self.key(scale_of(COMPUTE)), scale.reshape(-1), (0, scale.numel())

    def key(self, role: str) -> PartKey:
        return PartKey(operator=str(self.operator), tensor=self.name, role=role)


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedBuffer:
    """A module buffer, of which every rank snapshots its own copy."""

    operator: OperatorId
    name: str
    buffer: torch.Tensor

    def piece(self) -> Piece:
        key = PartKey(operator=str(self.operator), tensor=self.name, role=BUFFER)
        return key, self.buffer, (0, self.buffer.numel())


class RankOperators:
    """All operators of this rank's model chunks, and the table of its stage group. The constructor is collective."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._steps = AdamSteps(state)
        self._total_norm: float | None = None
        self.parameters = list(_parameters(state))
        self._owned: dict[OperatorId, list[OwnedParameter]] = defaultdict(list)
        for each in self.parameters:
            if each.start < each.end:
                self._owned[each.operator].append(each)
        self.buffers = list(_buffers(state))
        self._frozen: frozenset[str] = frozenset()
        self.table = _gather_table(self)

    def meet(self) -> None:
        """Gather the table again: ranks of the stage may be new, or this process was alone before.

        Collective in the stage.
        """
        self.table = _gather_table(self)

    def pieces(self, full: Collection[int], compute: Collection[int]) -> list[Piece]:
        """Return the pieces of the operators at these positions of the table: whole state, or compute weights."""
        wholes = {self.table.operators[position]: position in full for position in (*full, *compute)}
        found: list[Piece] = []
        for owned in self.parameters:
            if owned.operator in wholes:
                found += owned.pieces(full=wholes[owned.operator])
        return found

    def buffer_pieces(self, positions: Collection[int]) -> list[Piece]:
        """Return the buffers of the operators at these positions, which belong to both."""
        wanted = {self.table.operators[position] for position in positions}
        return [buffer.piece() for buffer in self.buffers if buffer.operator in wanted]

    def adam_steps(self) -> tuple[float, ...]:
        """Return the number of updates that each inner optimizer has made."""
        return tuple(step_count(optimizer) for optimizer in self._state.inner_optimizers)

    def note_step(self, iteration: int, gradients: ReadyGradients) -> None:
        """The step of `iteration` with these gradients follows."""
        self._steps.note(iteration, overflow=gradients.overflow)
        self._total_norm = gradients.total_norm

    def require_steps(self) -> None:
        """Raise ConfigError unless servers can repeat the optimizer's steps, and these give the compute weights."""
        frozen = next((each.name for each in self.parameters if not each.is_trained), None)
        require(frozen is None, "parameters", f"{frozen} frozen", "all trained where ckpt=flowcheck")
        self._steps.require_known()
        underived = [each.name for each in self.parameters if not each.derives_compute]
        wanted = "weights that follow from masters where ckpt=flowcheck: not FP8 parameters with delayed scaling"
        require(not underived, "fp8_recipe", underived[:1], wanted)

    def reduced_gradients(self) -> Mapping[PartKey, torch.Tensor]:
        """Return the gradients of this rank's pieces, unscaled and not clipped, live until the step.

        Keys are those of the master weights; tensors are flat float32, in the order of `pieces`. Pieces that take no
        step are left out.
        """
        found = {each.key(MASTER): each.reduced_gradient() for each in self.parameters}
        return {key: gradient for key, gradient in found.items() if gradient is not None}

    def steps_taken(self, iteration: int) -> Mapping[PartKey, AdamStep]:
        """Return Adam's step of `iteration` for each piece, by the same keys; empty if the step was skipped."""
        steps, found = self._steps.known(iteration), dict[PartKey, AdamStep]()
        for each in self.parameters if steps else ():
            if each.reduced_gradient() is not None:
                step = steps[id(updated_tensor(each.trained_by, each.parameter))]
                found[each.key(MASTER)] = replace(step, scale=each.clipped_by(self._total_norm))
        return found

    def gradients(self, full: Collection[int], iteration: int) -> Gradients | None:
        """Return the gradients and steps of these operators' pieces in `iteration`; None if unknown."""
        steps = self._steps.known(iteration)
        owned = (each for position in full for each in self._owned[self.table.operators[position]])
        found = {each.key(MASTER): each.gradient(steps) for each in owned}
        return {key: gradient for key, gradient in found.items() if gradient} if all(found.values()) else None

    def load(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        compute: Collection[str],
        adam_steps: Sequence[float],
    ) -> None:
        """Load this rank's pieces of a snapshot, then make all copies whole. Collective in the stage group.

        Operators in `full` get master weights, moments, step count and compute weights; those in `compute` only the
        last; both get their buffers. Raises CheckpointLoadError for a piece that is missing or has another size.
        """
        loaded = [owned for owned in self.parameters if str(owned.operator) in {*full, *compute}]
        for owned in loaded:
            index = owned.optimizer_index if str(owned.operator) in full else None
            owned.load(parts, None if index is None else adam_steps[index])
        for buffer in self.buffers:
            if str(buffer.operator) in {*full, *compute}:
                key, tensor, _ = buffer.piece()
                _widen(parts, key, tensor)
                _copy_part(parts, key, tensor)
        _cast_masters(each for each in loaded if str(each.operator) in full and each.derives_compute)
        _make_whole(loaded, full)
        fp8_parameters.refresh(each.parameter for each in loaded)

    def digests(self) -> dict[str, str]:
        """Return a hash, in hex, of this rank's pieces of each operator: weights, optimizer state, buffers."""
        state: dict[str, list[torch.Tensor]] = defaultdict(list)
        for owned in self.parameters:
            state[str(owned.operator)] += [*owned.forward_tensors(), *owned.optimizer_state().values()]
        for buffer in self.buffers:
            state[str(buffer.operator)].append(buffer.buffer)
        return hashes_of(state)

    def freeze(self, frozen: Collection[str]) -> None:
        """Let the weights of these operators skip their gradients, and all others compute them.

        The embedding always computes its own, so that every rank runs backward through all its layers: the exchanges of
        tokens there are collective. Grouped experts skip theirs only all together. None is skipped if gradients are
        reduced during backward, as Megatron waits for all of them, or if the script itself has frozen parameters: then
        no embedding may be there to lead all ranks through backward. The optimizer skips all frozen operators in any
        case: see `drop_frozen_gradients`.
        """
        self._frozen = frozenset(frozen)
        trained = [owned for owned in self.parameters if owned.is_trained]
        overlapped = any(cast("Any", chunk).ddp_config.overlap_grad_reduce for chunk in self._state.model)
        all_compute = overlapped or len(trained) < len(self.parameters)
        needed = {_grouped_name(owned) for owned in trained if str(owned.operator) not in frozen}
        for owned in trained:
            computes = owned.operator.kind is OperatorKind.EMBEDDING or _grouped_name(owned) in needed
            owned.parameter.requires_grad_(all_compute or computes)

    def drop_frozen_gradients(self) -> None:
        """Drop the gradients of frozen operators: the optimizer's next step then skips them (section 3.3)."""
        for owned in self.parameters:
            if owned.is_trained and str(owned.operator) in self._frozen and owned.start < owned.end:
                updated = updated_tensor(owned.trained_by, owned.parameter)
                updated.grad = None
                if hasattr(updated, "decoupled_grad"):
                    cast("Any", updated).decoupled_grad = None


def shard_identity() -> ShardIdentity:
    """Return the shard of the job that this rank holds."""
    return ShardIdentity(
        global_rank=dist.get_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=cast("int", parallel_state.get_expert_tensor_parallel_rank()),
        dp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def stage_group() -> dist.ProcessGroup:
    """Return the process group of this rank's pipeline stage: all its data-, expert- and tensor-parallel ranks."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))


def bare_model(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return a model chunk without its wrappers for data parallelism and precision."""
    while hasattr(chunk, "module"):
        chunk = cast("torch.nn.Module", chunk.module)
    return chunk


def shares_embedding(model: Any) -> bool:
    """Return whether the last stage holds a copy of the first stage's word embedding, for its output or for MTP."""
    return model.share_embeddings_and_output_weights or bool(getattr(model.config, "mtp_num_layers", None))


def locate(model: torch.nn.Module, name: str) -> OperatorId:
    """Return the operator of a parameter or buffer of a bare GPT model.

    Raises ConfigError for a name that belongs to none, and for experts that share one weight (Megatron's legacy
    GroupedMLP).
    """
    root = name.partition(".")[0]
    if root in _EDGES:
        return OperatorId(kind=_EDGES[root])
    if name.startswith("decoder.final_layernorm."):
        return OperatorId(kind=OperatorKind.FINAL_NORM)
    if match := _LAYER.match(name):
        layer = cast("Any", model).decoder.layers[int(match[1])]
        return _locate_in_layer(layer.mlp, match[2], layer=layer.layer_number - 1, mtp_depth=None)
    if match := _MTP.match(name):
        module = cast("Any", model).mtp.layers[int(match[1])]
        inner = getattr(module, "transformer_layer", None) or module.mtp_model_layer
        return _locate_in_layer(inner.mlp, match[2], layer=0, mtp_depth=int(match[1]))
    raise ConfigError(f"snapshots in memory: {name!r} is in no operator, wanted a GPTModel of Megatron-Core")


def _locate_in_layer(mlp: Any, rest: str, *, layer: int, mtp_depth: int | None) -> OperatorId:
    place = {"layer": layer, "mtp_depth": mtp_depth}
    if rest.startswith("mlp.router."):
        return OperatorId(kind=OperatorKind.GATE, **place)
    if rest.startswith("mlp.experts."):
        match = _SEQUENTIAL_EXPERT.match(rest) or _GROUPED_EXPERT.match(rest)
        if match is None and is_scaling(rest):  # a grouped layer has scales for all of its experts in one tensor
            return OperatorId(kind=OperatorKind.BLOCK, **place)
        if match is None:
            raise ConfigError(f"snapshots in memory: {rest!r} holds several experts, wanted one weight an expert")
        return OperatorId(kind=OperatorKind.EXPERT, expert=mlp.local_expert_indices[int(match[1])], **place)
    return OperatorId(kind=OperatorKind.BLOCK, **place)


def front_to_back(operator: OperatorId) -> tuple[int, ...]:
    """Return a sort key: embedding, layers (block, gate, experts), final norm, MTP modules, output."""
    in_layer = operator.layer is not None
    section = OperatorKind.BLOCK if in_layer else operator.kind
    after_decoder = 2 * _SECTIONS.index(section) + (3 if operator.mtp_depth is not None else 0)
    kind = list(OperatorKind).index(operator.kind)
    return (after_decoder, operator.mtp_depth or 0, operator.layer or 0, kind, operator.expert or 0)


def _parameters(state: TrainingState) -> Iterator[OwnedParameter]:
    optimizer_of = _optimizers_by_parameter(state)
    for index, chunk in enumerate(state.model):
        model = bare_model(chunk)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in optimizer_of:
                wanted = "one for every parameter that is not frozen"
                raise ConfigError(f"snapshots in memory: no optimizer updates {name!r}, wanted {wanted}")
            optimizer_index, optimizer = optimizer_of.get(parameter, (None, None))
            replicas = replicas_of(parameter)
            start, end = _owned_range(parameter, optimizer, replicas)
            yield OwnedParameter(
                operator=locate(model, name),
                name=f"model{index}.{name}",
                parameter=parameter,
                optimizer=optimizer,
                optimizer_index=optimizer_index,
                start=start,
                end=end,
                replicas=replicas,
                is_gathered_later=optimizer is not None and gathers_in_forward(chunk),
            )


def _optimizers_by_parameter(state: TrainingState) -> dict[torch.nn.Parameter, tuple[int, MegatronOptimizer]]:
    found: dict[torch.nn.Parameter, tuple[int, MegatronOptimizer]] = {}
    for index, optimizer in enumerate(state.inner_optimizers):
        for parameter in _updated_parameters(optimizer):
            found[parameter] = (index, optimizer)
    return found


def _updated_parameters(optimizer: MegatronOptimizer) -> Iterable[torch.nn.Parameter]:
    """Return the model's parameters that an inner optimizer updates, on any rank."""
    inner: Any = optimizer
    if isinstance(optimizer, DistributedOptimizer):
        return [] if inner.is_stub_optimizer else [parameter for buffer in inner.buffers for parameter in buffer.params]
    if hasattr(inner, "float16_groups"):
        return [parameter for group in inner.float16_groups + inner.fp32_from_fp32_groups for parameter in group]
    return (
        [] if inner.is_stub_optimizer else [parameter for group in inner.param_groups for parameter in group["params"]]
    )


def replicas_of(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Return the ranks that hold copies of a parameter."""
    if getattr(parameter, "allreduce", True):  # Megatron's mark: false on what expert parallelism splits
        return cast("dist.ProcessGroup", parallel_state.get_data_parallel_group(with_context_parallel=True))
    return cast("dist.ProcessGroup", parallel_state.get_expert_data_parallel_group())


def _owned_range(
    parameter: torch.nn.Parameter, optimizer: MegatronOptimizer | None, replicas: dist.ProcessGroup
) -> tuple[int, int]:
    if isinstance(optimizer, DistributedOptimizer):
        if parameter not in optimizer.model_param_group_index_map:
            return 0, 0
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        return owned.start, owned.end
    count, rank = replicas.size(), replicas.rank()
    return parameter.numel() * rank // count, parameter.numel() * (rank + 1) // count


def _buffers(state: TrainingState) -> Iterator[OwnedBuffer]:
    for index, chunk in enumerate(state.model):
        model = bare_model(chunk)
        for name, buffer in named_buffers(model):
            yield OwnedBuffer(operator=locate(model, name), name=f"model{index}.{name}", buffer=buffer)


def _gather_table(operators: RankOperators) -> OperatorTable:
    """Agree on the stage group's operators and on the share of each rank. Collective in the stage group."""
    mine: dict[OperatorId, list[int]] = defaultdict(lambda: [0, 0, 0])  # in full, compute weights, moments
    for owned in operators.parameters:
        sizes = mine[owned.operator]
        for key, tensor, _ in owned.pieces(full=True):
            sizes[0] += tensor.nbytes
            sizes[2] += tensor.nbytes if scaled_role(key.role) in MOMENTS else 0
        sizes[1] += sum(tensor.nbytes for _, tensor, _ in owned.pieces(full=False))
    for buffer in operators.buffers:
        for index in range(2):
            mine[buffer.operator][index] += buffer.buffer.nbytes
    own = pack_rows(list(mine), np.array(list(mine.values()), np.int64).reshape(-1, 3).T)
    packed = [b""] * stage_group().size()  # compressed: every rank gets those of all ranks of its stage
    dist.all_gather_object(packed, own, group=stage_group())
    everyone = [dict(zip(held, columns.T.tolist(), strict=True)) for held, columns in map(unpack_rows, packed)]
    names = sorted({operator for rank in everyone for operator in rank}, key=front_to_back)
    sizes = np.array([[rank.get(operator, [0, 0, 0]) for operator in names] for rank in everyone], dtype=np.int64)
    full, compute, moments = np.moveaxis(sizes, 2, 0)
    return OperatorTable(operators=tuple(names), full_bytes=full, compute_bytes=compute, moment_bytes=moments)


def _copy_part(parts: Mapping[PartKey, torch.Tensor], key: PartKey, target: torch.Tensor) -> None:
    part = parts.get(key)
    if part is None or part.numel() != target.numel() or part.dtype != target.dtype:
        got = "nothing" if part is None else f"{part.numel()} elements of {part.dtype}"
        raise CheckpointLoadError(f"{key}: got {got}, wanted {target.numel()} elements of {target.dtype}")
    target.copy_(part.view(target.shape))


def _widen(parts: Mapping[PartKey, torch.Tensor], key: PartKey, buffer: torch.Tensor) -> None:
    """Make a buffer float32 if the saved one was: Megatron widens the buffers of a new model in its first pass."""
    part = parts.get(key)
    if part is not None and part.dtype == torch.float32 and buffer.dtype in (torch.bfloat16, torch.float16):
        buffer.data = buffer.data.float()


def _make_whole(loaded: Iterable[OwnedParameter], full: Collection[str]) -> None:
    """Give every rank that holds a copy of these parameters all pieces of it."""
    tensors: dict[dist.ProcessGroup, list[tuple[torch.Tensor, int, int]]] = {}
    for owned in loaded:
        copies = [owned.weights()]
        if str(owned.operator) in full and not owned.is_sharded:
            copies = [*copies, *owned.optimizer_state().values()]
        tensors.setdefault(owned.replicas, []).extend((copy, owned.start, owned.end) for copy in copies)
    for group, pieces in tensors.items():
        if group.size() > 1:
            merge(pieces, group)


def _cast_masters(loaded: Iterable[OwnedParameter]) -> None:
    """Cast master weights to the FP8 parameters among these that follow from them."""
    shards: dict[dist.ProcessGroup, list[Shard]] = {}
    for owned in loaded:
        if is_fp8_parameter(owned.parameter):
            shards.setdefault(owned.replicas, []).append(owned.shard())
    for group, parts in shards.items():
        fp8_parameters.cast_masters(parts, group)


def is_grouped(name: str) -> bool:
    """Return whether a parameter is the weight of an expert in a layer of all local experts."""
    return _GROUPED_EXPERT.search(name) is not None


def _grouped_name(owned: OwnedParameter) -> str:
    """Return the name without a grouped expert's number: weights of one name all compute gradients, or none."""
    return re.sub(r"(linear_fc[12]\.(?:weight|bias))\d+$", r"\1", owned.name)
