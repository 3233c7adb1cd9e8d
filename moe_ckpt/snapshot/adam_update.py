"""Copies by gradient: a peer that holds the state before a step takes the step itself.

Owns: the contents of an update. Must not: send, or take the step
(`snapshot.arriving_update` does). MoEtion, section 5.2 and Algorithm 3; FlowCheck,
section 5.

    owner   state t-1 -> Adam -> state t      header of t, gradients, Adam's numbers of the step, buffers
    peer    copy of t-1 -> the same step -> copy of t

If the owner has a snapshot of t (`ckpt=moetion`), the header has its checksum, and any
other result is refused. If only the peer computes t (`ckpt=flowcheck`, a checkpoint
server), the update `seals` it: the peer computes the checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.mirror.plan import (
    BucketPlace,
    Mirrored,
    mirrored_from_json,
    mirrored_to_json,
)
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

_UPDATE = "update-"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """A step of torch's Adam, or, if `decoupled`, of AdamW, after `steps` earlier ones.

    The gradient is first multiplied by `scale`: below 1 it clips a gradient that was
    handed over before clipping.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    steps: float
    scale: float = 1.0


Gradients = Mapping[PartKey, tuple[torch.Tensor, AdamStep]]
"""By master weight: the gradient (float32, of as many elements) and the numbers of
Adam's step.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The head of an update: the keys of the copies before and after the step, and the
    header of the latter.

    `steps` are those of the header's master weights, in its order; None for a weight
    that takes no step. The payload holds the gradients of the weights that take a step
    (float32, one after another), except those that are `mirrored`, then the bytes of
    the header's buffers. `seals`: the header has no checksum yet.
    """

    base: str
    target: str
    steps: tuple[AdamStep | None, ...]
    header: SnapshotHeader
    seals: bool = False
    mirrored: Mirrored | None = None

    @property
    def unit(self) -> str:
        """The name of the unit."""
        return self.header.unit.name if self.header.unit else ""

    @property
    def stepping(self) -> list[tuple[Part, AdamStep]]:
        """The master weights that take a step, each with its step."""
        with_steps = zip(masters(self.header), self.steps, strict=True)
        return [(part, step) for part, step in with_steps if step]

    @property
    def places(self) -> tuple[BucketPlace | None, ...]:
        """The places of the mirrored gradients of the weights that take a step; None
        for those in the payload.
        """
        return self.mirrored.places if self.mirrored else (None,) * len(self.stepping)

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of gradients and buffers."""
        stepping = zip(self.stepping, self.places, strict=True)
        gradients = sum(
            4 * part.numel for (part, _), place in stepping if place is None
        )
        return gradients + sum(part.nbytes for part in buffer_parts(self.header))


def is_update(key: str) -> bool:
    """Return whether a blob of this key is an update."""
    return key.startswith(_UPDATE)


def update_key(target: str) -> str:
    """Return the key of the update that makes the copy with key `target`."""
    return f"{_UPDATE}{target}"


def can_be_updated(header: SnapshotHeader) -> bool:
    """Return whether a step of torch's Adam determines all of a snapshot: whole FP32
    state and nothing else.
    """
    return not buffer_parts(header) and follows_from_gradients(header)


def follows_from_gradients(header: SnapshotHeader) -> bool:
    """Return whether all of a snapshot but its buffers is whole FP32 state, which a
    step of torch's Adam determines.
    """
    parts = state_parts(header)
    tensors = {(part.key.operator, part.key.tensor) for part in parts}
    whole = {
        PartKey(operator=op, tensor=name, role=role)
        for op, name in tensors
        for role in (MASTER, *MOMENTS)
    }
    # other formats are rounded in kernels of the owner's optimizer, for which torch has
    # no twin
    return {part.key for part in parts} == whole and all(
        part.dtype == torch.float32 for part in parts
    )


def buffer_parts(header: SnapshotHeader) -> list[Part]:
    """Return the parts that no step of an optimizer changes."""
    return [part for part in header.parts if part.key.role == BUFFER]


def update_to_bytes(update: Update) -> bytes:
    """Return what `update_from_bytes` reads."""
    steps = [step and astuple(step) for step in update.steps]
    head = {
        "base": update.base,
        "target": update.target,
        "steps": steps,
        "seals": update.seals,
    }
    if update.mirrored:
        head["mirrored"] = mirrored_to_json(update.mirrored)
    return (
        json.dumps(head, separators=(",", ":")).encode()
        + b"\n"
        + header_to_json(update.header)
    )


def update_from_bytes(data: bytes) -> Update:
    """Return the head that `update_to_bytes` wrote. Raises CheckpointLoadError if the
    bytes are anything else.
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
            mirrored=mirrored_from_json(fields.get("mirrored")),
        )
        for key in (update.base, update.target):
            if not is_key(key):  # a peer chooses these names of files
                raise ValueError(
                    f"got key {key!r}, wanted letters, digits, '.', '_' and '-'"
                )
        # here, where the caller expects an error of the bytes: the strict `zip`s of
        # these would raise ValueError later
        if len(update.places) != sum(step is not None for step in steps):
            raise ValueError(f"got {len(update.places)} places of gradients")
        return update
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointLoadError(
            f"an update's head of {len(data)} bytes: {error!r}"
        ) from error


def pack_gradients(
    header: SnapshotHeader, gradients: Gradients, acquire: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """Return a buffer with the gradients of a header's master weights, in its order,
    and their bytes.

    `acquire` returns a buffer of at least so many bytes; its errors are raised.
    """
    flat = [gradients[part.key][0].reshape(-1) for part in masters(header)]
    nbytes = 4 * sum(gradient.numel() for gradient in flat)
    packed = acquire(nbytes)
    # straight into shared memory: the result of a `cat` without `out` would have to be
    # copied there
    torch.cat(flat, out=packed[:nbytes].view(torch.float32))
    return packed, nbytes


def steps_of(
    header: SnapshotHeader, steps: Mapping[PartKey, AdamStep]
) -> tuple[AdamStep | None, ...]:
    """Return the steps of a header's master weights, in its order; None for a weight
    that takes none.
    """
    return tuple(steps.get(part.key) for part in masters(header))


def state_parts(header: SnapshotHeader) -> list[Part]:
    """Return the parts that a step of the optimizer changes."""
    return [part for part in header.parts if part.key.role != BUFFER]


def shapes_of(
    header: SnapshotHeader,
) -> list[tuple[PartKey, torch.dtype, tuple[int, int]]]:
    """Return the keys, types and ranges of the parts that a step changes."""
    return [
        (part.key, part.dtype, (part.range_start, part.range_end))
        for part in state_parts(header)
    ]


def masters(header: SnapshotHeader) -> list[Part]:
    """Return the parts that are master weights."""
    return [part for part in header.parts if part.key.role == MASTER]
