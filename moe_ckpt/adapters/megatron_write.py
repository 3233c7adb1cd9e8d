"""One checkpoint through PyTorch's distributed checkpoint, in parts between which training may go on.

Owns: who writes what, this rank's file, and the metadata over all of them. Must not: know what is saved, or when. Only
the training thread talks to other ranks: what a background thread has begun may outlive a generation of process groups.

    training thread      plan, with all ranks                       finish, with all ranks
    this or another                           write -----------/
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from moe_ckpt.errors import CheckpointSaveError


class PlannedWrite:
    """This rank's part of a checkpoint of `content`, in a directory that exists. To make one is collective.

    Raises CheckpointSaveError on all ranks.
    """

    def __init__(self, directory: Path, content: dict[str, Any], group: dist.ProcessGroup) -> None:
        self._directory = directory
        self._ranks = _DistWrapper(group, use_dist=True, coordinator_rank=0)
        self._storage = dcp.FileSystemWriter(directory)
        self._planner = _Planner()
        self._metadata: Metadata | None = None
        with self._failing_as_save():
            self._plan: SavePlan = self._ranks.reduce_scatter(
                "plan", lambda: self._plan_mine(content), self._plan_everybodys
            )

    def write(self) -> list[WriteResult]:
        """Write this rank's file and sync it. For any thread: it waits for nobody else."""
        self._planner.require_wanted()
        written = self._storage.write_data(self._planner.finish_plan(self._plan), self._planner)
        written.wait()
        return written.value()

    def abandon(self) -> None:
        """Let `write` end with an error before its next tensor."""
        self._planner.abandon()

    def finish(self, written: Callable[[], list[WriteResult]]) -> None:
        """Write the metadata, once `write` has ended everywhere; `written` returns or raises what it did. Collective.

        Raises CheckpointSaveError on all ranks if it failed on any.
        """
        with self._failing_as_save():
            self._ranks.all_reduce("write", written, self._finish_everybodys)

    def _plan_mine(self, content: dict[str, Any]) -> SavePlan:
        is_coordinator = self._ranks.is_coordinator
        self._planner.set_up_planner(content, storage_meta=self._storage.storage_meta(), is_coordinator=is_coordinator)
        self._storage.set_up_storage_writer(is_coordinator)
        return self._storage.prepare_local_plan(self._planner.create_local_plan())

    def _plan_everybodys(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._storage.prepare_global_plan(plans)

    def _finish_everybodys(self, results: list[list[WriteResult]]) -> None:
        assert self._metadata is not None  # of the coordinator, which alone is here
        self._storage.finish(self._metadata, results)

    @contextlib.contextmanager
    def _failing_as_save(self) -> Iterator[None]:
        try:
            yield
        except CheckpointException as error:
            raise CheckpointSaveError(f"{self._directory}: {reason_of(error)}") from error


class _Planner(MCoreSavePlanner):
    """Megatron's, for a write that may be given up half-way."""

    def __init__(self) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._is_abandoned = threading.Event()

    def abandon(self) -> None:
        self._is_abandoned.set()

    def require_wanted(self) -> None:
        if self._is_abandoned.is_set():
            raise CheckpointSaveError("abandoned: other ranks were lost")

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.require_wanted()
        return super().resolve_data(write_item)


def reason_of(error: CheckpointException) -> str:
    """Return what lies behind an error of PyTorch, which wraps one per failing rank."""
    return "; ".join(sorted({f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items()}))
