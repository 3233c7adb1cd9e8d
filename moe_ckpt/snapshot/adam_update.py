"""Copies by gradient: a peer that holds the state before a step takes the step itself.

Owns: the contents of an update, and the step on the peer's side. Must not: send. MoEtion, section 5.2 and Algorithm 3;
FlowCheck, section 5.

    owner   state t-1 -> Adam -> state t      header of t, gradients, Adam's numbers of the step, buffers
    peer    copy of t-1 -> the same step -> copy of t

If the owner has a snapshot of t (`ckpt=moetion`), the header has its checksum, and any other result is refused. If only
the peer computes t (`ckpt=flowcheck`, a checkpoint server), the update `seals` it: the peer computes the checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.mirror.plan import (
    BucketPlace,
    Mirrored,
    MirroredSums,
    mirrored_from_json,
    mirrored_to_json,
)
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.codec import (
    BUFFER,
    MASTER,
    MOMENTS,
    Part,
    PartKey,
    Snapshot,
    SnapshotHeader,
    checksum,
    header_from_json,
    header_to_json,
)

_UPDATE = "update-"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """A step of torch's Adam, or, if `decoupled`, of AdamW, after `steps` earlier ones.

    The gradient is first multiplied by `scale`: below 1 it clips a gradient that was handed over before clipping.
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
"""By master weight: the gradient (float32, of as many elements) and the numbers of Adam's step."""

CapturedSums = Callable[[MirroredSums], list[bytearray]]
"""Returns the bytes of each bucket that a server has captured. Raises CheckpointLoadError if it lacks any."""


def no_capture(wanted: MirroredSums) -> list[bytearray]:
    """Capture nothing: a server without a mirror port."""
    raise CheckpointLoadError(f"ckpt.capture: got tap, wanted mirror: {wanted.size} ranks send no gradients")


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The head of an update: the keys of the copies before and after the step, and the header of the latter.

    `steps` are those of the header's master weights, in its order; None for a weight that takes no step. The payload
    holds the gradients of the weights that take a step (float32, one after another), except those that are `mirrored`,
    then the bytes of the header's buffers. `seals`: the header has no checksum yet.
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
        masters = zip(_masters(self.header), self.steps, strict=True)
        return [(part, step) for part, step in masters if step]

    @property
    def places(self) -> tuple[BucketPlace | None, ...]:
        """The places of the mirrored gradients of the weights that take a step; None for those in the payload."""
        return self.mirrored.places if self.mirrored else (None,) * len(self.stepping)

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of gradients and buffers."""
        stepping = zip(self.stepping, self.places, strict=True)
        gradients = sum(4 * part.numel for (part, _), place in stepping if place is None)
        return gradients + sum(part.nbytes for part in buffer_parts(self.header))


def is_update(key: str) -> bool:
    """Return whether a blob of this key is an update."""
    return key.startswith(_UPDATE)


def update_key(target: str) -> str:
    """Return the key of the update that makes the copy with key `target`."""
    return f"{_UPDATE}{target}"


def can_be_updated(header: SnapshotHeader) -> bool:
    """Return whether a step of torch's Adam determines all of a snapshot: whole FP32 state and nothing else."""
    return not buffer_parts(header) and follows_from_gradients(header)


def follows_from_gradients(header: SnapshotHeader) -> bool:
    """Return whether all of a snapshot but its buffers is whole FP32 state, which a step of torch's Adam determines."""
    parts = _state_parts(header)
    tensors = {(part.key.operator, part.key.tensor) for part in parts}
    keys = {part.key for part in parts}
    whole = {PartKey(operator=op, tensor=name, role=role) for op, name in tensors for role in (MASTER, *MOMENTS)}
    return keys == whole and all(part.dtype == torch.float32 for part in parts)


def buffer_parts(header: SnapshotHeader) -> list[Part]:
    """Return the parts that no step of an optimizer changes."""
    return [part for part in header.parts if part.key.role == BUFFER]


