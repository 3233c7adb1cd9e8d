"""The examples train as they are written, and the lost state comes back."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.ranks import rank_store, run_ranks

OWN_LOOP = Path(__file__).parents[1] / "examples" / "own_loop.py"


def train(folder: Path, **changes: Any) -> str:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=rank_store(), rank=rank, world_size=world_size)
    return runpy.run_path(str(OWN_LOOP), run_name="example")["main"](folder, **changes)


def train_without_losses(folder: Path) -> str:
    return train(folder, losses=())


def test_an_own_loop_gets_its_lost_state_back(tmp_path: Path) -> None:
    recovered = run_ranks(2, train, tmp_path / "lost")
    assert "StageRecovered" in (tmp_path / "lost" / "rank1.jsonl").read_text()
    assert recovered == run_ranks(2, train_without_losses, tmp_path / "undisturbed")
