"""A plain run of a training loop that is not ours, which writes digests of the state: the other side of a comparison.

Owns: the run folder's events and result.json of a run without supervisors. Must not: change or communicate anything
before the last iteration.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moe_ckpt.elastic.torchrun import read_launch
from moe_ckpt.events import EventLog
from moe_ckpt.megatron.checks import StateChecks
from moe_ckpt.megatron.state import TrainingState, digest_of
from moe_ckpt.run_folder import open_run_folder
from moe_ckpt.run_settings import RunSettings


def observe(training: Any, stepping: Any, iteration_of: Callable[..., int], settings: RunSettings) -> None:
    """Let the loop of this process log a digest every `run.digest_every_iters` iterations, where that is not 0.

    `training` is the module that calls `train`, `stepping` the one that calls `train_step`. `iteration_of` gives the
    number of an iteration, counted from 1, from the arguments of `train_step`.
    """
    if not settings.checks.digest_every_iters:
        return
    train, train_step = training.train, stepping.train_step
    checks: list[StateChecks] = []

    def observed_step(*arguments: Any, **options: Any) -> Any:
        iteration = iteration_of(*arguments, **options)
        outcome = train_step(*arguments, **options)
        checks[0].log_where_due(iteration)
        return outcome

    def observed(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **options: Any) -> Any:
        launch = read_launch()
        folder = open_run_folder(settings.folder, launch)
        origin = folder.clock_origin_unix_s
        events = EventLog(folder.events(launch.global_rank), global_rank=launch.global_rank, clock_origin_unix_s=origin)
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
        checks.append(StateChecks(settings.checks, state, events))
        outcome = train(forward_step, model, optimizer, scheduler, *rest, **options)
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, digest_of(state))
        if launch.global_rank == 0:
            whole = hashlib.sha256("\n".join(digests).encode()).hexdigest()
            wall_s = round(time.time() - origin, 3)
            folder.write_result({"wall_s": wall_s, "digest": whole, "digest_per_rank": digests})
        return outcome

    training.train, stepping.train_step = observed, observed_step
