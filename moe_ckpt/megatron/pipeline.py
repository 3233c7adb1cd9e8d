"""Transfers between pipeline stages: a `P2PCommunicator` for Megatron's schedules.

Owns: counting and logging sent tensors, measuring waits for neighbours (*bubbles*),
and, in a replay, giving the schedule the logged tensors of neighbours in place of
received tensors. Every schedule calls `_communicate` for every transfer, so one
override suffices. Must not: keep or fetch logs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from moe_ckpt.snapshot.boundary_log import BoundaryLog, Direction, LoggedEnds
from moe_ckpt.snapshot.bubbles import PipelineBubbles


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Transfers of this rank since the communicator was made."""

    activation_bytes: int
    """Bytes of activations that this rank sent to the next stage."""

    gradient_bytes: int
    """Bytes of gradients that this rank sent to the previous stage."""

    logging_s: float
    """Seconds that the training thread spent on logging sent tensors."""


class StageCommunicator(P2PCommunicator):
    """Megatron's communicator, which logs sent tensors and can replay received tensors.

    Args:
        pp_group: The process group of the pipeline.
        config: Megatron's TransformerConfig. The constructor sets `batch_p2p_sync` to
            false.

    Example:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        communicator = StageCommunicator(groups.pp, config)
        get_forward_backward_func()(
            ..., p2p_communicator=communicator, pg_collection=groups
        )
    """

    def __init__(self, pp_group: torch.distributed.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        # Otherwise each transfer waits for all streams of the device, also for the
        # copies of a whole snapshot. Megatron waits because of a race in old releases
        # of torch
        config.batch_p2p_sync = False
        self._activation_bytes = 0
        self._gradient_bytes = 0
        self.log: BoundaryLog | None = None
        self.bubbles: PipelineBubbles | None = None
        # the second dimension of each tensor, if sequence lengths vary
        self.rows: int | None = None
        # logged tensors that a replay takes in place of received tensors
        self._from_previous: deque[torch.Tensor] | None = None
        self._from_next: deque[torch.Tensor] | None = None

    @property
    def observed(self) -> Observed:
        """The transfers so far."""
        return Observed(
            activation_bytes=self._activation_bytes,
            gradient_bytes=self._gradient_bytes,
            logging_s=self.log.spent_s if self.log else 0.0,
        )

    def tensor_bytes(self, num_tokens: int) -> int:
        """Return the bytes that cross a stage boundary for one micro-batch.

        Args:
            num_tokens: Tokens of the micro-batch.
        """
        config: Any = self.config
        # a sequence-parallel rank sends its own part of each sequence
        num_shards = (
            config.tensor_model_parallel_size if config.sequence_parallel else 1
        )
        return (
            num_tokens
            // num_shards
            * config.hidden_size
            * config.pipeline_dtype.itemsize
        )

    @contextlib.contextmanager
    def replaying(self, ends: LoggedEnds) -> Iterator[None]:
        """Take logged tensors in place of transfers, within the context.

        Transfers at a logged end take the logged tensors in order, and send nothing.
        Other transfers are not changed.

        Args:
            ends: The logs of the neighbours.
        """
        before, after = (
            None if end is None else deque(end)
            for end in (ends.from_previous, ends.from_next)
        )
        self._from_previous, self._from_next = before, after
        try:
            yield
            left = [len(queue) for queue in (before, after) if queue]
            assert not left, (
                f"{left} logged tensors were not asked for: another schedule than the"
                " one that was logged?"
            )
        finally:
            self._from_previous = self._from_next = None

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        **options: Any,
    ) -> Any:
        # replays are logged as well, because a later fault needs the log again
        self._observe(tensor_send_next, tensor_send_prev)
        before, after = self._from_previous, self._from_next
        live = {
            "tensor_send_next": tensor_send_next if after is None else None,
            "tensor_send_prev": tensor_send_prev if before is None else None,
            "recv_prev": recv_prev and before is None,
            "recv_next": recv_next and after is None,
        }
        received: Any = (None, None, None)
        if any(value is not None and value is not False for value in live.values()):
            waits = live["recv_prev"] or live["recv_next"]
            with (
                self.bubbles.open()
                if self.bubbles and waits
                else contextlib.nullcontext()
            ):
                received = super()._communicate(
                    **live, tensor_shape=tensor_shape, **options
                )
        from_previous, from_next, requests = received
        if recv_prev and before is not None:
            from_previous = self._logged(before, tensor_shape)
        if recv_next and after is not None:
            from_next = self._logged(after, tensor_shape)
        return from_previous, from_next, requests

    def _observe(
        self, activation: torch.Tensor | None, gradient: torch.Tensor | None
    ) -> None:
        self._activation_bytes += 0 if activation is None else activation.nbytes
        self._gradient_bytes += 0 if gradient is None else gradient.nbytes
        for direction, tensor in (
            (Direction.ACTIVATION, activation),
            (Direction.GRADIENT, gradient),
        ):
            if self.log is not None and tensor is not None:
                self.log.record(direction, tensor)

    def _logged(self, queue: deque[torch.Tensor], shape: Any) -> torch.Tensor:
        """Return the next logged tensor in the form of a received tensor.

        The tensor is on the device, and is a leaf that accumulates a gradient.
        """
        stored = queue.popleft()
        # Megatron gives no shape here, because stages exchange the shape before each
        # tensor
        if self.config.variable_seq_lengths:
            assert self.rows is not None, "require_replayable refuses this"
            hidden_size = cast("Any", self.config).hidden_size
            row_bytes = hidden_size * self.config.pipeline_dtype.itemsize
            shape = (stored.numel() // (self.rows * row_bytes), self.rows, hidden_size)
        tensor = torch.empty(
            tuple(shape),
            dtype=self.config.pipeline_dtype,
            device=torch.cuda.current_device(),
        )
        tensor.view(-1).view(torch.uint8).copy_(stored)
        # as in Megatron's receive buffers: the previous stage gets the gradient
        return tensor.requires_grad_()
