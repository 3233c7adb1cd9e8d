"""Windows of snapshots for tests: taken from a pool of buffers, confirmed or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moe_ckpt.snapshot.codec import Snapshot, layout_parts
from moe_ckpt.snapshot.windows import HostBuffers, PrivateMemory, SnapshotMemory, SnapshotPublisher
from tests.snapshot.samples import HEADER, Piece, piece


def pool(limit_bytes: int | None = None) -> HostBuffers:
    return HostBuffers(PrivateMemory(pinned=False), limit_bytes)


def snapshot_of(buffers: HostBuffers, place: tuple[int, int, int], pieces: Sequence[Piece] = ()) -> Snapshot:
    """Take the snapshot of a (window start, slot, number of slots), of 1000 bytes if no pieces are given."""
    start, slot, num_slots = place
    parts, payload_bytes = layout_parts(pieces or [piece(torch.zeros(250))])
    numbers = {"iteration": start + slot, "window_start": start, "slot": slot, "num_slots": num_slots}
    header = replace(HEADER, **numbers, parts=parts, payload_bytes=payload_bytes)
    return Snapshot(header=header, payload=buffers.acquire(payload_bytes))


def take_window(
    memory: SnapshotMemory,
    buffers: HostBuffers,
    start: int,
    num_slots: int = 2,
    *,
    daemon: SnapshotPublisher | None = None,
) -> None:
    """Take a whole window without confirming it."""
    memory.begin(start, num_slots)
    for slot in range(num_slots):
        snapshot = snapshot_of(buffers, (start, slot, num_slots))
        if daemon:
            daemon.add_snapshot(snapshot)
        memory.add(snapshot)


def persist_window(
    memory: SnapshotMemory, buffers: HostBuffers, start: int, *, daemon: SnapshotPublisher | None = None
) -> None:
    take_window(memory, buffers, start, daemon=daemon)
    memory.confirm()


def starts_of(memory: SnapshotMemory) -> list[int]:
    return [window.start for window in memory.windows()]
