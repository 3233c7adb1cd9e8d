"""The operators of one rank's Megatron-Core GPT, and the pieces that the rank owns.

Owns: which piece of each parameter this rank snapshots, and loading pieces so that all
copies are whole again. If several ranks hold a parameter, each rank snapshots the piece
whose master weights the rank keeps (the distributed optimizer's shard), or an even
share if the optimizer is not sharded. Every byte is taken once. Must not: copy to host
memory, or decide when a piece is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.config import require
from moe_ckpt.errors import CheckpointLoadError, ConfigError
from moe_ckpt.megatron import fp8_parameters
from moe_ckpt.megatron.buffers import named_buffers
from moe_ckpt.megatron.fp8_parameters import Shard, is_fp8_parameter
from moe_ckpt.megatron.gradients import AdamSteps
from moe_ckpt.megatron.groups import replicas_of, stage_group
from moe_ckpt.megatron.merging import merge
from moe_ckpt.megatron.operator_names import (
    bare_model,
    front_to_back,
    grouped_name,
    locate,
)
from moe_ckpt.megatron.optimizer_state import (
    gradient_dtype,
    step_count,
    updated_tensor,
)
from moe_ckpt.megatron.overlapped import gathers_in_forward
from moe_ckpt.megatron.owned import OwnedBuffer, OwnedParameter, copy_part
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.packed import pack_rows, unpack_rows
from moe_ckpt.snapshot.adam_update import AdamStep, Gradients
from moe_ckpt.snapshot.capture import Piece
from moe_ckpt.snapshot.codec import (
    GRADIENT,
    MASTER,
    MOMENTS,
    PartKey,
    scaled_role,
)
from moe_ckpt.snapshot.device_hash import hashes_of
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable, ReadyGradients

_WIDENED = ({torch.float32, torch.bfloat16}, {torch.float32, torch.float16})


class RankOperators:
    """Implements `engine.interfaces.Operators` for the operators of this rank's chunks.

    The constructor is collective in the stage group.

    Args:
        state: This rank's training state.

    Raises:
        ConfigError: A parameter belongs to no operator, or is trained without an
            optimizer.
    """

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
        """Gather the table again. Collective in the stage group.

        Ranks of the stage may be new, or this process may have been alone before.
        """
        self.table = _gather_table(self)

    def pieces(self, full: Collection[int], compute: Collection[int]) -> list[Piece]:
        """Return this rank's pieces of operators.

        Args:
            full: Positions in the table of operators whose whole state is returned.
            compute: Positions of operators whose compute weights are returned.
        """
        wholes = {
            self.table.operators[position]: position in full
            for position in (*full, *compute)
        }
        found: list[Piece] = []
        for owned in self.parameters:
            if owned.operator in wholes:
                found += owned.pieces(full=wholes[owned.operator])
        return found

    def buffer_pieces(self, positions: Collection[int]) -> list[Piece]:
        """Return the buffers of the operators at these positions of the table.

        A snapshot has an operator's buffers beside the operator's whole state, and
        beside the compute weights alone.
        """
        wanted = {self.table.operators[position] for position in positions}
        return [buffer.piece() for buffer in self.buffers if buffer.operator in wanted]

    def adam_steps(self) -> tuple[float, ...]:
        """Return the number of updates that each inner optimizer has made."""
        return tuple(
            step_count(optimizer) for optimizer in self._state.inner_optimizers
        )

    def log_step(self, iteration: int, gradients: ReadyGradients) -> None:
        """Record the step of `iteration` with these gradients, which follows."""
        self._steps.note(iteration, overflow=gradients.overflow)
        self._total_norm = gradients.total_norm

    def require_steps(self) -> None:
        """Check that servers can repeat optimizer steps and derive compute weights.

        Raises:
            ConfigError: A parameter is frozen, the steps of an optimizer are not known,
                or compute weights do not follow from master weights.
        """
        frozen = next(
            (each.name for each in self.parameters if not each.is_trained), None
        )
        require(
            frozen is None,
            "parameters",
            f"{frozen} frozen",
            "all trained where ckpt=flowcheck",
        )
        self._steps.require_known()
        underived = [each.name for each in self.parameters if not each.derives_compute]
        wanted = (
            "weights that follow from masters where ckpt=flowcheck: not FP8 parameters"
            " with delayed scaling"
        )
        require(not underived, "fp8_recipe", underived[:1], wanted)

    def reduced_gradients(self) -> Mapping[PartKey, torch.Tensor]:
        """Return the gradients of this rank's pieces, unscaled and not clipped.

        Returns:
            Flat float32 gradients by the keys of master weights, in the order of
            `pieces`, live until the step. Pieces that take no step are left out.
        """
        found = {each.key(MASTER): each.reduced_gradient() for each in self.parameters}
        return {
            key: gradient for key, gradient in found.items() if gradient is not None
        }

    def steps_taken(self, iteration: int) -> Mapping[PartKey, AdamStep]:
        """Return Adam's step of `iteration` for each piece that took the step.

        Args:
            iteration: The newest iteration, whose gradients are still in their buffers.

        Returns:
            Steps by the keys of master weights; empty if the step was skipped.
        """
        steps = self._steps.known(iteration)
        if not steps:
            return {}
        found: dict[PartKey, AdamStep] = {}
        for each in self.parameters:
            if each.reduced_gradient() is None:
                continue
            step = steps[id(updated_tensor(each.trained_by, each.parameter))]
            found[each.key(MASTER)] = replace(
                step, scale=each.clipped_by(self._total_norm)
            )
        return found

    def gradients(self, full: Collection[int], iteration: int) -> Gradients | None:
        """Return the gradients and steps of operators in `iteration`.

        Args:
            full: Positions of the operators in the table.
            iteration: The iteration, whose step has been taken.

        Returns:
            Gradients and steps of this rank's pieces, by the keys of master weights;
            None if the step of a piece is not known.
        """
        steps = self._steps.known(iteration)
        owned = (
            each
            for position in full
            for each in self._owned[self.table.operators[position]]
        )
        found = {each.key(MASTER): each.gradient(steps) for each in owned}
        return (
            {key: gradient for key, gradient in found.items() if gradient}
            if all(found.values())
            else None
        )

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients with which this rank takes a step."""
        return sum(
            (each.end - each.start) * gradient_dtype(each.trained_by).itemsize
            for each in self.parameters
            if each.is_trained
        )

    def gradient_pieces(self) -> list[Piece]:
        """Return the gradients with which this rank's pieces take the next step.

        Returns:
            Live tensors: unscaled and not clipped, in the type that the optimizer
            reads.

        Raises:
            CheckpointSaveError: A piece has no gradient.
        """
        return [
            (each.key(GRADIENT), gradient, (each.start, each.end))
            for each in self.parameters
            if (gradient := each.step_gradient()) is not None
        ]

    def set_gradients(
        self, gradients: Mapping[PartKey, torch.Tensor], updated: Collection[str]
    ) -> None:
        """Give the optimizer logged gradients for its next step.

        Args:
            gradients: Tensors in host memory, by the keys of `gradient_pieces`.
            updated: Names of the operators that take the step. All others take none.

        Raises:
            CheckpointLoadError: A gradient is missing, or has another size.
        """
        for each in self.parameters:
            takes_step = str(each.operator) in updated and each.start < each.end
            if not takes_step or not each.is_trained:
                each.set_gradient(None)
                continue
            gradient = gradients.get(each.key(GRADIENT))
            if gradient is None or gradient.numel() != each.end - each.start:
                got = "none" if gradient is None else f"{gradient.numel()} elements"
                raise CheckpointLoadError(
                    f"gradient of {each.name}: got {got}, wanted"
                    f" {each.end - each.start} elements"
                )
            each.set_gradient(gradient)

    def load_own(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        adam_steps: Sequence[float],
    ) -> None:
        """Load this rank's pieces of a snapshot, on this rank alone.

        Args:
            parts: The tensors of the snapshot.
            full: Names of operators that get master weights, moments, step count,
                compute weights and buffers.
            adam_steps: The step count of each inner optimizer.

        Raises:
            CheckpointLoadError: A piece is missing, or has another size or type.
        """
        self._load(parts, full, (), adam_steps)

    def make_whole(self) -> None:
        """Give each rank all pieces of the state that ranks share.

        Collective in the stage group. Ranks that have the state keep it. Weights of
        sharded optimizers are left to the gather after a step.
        """
        shared = [each for each in self.parameters if not each.is_sharded]
        _make_whole(shared, {str(each.operator) for each in shared})

    def load(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        compute: Collection[str],
        adam_steps: Sequence[float],
    ) -> None:
        """Load this rank's pieces of a snapshot, then make all copies whole.

        Collective in the stage group. All named operators get their buffers.

        Args:
            parts: The tensors of the snapshot.
            full: Names of operators that get master weights, moments, step count and
                compute weights.
            compute: Names of operators that get compute weights.
            adam_steps: The step count of each inner optimizer.

        Raises:
            CheckpointLoadError: A piece is missing, or has another size or type.
        """
        loaded = self._load(parts, full, compute, adam_steps)
        _cast_masters(
            each
            for each in loaded
            if str(each.operator) in full and each.derives_compute
        )
        # after the casts, which write only the elements whose masters this rank has
        _make_whole(loaded, full)
        # last, because the copy that backward reads is made from the whole payload
        fp8_parameters.refresh(each.parameter for each in loaded)

    def _load(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        compute: Collection[str],
        adam_steps: Sequence[float],
    ) -> list[OwnedParameter]:
        """Load pieces and buffers on this rank alone; return the loaded parameters."""
        named = {*full, *compute}
        loaded = [owned for owned in self.parameters if str(owned.operator) in named]
        for owned in loaded:
            index = owned.optimizer_index if str(owned.operator) in full else None
            owned.load(parts, None if index is None else adam_steps[index])
        for buffer in self.buffers:
            if str(buffer.operator) in named:
                key, tensor, _ = buffer.piece()
                _give_type_of_saved(parts, key, tensor)
                copy_part(parts, key, tensor)
        return loaded

    def digests(self) -> dict[str, str]:
        """Return a hash, in hex, of this rank's pieces of each operator, by name.

        The hash covers weights, optimizer state and buffers.
        """
        state: dict[str, list[torch.Tensor]] = defaultdict(list)
        for owned in self.parameters:
            state[str(owned.operator)] += [
                *owned.forward_tensors(),
                *owned.optimizer_state().values(),
            ]
        for buffer in self.buffers:
            state[str(buffer.operator)].append(buffer.buffer)
        return hashes_of(state)

    def freeze(self, frozen: Collection[str]) -> None:
        """Skip the weight gradients of frozen operators, and compute all others.

        The optimizer skips frozen operators in any case: see `drop_frozen_gradients`.

        Args:
            frozen: Names of the operators to freeze.
        """
        self._frozen = frozenset(frozen)
        trained = [owned for owned in self.parameters if owned.is_trained]
        overlapped = any(
            cast("Any", chunk).ddp_config.overlap_grad_reduce
            for chunk in self._state.model
        )
        # With overlap, Megatron waits for all gradients that are reduced during
        # backward. If the script has frozen parameters, there may be no trained
        # embedding that leads all ranks through backward
        all_compute = overlapped or len(trained) < len(self.parameters)
        # a grouped layer asks only its first weight whether gradients are computed, so
        # all of its experts skip gradients together
        needed = {
            grouped_name(owned.name)
            for owned in trained
            if str(owned.operator) not in frozen
        }
        for owned in trained:
            # the embedding always computes a gradient: a rank that needs no gradient at
            # all skips backward, and the other ranks wait for its exchange of tokens
            computes = (
                owned.operator.kind is OperatorKind.EMBEDDING
                or grouped_name(owned.name) in needed
            )
            owned.parameter.requires_grad_(all_compute or computes)

    def drop_frozen_gradients(self) -> None:
        """Drop the gradients of frozen operators.

        The optimizer's next step then skips the operators. MoEvement, section 3.3.
        """
        for owned in self.parameters:
            if (
                owned.is_trained
                and str(owned.operator) in self._frozen
                and owned.start < owned.end
            ):
                updated = updated_tensor(owned.trained_by, owned.parameter)
                updated.grad = None  # zeros would still decay moments and weights
                if hasattr(updated, "decoupled_grad"):
                    cast("Any", updated).decoupled_grad = None


