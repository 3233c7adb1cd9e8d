"""The pieces of parameters that this rank snapshots, and copies of module buffers.

Owns: reading and loading the tensors of a piece (compute weights and optimizer state),
and the gradient of the coming step. Must not: communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.megatron import fp8_parameters
from moe_ckpt.megatron.fp8_parameters import Shard, is_fp8_parameter
from moe_ckpt.megatron.gradients import repeats_on_a_host
from moe_ckpt.megatron.optimizer_state import (
    derives_compute,
    holds_masters,
    master_values,
    stored_state,
    updated_tensor,
    write_step_count,
)
from moe_ckpt.megatron.rounded_weights import forward_tensors, rounding_of
from moe_ckpt.snapshot.adam_update import AdamStep
from moe_ckpt.snapshot.capture import Piece
from moe_ckpt.snapshot.codec import (
    BUFFER,
    COMPUTE,
    MASTER,
    PartKey,
    scale_of,
    scaled_role,
)
from moe_ckpt.types import OperatorId


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedParameter:
    """A parameter of this rank, and the range of elements that this rank snapshots.

    A parameter that the script has frozen has no optimizer: its state is its compute
    weights.
    """

    operator: OperatorId
    """The operator to which the parameter belongs."""

    name: str
    """A name that is unique in the rank: the model chunk and the parameter's name."""

    parameter: torch.nn.Parameter
    """The whole parameter of the model."""

    optimizer: MegatronOptimizer | None
    """The inner optimizer that updates the parameter; None: the parameter is frozen."""

    optimizer_index: int | None
    """The position of `optimizer` among the inner optimizers; None: frozen."""

    start: int
    """The first element of the range in the flattened parameter."""

    end: int
    """The end of the range; equal to `start` if the range is empty."""

    replicas: dist.ProcessGroup
    """The ranks that hold copies of the parameter."""

    is_gathered_later: bool = False
    """Whether the next forward pass gathers the weights (`overlap_param_gather`)."""

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
        """Whether compute weights follow from the stored master weights.

        Snapshots in full then leave out the compute weights.
        """
        has_history = fp8_parameters.has_history(self.parameter)
        return (
            self.optimizer is not None
            and derives_compute(self.optimizer)
            and not has_history
        )

    def weights(self) -> torch.Tensor:
        """Return all compute weights, flattened; of an FP8 parameter, the payload."""
        return fp8_parameters.weights_of(self.parameter)[0].view(-1)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's master weights and moments, flattened, by role.

        A sharded optimizer has this rank's shard, any other has all elements.
        """
        if self.optimizer is None or (self.is_sharded and self.start == self.end):
            return {}
        return stored_state(self.optimizer, self.parameter)

    def pieces(self, *, full: bool) -> Iterator[Piece]:
        """Yield the owned piece of the whole state, or of the compute weights.

        Args:
            full: Whether to yield the whole state. The whole state includes compute
                weights if they are not the rounding of the stored master weights.
        """
        if full:
            yield from self._state_pieces()
        if not full or not self.derives_compute:
            yield from self._compute_pieces()

    def load(self, parts: Mapping[PartKey, torch.Tensor], steps: float | None) -> None:
        """Load the owned piece of a snapshot: the whole state, or the compute weights.

        FP8 parameters that follow from masters are left to `cast_masters`, which needs
        all ranks.

        Args:
            parts: The tensors of the snapshot.
            steps: The step count of the whole state; None: load compute weights only.

        Raises:
            CheckpointLoadError: A part is missing, or has another size or type.
        """
        state = {} if steps is None else self.optimizer_state()
        for key, tensor, _ in self._state_pieces() if state else ():
            copy_part(parts, key, tensor)
        if steps is None or not self.derives_compute:
            self._load_compute(parts)
        elif state and not is_fp8_parameter(self.parameter):
            # `copy_` rounds as Megatron rounds its masters, to the same bits
            self.weights()[self.start : self.end].copy_(
                master_values(state)[self._held()]
            )
        if steps is not None and state:
            write_step_count(self.trained_by, self.parameter, steps)

    def _load_compute(self, parts: Mapping[PartKey, torch.Tensor]) -> None:
        # load into new memory, because the pieces of a weight that forward passes round
        # are no view of the parameter
        loaded = {
            key.role: torch.empty_like(tensor)
            for key, tensor, _ in self._compute_pieces()
        }
        for role, tensor in loaded.items():
            copy_part(parts, self.key(role), tensor)
        owned, weights, scale = (
            slice(self.start, self.end),
            loaded[COMPUTE],
            loaded.get(scale_of(COMPUTE)),
        )
        if is_fp8_parameter(self.parameter):
            scales = fp8_parameters.scales_of(self.parameter)
            scales.copy_(loaded[scale_of(COMPUTE)].view(scales.shape))
        elif scale is not None:
            rounding = rounding_of(self.parameter)
            assert rounding is not None, (
                "the key of a scale is that of a rounded weight"
            )
            weights = rounding.values(self.parameter, weights, scale, owned)
        self.weights()[owned].copy_(weights)

    def shard(self) -> Shard:
        """Return this rank's part of the master weights of an FP8 parameter."""
        state = self.optimizer_state()
        return Shard(
            self.parameter,
            state[MASTER] if state else None,
            self.start if state else None,
        )

    def gradient(
        self, steps: Mapping[int, AdamStep]
    ) -> tuple[torch.Tensor, AdamStep] | None:
        """Return the float32 gradient of the owned piece, and its step.

        Args:
            steps: Known steps, by the `id` of the master weights.

        Returns:
            None if the step is not known or does not repeat on a host, if the gradient
            is not float32, or if compute weights do not follow from the masters.
        """
        if self.optimizer is None:
            return None
        master = updated_tensor(self.optimizer, self.parameter)
        if (
            id(master) not in steps
            or master.grad is None
            or master.grad.dtype != torch.float32
        ):
            return None
        # another process would have the new masters, but the old compute weights
        if not self.derives_compute or not repeats_on_a_host(master):
            return None
        return master.grad.view(-1)[self._held()], steps[id(master)]

    def reduced_gradient(self) -> torch.Tensor | None:
        """Return the flattened float32 gradient of the owned piece; None if absent."""
        # with a sharded optimizer, only another rank has the gradient of an empty piece
        if self.optimizer is None or self.start == self.end:
            return None
        master = updated_tensor(self.optimizer, self.parameter)
        if master.grad is None:
            return None
        assert master.grad.dtype == torch.float32, master.grad.dtype
        return master.grad.view(-1)[self._held()]

    def step_gradient(self) -> torch.Tensor | None:
        """Return the gradient with which the owned piece takes the next step.

        Returns:
            The flattened gradient, in the type that the optimizer reads. None if the
            piece is empty or frozen.

        Raises:
            CheckpointSaveError: The optimizer has no gradient for the parameter.
        """
        if self.optimizer is None or self.start == self.end:
            return None
        updated = updated_tensor(self.optimizer, self.parameter)
        gradient = getattr(updated, _gradient_name(self.optimizer), None)
        if gradient is None:
            raise CheckpointSaveError(
                f"{self.name}: got no gradient, wanted one for every parameter that is"
                " not frozen"
            )
        return gradient.view(-1)[self._held()]

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Set the gradient of the next step.

        Elements outside the owned piece get zeros: other ranks take the steps of these
        elements.

        Args:
            gradient: Flattened, of the owned piece. None: the parameter takes no step.
        """
        if self.optimizer is None or (self.is_sharded and self.start == self.end):
            return
        updated = updated_tensor(self.optimizer, self.parameter)
        whole = None
        if gradient is not None:
            whole = torch.zeros(
                updated.shape, dtype=gradient.dtype, device=updated.device
            )
            whole.view(-1)[self._held()].copy_(gradient)
        setattr(updated, _gradient_name(self.optimizer), whole)

    def clipped_by(self, total_norm: float | None) -> float:
        """Return the factor by which Megatron multiplies the gradient before the step.

        Args:
            total_norm: The gradient norm over all ranks; None: unknown, no clipping.
        """
        most = self.trained_by.config.clip_grad
        # Megatron's expression and constant: another order of operations gives other
        # last bits
        scale = (
            most / (total_norm + 1.0e-6)
            if total_norm is not None and most > 0.0
            else 1.0
        )
        return scale if scale < 1.0 else 1.0

    def forward_tensors(self) -> list[torch.Tensor]:
        """Return the weights with which forward passes compute, flattened.

        An FP8 parameter has payload and scales. If the next pass gathers the weights,
        only this rank's shard is returned: other elements are still those of an earlier
        step.
        """
        found = [
            tensor.reshape(-1) for tensor in forward_tensors(self.parameter).values()
        ]
        return (
            [tensor[self.start : self.end] for tensor in found]
            if self.is_gathered_later
            else found
        )

    def _held(self) -> slice:
        """Return the range of the owned piece within this rank's optimizer state."""
        return slice(None) if self.is_sharded else slice(self.start, self.end)

    def _state_pieces(self) -> Iterator[Piece]:
        for role, tensor in self.optimizer_state().items():
            # a scale: each rank has the scale of its own part
            if role != scaled_role(role):
                yield self.key(role), tensor, (0, 1)
            else:
                yield self.key(role), tensor[self._held()], (self.start, self.end)

    def _compute_pieces(self) -> Iterator[Piece]:
        owned = (self.start, self.end)
        if is_fp8_parameter(self.parameter):
            payload, scale = self.weights(), fp8_parameters.scales_of(self.parameter)
        elif rounding := rounding_of(self.parameter):
            rounded, scale = rounding.rounded(self.parameter)
            payload = rounded.view(-1)
        else:
            payload, scale = self.weights(), None
        yield self.key(COMPUTE), payload[slice(*owned)], owned
        if scale is not None:
            yield self.key(scale_of(COMPUTE)), scale.reshape(-1), (0, scale.numel())

    def key(self, role: str) -> PartKey:
        return PartKey(operator=self._operator_name, tensor=self.name, role=role)

    @cached_property
    def _operator_name(self) -> str:
        return str(self.operator)


