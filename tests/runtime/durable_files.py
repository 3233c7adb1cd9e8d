"""A durable state of one small file a rank, and the tier that saves and loads through it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.events import EventLog
from moe_ckpt.runtime.durable import DurableTier
from moe_ckpt.store.disk import CheckpointFolder, seal_files
from moe_ckpt.types import FileRecord, ParallelLayout, RunIdentity
from tests.ranks import rank_store

IDENTITY = RunIdentity(run_id="run-1", model="0123abcd", layout=ParallelLayout(pp=1, dp=2, ep=1, tp=1))


class OneFileEach:
    """Implements `ports.DurableState`: every rank writes a file, rank 0 one more, of which it does not tell."""

    def __init__(self, spoiling: str = "") -> None:
        self._spoiling = spoiling
        self._files: Sequence[FileRecord] = ()

    def start_save(self, directory: Path, iteration: int) -> None:
        mine = directory / f"rank{dist.get_rank()}"
        mine.write_bytes(b"weights")
        if dist.get_rank() == 0:
            (directory / "metadata").write_bytes(b"names")
        self._files = seal_files(directory, [mine.name])
        if mine.name == self._spoiling:
            mine.write_bytes(b"Weights")

    def finish_save(self, *, wait: bool) -> Sequence[FileRecord] | None:
        return self._files

    def abandon_save(self) -> None:
        pass

    def is_writing(self) -> bool:
        return False

    def load(self, directory: Path, resharded_from: ParallelLayout | None = None) -> int:
        return 1


def open_tier(folder: Path, state: OneFileEach, keep: int = 1) -> DurableTier:
    """Join the others and return what saves and loads through `state`; inside `run_ranks`."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=rank_store(), rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    events = EventLog(folder / "events" / f"{rank}.jsonl", global_rank=rank, clock_origin_unix_s=0.0)
    return DurableTier(state, CheckpointFolder(folder), IDENTITY, TorchRanks(), events, keep=keep)
