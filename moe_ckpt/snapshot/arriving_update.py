"""The step of a peer that holds the state before it: a pipeline of the arriving update
and the optimizer.

Owns: the order of copy, checks and steps, and the rule that no result of damaged bytes
is stored. Must not: receive. MoEtion, Algorithm 3; FlowCheck, section 6.1 and Figure 7.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from threading import Condition

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.mirror.plan import BucketPlace, MirroredSums
from moe_ckpt.snapshot.adam_update import (
    AdamStep,
    Update,
    buffer_parts,
    follows_from_gradients,
    masters,
    shapes_of,
    state_parts,
    update_from_bytes,
)
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.codec import (
    MASTER,
    MOMENTS,
    Snapshot,
    SnapshotHeader,
    checksum,
    header_from_json,
    header_to_json,
)

CapturedSums = Callable[[MirroredSums], list[bytearray]]
"""Returns the bytes of each bucket that a server has captured. Raises
CheckpointLoadError if it lacks any.
"""


def no_capture(wanted: MirroredSums) -> list[bytearray]:
    """Capture nothing: a server without a mirror port."""
    raise CheckpointLoadError(
        f"ckpt.capture: got tap, wanted mirror: {wanted.size} ranks send no gradients"
    )


class ArrivingUpdate:
    """Computes the copy that an update leads to, while the update's payload arrives: a
    pipeline with its receiver.

        receiver   head | gradient 1 | gradient 2 | gradient 3 | hash         arrived, arrived, ...
        updater         copy of t-1, step 1 ... step 2 ....... step 3 | seal  in `run`, another thread

    An update follows its training step: its head has the learning rate and the scale
    that clips all gradients by their common norm, and a step may be skipped, all of
    which is decided after the last gradient of an iteration is reduced. So no step can
    begin earlier, while ranks still reduce; it begins before the last byte is here. The
    result is stored by `keep` only, once the receiver has compared the hash of all
    bytes: steps from garbled ones have no effect.

    `payload` is memory of `folder`, which is freed at the end; mirrored gradients come
    from `captured`.
    """

    def __init__(
        self,
        folder: BlobFolder,
        key: str,
        head: bytes,
        payload: torch.Tensor | None,
        payload_bytes: int,
        captured: CapturedSums = no_capture,
    ) -> None:
        self._folder = folder
        self._key = key
        self._head = head
        self._payload = payload
        self._payload_bytes = payload_bytes
        self._captured = captured
        self._changed = Condition()
        self._arrived_bytes = 0
        self._is_abandoned = False
        self._waited_s = 0.0
        self._made: tuple[Update, Snapshot] | None = None
        self._running: Future[None] | None = None
        self.busy_s = 0.0

    def start(self, executor: Executor) -> None:
        """Begin the steps, in a thread of `executor`."""
        self._running = executor.submit(self.run)

    def arrived(self, num_bytes: int) -> None:
        """So many bytes of the payload are here, from its beginning."""
        with self._changed:
            self._arrived_bytes = num_bytes
            self._changed.notify_all()

    def run(self) -> None:
        """Take all steps, each once its gradient is here. Raises CheckpointLoadError."""
        began_s = time.monotonic()
        try:
            self._take_steps()
        finally:
            self.busy_s += time.monotonic() - began_s - self._waited_s

    def keep(self) -> None:
        """All bytes are here and intact: wait for the last step, and store the copy
        beside the one before the step.

        Raises CheckpointLoadError, naming the iterations, if the copy before the step
        is missing or the result differs from the owner's state; the folder is then
        unchanged.
        """
        assert self._running is not None
        self._running.result()
        assert self._made is not None
        began_s = time.monotonic()
        update, made = self._made
        header = _sealed(made, is_new=update.seals)
        # `_made` stays until this has succeeded: after a failure `abandon` has to free
        # its memory
        self._folder.deposit(
            update.target,
            header_to_json(header),
            made.payload,
            made.header.payload_bytes,
        )
        self._made = None
        assert self._payload is not None
        self._folder.free(self._payload)
        self.busy_s += time.monotonic() - began_s

    def abandon(self) -> None:
        """No more bytes come, or those that came are garbled: end the thread, and free
        the memory of the copy.
        """
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()
        if self._running and not self._running.cancel():
            # waits: the thread reads memory that the receiver frees
            self._running.exception()
        if self._made:
            self._folder.free(self._made[1].payload)
            self._made = None

    def _take_steps(self) -> None:
        update = update_from_bytes(self._head)
        base, wanted = _base_of(update, self._folder), update.header
        if len(update.steps) != len(masters(wanted)):
            raise CheckpointLoadError(
                f"{self._key}: got {len(update.steps)} steps, wanted"
                f" {len(masters(wanted))}"
            )
        # before the first step: `_await` would wait without end for bytes that no
        # sender has
        if self._payload is None or self._payload_bytes != update.payload_bytes:
            got = f"got {self._payload_bytes} bytes of gradients"
            raise CheckpointLoadError(
                f"{self._key}: {got}, wanted {update.payload_bytes}"
            )
        made = Snapshot(
            header=wanted, payload=self._folder.allocate(wanted.payload_bytes)
        )
        self._made = update, made
        before = {part.key: part for part in base.header.parts}
        for part in state_parts(wanted):
            # a copy, and no step in place: if the arriving bytes are garbled, the base
            # is still the newest good state
            made.part(part).copy_(base.part(before[part.key]))
        # after the copy: this finds earlier damage, and later damage has no effect
        if update.seals:
            _sealed(base, is_new=False)
        sums = _Sums(update.mirrored.groups if update.mirrored else (), self._captured)
        parts = {part.key: made.part(part).view(-1) for part in wanted.parts}
        offset = 0
        for (part, step), place in zip(update.stepping, update.places, strict=True):
            if place is None:
                gradient = self._await(offset, 4 * part.numel).view(torch.float32)
                offset += 4 * part.numel
            else:
                gradient = sums.gradient(place, part.numel)
            _take_step(
                [parts[replace(part.key, role=role)] for role in (MASTER, *MOMENTS)],
                step,
                gradient,
            )
        for part in buffer_parts(wanted):
            parts[part.key].view(torch.uint8).copy_(self._await(offset, part.nbytes))
            offset += part.nbytes

    def _await(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of the payload once they are here."""
        assert self._payload is not None
        began_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_abandoned or self._arrived_bytes >= start + num_bytes
            )
            if self._is_abandoned:
                raise CheckpointLoadError(
                    f"{self._key}: got {self._arrived_bytes} bytes, wanted"
                    f" {start + num_bytes}"
                )
        self._waited_s += time.monotonic() - began_s
        return self._payload[start : start + num_bytes]