def _gradient_name(optimizer: MegatronOptimizer) -> str:
    """Return the attribute in which the inner optimizer looks for a gradient."""
    return "decoupled_grad" if holds_masters(optimizer) else "grad"


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedBuffer:
    """A module buffer, of which every rank snapshots its own copy."""

    operator: OperatorId
    """The operator to which the buffer belongs."""

    name: str
    """A name that is unique in the rank: the model chunk and the buffer's name."""

    buffer: torch.Tensor
    """The buffer of the model."""

    def piece(self) -> Piece:
        key = PartKey(operator=str(self.operator), tensor=self.name, role=BUFFER)
        return key, self.buffer, (0, self.buffer.numel())


def copy_part(
    parts: Mapping[PartKey, torch.Tensor], key: PartKey, target: torch.Tensor
) -> None:
    """Copy one part of a snapshot to a tensor.

    Raises:
        CheckpointLoadError: The part is missing, or has another size or type.
    """
    part = parts.get(key)
    # types, too: `copy_` converts without an error, and would round a state of another
    # format
    if part is None or part.numel() != target.numel() or part.dtype != target.dtype:
        got = "nothing" if part is None else f"{part.numel()} elements of {part.dtype}"
        raise CheckpointLoadError(
            f"{key}: got {got}, wanted {target.numel()} elements of {target.dtype}"
        )
    target.copy_(part.view(target.shape))
