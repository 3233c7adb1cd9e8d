"""Digests of a third-party training loop that runs without an attachment.

An attached run is compared with the digests of `PlainRun`, another run of the same
command with the digests of `ProvenRun` (`moe-ckpt prove`). Must not: change the run,
except in a control, or communicate before the last iteration.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from moe_ckpt.elastic.torchrun_variables import read_launch
from moe_ckpt.megatron.checks import StateChecks, forget_first_moments, job_digest
from moe_ckpt.megatron.determinism import make_deterministic
from moe_ckpt.megatron.state import TrainingState, named_state
from moe_ckpt.observation import Order
from moe_ckpt.observe import Observer, make_observer
from moe_ckpt.run_folder import open_run_folder
from moe_ckpt.run_settings import RunSettings


class Watch(Protocol):
    """An observer of a loop's iterations."""

    def begin(self, state: TrainingState) -> None:
        """Note that training begins.

        Args:
            state: The training state as built or loaded.
        """
        ...

    def iteration_begins(self, iteration: int) -> None:
        """Note that an iteration begins, counted from 1."""
        ...

    def iteration_ends(self, iteration: int) -> None:
        """Note that the state is the state after the iteration."""
        ...

    def finish(self) -> None:
        """Note that all iterations are done."""
        ...


def watch_loop(
    training: Any, stepping: Any, iteration_of: Callable[..., int], watch: Watch
) -> None:
    """Wrap the `train` and `train_step` of a loop so that both call a watch.

    Args:
        training: The module that calls `train`.
        stepping: The module that calls `train_step`.
        iteration_of: Returns the number of an iteration, counted from 1, given the
            arguments of `train_step`.
        watch: The observer of the iterations.
    """

    def state_of(
        _: Any, model: Any, optimizer: Any, scheduler: Any, *__: Any, **___: Any
    ) -> TrainingState:
        return TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)

    _watch(training, stepping, state_of, iteration_of, watch)


def watch_trainer(base: Any, watch: Watch) -> None:
    """Wrap the `train` and `train_step` of ms-swift's trainers.

    Args:
        base: The base class of the trainers.
        watch: The observer of the iterations.
    """

    def state_of(trainer: Any, *_: Any) -> TrainingState:
        scheduler = trainer.opt_param_scheduler
        return TrainingState(
            model=trainer.wrapped_models,
            optimizer=trainer.optimizer,
            scheduler=scheduler,
        )

    _watch(base, base, state_of, lambda trainer, _: trainer.state.iteration + 1, watch)


def _watch(
    training: Any,
    stepping: Any,
    state_of: Callable[..., TrainingState],
    iteration_of: Callable[..., int],
    watch: Watch,
) -> None:
    train, train_step = training.train, stepping.train_step

    @functools.wraps(train_step)
    def watched_step(*arguments: Any, **options: Any) -> Any:
        iteration = iteration_of(*arguments, **options)
        watch.iteration_begins(iteration)
        outcome = train_step(*arguments, **options)
        watch.iteration_ends(iteration)
        return outcome

    @functools.wraps(train)
    def watched(*arguments: Any, **options: Any) -> Any:
        watch.begin(state_of(*arguments, **options))
        outcome = train(*arguments, **options)
        watch.finish()
        return outcome

    training.train, stepping.train_step = watched, watched_step


class PlainRun:
    """The digests and the result.json of one rank in a plain run.

    The run folder has the same form as the folder of an attached run.

    Args:
        settings: The settings of the run.
    """

    _checks: StateChecks
    _state: TrainingState

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._launch = read_launch()

    def begin(self, state: TrainingState) -> None:
        """Open the run folder and the log of events. Collective."""
        config: Any = state.model[0].config
        if torch.cuda.is_available() and config.deterministic_mode:
            # as in the attached run, which is compared with this run bit for bit
            make_deterministic()
        self._folder = open_run_folder(self._settings.job.folder, self._launch)
        events = self._folder.open_events(self._launch.global_rank)
        self._state = state
        self._checks = StateChecks(self._settings.job.checks, state, events)

    def iteration_begins(self, iteration: int) -> None:
        """Do nothing."""

    def iteration_ends(self, iteration: int) -> None:
        """Log a digest every `run.digest_every_iters` iterations."""
        self._checks.log_where_due(iteration)

    def finish(self) -> None:
        """Write result.json. Collective."""
        digest, digests = job_digest(self._state)
        if self._launch.global_rank == 0:
            wall_s = round(time.time() - self._folder.clock_origin_unix_s, 3)
            self._folder.write_result(
                {"wall_s": wall_s, "digest": digest, "digest_per_rank": digests}
            )


class ProvenRun:
    """The digests of one rank in a run of `moe-ckpt prove`.

    Args:
        order: The orders to the ranks beside training.
    """

    _state: TrainingState
    _observer: Observer
    _has_begun = False

    def __init__(self, order: Order) -> None:
        self._order = order

    def begin(self, state: TrainingState) -> None:
        """Open the log of digests."""
        self._state = state
        self._observer = make_observer(self._order)

    def iteration_begins(self, iteration: int) -> None:
        """Log, before the first iteration, the state that training begins with."""
        if not self._has_begun:
            self._has_begun = True
            self._observer.log_loaded(iteration - 1, named_state(self._state))

    def iteration_ends(self, iteration: int) -> None:
        """Log the state after an iteration.

        If so ordered, the rank then kills its process or damages its state.
        """
        state = self._state
        self._observer.log(iteration, named_state(state), lambda: _spoil(state))

    def finish(self) -> None:
        """Do nothing."""


def _spoil(state: TrainingState) -> None:
    """Damage a state, for a control.

    Drops an Adam's first moments; without Adam, sets the first weight to zero.
    """
    if not forget_first_moments(state):
        with torch.no_grad():
            next(state.model[0].parameters()).zero_()
