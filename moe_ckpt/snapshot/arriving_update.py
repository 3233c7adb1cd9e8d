"""Takes the step of an update on a peer's copy while the payload still arrives.

Owns: the order of copy, checks and steps, and the rule that no result of damaged bytes
is stored. Must not: receive bytes. MoEtion, Algorithm 3; FlowCheck, section 6.1 and
Figure 7.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from threading import Condition

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot.adam_update import (
    AdamStep,
    ObservedGradients,
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

ReadGradient = Callable[[int, int], torch.Tensor]
"""Returns an observed gradient, flat and in float32, as the optimizer uses the
gradient. The arguments are the gradient's number among the observed gradients of the
update, and the number of elements. Waits for the gradient. Raises CheckpointLoadError
if the gradient cannot be read.
"""

OpenGradients = Callable[[ObservedGradients], ReadGradient]
"""Opens the observed gradients of an update. Raises CheckpointLoadError if the
gradients cannot be found.
"""


def observes_nothing(wanted: ObservedGradients) -> ReadGradient:
    """Refuse every request, in a process that observes no gradients.

    Raises:
        CheckpointLoadError: Always.
    """
    raise CheckpointLoadError(
        f"got an update without {sum(wanted.weights)} of its gradients, wanted all of"
        " them: this process observes none"
    )


class ArrivingUpdate:
    """Computes the copy that an update leads to, while the payload arrives.

    The receiver and the updater form a pipeline. The receiver calls `arrived`. The
    updater executes `run` in another thread.

        receiver   head | gradient 1 | gradient 2 | gradient 3 | hash
        updater         copy of t-1, step 1 ... step 2 ....... step 3 | seal

    No step can begin while ranks still reduce gradients: the head holds the learning
    rate and the scale that clips all gradients by their common norm, and a step may be
    skipped. All of these are decided after the last gradient of an iteration is
    reduced. The first step begins before the last byte of the payload has arrived.

    Only `keep` stores the result, after the receiver has compared the hash of all
    bytes. Steps from garbled bytes therefore have no effect.

    Attributes:
        busy_s: Seconds spent on the steps and on storing the result, without the waits
            for bytes.
    """

    def __init__(
        self,
        folder: BlobFolder,
        key: str,
        head: bytes,
        payload: torch.Tensor | None,
        payload_bytes: int,
        open_gradients: OpenGradients = observes_nothing,
    ) -> None:
        """Prepare the steps, which `start` begins.

        Args:
            folder: Copies of the owner's blobs. The folder holds the copy before the
                step and receives the result.
            key: Key of the update.
            head: Bytes of the update's head.
            payload: Memory of `folder` in which the payload arrives; None if the update
                has no payload. `keep` frees the memory. If `abandon` is called, the
                receiver frees the memory.
            payload_bytes: Bytes of the payload.
            open_gradients: Opens the gradients that this process observes.
        """
        self._folder = folder
        self._key = key
        self._head = head
        self._payload = payload
        self._payload_bytes = payload_bytes
        self._open_gradients = open_gradients
        self._changed = Condition()
        self._arrived_bytes = 0
        self._is_abandoned = False
        self._waited_s = 0.0
        self._made: tuple[Update, Snapshot] | None = None
        self._running: Future[None] | None = None
        self.busy_s = 0.0

    def start(self, executor: Executor) -> None:
        """Begin the steps in a thread of `executor`."""
        self._running = executor.submit(self.run)

    def arrived(self, num_bytes: int) -> None:
        """Report that the first `num_bytes` bytes of the payload have arrived."""
        with self._changed:
            self._arrived_bytes = num_bytes
            self._changed.notify_all()

    def run(self) -> None:
        """Take all steps, each as soon as its gradient has arrived.

        Raises:
            CheckpointLoadError: The head, the payload's size or the copy before the
                step is wrong, an observed gradient cannot be read, or `abandon` was
                called.
            CheckpointSaveError: The folder has no room for the result.
        """
        began_s = time.monotonic()
        try:
            self._take_steps()
        finally:
            self.busy_s += time.monotonic() - began_s - self._waited_s

    def keep(self) -> None:
        """Wait for the last step, and store the result beside the copy before the step.

        The receiver calls this method once all bytes have arrived intact. After an
        error the blobs of the folder are unchanged.

        Raises:
            CheckpointLoadError: The copy before the step is missing, or the result
                differs from the owner's state. The error names the iterations.
            CheckpointSaveError: The folder has no room for the result.
        """
        assert self._running is not None
        self._running.result()
        assert self._made is not None
        began_s = time.monotonic()
        update, made = self._made
        header = _sealed(made, is_new=update.seals)
        # `_made` stays set until the deposit has succeeded: after a failure `abandon`
        # has to free the memory
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
        """End the thread, and free the memory of the result.

        The receiver calls this method if no more bytes come, if the bytes are garbled,
        or if `keep` has failed.
        """
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()
        if self._running and not self._running.cancel():
            # waits for the thread, which reads memory that the receiver frees
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
        # checked before the first step: `_await` would wait forever for bytes that no
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
            # copied, not stepped in place: if the arriving bytes are garbled, the base
            # is still the newest good state
            made.part(part).copy_(base.part(before[part.key]))
        # verified after the copy: the check finds damage from before the copy, and
        # later damage of the base has no effect
        if update.seals:
            _sealed(base, is_new=False)
        read = self._open_gradients(update.observed) if update.observed else None
        parts = {part.key: made.part(part).view(-1) for part in wanted.parts}
        offset, num_observed = 0, 0
        for (part, step), is_observed in zip(
            update.stepping, update.are_observed, strict=True
        ):
            if read and is_observed:
                gradient = read(num_observed, part.numel)
                num_observed += 1
            else:
                gradient = self._await(offset, 4 * part.numel).view(torch.float32)
                offset += 4 * part.numel
            _take_step(
                [parts[replace(part.key, role=role)] for role in (MASTER, *MOMENTS)],
                step,
                gradient,
            )
        for part in buffer_parts(wanted):
            parts[part.key].view(torch.uint8).copy_(self._await(offset, part.nbytes))
            offset += part.nbytes

    def _await(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of the payload, once these bytes have arrived.

        Raises:
            CheckpointLoadError: `abandon` was called.
        """
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


def _sealed(made: Snapshot, *, is_new: bool) -> SnapshotHeader:
    """Return the header with the checksum of the payload.

    Args:
        made: The snapshot.
        is_new: Whether the header receives a new checksum. Otherwise the header's own
            checksum is verified.

    Raises:
        CheckpointLoadError: The header's own checksum belongs to another payload.
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
    """Return the copy before the step.

    Raises:
        CheckpointLoadError: The copy is missing, or does not fit the update.
    """
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
    # buffers are not compared: the update carries the buffers, and a buffer's dtype may
    # have changed
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
    # torch's own class instead of a formula: the bits equal the owner's only with the
    # same operations in the same order
    adam = torch.optim.AdamW if step.decoupled else torch.optim.Adam
    optimizer = adam(
        [weights],
        lr=step.learning_rate,
        betas=(step.beta1, step.beta2),
        eps=step.eps,
        weight_decay=step.weight_decay,
    )
    # the count before this step: Adam's bias corrections depend on the count
    optimizer.state[weights] = {
        "step": torch.tensor(step.steps),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    # a product with 1.0 has the same bits, but would cost a copy of the gradient
    weights.grad = gradient if step.scale == 1.0 else gradient * step.scale
    optimizer.step()
