"""Digests of a training loop that is not ours, in a run without an attachment: an attached run is compared with them.

Owns: the events and result.json of such a run. Must not: change the run, or communicate before the last iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from moe_ckpt.elastic.torchrun import read_launch
from moe_ckpt.megatron.checks import StateChecks, job_digest
from moe_ckpt.megatron.determinism import make_deterministic
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.run_folder import open_run_folder
from moe_ckpt.run_settings import RunSettings


def observe(training: Any, stepping: Any, iteration_of: Callable[..., int], settings: RunSettings) -> None:
    """Let the loop of this process log a digest every `run.digest_every_iters` iterations, unless this is 0.

    Args:
        training: The module that calls `train`.
        stepping: The module that calls `train_step`.
        iteration_of: Returns the number of an iteration, counted from 1, given the arguments of `train_step`.
        settings: The settings of the run.
    """

    def state_of(_: Any, model: Any, optimizer: Any, scheduler: Any, *__: Any, **___: Any) -> TrainingState:
        return TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)

    _observe(training, stepping, state_of, iteration_of, settings)


def observe_trainer(base: Any, settings: RunSettings) -> None:
    """Let ms-swift's trainers, of the class `base`, log digests as `observe` does."""

    def state_of(trainer: Any, *_: Any) -> TrainingState:
        scheduler = trainer.opt_param_scheduler
        return TrainingState(model=trainer.wrapped_models, optimizer=trainer.optimizer, scheduler=scheduler)

    _observe(base, base, state_of, lambda trainer, _: trainer.state.iteration + 1, settings)


def _observe(
    training: Any,
    stepping: Any,
    state_of: Callable[..., TrainingState],
    iteration_of: Callable[..., int],
    settings: RunSettings,
) -> None:
    if not settings.job.checks.digest_every_iters:
        return
    train, train_step = training.train, stepping.train_step
    plain = _PlainRun(settings)

    def observed_step(*arguments: Any, **options: Any) -> Any:
        iteration = iteration_of(*arguments, **options)
        outcome = train_step(*arguments, **options)
        plain.checks.log_where_due(iteration)
        return outcome

    def observed(*arguments: Any, **options: Any) -> Any:
        state = state_of(*arguments, **options)
        plain.begin(state)
        outcome = train(*arguments, **options)
        plain.finish(state)
        return outcome

    training.train, stepping.train_step = observed, observed_step


class _PlainRun:
    """The digests and the result of one rank."""

    checks: StateChecks

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._launch = read_launch()

    def begin(self, state: TrainingState) -> None:
        """Open the run folder and the log of events: training begins."""
        config: Any = state.model[0].config
        if torch.cuda.is_available() and config.deterministic_mode:
            make_deterministic()  # as in the attached run, which is compared with this one bit for bit
        self._folder = open_run_folder(self._settings.job.folder, self._launch)
        events = self._folder.open_events(self._launch.global_rank)
        self.checks = StateChecks(self._settings.job.checks, state, events)

    def finish(self, state: TrainingState) -> None:
        """Write result.json. Collective."""
        digest, digests = job_digest(state)
        if self._launch.global_rank == 0:
            wall_s = round(time.time() - self._folder.clock_origin_unix_s, 3)
            self._folder.write_result({"wall_s": wall_s, "digest": digest, "digest_per_rank": digests})