class _Sums:
    """The captured sums of an update, each group's from the first gradient on that is
    taken from it.
    """

    def __init__(self, groups: Sequence[MirroredSums], captured: CapturedSums) -> None:
        self._groups = groups
        self._captured = captured
        self._buckets: dict[int, list[torch.Tensor]] = {}

    def gradient(self, place: BucketPlace, numel: int) -> torch.Tensor:
        """Return a captured gradient as the optimizer has it, in float32. Raises
        CheckpointLoadError.
        """
        if place.group not in self._buckets:
            group = self._groups[place.group]
            dtype = getattr(torch, group.dtype)
            # only now: captured frames may still arrive while tapped gradients are
            # stepped
            self._buckets[place.group] = [
                torch.frombuffer(each, dtype=dtype) for each in self._captured(group)
            ]
        bucket = self._buckets[place.group][place.bucket]
        if place.start + numel > bucket.numel():
            raise CheckpointLoadError(
                f"got {place} for {numel} elements, wanted a place within"
                f" {bucket.numel()}"
            )
        return bucket[place.start : place.start + numel].float()


def _sealed(made: Snapshot, *, is_new: bool) -> SnapshotHeader:
    """Return the header with the checksum of the payload: a new one if `is_new`, else
    its own.

    Raises CheckpointLoadError if its own checksum belongs to another payload.
    """
    wanted = made.header
    found = checksum(made.payload, wanted.payload_bytes)
    if is_new:
        return replace(wanted, checksum=found)
    if found != wanted.checksum:
        got = f"got a state with checksum {found:016x}, wanted {wanted.checksum:016x}"
        raise CheckpointLoadError(
            f"{wanted}, made of gradients or to make the next one of: {got}"
        )
    return wanted


def _base_of(update: Update, folder: BlobFolder) -> Snapshot:
    """Return the state before the step."""
    wanted = update.header
    try:
        blob = folder.get(update.base)
        header = header_from_json(blob.header)
    except CheckpointLoadError as error:
        reason = (
            f"got no state to apply it to ({error}), wanted that of iteration"
            f" {wanted.iteration - 1}"
        )
        raise CheckpointLoadError(f"gradients for {wanted}: {reason}") from error
    is_of_epoch = header.version.epoch == wanted.version.epoch
    follows = is_of_epoch and header.iteration == wanted.iteration - 1
    # the update carries the buffers: their type may have changed
    same = shapes_of(header) == shapes_of(wanted)
    if (
        not follows
        or blob.payload is None
        or not same
        or not follows_from_gradients(wanted)
    ):
        raise CheckpointLoadError(
            f"gradients for {wanted}: got {header} to apply them to, wanted the"
            " iteration before"
        )
    return Snapshot(header=header, payload=blob.payload)


def _take_step(
    state: list[torch.Tensor], step: AdamStep, gradient: torch.Tensor
) -> None:
    master, exp_avg, exp_avg_sq = state
    weights = torch.nn.Parameter(master)
    # torch's own class, not a formula: the bits equal the owner's only if operations
    # and their order do
    adam = torch.optim.AdamW if step.decoupled else torch.optim.Adam
    optimizer = adam(
        [weights],
        lr=step.learning_rate,
        betas=(step.beta1, step.beta2),
        eps=step.eps,
        weight_decay=step.weight_decay,
    )
    # the count before this step, which Adam's bias corrections depend on
    optimizer.state[weights] = {
        "step": torch.tensor(step.steps),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    # a product with 1.0 has the same bits, and would cost a copy of the gradient
    weights.grad = gradient if step.scale == 1.0 else gradient * step.scale
    optimizer.step()
