"""A write that is given up ends where it is: what is not begun is not begun any more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from moe_ckpt.adapters.megatron_write import PlannedWrite
from moe_ckpt.errors import CheckpointSaveError
from tests.ranks import rank_store, run_ranks

NUM_TENSORS = 5


def _planned(folder: Path) -> PlannedWrite:
    dist.init_process_group("gloo", store=rank_store(), rank=int(os.environ["RANK"]), world_size=1)
    content = {f"tensor{number}": torch.zeros(3) for number in range(NUM_TENSORS)}
    group = dist.group.WORLD
    assert group is not None
    return PlannedWrite(folder, content, group)


def _num_read_tensors(before_each: Callable[[int], None]) -> list[int]:
    """Let `before_each` know of each tensor that is about to be written; return where their number is counted."""
    resolve_data, read = MCoreSavePlanner.resolve_data, [0]

    def counting(self: MCoreSavePlanner, write_item: Any) -> Any:
        read[0] += 1
        before_each(read[0])
        return resolve_data(self, write_item)

    MCoreSavePlanner.resolve_data = counting
    return read


def _abandoned_in(folder: Path, tensor: int) -> tuple[int, str]:
    planned, is_there, gate, failures = _planned(folder), threading.Event(), threading.Event(), list[str]()

    def hold(number: int) -> None:
        if number == tensor:
            is_there.set()
            gate.wait()

    def write() -> None:
        with pytest.raises(CheckpointSaveError) as failure:
            planned.write()
        failures.append(str(failure.value))

    read = _num_read_tensors(hold)
    writer = threading.Thread(target=write)
    writer.start()
    is_there.wait()
    planned.abandon()
    gate.set()
    writer.join()
    return read[0], failures[0]


@pytest.mark.parametrize("tensor", [1, 2, NUM_TENSORS])
def test_an_abandoned_write_ends_before_its_next_tensor_or_before_it_is_checked(tensor: int, tmp_path: Path) -> None:
    assert run_ranks(1, _abandoned_in, tmp_path, tensor) == [(tensor, "abandoned: other ranks were lost")]


def _abandoned_before_it_began(folder: Path) -> str:
    planned = _planned(folder)
    planned.abandon()
    with pytest.raises(CheckpointSaveError) as failure:
        planned.write()
    return str(failure.value)


def test_a_write_that_is_abandoned_before_it_begins_makes_no_file(tmp_path: Path) -> None:
    assert run_ranks(1, _abandoned_before_it_began, tmp_path) == ["abandoned: other ranks were lost"]
    assert list(tmp_path.iterdir()) == []
