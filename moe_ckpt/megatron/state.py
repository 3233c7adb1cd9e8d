"""The state of one rank's Megatron-Core training: its parts, its digest, its sharded
form.

Owns: the list of every tensor and number that the next iteration depends on -
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
from moe_ckpt.megatron import fp8_linear, optimizer_state
from moe_ckpt.megatron.buffers import (
    buffers_by_name,
    buffers_of,
    named_buffers,
    restore_buffers_by_name,
)
from moe_ckpt.megatron.chunk_batches import ChunkBatches, under
from moe_ckpt.megatron.kept_batches import KeptBatches
from moe_ckpt.megatron.optimizer_state import (
    counts_steps_per_parameter,
    keeps_remainders,
    torch_optimizer,
)
from moe_ckpt.megatron.overlapped import gathers_in_forward, shards
from moe_ckpt.megatron.schedule import OF_GROUPS, lengths_of, load_schedule, set_lengths
from moe_ckpt.snapshot.host_transfers import TRANSFERS

# per-rank parts
BUFFERS, RNG_STATE, STORED_STATES, DATA = (
    "buffers",
    "rng_state",
    "stored_states",
    "data",
)
_LENGTHS = "scheduler.lengths"
_SHARDING_METADATA: dict[str, Any] = {
    # loads at another layout of ranks, too
    "distrib_optim_sharding_type": "fully_reshardable",
    # names without an optimizer's number: layouts differ in how many there are
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The objects that a training loop built with Megatron-Core.

    `model` holds this rank's chunks, wrapped for data parallelism. An update advances
    the schedule by `schedule_increment`: iterations, or the samples of one, as the loop
    counts. It is a function, called at the end of each pass, if iterations differ in
    it. `data` is there if batches are not a function of the iteration: the position in
    it is then part of each iteration's start.
    """

    model: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    schedule_increment: int | Callable[[], int] = 1
    data: KeptBatches | ChunkBatches | None = None

    @property
    def increment_of_this_iteration(self) -> int:
        return (
            self.schedule_increment()
            if callable(self.schedule_increment)
            else self.schedule_increment
        )

    @property
    def inner_optimizers(self) -> list[MegatronOptimizer]:
        if isinstance(self.optimizer, ChainedOptimizer):
            return list(self.optimizer.chained_optimizers)
        return [self.optimizer]

    @cached_property
    def modules(self) -> Sequence[tuple[str, torch.nn.Module]]:
        """The modules of all chunks, named with the number of the chunk in front.

        Walked once: a walk takes 1 ms, several times an iteration, and a model that is
        trained gets no other modules: the optimizer has the parameters of these.
        Buffers and FP8 scales may be assigned anew, and are looked up in the modules.
        """
        numbered = enumerate(self.model)
        return [
            pair
            for index, chunk in numbered
            for pair in chunk.named_modules(prefix=str(index))
        ]


