"""Loads a state that ranks of another parallel layout have saved.

Owns: the parts whose form depends on the layout, beside the tensors that
`dist_checkpointing` cuts anew: the number of optimizers that Megatron chains, the
locations of buffers, the padding of the vocabulary, the seeds of the generators. Must
not: know directories without a checkpoint, or runs.

    saved by rank       here
    0  optimizer 0, 1   step count, loss scaler -> all optimizers here
                        (experts have their own where EP > 1)
    r  buffers          by global layer -> the ranks that have the layer
                        (rank 0 reads all, and broadcasts)
    r  generators       not loaded: seeded as at a run's start, for the iteration
    r  stored states    not loaded: scales belong to shards; numbers are stored again
                        with the scales of the shards here
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import (
    extract_nonpersistent,
    extract_sharded_base,
)
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from moe_ckpt.collectives import TorchRanks, broadcast_result, gather_results
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.megatron.buffers import merge_buffers
from moe_ckpt.megatron.state import (
    BUFFERS,
    DATA,
    RNG_STATE,
    STORED_STATES,
    TrainingState,
    sharded_state,
)

_NOT_AS_SAVED = (RNG_STATE, BUFFERS, STORED_STATES, "optimizer")
_OPTIMIZER, _SAVED_BUFFERS = "optimizer here", "buffers of all ranks"


class Reshard:
    """One load of a checkpoint from another layout. Collective over all ranks.

    Args:
        state: The training state of this rank, into which the checkpoint is loaded.
        directory: The checkpoint.
        num_ranks: The number of ranks that saved the checkpoint.
    """

    def __init__(self, state: TrainingState, directory: str, num_ranks: int) -> None:
        self._here = sharded_state(state, is_loading=True)
        self._directory = directory
        self._num_ranks = num_ranks

    def template(self) -> dict[str, Any]:
        """Return the request for `dist_checkpointing`.

        Raises:
            CheckpointLoadError: The vocabulary was padded to another size, or data
                loaders have a position of their own on each rank. Raised on all ranks.
        """
        if DATA in self._here:
            raise CheckpointLoadError(
                f"{self._directory}: saved at another layout, where other ranks read"
                " the data"
            )
        gather_results(
            TorchRanks(),
            lambda: _require_same_padding(self._here, self._directory),
            CheckpointLoadError,
        )
        asked = {
            key: part for key, part in self._here.items() if key not in _NOT_AS_SAVED
        }
        # a key of its own, because the part of optimizers in common.pt has another form
        asked[_OPTIMIZER] = self._here["optimizer"]
        readers, saved = (
            range(self._num_ranks) if dist.get_rank() == 0 else (),
            (self._num_ranks,),
        )
        asked[_SAVED_BUFFERS] = {
            rank: ShardedObject(f"moe_ckpt.{BUFFERS}", None, saved, (rank,))
            for rank in readers
        }
        return asked

    def adapt(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """Return the argument of `load_sharded_state`, without generators.

        Args:
            loaded: The state that `dist_checkpointing` has loaded.

        Raises:
            CheckpointLoadError: Buffers differed between the ranks that saved them.
                Raised on all ranks.
        """
        parts = loaded.pop(_SAVED_BUFFERS, {})
        buffers = broadcast_result(
            TorchRanks(), lambda: merge_buffers(parts.values()), CheckpointLoadError
        )
        # non-persistent parts are in the loaded part, and `merge` refuses a value that
        # is there twice
        _, persistent = extract_nonpersistent(self._here["optimizer"])
        # the part without tensors: groups, their settings, loss scalers
        unsharded = extract_sharded_base(persistent)[1]
        optimizer = cast("dict[Any, Any]", merge(unsharded, loaded.pop(_OPTIMIZER)))
        _take_over_counts(_chained(optimizer), _chained(loaded["optimizer"]))
        return {**loaded, "optimizer": optimizer, BUFFERS: buffers}


def reseed(run_seed: int, iteration: int) -> None:
    """Seed all generators of this rank as at a run's start, for continuing a run.

    Args:
        run_seed: The seed that the loop has given to this rank's generators: equal in a
            stage, different between stages.
        iteration: The iteration after which the run continues.
    """
    # 31 bits, because Megatron adds to the seed
    seed = (
        int.from_bytes(hashlib.sha256(f"{run_seed} {iteration}".encode()).digest()[:4])
        >> 1
    )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _require_same_padding(here: Mapping[str, Any], directory: str) -> None:
    """Raise CheckpointLoadError for a padding that Megatron would change.

    Rows that pad a vocabulary take part in every loss.
    """
    padded = [
        entry
        for entry in nested_values(cast("Any", here))
        if getattr(entry, "allow_shape_mismatch", False)
    ]
    # torch's reader, because megatron-core's load_tensors_metadata (0.16 to 0.19) fails
    # with torch 2.15
    saved = (
        FileSystemReader(directory).read_metadata().state_dict_metadata
        if padded
        else {}
    )
    for entry in padded:
        about = saved.get(entry.key)
        if (
            isinstance(about, TensorStorageMetadata)
            and tuple(about.size) != entry.global_shape
        ):
            raise CheckpointLoadError(
                f"{directory}: {entry.key} got {about.size[0]} rows, wanted"
                f" {entry.global_shape[0]}: parallel.tp pads the vocabulary to another"
                " size; set model.vocab_size to a multiple of both when a run begins"
            )


def _chained(optimizer: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the parts of a saved optimizer.

    Megatron stores a single part without a list.
    """
    return (
        [optimizer[index] for index in sorted(optimizer)]
        if 0 in optimizer
        else [optimizer]
    )


def _take_over_counts(
    mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]
) -> None:
    """Give step count and loss scaler of the saved optimizers to these optimizers.

    All optimizers count steps alike. If two optimizers become one, the scaler of the
    first stays: losses are multiplied by this scaler, while the experts' scaler only
    divides.
    """
    for index, part in enumerate(mine):
        saved = theirs[min(index, len(theirs) - 1)]
        _take_over_step(part.get("optimizer", part), saved.get("optimizer", saved))
        if "grad_scaler" in part:
            part["grad_scaler"] = saved["grad_scaler"]


def _take_over_step(mine: dict[str, Any], saved: dict[str, Any]) -> None:
    """Set the step count where Megatron keeps the count.

    Megatron keeps the count in the groups, or, for unsharded torch Adams, beside the
    moments.
    """
    steps = [group["step"] for group in saved["param_groups"] if "step" in group]
    assert len({float(step) for step in steps}) <= 1, steps
    if steps:
        for group in mine["param_groups"]:
            group["step"] = steps[0]
    else:  # a count of 0 is not saved
        mine.setdefault("state", {})["common_step"] = saved.get("state", {}).get(
            "common_step", torch.tensor(0.0)
        )
