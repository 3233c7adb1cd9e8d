"""Compares the state of a training script after each iteration for `moe-ckpt prove`.

    from moe_ckpt.observe import observe

    for iteration in range(first, last + 1):
        train_one(iteration)
        observe(iteration, model=model, optimizer=optimizer)

Without `moe-ckpt prove` the call returns at once. The loops of Megatron-LM,
Megatron-Bridge and ms-swift need no call. Must not: communicate, or change a state,
except in the control of a proof.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.digests import NamedTensors, digests_by_name
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import EventLog, StateDigest, TensorDigests, WorkerStarted
from moe_ckpt.observation import Order, read_order
from moe_ckpt.private_files import make_private, replace_private


def observe(iteration: int, **state: Any) -> None:
    """Log digests of this rank's state after an iteration, under `moe-ckpt prove`.

    Call this function on each rank after each iteration, before or after the script's
    own save.

    Args:
        iteration: The number of the iteration, one more than that of the one before.
        **state: Everything on which the next iteration depends, by names: modules,
            optimizers (of torch or Megatron-Core) and other objects with `state_dict`,
            and tensors, numbers and texts in nested dictionaries and lists, such as
            `rng=torch.get_rng_state()`.

    Raises:
        ConfigError: A part of the state is of another kind.

    Example:
        >>> observe(1, model=torch.nn.Linear(2, 2))  # does nothing here
    """
    order = read_order()
    if order is None:
        return
    named = list(named_tensors(state))
    _observer(order).log(iteration, named, lambda: _set_first_to_zero(named))


def named_tensors(state: Mapping[str, Any]) -> NamedTensors:
    """Yield the tensors of a state, under names that are the paths to the tensors.

    Args:
        state: As in `observe`. Of a distributed tensor the local shard is taken.

    Raises:
        ConfigError: A part of the state is of another kind.
    """
    for name, value in state.items():
        yield from _flat(str(name), value)


def _flat(name: str, value: Any) -> NamedTensors:
    if isinstance(value, torch.Tensor):
        to_local: Callable[[], torch.Tensor] | None = getattr(value, "to_local", None)
        yield name, to_local() if to_local else value
    elif hasattr(value, "chained_optimizers"):  # Megatron-Core's, several optimizers
        yield from _flat(name, value.chained_optimizers)
    elif hasattr(value, "get_loss_scale"):  # Megatron-Core's, around one of torch
        # this optimizer's own state_dict leaves out the masters and moments that only
        # this rank has
        yield from _flat(f"{name}.loss_scale", value.get_loss_scale())
        yield from _flat(name, value.optimizer.state_dict())
        yield from _flat(
            f"{name}.masters", [group["params"] for group in value.param_groups]
        )
    elif hasattr(value, "state_dict"):
        yield from _flat(name, value.state_dict())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _flat(f"{name}.{number}", each)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        yield name, torch.from_numpy(np.array(value))
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield name, torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
    else:
        wanted = "an object with state_dict, a tensor, or a nest of them and of numbers"
        raise ConfigError(
            f"observe: {name}: got {type(value).__name__}, wanted {wanted}"
        )


def _set_first_to_zero(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Set the first tensor of floating-point numbers to zero, in place."""
    for _, tensor in named:
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.zero_()
            return


class Observer:
    """One rank's digests in a run of a proof, and the ordered death and control.

    Args:
        order: The order to this run's ranks.
        global_rank: This rank.
        world_size: The number of ranks of the command.
    """

    def __init__(self, order: Order, global_rank: int, world_size: int) -> None:
        self._order = order
        self._global_rank = global_rank
        run = Path(order.run)
        make_private(run)
        if global_rank == 0:
            replace_private(run / "run.json", json.dumps({"world_size": world_size}))
        path = run / "events" / f"rank{global_rank:04d}.jsonl"
        self._events = EventLog(path, global_rank=global_rank, clock_origin_unix_s=0.0)
        was_killed = order.killed.exists()
        self._spoils = was_killed and order.spoil_after_resume
        about = {"pid": os.getpid(), "host": socket.gethostname(), "device": ""}
        self._events.append(WorkerStarted(**about, incarnation=int(was_killed)))

    def log_loaded(self, done: int, named: NamedTensors) -> None:
        """Log digests of the loaded state, after `done` iterations.

        Training begins with this state.
        """
        self._events.append(
            TensorDigests(iteration=done, digests=digests_by_name(named))
        )

    def log(
        self, iteration: int, named: NamedTensors, spoil: Callable[[], None]
    ) -> None:
        """Log digests of the state after an iteration.

        Then die, or spoil the state, if the order demands that.

        Args:
            iteration: The iteration.
            named: The tensors of the state.
            spoil: Changes the state, in a control.
        """
        digests = digests_by_name(named)
        whole = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
        self._events.append(StateDigest(iteration=iteration, digest=whole))
        self._events.append(TensorDigests(iteration=iteration, digests=digests))
        if self._spoils:
            self._spoils = False
            spoil()
        if (self._global_rank, iteration) == (
            self._order.kill_rank,
            self._order.kill_iteration,
        ):
            self._die()

    def _die(self) -> None:
        """Kill this process, unless one of this rank has already done so in the run."""
        try:
            self._order.killed.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def make_observer(order: Order) -> Observer:
    """Return the observer of this process, with the rank of torch or the launcher."""
    if dist.is_available() and dist.is_initialized():
        return Observer(order, dist.get_rank(), dist.get_world_size())
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return Observer(order, int(rank), int(world_size))


_observer = functools.cache(make_observer)
