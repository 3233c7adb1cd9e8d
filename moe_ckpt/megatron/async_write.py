"""One checkpoint through PyTorch's distributed checkpoint, in parts between which
training may continue.

Owns: the plan of the write, this rank's file, and the metadata of all files. Must not:
know the contents, or decide when to save. Only the training thread communicates: a
background thread may outlive a generation of process groups.

    training thread      plan, with all ranks                            finish, with all ranks
    this or another                           write, sync, checksum ----/
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

from moe_ckpt.durable.checkpoint_folder import seal_files
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.types import FileRecord


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Written:
    """The shard that one rank has written: the place of each item, and its synced
    files.
    """

    results: list[WriteResult]
    files: Sequence[FileRecord]


class PlannedWrite:
    """This rank's part of a checkpoint of `content`, in an existing directory. The
    constructor is collective.

    Raises CheckpointSaveError on all ranks.
    """

    def __init__(
        self, directory: Path, content: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self._directory = directory
        self._ranks = _DistWrapper(group, use_dist=True, coordinator_rank=0)
        # sealing files syncs them
        self._storage = dcp.FileSystemWriter(directory, sync_files=False)
        self._planner = _Planner()
        self._metadata: Metadata | None = None
        with self._failing_as_save():
            self._plan: SavePlan = self._ranks.reduce_scatter(
                "plan", lambda: self._plan_own(content), self._plan_of_all
            )

    def write(self) -> Written:
        """Write this rank's file, sync it and read it back. For any thread: no
        communication.
        """
        self._planner.require_wanted()
        writing = self._storage.write_data(
            self._planner.finish_plan(self._plan), self._planner
        )
        writing.wait()
        results = writing.value()
        # no save begins until an abandoned one has ended: it reads nothing back
        self._planner.require_wanted()
        names = {str(result.storage_data.relative_path) for result in results}
        return Written(results=results, files=seal_files(self._directory, names))

    def abandon(self) -> None:
        """Make `write` fail before its next tensor, or before it checks its file."""
        self._planner.abandon()

    def finish(self, written: Callable[[], Written]) -> Sequence[FileRecord]:
        """Write the metadata once `write` has ended on all ranks; `written` returns its
        result or raises its error.

        Collective.

        Returns this rank's files. Raises CheckpointSaveError on all ranks if a write
        failed on any.
        """
        with self._failing_as_save():
            # `written` raises in here, where torch hands an error on to all ranks;
            # outside the others would wait
            self._ranks.all_reduce(
                "write", lambda: written().results, self._finish_of_all
            )
        return written().files

    def _plan_own(self, content: dict[str, Any]) -> SavePlan:
        is_coordinator = self._ranks.is_coordinator
        self._planner.set_up_planner(
            content,
            storage_meta=self._storage.storage_meta(),
            is_coordinator=is_coordinator,
        )
        self._storage.set_up_storage_writer(is_coordinator)
        return self._storage.prepare_local_plan(self._planner.create_local_plan())

    def _plan_of_all(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._storage.prepare_global_plan(plans)

    def _finish_of_all(self, results: list[list[WriteResult]]) -> None:
        assert self._metadata is not None  # of the coordinator, which alone is here
        self._storage.finish(self._metadata, results)

    @contextlib.contextmanager
    def _failing_as_save(self) -> Iterator[None]:
        try:
            yield
        except CheckpointException as error:
            raise CheckpointSaveError(
                f"{self._directory}: {reason_of(error)}"
            ) from error


class _Planner(MCoreSavePlanner):
    """Megatron's planner, for a write that may be abandoned."""

    def __init__(self) -> None:
        # as Megatron's planner asserts: of several copies of a tensor, one rank alone
        # names it in its content
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
    """Return the causes of a PyTorch error, which wraps one per failing rank."""
    return "; ".join(
        sorted({f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items()})
    )