def named_state(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that the next iteration depends on, under a name that is
    stable over restarts.

    Of weights that the next forward pass gathers, the rank's shard: others are still
    those of an earlier step.
    """
    held = shards(state.inner_optimizers)
    for index, chunk in enumerate(state.model):
        for name, parameter in chunk.named_parameters():
            is_partial = gathers_in_forward(chunk) and parameter in held
            for suffix, tensor in fp8_linear.forward_tensors(parameter).items():
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
    # else the CPU stand-in's "CUDA" generator is the CPU's, which is there already
    if torch.cuda.is_available():
        yield "rng.cuda", torch.cuda.get_rng_state()
    for name, rng_state in sorted(_rng_tracker().get_states().items()):
        yield f"rng.{name}", rng_state


def digest_of(state: TrainingState) -> str:
    """Return a SHA-256, in hex, over names, types, shapes and bytes of this rank's
    whole state.
    """
    return whole_digest(named_state(state))


def tensor_digests(state: TrainingState) -> dict[str, str]:
    """Return the start of a SHA-256, in hex, of each tensor of this rank's whole state,
    by its name.
    """
    return digests_by_name(named_state(state))


def allocate_optimizer_state(state: TrainingState) -> None:
    """Give a fresh Adam zero moments and step 0, as its first step would.

    Megatron can neither save nor load an Adam that has not stepped yet: a fresh one, or
    one whose steps all overflowed.
    """
    for optimizer in state.inner_optimizers:
        optimizer_state.allocate(optimizer)


def sharded_state(state: TrainingState, *, is_loading: bool) -> dict[str, Any]:
    """Return the state as a sharded state dict for `dist_checkpointing`. Collective.

    Model and optimizer are in Megatron's own form, which its other tools load; values
    that Megatron leaves out and exactness needs are in per-rank objects beside it.
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
    # FP8 parameters are cast again from their masters: `gather_parameters`
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
    # Megatron saves the numbers that they represent, and numbers that are stored again
    # get another scale
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
    """Set the step count of torch's Adam on a rank where it has no parameters, as the
    experts' on a dense stage.
    """
    # Megatron reads the count off a parameter, and saves rank 0's for all ranks
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
    """Load a sharded state dict; generators that it lacks stay as they are. FP8
    parameters are cast by the caller.
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
    """Return the chunks without their data-parallel wrapper, under the keys that
    Megatron's checkpoints use.
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
    """Load one inner optimizer around three faults of Megatron's with torch's Adam,
    whose step count is a tensor.
    """
    sharded, inner = part.pop("param_state", None), torch_optimizer(optimizer)
    if sharded is None and inner and counts_steps_per_parameter(optimizer):
        # Megatron does not save a count of 0: that of a run whose steps all overflowed
        part.get("optimizer", part).setdefault("state", {}).setdefault(
            "common_step", torch.tensor(0.0)
        )
    optimizer.load_state_dict(part)
    slots = list(cast("Any", inner).state.values()) if inner else []
    # copies: Megatron hands one tensor to all parameters, and Adam would count it up
    # once for each of them. Set aside: Megatron looks for step counts among a sharded
    # optimizer's tensors, where it did not save them
    steps = [
        slot.pop("step").detach().clone() if torch.is_tensor(slot.get("step")) else None
        for slot in slots
    ]
    if sharded is not None:
        # Megatron saves all states as FP32, and FusedAdam takes these as int16 only
        if keeps_remainders(optimizer):
            for entry in sharded.values():
                entry["param"] = entry["param"].to(torch.int16)
        cast("Any", optimizer).load_parameter_state_from_fully_reshardable(sharded)
    for slot, step in zip(slots, steps, strict=True):
        if step is not None:
            slot["step"] = step


def small_state(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return copies, on the host, of an iteration's start, beside parameters, moments
    and buffers.

    These are the states of all generators, the loss scalers, and the positions in the
    learning-rate schedule and in data without random access.
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
    """Restore the result of `small_state`; learning rates follow from the position in
    the schedule.
    """
    _restore_rng_tensors(under("rng.", saved))
    state.scheduler.num_steps = int(saved["scheduler.num_steps"])
    if _LENGTHS in saved:  # else an older version has saved it
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
            # counters as plain numbers: as a tensor, Megatron's `+= 1` would change the
            # saved one in place
            scaler.load_state_dict(
                {
                    key: value if value.ndim else value.item()
                    for key, value in values.items()
                }
            )


def buffers(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return copies, on the host, of all module buffers, persistent or not, and of
    scales of FP8 layers.

    One transfer for all of them: this is part of each iteration.
    """
    named = _buffers(state)
    return dict(zip(named, TRANSFERS.fetch(list(named.values())), strict=True))


def restore_buffers(state: TrainingState, saved: Mapping[str, torch.Tensor]) -> None:
    """Restore the result of `buffers`."""
    for name, buffer in _buffers(state).items():
        buffer.copy_(saved[name])


def _buffers(state: TrainingState) -> dict[str, torch.Tensor]:
    return dict(buffers_of(state.modules))


def _rng_tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()


def _rng_tensors() -> dict[str, torch.Tensor]:
    """Return the states of all generators as tensors, so that they travel without
    pickling.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = cast(
        "tuple[Any, ...]", np.random.get_state()
    )
    return {
        # by way of NumPy: torch takes four times as long for a list of 626 numbers
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
