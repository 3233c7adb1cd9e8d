"""The iterators of all model chunks of a rank are restored together.

The iterators go back in the same process, and go on in a new process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.chunk_batches import ChunkBatches
from moe_ckpt.megatron.kept_batches import KeptBatches


def numbered(first: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.tensor(first)
        first += 1


def chunks(*firsts: int) -> list[KeptBatches]:
    return [KeptBatches(numbered(first), limit_bytes=1 << 10) for first in firsts]


def read(kept: list[KeptBatches]) -> list[int]:
    return [int(next(chunk)) for chunk in kept for _ in range(2)]


def test_all_chunks_go_back_to_the_start_of_an_iteration() -> None:
    kept = chunks(0, 100)
    assert read(kept) == [0, 1, 100, 101]
    start = ChunkBatches(kept).saved()
    assert read(kept) == [2, 3, 102, 103]
    ChunkBatches(kept).restore(start)
    assert read(kept) == [2, 3, 102, 103]


def test_a_new_process_goes_on_with_each_chunks_own_batches() -> None:
    kept, anew, swapped = chunks(0, 100), chunks(0, 100), chunks(100, 0)
    read(kept)
    ChunkBatches(anew).restore(ChunkBatches(kept).saved())
    assert read(anew) == [2, 3, 102, 103]
    ChunkBatches(swapped).restore(ChunkBatches(kept).saved())
    with pytest.raises(ConfigError, match="other micro-batches than before"):
        read(swapped)
