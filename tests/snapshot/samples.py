"""Samples of snapshots and windows: one run, one shard, one header, all roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from moe_ckpt.snapshot.codec import (
    PartKey,
    ShardIdentity,
    Snapshot,
    SnapshotHeader,
    layout_parts,
)
from moe_ckpt.snapshot.windows import (
    HostBuffers,
    PrivateMemory,
    SnapshotMemory,
    SnapshotPublisher,
)
from moe_ckpt.types import ParallelLayout, RunIdentity, Version

IDENTITY = RunIdentity(
    run_id="run-1", model="0123abcd", layout=ParallelLayout(pp=2, dp=4, ep=2, tp=1)
)
SHARD = ShardIdentity(
    global_rank=3, pp_rank=0, tp_rank=0, ep_rank=1, etp_rank=0, dp_rank=3
)
HEADER = SnapshotHeader(
    identity=IDENTITY,
    shard=SHARD,
    iteration=12,
    window_start=11,
    slot=1,
    num_slots=3,
    full=("layer 0 expert 1",),
    compute=("layer 0 gate", "layer 0"),
    adam_steps=(12.0, 11.5),
    parts=(),
    payload_bytes=0,
    checksum=0,
)

Piece = tuple[PartKey, torch.Tensor, tuple[int, int]]


def piece(
    tensor: torch.Tensor, name: str = "weight", role: str = "master", start: int = 0
) -> Piece:
    key = PartKey(operator="layer 0 expert 1", tensor=name, role=role)
    return key, tensor, (start, start + tensor.numel())


def only_part(snapshot: Snapshot) -> torch.Tensor:
    (part,) = snapshot.header.parts
    return snapshot.part(part)


def damaged(data: bytes) -> Iterator[bytes]:
    """Yield these bytes with one bit flipped, and cut short, at each byte in turn."""
    for index in range(len(data)):
        yield data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :]
        yield data[:index]


def pool(limit_bytes: int | None = None) -> HostBuffers:
    return HostBuffers(PrivateMemory(pinned=False), limit_bytes)


def snapshot_of(
    buffers: HostBuffers,
    slot_of_window: tuple[int, int, int],
    pieces: Sequence[Piece] = (),
) -> Snapshot:
    """Return the snapshot of a (window start, slot, number of slots).

    The snapshot has 1000 bytes if no pieces are given.
    """
    start, slot, num_slots = slot_of_window
    parts, payload_bytes = layout_parts(pieces or [piece(torch.zeros(250))])
    numbers = {
        "iteration": start + slot,
        "window_start": start,
        "slot": slot,
        "num_slots": num_slots,
    }
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
    memory.begin(Version(epoch=0, iteration=start), num_slots)
    for slot in range(num_slots):
        snapshot = snapshot_of(buffers, (start, slot, num_slots))
        if daemon:
            daemon.add_snapshot(snapshot)
        memory.add(snapshot)


def keep_window(
    memory: SnapshotMemory,
    buffers: HostBuffers,
    start: int,
    *,
    daemon: SnapshotPublisher | None = None,
) -> None:
    take_window(memory, buffers, start, daemon=daemon)
    memory.keep_in_flight()


def starts_of(memory: SnapshotMemory) -> list[int]:
    return [window.start for window in memory.windows()]
