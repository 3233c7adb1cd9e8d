"""Copies by gradient: a peer that holds a unit as it was makes of its gradients what the unit has become.

Owns: what an update consists of, and taking the step on the peer's side. Must not: send, or believe in the result: it
is kept only if it is, bit for bit, what the owner has. MoEtion, section 5.2 and Algorithm 3.

    owner   state t-1 -> Adam -> state t      header of t, gradients, Adam's numbers of the step
    peer    copy of t-1 -> the same step -> checksum as in the header of t -> copy of t
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.store.blobs import BlobFolder
from moe_ckpt.store.codec import (
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
    """A step of torch's Adam, or, `decoupled`, of AdamW, after `steps` others."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    steps: float


Gradients = Mapping[PartKey, tuple[torch.Tensor, AdamStep]]
"""By the master weights that took the step: the gradient, float32, of as many elements, and the numbers of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The head of an update: the keys of the copy that it is for and of the one that it makes, and the latter's header.

    `steps` are those of the header's master weights, in its order; the payload has their gradients one after another.
    """

    base: str
    target: str
    steps: tuple[AdamStep, ...]
    header: SnapshotHeader

    @property
    def unit(self) -> str:
        """The name of the unit."""
        return self.header.unit.name if self.header.unit else ""


def is_update(key: str) -> bool:
    """Return whether a blob of this key is an update."""
    return key.startswith(_UPDATE)


def update_key(target: str) -> str:
    """Return the key of the update that makes the copy with key `target`."""
    return f"{_UPDATE}{target}"


def can_be_updated(header: SnapshotHeader) -> bool:
    """Return whether a step of torch's Adam changes all of a snapshot: it holds whole FP32 state and nothing else."""
    tensors = {(part.key.operator, part.key.tensor) for part in header.parts}
    keys = {part.key for part in header.parts}
    whole = {PartKey(operator=op, tensor=name, role=role) for op, name in tensors for role in (MASTER, *MOMENTS)}
    return keys == whole and all(part.dtype == torch.float32 for part in header.parts)


def update_to_bytes(update: Update) -> bytes:
    """Return what `update_from_bytes` reads."""
    head = {"base": update.base, "target": update.target, "steps": [astuple(step) for step in update.steps]}
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + header_to_json(update.header)


def update_from_bytes(data: bytes) -> Update:
    """Return the head that `update_to_bytes` wrote. Raises CheckpointLoadError if the bytes are anything else."""
    head, _, header = data.partition(b"\n")
    try:
        fields = json.loads(head)
        steps = tuple(AdamStep(**dict(zip(AdamStep.__slots__, step, strict=True))) for step in fields["steps"])
        return Update(base=fields["base"], target=fields["target"], steps=steps, header=header_from_json(header))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointLoadError(f"an update's head of {len(data)} bytes: {error!r}") from error


def pack_gradients(
    header: SnapshotHeader, gradients: Gradients, acquire: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """Return a buffer with the gradients of a header's master weights, in its order, and their bytes.

    Raises what `acquire` raises, which gives a buffer of at least so many bytes.
    """
    flat = [gradients[part.key][0].reshape(-1) for part in _masters(header)]
    nbytes = 4 * sum(gradient.numel() for gradient in flat)
    packed = acquire(nbytes)
    torch.cat(flat, out=packed[:nbytes].view(torch.float32))
    return packed, nbytes


def steps_of(header: SnapshotHeader, gradients: Gradients) -> tuple[AdamStep, ...]:
    """Return the steps of a header's master weights, in its order."""
    return tuple(gradients[part.key][1] for part in _masters(header))


def apply_update(
    folder: BlobFolder, key: str, head: bytes, gradients: torch.Tensor | None, gradient_bytes: int
) -> None:
    """Let the copy that an update makes be in `folder`, beside the one that it is for.

    `gradients` is memory of the folder, which is freed. Raises CheckpointLoadError, naming the iterations, where the
    copy before the step is not there, and where the result is not what the owner has; then nothing has changed.
    """
    update = update_from_bytes(head)
    base = _base_of(update, folder)
    wanted_bytes = 4 * sum(part.numel for part in _masters(update.header))
    if gradients is None or gradient_bytes != wanted_bytes or len(update.steps) != len(_masters(update.header)):
        raise CheckpointLoadError(f"{key}: got {gradient_bytes} bytes of gradients, wanted {wanted_bytes}")
    nbytes = update.header.payload_bytes
    payload = folder.allocate(nbytes)
    try:
        payload[:nbytes].copy_(base.payload[:nbytes])
        _take_steps(Snapshot(header=update.header, payload=payload), update.steps, gradients)
        found = checksum(payload, nbytes)
        if found != update.header.checksum:
            got = f"got a state with checksum {found:016x}, wanted {update.header.checksum:016x}"
            raise CheckpointLoadError(f"{update.header}, made of its gradients: {got}")
        folder.deposit(update.target, header_to_json(update.header), payload, nbytes)
    except BaseException:
        folder.free(payload)
        raise
    folder.free(gradients)


def _base_of(update: Update, folder: BlobFolder) -> Snapshot:
    """Return the state before the step."""
    wanted = update.header
    try:
        blob = folder.get(update.base)
        header = header_from_json(blob.header)
    except CheckpointLoadError as error:
        reason = f"got no state to apply it to ({error}), wanted that of iteration {wanted.iteration - 1}"
        raise CheckpointLoadError(f"gradients for {wanted}: {reason}") from error
    version = wanted.version
    follows = header.version.lineage == version.lineage and header.iteration == version.iteration - 1
    if not follows or blob.payload is None or header.parts != wanted.parts or not can_be_updated(wanted):
        raise CheckpointLoadError(f"gradients for {wanted}: got {header} to apply them to, wanted the iteration before")
    return Snapshot(header=header, payload=blob.payload)


def _take_steps(snapshot: Snapshot, steps: tuple[AdamStep, ...], gradients: torch.Tensor) -> None:
    parts = {part.key: snapshot.part(part).view(-1) for part in snapshot.header.parts}
    masters = _masters(snapshot.header)
    flat = gradients[: 4 * sum(part.numel for part in masters)].view(torch.float32)
    each = flat.split([part.numel for part in masters])
    for part, step, gradient in zip(masters, steps, each, strict=True):
        _take_step([parts[key] for key in _with_moments(part.key)], step, gradient)


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
    weights.grad = gradient
    optimizer.step()


def _masters(header: SnapshotHeader) -> list[Part]:
    return [part for part in header.parts if part.key.role == MASTER]


def _with_moments(master: PartKey) -> Iterator[PartKey]:
    yield from (PartKey(operator=master.operator, tensor=master.tensor, role=role) for role in (MASTER, *MOMENTS))
