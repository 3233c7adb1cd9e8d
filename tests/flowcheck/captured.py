"""The committed capture of scripts/write_captures.py.

On 3 ranks, the capture has a mark, and two buckets in each of two iterations.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from moe_ckpt.flowcheck.mirror.frames import TcpSegment, segment_of
from moe_ckpt.flowcheck.mirror.gradients import Gradient
from moe_ckpt.flowcheck.mirror.plan import MirroredSums
from moe_ckpt.flowcheck.mirror.watcher import Watcher

NUM_RANKS, ITERATIONS, SIZES = 3, 2, (1500, 700)
BUCKETS = tuple(4 * size for size in SIZES)
GROUP = b"the captured set".hex()
OPERATIONS = len(SIZES) + 1
"""Operations of an iteration: one for each bucket, and one for the norm."""
_STORE_PORT = 29555
_FILE_HEADER_BYTES, _RECORD = 24, struct.Struct("<IIII")


def read_pcap(path: Path) -> list[bytes]:
    """Return the frames of a classic little-endian pcap file."""
    data, frames, offset = path.read_bytes(), list[bytes](), _FILE_HEADER_BYTES
    assert data[:4] == bytes.fromhex("d4c3b2a1"), path
    while offset < len(data):
        _, _, captured, _ = _RECORD.unpack_from(data, offset)
        offset += _RECORD.size
        frames.append(data[offset : offset + captured])
        offset += captured
    return frames


@cache
def frames() -> tuple[bytes, ...]:
    return tuple(read_pcap(Path(__file__).parent / "captures" / "ring.pcap"))


def wanted(iteration: int) -> MirroredSums:
    """Return the reductions of an iteration; operation 0 is the mark."""
    first = 1 + OPERATIONS * iteration
    return MirroredSums(
        group=GROUP,
        size=NUM_RANKS,
        buckets=BUCKETS,
        dtype="float32",
        first=first,
        end=first + OPERATIONS,
    )


def reduced(iteration: int) -> list[bytes]:
    """Return the sums that the ranks have reduced in an iteration, by bucket."""

    def gradient(bucket: int, rank: int) -> np.ndarray:
        return (
            np.arange(SIZES[bucket], dtype=np.float32) % 1000
            + 1000 * bucket
            + 10_000 * iteration
            + rank
        )

    totals = [
        sum(gradient(bucket, rank) for rank in range(NUM_RANKS))
        for bucket in range(len(SIZES))
    ]
    return [np.asarray(total, np.float32).tobytes() for total in totals]


def is_of_store(segment: TcpSegment) -> bool:
    """Return whether a segment belongs to the store where ranks meet."""
    return _STORE_PORT in (segment.stream.source_port, segment.stream.target_port)


def watch(
    segments: Iterable[TcpSegment | None],
    captures: int = NUM_RANKS,
    loss: float = 0.0,
    seed: int = 0,
) -> Watcher:
    """Return a watcher that has seen these segments, and to which no more come.

    Args:
        segments: The segments. None: a frame without a segment.
        captures: The number of watched ranks.
        loss: The share of the segments that each capture loses.
        seed: The seed of the loss.
    """
    watcher = Watcher(captures, loss=loss, seed=seed)
    for segment in segments:
        if segment is not None:
            watcher.see_segment(segment)
    watcher.flush()
    return watcher


def watch_frames(
    frames: Iterable[bytes], captures: int = NUM_RANKS, loss: float = 0.0
) -> Watcher:
    return watch(map(segment_of, frames), captures, loss)


def whole_iterations(watcher: Watcher) -> list[int]:
    """Return the complete iterations.

    Asserts that the bytes of these iterations are the ranks' sums.
    """
    whole = []
    for iteration in range(ITERATIONS):
        sums = watcher.sums(wanted(iteration))
        if sums is not None:
            assert [bytes(each) for each in sums] == reduced(iteration)
            whole.append(iteration)
    return whole


def missing_bytes(watcher: Watcher, iteration: int) -> int:
    """Return the number of bytes of an iteration's sums that no capture has.

    Asserts that all other bytes are those of the ranks' sums.
    """
    missing = 0
    for number, (result, right) in enumerate(
        zip(_results(watcher, iteration), reduced(iteration), strict=True)
    ):
        assert not result.differs
        agrees, probe = copy.deepcopy(result), copy.deepcopy(result)
        agrees.put(0, right)
        assert not agrees.differs, number
        missing += sum(
            not _has_byte(probe, start, right) for start in range(len(right))
        )
    return missing


def _has_byte(probe: Gradient, start: int, right: bytes) -> bool:
    """Return whether a capture has a byte, from which a wrong byte differs."""
    probe.differs = False
    probe.put(start, bytes([right[start] ^ 1]))
    return probe.differs


def _results(watcher: Watcher, iteration: int) -> list[Gradient]:
    results = watcher.results(wanted(iteration))
    return [*results, *(Gradient(num_bytes) for num_bytes in BUCKETS[len(results) :])]
