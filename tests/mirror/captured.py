"""The committed capture of scripts/write_captures.py: three ranks reduce two buckets in each of two iterations."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from moe_ckpt.mirror.frames import TcpSegment, segment_of
from moe_ckpt.mirror.gradients import Capture, Collected
from moe_ckpt.mirror.ring import RingTracker

NUM_RANKS, ITERATIONS, SIZES = 3, 2, (1500, 700)
BUCKETS = tuple(4 * size for size in SIZES)
_STORE_PORT = 29555
_FILE_HEADER_BYTES, _RECORD = 24, struct.Struct("<IIII")


def read_pcap(path: Path) -> list[bytes]:
    """Return the frames of a classic little-endian pcap file."""
    data, frames, place = path.read_bytes(), list[bytes](), _FILE_HEADER_BYTES
    assert data[:4] == bytes.fromhex("d4c3b2a1"), path
    while place < len(data):
        _, _, captured, _ = _RECORD.unpack_from(data, place)
        place += _RECORD.size
        frames.append(data[place : place + captured])
        place += captured
    return frames


def frames() -> list[bytes]:
    return read_pcap(Path(__file__).parent / "captures" / "ring.pcap")


def reduced(iteration: int) -> list[bytes]:
    """Return the sums that the ranks have reduced in an iteration."""

    def gradient(bucket: int, rank: int) -> np.ndarray:
        return np.arange(SIZES[bucket], dtype=np.float32) % 1000 + 1000 * bucket + 10_000 * iteration + rank

    totals = [sum(gradient(bucket, rank) for rank in range(NUM_RANKS)) for bucket in range(len(SIZES))]
    return [np.asarray(total, np.float32).tobytes() for total in totals]


def is_of_store(segment: TcpSegment) -> bool:
    """Return whether a segment is of the store where ranks meet."""
    return _STORE_PORT in (segment.stream.source_port, segment.stream.target_port)


class Mirror:
    """Captures at some ranks, fed with frames or segments of whatever streams."""

    def __init__(self, *ranks: int, patience_bytes: int = 1 << 16) -> None:
        self.collected = Collected(BUCKETS)
        self.captures = {
            (_address(rank), _address((rank - 1) % NUM_RANKS)): Capture(
                self.collected, RingTracker(BUCKETS, size=NUM_RANKS, rank=rank), patience_bytes=patience_bytes
            )
            for rank in ranks
        }

    def see(self, segments: Iterable[TcpSegment | None]) -> Mirror:
        for segment in segments:
            if segment is None or is_of_store(segment):
                continue
            capture = self.captures.get((segment.stream.source, segment.stream.target))
            if capture:
                capture.feed(segment)
        for capture in self.captures.values():
            capture.flush()
        return self

    def see_frames(self, frames: Iterable[bytes]) -> Mirror:
        return self.see(map(segment_of, frames))

    def whole_iterations(self) -> list[int]:
        """Return the iterations that are complete, whose bytes are the ranks' sums."""
        whole = [iteration for iteration in range(ITERATIONS) if self.collected.is_complete(iteration)]
        for iteration in whole:
            assert self.collected.take(iteration) == reduced(iteration)
        return whole


def _address(rank: int) -> bytes:
    return bytes([10, 77, 0, rank + 1])
