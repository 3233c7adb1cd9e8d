"""Whole runs on forked ranks for tests, like those of `torchrun launcher/train.py`."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from launcher.config import Settings, compose_settings
from launcher.run import run
from moe_ckpt.events import IterationCommitted, read_events
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.types import ReadyGradients
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.made_once import made_once
from tests.scenarios import ROOT
from tests.waits import JOB_S

T = TypeVar("T")

# the LICENSE has the same bytes in every checkout
LICENSE_AS_TEXT = ("data=text", f"data.path={ROOT / 'LICENSE'}")

FAST = (
    "train.sequence_length=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "model.num_layers=2",
    "model.num_experts=4",
    "model.hidden_size=32",
    "model.moe_ffn_hidden_size=32",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "train.eval_batches=1",
    "run.tensorboard=false",
    "train.lr_warmup_iters=1",
    "run.progress=none",
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A SIGKILL of ranks at a point: a real death, with nothing flushed or closed."""

    ranks: tuple[int, ...]
    iteration: int
    phase: str
    """start, gradients, before-save, while-saving or after-save."""


class KillingHooks:
    """Hooks that kill this process at the point of a `Kill`, else call `inner`."""

    def __init__(self, inner: TrainingHooks, kill: Kill, folder: Path) -> None:
        self._inner = inner
        self._kill = kill
        self._folder = folder

    def iteration_started(self, iteration: int) -> None:
        self._die_at(iteration, "start")
        self._inner.iteration_started(iteration)

    def loss_known(self, iteration: int, loss: float) -> None:
        self._inner.loss_known(iteration, loss)

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        self._die_at(iteration, "gradients")
        return self._inner.gradients_ready(iteration, gradients)

    def update_applied(self, iteration: int) -> None:
        self._inner.update_applied(iteration)

    def step_committed(self, iteration: int) -> None:
        self._die_at(iteration, "before-save")
        if (iteration, "while-saving") == (self._kill.iteration, self._kill.phase):
            threading.Thread(
                target=self._die_once_a_directory_is_there, daemon=True
            ).start()
        self._inner.step_committed(iteration)
        self._die_at(iteration, "after-save")

    def _die_at(self, iteration: int, phase: str) -> None:
        if (iteration, phase) == (self._kill.iteration, self._kill.phase):
            self._die()

    def _die_once_a_directory_is_there(self) -> None:
        directory = self._folder / "checkpoints" / f"iter_{self._kill.iteration:07d}"
        while not directory.exists():
            pass
        self._die()

    def _die(self) -> None:
        if int(os.environ["RANK"]) in self._kill.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    world_size: int,
    folder: Path,
    *overrides: str,
    kill: Kill | None = None,
    max_file_bytes: int | None = None,
    setup: Callable[[], None] | None = None,
    timeout_s: float = JOB_S,
) -> dict[str, Any]:
    """Train on forked ranks and return the result of rank 0.

    Args:
        world_size: The number of ranks.
        folder: The run folder.
        overrides: Settings of the launcher.
        kill: Kills ranks during the training.
        max_file_bytes: The size in bytes beyond which the kernel lets no file grow, as
            with a full disk.
        setup: A module's function that each rank calls before the training.
        timeout_s: Time limit, in seconds.

    Raises:
        RankFailedError: A rank failed.
    """
    settings = job_settings(folder, *overrides)
    arguments = (settings, kill, folder, max_file_bytes, setup)
    return run_ranks(world_size, _run_rank, *arguments, timeout_s=timeout_s)[0]


def job_settings(folder: Path, *overrides: str) -> Settings:
    """Return the settings of a small run in `folder`."""
    settings = small_settings(*overrides)
    composed_yaml = settings.composed_yaml.replace(
        "  dir: null\n", f"  dir: {folder}\n"
    )
    return replace(
        settings,
        run=replace(settings.run, dir=str(folder)),
        composed_yaml=composed_yaml,
    )


def small_settings(*overrides: str) -> Settings:
    """Return the settings of a small run, composed once in a test session.

    Hydra needs longer to compose settings than a rank needs for an iteration.
    """
    return made_once(_compose, *overrides)


def _compose(*overrides: str) -> Settings:
    return compose_settings(fast(*overrides))


def fast(*overrides: str) -> tuple[str, ...]:
    """Return the overrides of a small run, followed by `overrides`.

    The training data is the LICENSE unless `overrides` choose other data.
    """
    chooses_data = any(override.startswith("data=") for override in overrides)
    return (*FAST, *(() if chooses_data else LICENSE_AS_TEXT), *overrides)


def _run_rank(
    settings: Settings,
    kill: Kill | None,
    folder: Path,
    max_file_bytes: int | None,
    setup: Callable[[], None] | None,
) -> dict[str, Any]:
    if setup:
        setup()
    if max_file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    def wrap(hooks: TrainingHooks) -> TrainingHooks:
        return KillingHooks(hooks, kill, folder) if kill else hooks

    return run(settings, store=rank_store(), around_hooks=wrap)


def losing(*lost: tuple[Any, ...]) -> tuple[str, ...]:
    """Return overrides of a run with ckpt=moevement that loses state.

    Args:
        lost: The losses, each as (iteration, stage, phase[, data-parallel rank]).
    """
    keys = ("iteration", "stage", "phase", "dp_rank")
    losses = (
        ",".join(f"{key}:{value}" for key, value in zip(keys, loss, strict=False))
        for loss in lost
    )
    return (
        "ckpt=moevement",
        "fault=state_loss",
        "fault.at=[" + ",".join(f"{{{loss}}}" for loss in losses) + "]",
    )


def events_of(folder: Path, kind: type[T], global_rank: int = 0) -> list[T]:
    """Return one rank's events of a kind, of all processes of the rank, in order."""
    logged = read_events(folder / "events" / f"rank{global_rank:04d}.jsonl")
    return [entry.event for entry in logged if isinstance(entry.event, kind)]


def losses(folder: Path) -> dict[int, float]:
    """Return losses by iteration; an iteration that ran twice must have one loss."""
    found: dict[int, float] = {}
    for event in events_of(folder, IterationCommitted):
        assert found.setdefault(event.iteration, event.loss) == event.loss, event
    return found
