"""The network of thread ranks: frames of gloo's ring all-reduces, for mirror ports.

Frames are built after the sum is known. So messages of the reduce-scatter carry zeros,
except the messages of marks.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from moe_ckpt.collectives import Ranks
from moe_ckpt.flowcheck.mirror.marks import GROUP_BYTES, mark_of
from moe_ckpt.flowcheck.mirror.plan import BucketOffset, MirroredSums
from moe_ckpt.flowcheck.mirror.ring import Ring
from moe_ckpt.snapshot.codec import MASTER, PartKey
from tests.harness.threads.model import Model, Weight

_ALL_REDUCE = 4


class WirePort:
    """Implements `mirror.port.FrameSource`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: list[bytes] = []

    def put(self, frames: list[bytes]) -> None:
        with self._changed:
            self._frames += frames
            self._changed.notify_all()

    def read(self, timeout_s: float) -> list[bytes]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._frames), timeout_s)
            frames, self._frames = self._frames, []
            return frames

    def close(self) -> None:
        pass


class Wire:
    """Shows each frame at all ports.

    `is_lost` chooses operations, by stage and number, whose frames reach no port.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ports: list[WirePort] = []
        # bytes, by stage and sender
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._operations: dict[int, int] = defaultdict(int)  # by stage
        self.is_lost: Callable[[int, int], bool] = lambda stage, operation: False

    def port(self) -> WirePort:
        with self._lock:
            self._ports.append(WirePort())
            return self._ports[-1]

    def num_operations(self, stage: int) -> int:
        return self._operations[stage]

    def all_reduce(
        self, stage: int, contributions: list[bytes], result: bytes, element_bytes: int
    ) -> None:
        """Send the frames of one operation.

        Args:
            stage: The stage that reduces.
            contributions: Each rank's bytes of a mark, by rank. Empty bytes for each
                rank if the operation is no mark.
            result: Bytes of the result.
            element_bytes: Bytes of an element.
        """
        size = len(contributions)
        ring = Ring(num_bytes=len(result), size=size, element_bytes=element_bytes)
        with self._lock:
            number = self._operations[stage]
            self._operations[stage] += 1
            frames: list[bytes] = []
            for rank in range(size):
                for step, sent in enumerate(ring.sends(rank)):
                    content = slice(sent.start, sent.start + sent.num_bytes)
                    behind = [
                        contributions[(rank + i) % size]
                        for i in range(step // ring.segments_per_rank + 1)
                    ]
                    partial = (
                        bytes(map(max, *behind, behind[0]))
                        if any(behind)
                        else bytes(len(result))
                    )
                    payload = (result if sent.is_final else partial)[content]
                    frames.append(
                        self._frame(
                            stage, rank, (rank - 1) % size, _message(number, payload)
                        )
                    )
            for port in self._ports if not self.is_lost(stage, number) else ():
                port.put(frames)

    def _frame(self, stage: int, source: int, target: int, payload: bytes) -> bytes:
        sequence = self._sent[stage, source]
        self._sent[stage, source] += len(payload)
        tcp = (
            struct.pack(
                ">HHIIBBHHH",
                7000 + stage,
                8000,
                sequence % 2**32,
                0,
                5 << 4,
                0x10,
                0,
                0,
                0,
            )
            + payload
        )
        ends = bytes([10, stage, 0, source]) + bytes([10, stage, 0, target])
        ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0) + ends
        return bytes(12) + b"\x08\x00" + ip + tcp


def _message(number: int, payload: bytes) -> bytes:
    slot = (_ALL_REDUCE << 56) | (number << 24)
    return struct.pack("<6Q", 48 + len(payload), 1, slot, 0, len(payload), 0) + payload


class ModelMirror:
    """Implements `server_states.Mirror` for one rank of a stage.

    The stage reduces the gradients of all sharded weights in one bucket.
    """

    def __init__(self, model: Model, stage_ranks: Ranks, wire: Wire) -> None:
        self._model = model
        self._ranks = stage_ranks
        self._wire = wire
        self._group = b""
        self._num_operations = 0
        self.offsets: Mapping[PartKey, BucketOffset] = self._find_offsets()
        model.on_reduced = self._reduced

    def mark(self) -> None:
        self._group = self._ranks.broadcast(secrets.token_bytes(GROUP_BYTES))
        marks = [
            mark_of(self._group, self._ranks.size, rank)
            for rank in range(self._ranks.size)
        ]
        self._send(marks, bytes(map(max, *marks, marks[0])), 1)
        self._num_operations = self._wire.num_operations(self._model.stage)
        self._ranks.barrier()  # no rank reduces before all have the number

    def sums(self) -> tuple[MirroredSums, ...]:
        first, self._num_operations = (
            self._num_operations,
            self._wire.num_operations(self._model.stage),
        )
        return (
            MirroredSums(
                group=self._group.hex(),
                size=self._ranks.size,
                buckets=(
                    4
                    * sum(
                        weight.gradient.numel() for weight in self._reduced_weights()
                    ),
                ),
                dtype="float32",
                first=first,
                end=self._num_operations,
            ),
        )

    def _reduced(self) -> None:
        bucket = torch.cat([weight.gradient for weight in self._reduced_weights()])
        self._send([b""] * self._ranks.size, bucket.numpy().tobytes(), 4)

    def _send(
        self, contributions: list[bytes], result: bytes, element_bytes: int
    ) -> None:
        if self._ranks.rank == 0:
            self._wire.all_reduce(
                self._model.stage, contributions, result, element_bytes
            )
        self._ranks.barrier()

    def _reduced_weights(self) -> list[Weight]:
        return [weight for weight in self._model.weights.values() if weight.is_sharded]

    def _find_offsets(self) -> dict[PartKey, BucketOffset]:
        offsets = dict[PartKey, BucketOffset]()
        start, tied = 0, self._model.tied_weight()
        for weight in self._reduced_weights():
            if weight is not tied and weight.master.numel():
                offsets[weight.key(MASTER)] = BucketOffset(
                    group=0, bucket=0, start=start + weight.range[0]
                )
            start += weight.gradient.numel()
        return offsets