def _parameters(state: TrainingState) -> Iterator[OwnedParameter]:
    optimizer_of = {
        parameter: (index, optimizer)
        for index, optimizer in enumerate(state.inner_optimizers)
        for parameter in _updated_parameters(optimizer)
    }
    for index, chunk in enumerate(state.model):
        model = bare_model(chunk)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in optimizer_of:
                wanted = "one for every parameter that is not frozen"
                raise ConfigError(
                    f"snapshots in memory: no optimizer updates {name!r}, wanted"
                    f" {wanted}"
                )
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


def _updated_parameters(optimizer: MegatronOptimizer) -> Iterable[torch.nn.Parameter]:
    """Return the model's parameters that an inner optimizer updates, on any rank."""
    inner: Any = optimizer
    if getattr(inner, "is_stub_optimizer", False):  # Megatron gives a stub no buffers
        return []
    # parameter groups have only parameters of which this rank has a shard
    if isinstance(optimizer, DistributedOptimizer):
        return [parameter for buffer in inner.buffers for parameter in buffer.params]
    # parameter groups of the inner optimizer have the FP32 masters of these parameters
    if hasattr(inner, "float16_groups"):
        return [
            parameter
            for group in inner.float16_groups + inner.fp32_from_fp32_groups
            for parameter in group
        ]
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def _owned_range(
    parameter: torch.nn.Parameter,
    optimizer: MegatronOptimizer | None,
    replicas: dist.ProcessGroup,
) -> tuple[int, int]:
    if isinstance(optimizer, DistributedOptimizer):
        # all elements are in the shards of other ranks
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
            yield OwnedBuffer(
                operator=locate(model, name), name=f"model{index}.{name}", buffer=buffer
            )