def update_to_bytes(update: Update) -> bytes:
    """Return what `update_from_bytes` reads."""
    steps = [step and astuple(step) for step in update.steps]
    head = {"base": update.base, "target": update.target, "steps": steps, "seals": update.seals}
    if update.mirrored:
        head["mirrored"] = mirrored_to_json(update.mirrored)
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + header_to_json(update.header)


def update_from_bytes(data: bytes) -> Update:
    """Return the head that `update_to_bytes` wrote. Raises CheckpointLoadError if the bytes are anything else."""
    head, _, header = data.partition(b"\n")
    try:
        fields = json.loads(head)
        steps = tuple(step and AdamStep(**dict(zip(AdamStep.__slots__, step, strict=True))) for step in fields["steps"])
        keys = {"base": fields["base"], "target": fields["target"]}
        update = Update(
            **keys,
            steps=steps,
            header=header_from_json(header),
            seals=fields["seals"] is True,
            mirrored=mirrored_from_json(fields.get("mirrored")),
        )
        if len(update.places) != sum(step is not None for step in steps):
            raise ValueError(f"got {len(update.places)} places of gradients")
        return update
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointLoadError(f"an update's head of {len(data)} bytes: {error!r}") from error


def pack_gradients(
    header: SnapshotHeader, gradients: Gradients, acquire: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """Return a buffer with the gradients of a header's master weights, in its order, and their bytes.

    `acquire` returns a buffer of at least so many bytes; its errors are raised.
    """
    flat = [gradients[part.key][0].reshape(-1) for part in _masters(header)]
    nbytes = 4 * sum(gradient.numel() for gradient in flat)
    packed = acquire(nbytes)
    torch.cat(flat, out=packed[:nbytes].view(torch.float32))
    return packed, nbytes


def steps_of(header: SnapshotHeader, steps: Mapping[PartKey, AdamStep]) -> tuple[AdamStep | None, ...]:
    """Return the steps of a header's master weights, in its order; None for a weight that takes none."""
    return tuple(steps.get(part.key) for part in _masters(header))


def apply_update(
    folder: BlobFolder,
    key: str,
    head: bytes,
    gradients: torch.Tensor | None,
    gradient_bytes: int,
    captured: CapturedSums = no_capture,
) -> None:
    """Compute the copy that an update leads to, and store it in `folder` beside the copy before the step.

    `gradients` is memory of the folder, which is freed; mirrored ones come from `captured`. Raises CheckpointLoadError,
    naming the iterations, if the copy before the step is missing or the result differs from the owner's state; the
    folder is then unchanged.
    """
    update = update_from_bytes(head)
    base, wanted = _base_of(update, folder), update.header
    if len(update.steps) != len(_masters(wanted)):
        raise CheckpointLoadError(f"{key}: got {len(update.steps)} steps, wanted {len(_masters(wanted))}")
    if gradients is None or gradient_bytes != update.payload_bytes:
        raise CheckpointLoadError(f"{key}: got {gradient_bytes} bytes of gradients, wanted {update.payload_bytes}")
    sums = [
        [torch.frombuffer(bucket, dtype=getattr(torch, group.dtype)) for bucket in captured(group)]
        for group in (update.mirrored.groups if update.mirrored else ())
    ]
    nbytes = wanted.payload_bytes
    payload = folder.allocate(nbytes)
    try:
        made = Snapshot(header=wanted, payload=payload)
        before = {part.key: part for part in base.header.parts}
        for part in _state_parts(made.header):
            made.part(part).copy_(base.part(before[part.key]))
        if update.seals:  # after the copy: this finds earlier damage, and later damage has no effect
            _sealed(base, is_new=False)
        _take_steps(made, update, gradients, sums)
        header = _sealed(made, is_new=update.seals)
        folder.deposit(update.target, header_to_json(header), payload, nbytes)
    except BaseException:
        folder.free(payload)
        raise
    folder.free(gradients)


def _sealed(made: Snapshot, *, is_new: bool) -> SnapshotHeader:
    """Return the header with the checksum of the payload: a new one if `is_new`, else its own.

    Raises CheckpointLoadError if its own checksum belongs to another payload.
    """
    wanted = made.header
    found = checksum(made.payload, wanted.payload_bytes)
    if is_new:
        return replace(wanted, checksum=found)
    if found != wanted.checksum:
        got = f"got a state with checksum {found:016x}, wanted {wanted.checksum:016x}"
        raise CheckpointLoadError(f"{wanted}, made of gradients or to make the next one of: {got}")
    return wanted


def _base_of(update: Update, folder: BlobFolder) -> Snapshot:
    """Return the state before the step."""
    wanted = update.header
    try:
        blob = folder.get(update.base)
        header = header_from_json(blob.header)
    except CheckpointLoadError as error:
        reason = f"got no state to apply it to ({error}), wanted that of iteration {wanted.iteration - 1}"
        raise CheckpointLoadError(f"gradients for {wanted}: {reason}") from error
    is_of_epoch = header.version.lineage == wanted.version.lineage
    follows = is_of_epoch and header.iteration == wanted.iteration - 1
    same = _shapes(header) == _shapes(wanted)  # the update carries the buffers: their type may have changed
    if not follows or blob.payload is None or not same or not follows_from_gradients(wanted):
        raise CheckpointLoadError(f"gradients for {wanted}: got {header} to apply them to, wanted the iteration before")
    return Snapshot(header=header, payload=blob.payload)


def _take_steps(made: Snapshot, update: Update, payload: torch.Tensor, sums: list[list[torch.Tensor]]) -> None:
    parts = {part.key: made.part(part).view(-1) for part in made.header.parts}
    offset = 0
    for (part, step), place in zip(update.stepping, update.places, strict=True):
        if place is None:
            gradient = payload[offset : offset + 4 * part.numel].view(torch.float32)
            offset += 4 * part.numel
        else:
            gradient = _captured_gradient(place, sums, part.numel)
        _take_step([parts[replace(part.key, role=role)] for role in (MASTER, *MOMENTS)], step, gradient)
    for part in buffer_parts(made.header):
        parts[part.key].view(torch.uint8).copy_(payload[offset : offset + part.nbytes])
        offset += part.nbytes


def _captured_gradient(place: BucketPlace, sums: list[list[torch.Tensor]], numel: int) -> torch.Tensor:
    """Return a captured gradient as the optimizer has it, in float32. Raises CheckpointLoadError."""
    bucket = sums[place.group][place.bucket]
    if place.start + numel > bucket.numel():
        raise CheckpointLoadError(f"got {place} for {numel} elements, wanted a place within {bucket.numel()}")
    return bucket[place.start : place.start + numel].float()


def _take_step(state: list[torch.Tensor], step: AdamStep, gradient: torch.Tensor) -> None:
    master, exp_avg, exp_avg_sq = state
    weights = torch.nn.Parameter(master)
    adam = torch.optim.AdamW if step.decoupled else torch.optim.Adam
    optimizer = adam(
        [weights],
        lr=step.learning_rate,
        betas=(step.beta1, step.beta2),
        eps=step.eps,
        weight_decay=step.weight_decay,
    )
    optimizer.state[weights] = {"step": torch.tensor(step.steps), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    weights.grad = gradient if step.scale == 1.0 else gradient * step.scale
    optimizer.step()


def _state_parts(header: SnapshotHeader) -> list[Part]:
    return [part for part in header.parts if part.key.role != BUFFER]


def _shapes(header: SnapshotHeader) -> list[tuple[PartKey, torch.dtype, tuple[int, int]]]:
    return [(part.key, part.dtype, (part.range_start, part.range_end)) for part in _state_parts(header)]


def _masters(header: SnapshotHeader) -> list[Part]:
    return [part for part in header.parts if part.key.role == MASTER]
