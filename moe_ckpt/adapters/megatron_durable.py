"""The training state as a directory in Megatron's `dist_checkpointing` format (torch_dist).

Owns: one save at a time, in step with all ranks, and loading. Synchronous saves finish inside `start_save`;
asynchronous ones write in forked processes while training goes on, and `finish_save` completes them. A failure on any
rank is a failure on all. Must not: name directories, decide when to save, or mark anything as committed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException

from moe_ckpt.adapters.megatron_state import TrainingState, load_sharded_state, named_state, sharded_state
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError

_METADATA_RESERVE_BYTES = 16 << 20


class MegatronDurableState:
    """Implements `ports.DurableState`."""

    def __init__(self, state: TrainingState, *, asynchronous: bool) -> None:
        self._state = state
        self._asynchronous = asynchronous
        self._queue = AsyncCallsQueue()

    def start_save(self, directory: Path, iteration: int) -> None:
        self._check_free_space(directory)
        content = {"iteration": iteration, **sharded_state(self._state, is_loading=False)}
        try:
            request: AsyncRequest | None = dist_checkpointing.save(
                content, str(directory), async_sharded_save=self._asynchronous
            )
            if request is not None:
                self._queue.schedule_async_request(request)
        except (CheckpointException, CheckpointingException, OSError) as error:
            raise _save_error(directory, error) from error

    def finish_save(self, *, wait: bool) -> bool:
        try:
            self._queue.maybe_finalize_async_calls(blocking=wait)
        except (CheckpointException, CheckpointingException, OSError) as error:
            raise _save_error("an asynchronous save", error) from error
        return self._queue.get_num_unfinalized_calls() == 0

    def load(self, directory: Path) -> int:
        template: dict[str, Any] = {"iteration": 0, **sharded_state(self._state, is_loading=True)}
        try:
            loaded = dist_checkpointing.load(template, str(directory))
            load_sharded_state(self._state, loaded)
        except (CheckpointException, CheckpointingException, OSError, KeyError, ValueError, RuntimeError) as error:
            raise CheckpointLoadError(f"{directory}: {error}") from error
        return int(loaded["iteration"])

    def _check_free_space(self, directory: Path) -> None:
        """Refuse on all ranks together what cannot fit; a disk that fills later is reported by the writers."""
        needed = torch.tensor(sum(tensor.nbytes for _, tensor in named_state(self._state)), dtype=torch.int64)
        needed = needed.to(torch.cuda.current_device())
        dist.all_reduce(needed)
        verdict: list[str | None] = [None]
        if dist.get_rank() == 0:
            verdict = [_lack_of_space(directory, int(needed.item()) + _METADATA_RESERVE_BYTES)]
        dist.broadcast_object_list(verdict, src=0)
        if verdict[0] is not None:
            raise CheckpointSaveError(verdict[0])


def _lack_of_space(directory: Path, needed_bytes: int) -> str | None:
    try:
        free_bytes = shutil.disk_usage(directory).free
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if free_bytes >= needed_bytes:
        return None
    return f"{directory}: {free_bytes / 2**20:.0f} MiB free, a checkpoint takes up to {needed_bytes / 2**20:.0f} MiB"


def _save_error(what: object, error: Exception) -> CheckpointSaveError:
    causes = [str(cause) for cause in _root_causes(error)] or ["another rank failed to write"]
    return CheckpointSaveError(f"{what}: {'; '.join(sorted(set(causes)))}")


def _root_causes(error: Exception) -> list[BaseException]:
    if isinstance(error, CheckpointException):
        return [wrapped[0] for wrapped in error.failures.values()]
    return [error]
