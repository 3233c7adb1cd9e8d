"""Copies by gradient: a peer that holds the state before a step takes the step itself.

Owns: the contents of an update. Must not: send updates, or take the step
(`snapshot.arriving_update` does). MoEtion, section 5.2 and Algorithm 3; FlowCheck,
section 5.

    owner   state t-1 -> Adam -> state t
            sends: header of t, gradients, Adam's numbers of the step, buffers
    peer    copy of t-1 -> the same step -> copy of t

If the owner has a snapshot of t (`ckpt=moetion`), the header holds the checksum of that
snapshot, and the peer refuses any other result. If only the peer computes t
(`ckpt=flowcheck`, where the peer is a checkpoint server), the update `seals` the copy:
the peer computes the checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot.blobs import is_key
from moe_ckpt.snapshot.codec import (
    BUFFER,
    MASTER,
    MOMENTS,
    Part,
    PartKey,
    SnapshotHeader,
    header_from_json,
    header_to_json,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """One step of torch's Adam, or of AdamW if `decoupled`, for one master weight."""

    learning_rate: float
    """Learning rate of the step."""

    beta1: float
    """Decay rate of the first moment."""

    beta2: float
    """Decay rate of the second moment."""

    eps: float
    """Term that Adam adds to the denominator."""

    weight_decay: float
    """Coefficient of weight decay."""

    decoupled: bool
    """Whether weight decay is decoupled from the gradient, as in AdamW."""

    steps: float
    """Number of steps that the weight has taken before."""

    scale: float = 1.0
    """Factor applied to the gradient before the step. A factor below 1 clips a gradient
    that was handed over before clipping.
    """


