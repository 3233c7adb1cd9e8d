"""Marks: all-reduces whose bytes name the group of a stream and its sender. Pure.

gloo's connections use ports that no setting determines. At the start of a stream of
gradients each group reduces a mark by MAX. The mark has as many equal units as the ring
has segments, so that each message is one unit. A partial result names the ranks that
have contributed to the result: the sender, and the ranks behind the sender in the ring.

    16 bytes MAGIC | 16 bytes of the group | one byte per rank: 1 if it has contributed
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.flowcheck.mirror.framing import PREAMBLE_BYTES, data_length

MAGIC = b"moe_ckpt mirror\xff"
GROUP_BYTES = 16
_HEAD_BYTES = len(MAGIC) + GROUP_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamMark:
    """A mark in a segment."""

    group: bytes
    """Name of the group, 16 bytes."""

    size: int
    """Number of ranks in the group."""

    rank: int
    """Rank of the sender in the group."""

    start: int
    """Position in the segment's payload at which gloo's message begins."""


def mark_of(group: bytes, size: int, rank: int) -> bytes:
    """Return the bytes that a rank of a group contributes to the reduction by MAX.

    Args:
        group: Name of the group, 16 bytes.
        size: Number of ranks in the group.
        rank: Rank in the group.
    """
    assert len(group) == GROUP_BYTES, group
    contributed = bytes(int(each == rank) for each in range(size))
    return 2 * size * (MAGIC + group + contributed)


def find_mark(payload: bytes) -> StreamMark | None:
    """Return the first mark in these bytes of a stream that names the sender.

    The bytes must contain the whole message of the mark. None if there is no such mark.
    """
    offset = payload.find(MAGIC)
    while offset >= 0:
        found = _mark_at(payload, offset)
        if found:
            return found
        offset = payload.find(MAGIC, offset + 1)
    return None


def _mark_at(payload: bytes, offset: int) -> StreamMark | None:
    start = offset - PREAMBLE_BYTES
    length = data_length(payload[start:offset]) if start >= 0 else None
    if length is None or length <= _HEAD_BYTES or len(payload) < offset + length:
        return None
    unit = payload[offset : offset + length]
    contributed = unit[_HEAD_BYTES:]
    size = len(contributed)
    senders = [
        rank
        for rank in range(size)
        if contributed[rank] == 1 and contributed[rank - 1] == 0
    ]
    # a complete result names no sender: all ranks have contributed
    if len(senders) != 1 or set(contributed) != {0, 1}:
        return None
    return StreamMark(
        group=unit[len(MAGIC) : _HEAD_BYTES], size=size, rank=senders[0], start=start
    )
