"""The state of one rank's Megatron-Core training: parts, digest and sharded form.

Owns: the list of every tensor and number on which the next iteration depends:
parameters, FP32 master weights, Adam moments and step counts, module buffers
(persistent or not), loss scaler, learning-rate schedule, RNG states. Must not: write
files or communicate, except through Megatron's own gathering of a sharded optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from moe_ckpt.digests import digests_by_name, whole_digest
from moe_ckpt.megatron import optimizer_state
from moe_ckpt.megatron.buffers import (
    buffers_by_name,
    buffers_of,
    named_buffers,
    restore_buffers_by_name,
)
from moe_ckpt.megatron.chunk_batches import ChunkBatches
from moe_ckpt.megatron.kept_batches import KeptBatches
from moe_ckpt.megatron.optimizer_state import (
    counts_steps_per_parameter,
    keeps_remainders,
    torch_optimizer,
)
from moe_ckpt.megatron.overlapped import gathers_in_forward, shards
from moe_ckpt.megatron.rounded_weights import forward_tensors
from moe_ckpt.megatron.schedule import OF_GROUPS, lengths_of, load_schedule, set_lengths
from moe_ckpt.snapshot.host_transfers import TRANSFERS
from moe_ckpt.snapshot.step_codec import under

# per-rank parts
BUFFERS, RNG_STATE, STORED_STATES, DATA = (
    "buffers",
    "rng_state",
    "stored_states",
    "data",
)
_LENGTHS = "scheduler.lengths"
_SHARDING_METADATA: dict[str, Any] = {
    # can be loaded at another layout of ranks
    "distrib_optim_sharding_type": "fully_reshardable",
    # names without an optimizer's number, because layouts differ in the number of
    # optimizers
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The objects that a training loop has built with Megatron-Core.

    Example:
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    """

    model: list[torch.nn.Module]
    """This rank's model chunks, each in Megatron's wrapper for data parallelism."""

    optimizer: MegatronOptimizer
    """The optimizer of all chunks."""

    scheduler: OptimizerParamScheduler
    """The schedule of learning rate and weight decay."""

    schedule_increment: int | Callable[[], int] = 1
    """The number by which an update advances the schedule.

    The unit is iterations, or the samples of an iteration, as the loop counts. If
    iterations differ in the number, a function that is called at the end of each pass.
    """

    data: KeptBatches | ChunkBatches | None = None
    """The data, if batches are not a function of the iteration; otherwise None.

    The position in the data is then part of each iteration's start.
    """

    @property
    def increment_of_this_iteration(self) -> int:
        """The number by which this iteration's update advances the schedule."""
        return (
            self.schedule_increment()
            if callable(self.schedule_increment)
            else self.schedule_increment
        )

    @property
    def inner_optimizers(self) -> list[MegatronOptimizer]:
        """The optimizers that Megatron chains, or the only optimizer."""
        if isinstance(self.optimizer, ChainedOptimizer):
            return list(self.optimizer.chained_optimizers)
        return [self.optimizer]

    @cached_property
    def modules(self) -> Sequence[tuple[str, torch.nn.Module]]:
        """The modules of all chunks; a name begins with the number of the chunk.

        The list is made once: a walk takes 1 ms, and would be made several times an
        iteration. A model that is trained gets no other modules, because the optimizer
        has the parameters of these modules. Buffers and FP8 scales may be assigned
        anew, so callers look them up in the modules.
        """
        numbered = enumerate(self.model)
        return [
            pair
            for index, chunk in numbered
            for pair in chunk.named_modules(prefix=str(index))
        ]