def _gather_table(operators: RankOperators) -> OperatorTable:
    """Agree on the operators of the stage and the share of each rank.

    Collective in the stage group.
    """
    # bytes in full, bytes of compute weights, bytes of moments
    mine: dict[OperatorId, list[int]] = defaultdict(lambda: [0, 0, 0])
    for owned in operators.parameters:
        sizes = mine[owned.operator]
        for key, tensor, _ in owned.pieces(full=True):
            sizes[0] += tensor.nbytes
            sizes[2] += tensor.nbytes if scaled_role(key.role) in MOMENTS else 0
        sizes[1] += sum(tensor.nbytes for _, tensor, _ in owned.pieces(full=False))
    for buffer in operators.buffers:
        for index in range(2):
            mine[buffer.operator][index] += buffer.buffer.nbytes
    own = pack_rows(
        list(mine), np.array(list(mine.values()), np.int64).reshape(-1, 3).T
    )
    # compressed, because every rank gets the rows of all ranks of its stage
    packed = TorchRanks(stage_group()).gather(own)
    everyone = [
        dict(zip(held, columns.T.tolist(), strict=True))
        for held, columns in map(unpack_rows, packed)
    ]
    names = sorted(
        {operator for rank in everyone for operator in rank}, key=front_to_back
    )
    sizes = np.array(
        [[rank.get(operator, [0, 0, 0]) for operator in names] for rank in everyone],
        dtype=np.int64,
    )
    full, compute, moments = np.moveaxis(sizes, 2, 0)
    return OperatorTable(
        operators=tuple(names),
        full_bytes=full,
        compute_bytes=compute,
        moment_bytes=moments,
    )