Gradients = Mapping[PartKey, tuple[torch.Tensor, AdamStep]]
"""For each master weight: the gradient (float32, with as many elements as the weight)
and the numbers of Adam's step.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedGradients:
    """Gradients that the payload of an update lacks, because the receiver has them.

    The receiver observes these gradients by a way of its own, such as a mirror port of
    the network (FlowCheck, section 4).
    """

    weights: tuple[bool, ...]
    """For each master weight that takes a step, in the order of the header: whether the
    receiver observes the weight's gradient.
    """

    source: Any
    """Value of JSON by which the receiver finds the gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Head of an update, which precedes the payload.

    The payload holds the gradients of the weights that take a step (float32, one after
    another, without the `observed` gradients), then the bytes of the header's buffers.
    """

    base: str
    """Key of the copy before the step."""

    target: str
    """Key of the copy after the step."""

    steps: tuple[AdamStep | None, ...]
    """Steps of the header's master weights, in the order of the header; None for a
    weight that takes no step.
    """

    header: SnapshotHeader
    """Header of the copy after the step."""

    seals: bool = False
    """Whether `header` has no checksum yet, so that the peer computes the checksum."""

    observed: ObservedGradients | None = None
    """Gradients that the receiver observes. None: the payload has all gradients."""

    @property
    def unit(self) -> str:
        """Name of the unit; empty if the header has no unit."""
        return self.header.unit.name if self.header.unit else ""

    @property
    def stepping(self) -> list[tuple[Part, AdamStep]]:
        """Master weights that take a step, each with its step."""
        with_steps = zip(masters(self.header), self.steps, strict=True)
        return [(part, step) for part, step in with_steps if step]

    @property
    def are_observed(self) -> tuple[bool, ...]:
        """Whether the receiver observes each gradient, in the order of `stepping`."""
        if self.observed is None:
            return (False,) * len(self.stepping)
        return self.observed.weights

    @property
    def payload_bytes(self) -> int:
        """Bytes of the gradients and buffers in the payload."""
        size_bytes = sum(part.nbytes for part in buffer_parts(self.header))
        for (part, _), is_observed in zip(
            self.stepping, self.are_observed, strict=True
        ):
            if not is_observed:
                size_bytes += 4 * part.numel
        return size_bytes


def can_be_updated(header: SnapshotHeader) -> bool:
    """Return whether a step of torch's Adam determines all of a snapshot.

    True for whole FP32 state without buffers.
    """
    return not buffer_parts(header) and follows_from_gradients(header)


def follows_from_gradients(header: SnapshotHeader) -> bool:
    """Return whether a step of torch's Adam determines all of a snapshot but buffers.

    True if all other parts are FP32 master weights, each with both FP32 moments.
    """
    parts = state_parts(header)
    tensors = {(part.key.operator, part.key.tensor) for part in parts}
    whole = {
        PartKey(operator=op, tensor=name, role=role)
        for op, name in tensors
        for role in (MASTER, *MOMENTS)
    }
    # the owner's optimizer rounds other formats in its own kernels, for which torch has
    # no equivalent
    return {part.key for part in parts} == whole and all(
        part.dtype == torch.float32 for part in parts
    )


def buffer_parts(header: SnapshotHeader) -> list[Part]:
    """Return the parts that no optimizer step changes: the buffers."""
    return [part for part in header.parts if part.key.role == BUFFER]


def update_to_bytes(update: Update) -> bytes:
    """Return the bytes of a head, which `update_from_bytes` reads."""
    steps = [step and astuple(step) for step in update.steps]
    head = {
        "base": update.base,
        "target": update.target,
        "steps": steps,
        "seals": update.seals,
    }
    if update.observed:
        head["observed"] = [update.observed.weights, update.observed.source]
    return (
        json.dumps(head, separators=(",", ":")).encode()
        + b"\n"
        + header_to_json(update.header)
    )


def update_from_bytes(data: bytes) -> Update:
    """Return the head that `update_to_bytes` wrote.

    Raises:
        CheckpointLoadError: The bytes are anything else.
    """
    head, _, header = data.partition(b"\n")
    try:
        fields = json.loads(head)
        steps = tuple(
            step and AdamStep(**dict(zip(AdamStep.__slots__, step, strict=True)))
            for step in fields["steps"]
        )
        update = Update(
            base=fields["base"],
            target=fields["target"],
            steps=steps,
            header=header_from_json(header),
            seals=fields["seals"] is True,
            observed=_observed_from_json(fields.get("observed")),
        )
        for key in (update.base, update.target):
            if not is_key(key):  # a peer chooses these file names
                raise ValueError(
                    f"got key {key!r}, wanted letters, digits, '.', '_' and '-'"
                )
        # checked here, where the caller expects errors in the bytes: the strict `zip`s
        # over `are_observed` would raise ValueError later
        if len(update.are_observed) != sum(step is not None for step in steps):
            raise ValueError(f"got {len(update.are_observed)} facts of gradients")
        return update
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointLoadError(
            f"an update's head of {len(data)} bytes: {error!r}"
        ) from error


def _observed_from_json(value: Any) -> ObservedGradients | None:
    if value is None:
        return None
    weights, source = value
    return ObservedGradients(
        weights=tuple(weight is True for weight in weights), source=source
    )


def pack_gradients(
    header: SnapshotHeader, gradients: Gradients, acquire: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """Pack the gradients of a header's master weights into one buffer.

    Args:
        header: Header whose order the gradients follow.
        gradients: Gradients of at least the master weights of `header`.
        acquire: Returns a buffer of at least the given number of bytes. Errors of
            `acquire` are raised.

    Returns:
        The buffer, and the bytes of the gradients at the beginning of the buffer.
    """
    flat = [gradients[part.key][0].reshape(-1) for part in masters(header)]
    nbytes = 4 * sum(gradient.numel() for gradient in flat)
    packed = acquire(nbytes)
    # `out` writes straight into shared memory: the result of a `cat` without `out`
    # would have to be copied there
    torch.cat(flat, out=packed[:nbytes].view(torch.float32))
    return packed, nbytes


def steps_of(
    header: SnapshotHeader, steps: Mapping[PartKey, AdamStep]
) -> tuple[AdamStep | None, ...]:
    """Return the steps of a header's master weights, in the order of the header.

    None for a weight that takes no step.
    """
    return tuple(steps.get(part.key) for part in masters(header))


def state_parts(header: SnapshotHeader) -> list[Part]:
    """Return the parts that an optimizer step changes: all but the buffers."""
    return [part for part in header.parts if part.key.role != BUFFER]


def shapes_of(
    header: SnapshotHeader,
) -> list[tuple[PartKey, torch.dtype, tuple[int, int]]]:
    """Return key, dtype and range of each part that an optimizer step changes."""
    return [
        (part.key, part.dtype, (part.range_start, part.range_end))
        for part in state_parts(header)
    ]


def masters(header: SnapshotHeader) -> list[Part]:
    """Return the parts that are master weights, in the order of the header."""
    return [part for part in header.parts if part.key.role == MASTER]