def named_state(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor on which the next iteration depends, by name.

    Names are stable over restarts. Of weights that the next forward pass gathers, only
    the rank's shard is yielded: other elements are still those of an earlier step.
    """
    held = shards(state.inner_optimizers)
    for index, chunk in enumerate(state.model):
        for name, parameter in chunk.named_parameters():
            is_partial = gathers_in_forward(chunk) and parameter in held
            for suffix, tensor in forward_tensors(parameter).items():
                yield (
                    f"model{index}.{name}{suffix}",
                    tensor.view(-1)[held[parameter]] if is_partial else tensor,
                )
        for name, buffer in named_buffers(chunk):
            yield f"model{index}.{name}", buffer
    for index, optimizer in enumerate(state.inner_optimizers):
        for name, tensor in optimizer_state.named_tensors(optimizer):
            yield f"optimizer{index}.{name}", tensor
        for key, value in sorted(_scaler_values(optimizer).items()):
            yield f"optimizer{index}.scaler.{key}", value
    yield "scheduler.num_steps", torch.tensor(state.scheduler.num_steps)
    yield "rng.cpu", torch.get_rng_state()
    # without CUDA, the "CUDA" generator of the CPU stand-in is the CPU's, yielded above
    if torch.cuda.is_available():
        yield "rng.cuda", torch.cuda.get_rng_state()
    for name, rng_state in sorted(_rng_tracker().get_states().items()):
        yield f"rng.{name}", rng_state


def digest_of(state: TrainingState) -> str:
    """Return a SHA-256, in hex, of this rank's whole state.

    The digest covers names, types, shapes and bytes.
    """
    return whole_digest(named_state(state))


def tensor_digests(state: TrainingState) -> dict[str, str]:
    """Return a digest of each tensor of this rank's whole state, by name.

    A digest is the start of a SHA-256, in hex.
    """
    return digests_by_name(named_state(state))


def allocate_optimizer_state(state: TrainingState) -> None:
    """Give a fresh Adam zero moments and step 0, as the first step would.

    Megatron can neither save nor load an Adam that has not stepped yet: a fresh Adam,
    or an Adam whose steps all overflowed.
    """
    for optimizer in state.inner_optimizers:
        optimizer_state.allocate(optimizer)


def sharded_state(state: TrainingState, *, is_loading: bool) -> dict[str, Any]:
    """Return the state as a sharded state dict for `dist_checkpointing`. Collective.

    Model and optimizer are in Megatron's own form, which Megatron's other tools load.
    Values that exactness needs and Megatron leaves out are in additional objects, one
    for each rank.

    Args:
        state: This rank's training state.
        is_loading: Whether the state dict is the template of a load.
    """
    model = {
        key: module.sharded_state_dict(metadata=_SHARDING_METADATA)
        for key, module in _keyed_modules(state)
    }
    # before Megatron asserts that an optimizer has exactly one step count
    _count_steps_without_parameters(state)
    # before FP8 weights are cast: Megatron finds an optimizer's parameters among the
    # model's tensors by their identity
    optimizer = state.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=_SHARDING_METADATA
    )
    # a load casts FP8 parameters again from their masters, in `gather_parameters`
    force_all_tensors_to_non_fp8(model)
    return {
        **model,
        "optimizer": optimizer,
        "opt_param_scheduler": state.scheduler.state_dict(),
        RNG_STATE: _per_rank(RNG_STATE, _rng_tensors()),
        BUFFERS: _per_rank(BUFFERS, buffers_by_name(state.model)),
        **({DATA: _per_rank(DATA, state.data.saved())} if state.data else {}),
        **_stored_states(state),
    }


def _stored_states(state: TrainingState) -> dict[str, ShardedObject]:
    """Return optimizer states in their stored form, for a load at the same layout."""
    # Megatron saves the numbers that the states represent, and numbers that are stored
    # again get another scale
    if not any(
        optimizer_state.is_rounded(optimizer) for optimizer in state.inner_optimizers
    ):
        return {}
    return {STORED_STATES: _per_rank(STORED_STATES, _optimizer_tensors(state))}


def _optimizer_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": tensor
        for index, optimizer in enumerate(state.inner_optimizers)
        for name, tensor in optimizer_state.named_tensors(optimizer)
    }


def _count_steps_without_parameters(state: TrainingState) -> None:
    """Set the step count of each torch Adam that has no parameters on this rank.

    An example is the experts' Adam on a dense stage.
    """
    # Megatron reads the count from a parameter, and saves rank 0's count for all ranks
    num_steps = max(map(optimizer_state.step_count, state.inner_optimizers))
    for optimizer in state.inner_optimizers:
        inner = torch_optimizer(optimizer)
        if (
            inner
            and counts_steps_per_parameter(optimizer)
            and not optimizer.get_parameters()
        ):
            cast("Any", inner).state["no parameters"] = {
                "step": torch.tensor(float(num_steps))
            }


def load_sharded_state(state: TrainingState, loaded: dict[str, Any]) -> None:
    """Load a sharded state dict.

    The caller has to cast FP8 parameters afterwards.

    Args:
        state: This rank's training state.
        loaded: The state dict. If generators are missing, the generators stay as they
            are.
    """
    for key, module in _keyed_modules(state):
        module.load_state_dict(loaded[key])
    parts = loaded["optimizer"]
    for index, optimizer in enumerate(state.inner_optimizers):
        settings = [
            {name: group[name] for name in OF_GROUPS if name in group}
            for group in optimizer.param_groups
        ]
        _load_optimizer(
            optimizer, parts if len(state.inner_optimizers) == 1 else parts[index]
        )
        for group, mine in zip(optimizer.param_groups, settings, strict=True):
            group.update(mine)
    load_schedule(state.scheduler, loaded["opt_param_scheduler"])
    # learning rates of the groups follow from the position
    state.scheduler.step(increment=0)
    restore_buffers_by_name(state.model, loaded[BUFFERS])
    # after Megatron's own load, which stores the same numbers with other scales
    if STORED_STATES in loaded:
        for name, tensor in _optimizer_tensors(state).items():
            tensor.copy_(loaded[STORED_STATES][name])
    if state.data and DATA in loaded:
        state.data.restore(loaded[DATA])
    if RNG_STATE in loaded:
        _restore_rng_tensors(loaded[RNG_STATE])


def _keyed_modules(state: TrainingState) -> list[tuple[str, Any]]:
    """Return the chunks without their data-parallel wrapper, by key.

    Keys are those of Megatron's checkpoints.
    """
    alone = len(state.model) == 1
    return [
        ("model" if alone else f"model{i}", cast("Any", chunk).module)
        for i, chunk in enumerate(state.model)
    ]


def _per_rank(name: str, value: Any) -> ShardedObject:
    world_size, global_rank = (
        torch.distributed.get_world_size(),
        torch.distributed.get_rank(),
    )
    return ShardedObject(
        f"moe_ckpt.{name}", value, (world_size,), (global_rank,), replica_id=0
    )


def _load_optimizer(optimizer: MegatronOptimizer, part: dict[str, Any]) -> None:
    """Load one inner optimizer, around three faults of Megatron.

    The faults concern torch's Adam, whose step count is a tensor.
    """
    sharded, inner = part.pop("param_state", None), torch_optimizer(optimizer)
    if sharded is None and inner and counts_steps_per_parameter(optimizer):
        # Megatron does not save a count of 0, which is the count of a run whose steps
        # all overflowed
        part.get("optimizer", part).setdefault("state", {}).setdefault(
            "common_step", torch.tensor(0.0)
        )
    optimizer.load_state_dict(part)
    slots = list(cast("Any", inner).state.values()) if inner else []
    # Copies, because Megatron gives one tensor to all parameters, and Adam would count
    # the tensor up once for each parameter. The counts are set aside, because Megatron
    # looks for step counts among a sharded optimizer's tensors, where Megatron has not
    # saved them
    steps = [
        slot.pop("step").detach().clone() if torch.is_tensor(slot.get("step")) else None
        for slot in slots
    ]
    if sharded is not None:
        # Megatron saves all states as FP32, and FusedAdam takes remainders as int16
        # only
        if keeps_remainders(optimizer):
            for entry in sharded.values():
                entry["param"] = entry["param"].to(torch.int16)
        cast("Any", optimizer).load_parameter_state_from_fully_reshardable(sharded)
    for slot, step in zip(slots, steps, strict=True):
        if step is not None:
            slot["step"] = step


def small_state(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return copies, on the host, of an iteration's start without the large tensors.

    The copies are the states of all generators, the loss scalers, and the positions in
    the learning-rate schedule and in data without random access. Parameters, moments
    and buffers are left out.
    """
    saved = {f"rng.{name}": tensor for name, tensor in _rng_tensors().items()}
    saved["scheduler.num_steps"] = torch.tensor(state.scheduler.num_steps)
    saved[_LENGTHS] = lengths_of(state.scheduler)
    if state.data:
        saved |= {
            f"{DATA}.{name}": tensor for name, tensor in state.data.saved().items()
        }
    for index, optimizer in enumerate(state.inner_optimizers):
        for key, value in _scaler_values(optimizer).items():
            saved[f"scaler{index}.{key}"] = value.detach().cpu().clone()
    return saved


def restore_small_state(
    state: TrainingState, saved: Mapping[str, torch.Tensor]
) -> None:
    """Restore a result of `small_state`.

    Learning rates follow from the position in the schedule.
    """
    _restore_rng_tensors(under("rng.", saved))
    state.scheduler.num_steps = int(saved["scheduler.num_steps"])
    if _LENGTHS in saved:  # older versions have saved no lengths
        set_lengths(state.scheduler, saved[_LENGTHS])
    # learning rates of the groups follow from the position
    state.scheduler.step(increment=0)
    _restore_scaler_state(state, saved)
    if state.data:
        state.data.restore(under(f"{DATA}.", saved))


def _scaler_values(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    scaler = getattr(optimizer, "grad_scaler", None)
    return (
        {key: torch.as_tensor(value) for key, value in scaler.state_dict().items()}
        if scaler
        else {}
    )


def _restore_scaler_state(
    state: TrainingState, saved: Mapping[str, torch.Tensor]
) -> None:
    for index, optimizer in enumerate(state.inner_optimizers):
        values = under(f"scaler{index}.", saved)
        if values:
            scaler = cast("Any", optimizer).grad_scaler
            # counters as plain numbers: Megatron's `+= 1` would change a saved tensor
            # in place
            scaler.load_state_dict(
                {
                    key: value if value.ndim else value.item()
                    for key, value in values.items()
                }
            )


def buffers(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return copies, on the host, of all module buffers and the scales of FP8 layers.

    Buffers that are not persistent are included. All copies share one transfer, because
    each iteration makes them.
    """
    named = _buffers(state)
    return dict(zip(named, TRANSFERS.fetch(list(named.values())), strict=True))


def restore_buffers(state: TrainingState, saved: Mapping[str, torch.Tensor]) -> None:
    """Restore a result of `buffers`."""
    for name, buffer in _buffers(state).items():
        buffer.copy_(saved[name])


def _buffers(state: TrainingState) -> dict[str, torch.Tensor]:
    return dict(buffers_of(state.modules))


def _rng_tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()


def _rng_tensors() -> dict[str, torch.Tensor]:
    """Return the states of all generators as tensors, which travel without pickling."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = cast(
        "tuple[Any, ...]", np.random.get_state()
    )
    return {
        # by way of NumPy, because torch takes four times as long for a list of 626
        # numbers
        "python": torch.from_numpy(np.array([version, *words], np.int64)),
        "python_gauss": torch.tensor(
            [] if gauss is None else [gauss], dtype=torch.float64
        ),
        "numpy": torch.from_numpy(
            np.concatenate([keys.astype(np.int64), [position, has_gauss]])
        ),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        **{
            f"tracker.{name}": rng_state.clone()
            for name, rng_state in _rng_tracker().get_states().items()
        },
    }


def _restore_rng_tensors(saved: Mapping[str, torch.Tensor]) -> None:
    version, *words = saved["python"].tolist()
    gauss = saved["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = saved["numpy"].tolist()
    np.random.set_state(
        (
            "MT19937",
            np.array(keys, np.uint32),
            position,
            has_gauss,
            float(saved["numpy_gauss"]),
        )
    )
    torch.set_rng_state(saved["cpu"])
    torch.cuda.set_rng_state(saved["cuda"])
    trackers = {
        name: tensor.clone() for name, tensor in under("tracker.", saved).items()
    }
    _rng_tracker().set_states(trackers)