def _give_type_of_saved(
    parts: Mapping[PartKey, torch.Tensor], key: PartKey, buffer: torch.Tensor
) -> None:
    """Give a buffer the type of the saved buffer, if Megatron changes the type."""
    part = parts.get(key)
    # A router's first pass widens 16-bit biases to float32. A new model may load a
    # later state, and ranks that have trained may go back to the state before that pass
    if part is not None and {part.dtype, buffer.dtype} in _WIDENED:
        buffer.data = buffer.data.to(part.dtype)


def _make_whole(loaded: Iterable[OwnedParameter], full: Collection[str]) -> None:
    """Give all pieces of these parameters to every rank that holds a copy."""
    tensors: dict[dist.ProcessGroup, list[tuple[torch.Tensor, int, int]]] = {}
    for owned in loaded:
        copies = [owned.weights()]
        # no other rank has a copy of a shard
        if str(owned.operator) in full and not owned.is_sharded:
            copies = [*copies, *owned.optimizer_state().values()]
        tensors.setdefault(owned.replicas, []).extend(
            (copy, owned.start, owned.end) for copy in copies
        )
    for group, pieces in tensors.items():
        if group.size() > 1:
            merge(pieces, group)


def _cast_masters(loaded: Iterable[OwnedParameter]) -> None:
    """Cast master weights to the FP8 parameters among `loaded`."""
    shards: dict[dist.ProcessGroup, list[Shard]] = {}
    for owned in loaded:
        if is_fp8_parameter(owned.parameter):
            shards.setdefault(owned.replicas, []).append(owned.shard())
    for group, parts in shards.items():
        fp8_parameters.cast_masters(parts, group)
