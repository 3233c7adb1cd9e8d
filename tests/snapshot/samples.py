"""Snapshots and what they are made of, as values: one run, one shard, one header, and parts of any role."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_ckpt.snapshot.codec import PartKey, ShardIdentity, Snapshot, SnapshotHeader
from moe_ckpt.types import ParallelLayout, RunIdentity

IDENTITY = RunIdentity(run_id="run-1", model="0123abcd", layout=ParallelLayout(pp=2, dp=4, ep=2, tp=1))
SHARD = ShardIdentity(global_rank=3, pp_rank=0, tp_rank=0, ep_rank=1, etp_rank=0, dp_rank=3)
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


def piece(tensor: torch.Tensor, name: str = "weight", role: str = "master", start: int = 0) -> Piece:
    key = PartKey(operator="layer 0 expert 1", tensor=name, role=role)
    return key, tensor, (start, start + tensor.numel())


def only_part(snapshot: Snapshot) -> torch.Tensor:
    (part,) = snapshot.header.parts
    return snapshot.part(part)


def damaged(data: bytes) -> Iterator[bytes]:
    """Give these bytes with one bit flipped, and cut short, at each place in turn."""
    for place in range(len(data)):
        yield data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
        yield data[:place]
