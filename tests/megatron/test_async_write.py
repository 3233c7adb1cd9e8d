"""An abandoned write ends before its next tensor or before reading back its file."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.megatron.async_write import PlannedWrite
from tests.harness.gloo.ranks import rank_store, run_ranks

NUM_TENSORS = 5


def _write_until_abandoned(planned: PlannedWrite) -> None:
    with pytest.raises(
        CheckpointSaveError, match=r"^abandoned: other ranks were lost$"
    ):
        planned.write()


def _abandoned_in(folder: Path, tensor: int) -> int:
    """Abandon a write while a tensor is written.

    Args:
        tensor: The number of the tensor, counted from 1.

    Returns:
        The number of tensors that the write has read.
    """
    is_there, gate, num_read = threading.Event(), threading.Event(), 0
    resolve_data = MCoreSavePlanner.resolve_data

    def held(self: MCoreSavePlanner, write_item: Any) -> Any:
        nonlocal num_read
        num_read += 1
        if num_read == tensor:
            is_there.set()
            gate.wait()
        return resolve_data(self, write_item)

    MCoreSavePlanner.resolve_data = held
    dist.init_process_group(
        "gloo", store=rank_store(), rank=int(os.environ["RANK"]), world_size=1
    )
    assert dist.group.WORLD is not None
    content = {f"tensor{number}": torch.zeros(3) for number in range(NUM_TENSORS)}
    planned = PlannedWrite(folder, content, dist.group.WORLD)
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(_write_until_abandoned, planned)
        is_there.wait()
        planned.abandon()
        gate.set()
        writing.result()
    return num_read


@pytest.mark.parametrize("tensor", [1, 2, NUM_TENSORS])
def test_an_abandoned_write_ends_before_its_next_tensor_or_its_check(
    tensor: int, tmp_path: Path
) -> None:
    assert run_ranks(1, _abandoned_in, tmp_path, tensor) == [tensor]
