"""Tensors of which each rank has a part become whole, in chunks.

A nearly full device has room for one chunk.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.megatron.merging import chunks_of, merge
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.gloo.workers import own_rank


@given(sizes=st.lists(st.integers(0, 20), max_size=6), limit=st.integers(1, 25))
def test_chunks_hold_every_byte_once_in_order(sizes: list[int], limit: int) -> None:
    everything = torch.arange(sum(sizes), dtype=torch.uint8)
    chunks = list(chunks_of(everything.split(sizes) if sizes else [], limit))
    counted = [sum(part.numel() for part in chunk) for chunk in chunks]
    assert all(count == limit for count in counted[:-1])
    assert all(0 < count <= limit for count in counted)
    assert [
        byte for chunk in chunks for part in chunk for byte in part.tolist()
    ] == everything.tolist()


def merge_halves(limit_bytes: int) -> tuple[list[list[float]], int]:
    rank = own_rank()
    dist.init_process_group("gloo", store=rank_store(), rank=rank, world_size=2)
    pieces = []
    for size, dtype in ((6, torch.float32), (5, torch.bfloat16)):
        start, end = (0, size // 2) if rank == 0 else (size // 2, size)
        tensor = torch.full((size,), 9.0, dtype=dtype)  # stale in the other half
        tensor[start:end] = torch.arange(start, end, dtype=dtype)
        pieces.append((tensor, start, end))
    assert dist.group.WORLD is not None
    num_chunks = merge(pieces, dist.group.WORLD, limit_bytes)
    return [tensor.tolist() for tensor, _, _ in pieces], num_chunks


@pytest.mark.parametrize(("limit_bytes", "num_chunks"), [(1 << 20, 1), (10, 4)])
def test_halves_become_whole_on_both_ranks(limit_bytes: int, num_chunks: int) -> None:
    whole = [[float(number) for number in range(size)] for size in (6, 5)]
    assert run_ranks(2, merge_halves, limit_bytes) == [(whole, num_chunks)] * 2
