"""The training state as a directory in Megatron's `dist_checkpointing` format.

Owns: one save at a time, in step with all ranks, and loading. Must not: name
directories, decide when to save, or commit a checkpoint.

Megatron describes and shards the state, for the backend torch_dist. PyTorch's
distributed checkpoint writes the shards in this process, and reports a failure on any
rank to all ranks. Megatron's own writer forks processes, which costs seconds on a CPU,
and waits for ever for a killed process. An asynchronous save copies the state to host
memory; a thread without collectives writes and checks the copy while training
continues.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException

from moe_ckpt.collectives import TorchRanks, broadcast_result, gather_results
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.megatron.async_write import PlannedWrite, Written, reason_of
from moe_ckpt.megatron.fp8_parameters import is_fp8_parameter
from moe_ckpt.megatron.optimizer_state import is_rounded
from moe_ckpt.megatron.reshard import Reshard, reseed
from moe_ckpt.megatron.state import TrainingState, load_sharded_state, sharded_state
from moe_ckpt.megatron.step import gather_late_parameters, gather_parameters
from moe_ckpt.types import FileRecord, ParallelLayout

_log = logging.getLogger(__name__)

_FORMAT = CheckpointingConfig("torch_dist", 1)
_METADATA_RESERVE_BYTES = 16 << 20
# short compared with `runtime.progress_s`: a rank that waits for a slow disk must not
# count as hung
_LOOK_AGAIN_S = 1.0
_OTHER_SCALES = (
    "FP8 and FP16 states have a scale for each shard: at another layout they are stored"
    " again with other scales, and are not the same bit for bit"
)
_LOAD_ERRORS = (
    CheckpointException,
    CheckpointingException,
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    # Megatron's schedule asserts that its settings are those of the checkpoint
    AssertionError,
)


T = TypeVar("T")


class MegatronDurableState:
    """Implements `ports.DurableState`. The constructor is collective over all ranks.

    Args:
        state: This rank's training state.
        asynchronous: Whether a thread writes a save while training continues.
        cpu_backend: Backend of the process group that coordinates saves.
    """

    def __init__(
        self, state: TrainingState, *, asynchronous: bool, cpu_backend: str = "gloo"
    ) -> None:
        self._state = state
        self._group = cast("dist.ProcessGroup", dist.new_group(backend=cpu_backend))
        self._asynchronous = asynchronous
        # the save in flight, with the future result of this rank's write
        self._save: tuple[PlannedWrite, Future[Written]] | None = None
        self._abandoned: Future[Written] | None = None
        # the seed that the loop has given to this rank: a load replaces the generators
        # later
        self._run_seed = torch.initial_seed()

    def start_save(self, directory: Path, iteration: int) -> None:
        assert not self.is_writing(), "one save at a time"
        # weights outside this rank's shard would otherwise be those of an earlier step
        gather_late_parameters(self._state)
        content = {
            "iteration": iteration,
            **sharded_state(self._state, is_loading=False),
        }
        sharded, common = cast(
            "tuple[dict[str, Any], dict[str, Any]]", save_preprocess(content)
        )
        # check before the first file is written: on a disk that fills up during a save,
        # the save would fail after all of its cost
        self._refuse_without_space(
            directory, sum(entry.data.nbytes for entry in _tensors_to_write(sharded))
        )
        broadcast_result(
            TorchRanks(), lambda: _write_common(directory, common), CheckpointSaveError
        )
        if self._asynchronous:
            sharded = _host_copy(sharded)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        planned = PlannedWrite(directory, mcore_to_pyt_state_dict(by_key), self._group)
        self._save = planned, _begin(planned.write, in_background=self._asynchronous)

    def finish_save(self, *, wait: bool) -> Sequence[FileRecord] | None:
        if self._save is None:
            return ()
        planned, writing = self._save
        while not _true_on_all_ranks(writing.done()):
            if not wait:
                return None
            # after the wait the next vote meets the other ranks, or raises if ranks are
            # lost
            futures.wait([writing], timeout=_LOOK_AGAIN_S)
        self._save = None  # before `finish` raises: a failed save is over
        return planned.finish(writing.result)

    def abandon_save(self) -> None:
        if self._save:
            planned, self._abandoned = self._save
            planned.abandon()
            self._save = None

    def is_writing(self) -> bool:
        return self._save is not None or (
            self._abandoned is not None and not self._abandoned.done()
        )

    def load(
        self, directory: Path, resharded_from: ParallelLayout | None = None
    ) -> int:
        num_ranks = resharded_from.world_size if resharded_from else None
        iterations = gather_results(
            TorchRanks(), lambda: self._load(directory, num_ranks), CheckpointLoadError
        )
        if any(
            is_fp8_parameter(parameter)
            for chunk in self._state.model
            for parameter in chunk.parameters()
        ):
            # a checkpoint has no FP8 payloads: all ranks together cast them from the
            # masters
            gather_parameters(self._state)
        if (
            num_ranks is not None
            and any(map(is_rounded, self._state.inner_optimizers))
            and dist.get_rank() == 0
        ):
            _log.warning("%s: %s", directory, _OTHER_SCALES)
        return iterations[0]

    def _load(self, directory: Path, num_saving_ranks: int | None) -> int:
        reshard = (
            Reshard(self._state, str(directory), num_saving_ranks)
            if num_saving_ranks is not None
            else None
        )
        template = (
            reshard.template()
            if reshard
            else {"iteration": 0, **sharded_state(self._state, is_loading=True)}
        )
        with _failing_as_load(directory):
            loaded = cast(
                "dict[str, Any]", dist_checkpointing.load(template, str(directory))
            )
            load_sharded_state(
                self._state, reshard.adapt(loaded) if reshard else loaded
            )
        if reshard:
            reseed(self._run_seed, int(loaded["iteration"]))
        return int(loaded["iteration"])

    def _refuse_without_space(self, directory: Path, my_size_bytes: int) -> None:
        """Raise CheckpointSaveError on all ranks if the disk lacks space."""
        size_bytes = torch.tensor(my_size_bytes, dtype=torch.int64)
        dist.all_reduce(size_bytes, group=self._group)
        needed_bytes = int(size_bytes.item()) + _METADATA_RESERVE_BYTES
        broadcast_result(
            TorchRanks(),
            lambda: _require_space(directory, needed_bytes),
            CheckpointSaveError,
        )


@contextlib.contextmanager
def _failing_as_load(directory: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointLoadError:
        raise
    except _LOAD_ERRORS as error:
        reason = (
            reason_of(error)
            if isinstance(error, CheckpointException)
            else str(error) or repr(error)
        )
        raise CheckpointLoadError(f"{directory}: {reason}") from error


def _require_space(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        free_mib, needed_mib = free_bytes / 2**20, needed_bytes / 2**20
        raise CheckpointSaveError(
            f"{directory}: {free_mib:.0f} MiB free, a checkpoint may take"
            f" {needed_mib:.0f} MiB"
        )


def _write_common(directory: Path, common: dict[str, Any]) -> None:
    # `torch.save` to a path raises no OSError when the disk is full
    with (directory / COMMON_STATE_FNAME).open("wb") as file:
        torch.save(common, file)
    save_config(_FORMAT, str(directory))


def _host_copy(sharded: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors to host memory, so that training may change the originals.

    Objects need no copy, because they are serialized before training continues.
    """
    for entry in _tensors_to_write(sharded):
        entry.data = entry.data.detach().to("cpu", copy=True)
    return sharded


def _tensors_to_write(sharded: dict[str, Any]) -> list[Any]:
    """Return the tensors that this rank writes.

    Of several copies of a tensor only one rank writes a copy.
    """
    tensors = (
        entry for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)
    )
    return [
        entry
        for entry in tensors
        if entry.data is not None and is_main_replica(entry.replica_id)
    ]


def _begin(call: Callable[[], T], *, in_background: bool) -> Future[T]:
    """Run a call now, or in a separate thread.

    Returns:
        The future result. An error of the call is raised when the result is read.
    """
    outcome: Future[T] = Future()
    device = torch.cuda.current_device()

    def run() -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(device)  # each thread has a current device
        try:
            outcome.set_result(call())
        except BaseException as error:  # `outcome` carries any error
            outcome.set_exception(error)

    if in_background:
        # a daemon thread and no pool: neither another save nor the end of the process
        # waits for the thread
        threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    else:
        run()
    return outcome


def _true_on_all_ranks(mine: bool) -> bool:
    votes = torch.tensor(int(mine), device=torch.cuda.current_device())
    TorchRanks().reduce(votes, "min")
    return bool(votes.item())
