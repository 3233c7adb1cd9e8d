"""One checkpoint, written with PyTorch's distributed checkpoint in separate phases.

Training may continue between the phases.

Owns: the plan of the write, this rank's file, and the metadata of all files. Must not:
know the contents, or decide when to save. Only the training thread communicates,
because a background thread may outlive a generation of process groups.

    training thread      plan, with all ranks                  finish, with all ranks
    this or another                  write, sync, checksum ----/
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
    """The result of one rank's write."""

    results: list[WriteResult]
    """The location of each written item in this rank's file."""

    files: Sequence[FileRecord]
    """Size and checksum of each file that this rank wrote; the files are synced."""


class PlannedWrite:
    """This rank's part of a checkpoint, planned with all ranks.

    The constructor is collective in `group`.

    Args:
        directory: An existing directory.
        content: This rank's part of the state, in PyTorch's format.
        group: The ranks that write the checkpoint.

    Raises:
        CheckpointSaveError: Planning failed on a rank. Raised on all ranks.
    """

    def __init__(
        self, directory: Path, content: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self._directory = directory
        self._ranks = _DistWrapper(group, use_dist=True, coordinator_rank=0)
        # `seal_files` syncs the files
        self._storage = dcp.FileSystemWriter(directory, sync_files=False)
        self._planner = _Planner()
        self._metadata: Metadata | None = None
        with self._failing_as_save():
            self._plan: SavePlan = self._ranks.reduce_scatter(
                "plan", lambda: self._plan_own(content), self._plan_of_all
            )

    def write(self) -> Written:
        """Write this rank's file, sync the file and read it back.

        Any thread may call the method, which does not communicate.

        Raises:
            CheckpointSaveError: The write was abandoned.
        """
        self._planner.require_wanted()
        writing = self._storage.write_data(
            self._planner.finish_plan(self._plan), self._planner
        )
        writing.wait()
        results = writing.value()
        # do not read an abandoned file back: no other save begins until this write has
        # ended
        self._planner.require_wanted()
        names = {str(result.storage_data.relative_path) for result in results}
        return Written(results=results, files=seal_files(self._directory, names))

    def abandon(self) -> None:
        """Make `write` fail before its next tensor, or before reading back its file."""
        self._planner.abandon()

    def finish(self, written: Callable[[], Written]) -> Sequence[FileRecord]:
        """Write the metadata once `write` has ended on all ranks. Collective.

        Args:
            written: Returns the result of `write`, or raises its error.

        Returns:
            The records of this rank's files.

        Raises:
            CheckpointSaveError: A write failed on a rank. Raised on all ranks.
        """
        with self._failing_as_save():
            # `written` is called inside the collective, because torch passes an error
            # that is raised there on to all ranks. After an error outside, the other
            # ranks would wait
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
        assert self._metadata is not None  # only the coordinator calls this method
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
        # Megatron's planner asserts this value: of several copies of a tensor, only one
        # rank names the tensor in its content
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
    """Return the causes of a PyTorch error, which wraps one cause per failing rank."""
    return "; ".join(
        sorted({f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items()})
    )
