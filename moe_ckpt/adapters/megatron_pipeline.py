"""What crosses pipeline stages, seen through Megatron's own seam: a `P2PCommunicator` handed to its schedules.

Owns: counting the activations sent downstream and the gradients sent upstream. The schedules call `_communicate` for
every transfer, whatever the schedule, so this is the one place to look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


@dataclass(frozen=True, kw_only=True, slots=True)
class SentBytes:
    """What a rank has sent to its neighbour stages since its communicator was made."""

    activation_bytes: int
    gradient_bytes: int


class ObservedP2PCommunicator(P2PCommunicator):
    """Megatron's communicator, counting what this rank sends."""

    def __init__(self, pp_group: torch.distributed.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self.sent = SentBytes(activation_bytes=0, gradient_bytes=0)

    def _communicate(
        self, *, tensor_send_next: torch.Tensor | None, tensor_send_prev: torch.Tensor | None, **transfer: Any
    ) -> Any:
        self.sent = SentBytes(
            activation_bytes=self.sent.activation_bytes + _size_bytes(tensor_send_next),
            gradient_bytes=self.sent.gradient_bytes + _size_bytes(tensor_send_prev),
        )
        return super()._communicate(tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **transfer)


def _size_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
