"""Whole runs on forked ranks, as `torchrun launcher/train.py` makes them, for tests."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config import compose_settings
from launcher.run import run
from moe_ckpt.events import IterationCommitted, read_events
from moe_ckpt.ports import TrainingHooks
from tests.ranks import rank_store, run_ranks

FAST = (
    "train.sequence_length=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "model.hidden_size=32",
    "model.moe_ffn_hidden_size=32",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "train.eval_batches=1",
    "run.tensorboard=false",
    "run.progress=none",
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL these ranks at this point of this iteration: a real death, with nothing flushed or closed."""

    ranks: tuple[int, ...]
    iteration: int
    phase: str


class KillingHooks:
    """Dies on cue, else passes on."""

    def __init__(self, inner: TrainingHooks, kill: Kill) -> None:
        self._inner = inner
        self._kill = kill

    def iteration_started(self, iteration: int) -> None:
        self._die_at(iteration, "start")
        self._inner.iteration_started(iteration)

    def gradients_ready(self, iteration: int) -> None:
        self._die_at(iteration, "gradients")
        self._inner.gradients_ready(iteration)

    def step_committed(self, iteration: int) -> None:
        self._die_at(iteration, "before-save")
        self._inner.step_committed(iteration)
        self._die_at(iteration, "after-save")

    def _die_at(self, iteration: int, phase: str) -> None:
        if (iteration, phase) == (self._kill.iteration, self._kill.phase) and int(
            os.environ["RANK"]
        ) in self._kill.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    world_size: int, folder: Path, *overrides: str, kill: Kill | None = None, timeout_s: float = 90.0
) -> dict[str, Any]:
    """Run on forked ranks with run.dir=`folder` and return the result; raises RankFailedError where a rank fails."""
    arguments = (*FAST, f"run.dir={folder}", *overrides)
    return run_ranks(world_size, _run_rank, arguments, kill, timeout_s=timeout_s)[0]


def _run_rank(arguments: tuple[str, ...], kill: Kill | None) -> dict[str, Any]:
    wrap = (lambda hooks: KillingHooks(hooks, kill)) if kill else (lambda hooks: hooks)
    return run(compose_settings(arguments), store=rank_store(), around_hooks=wrap)


def committed(folder: Path, global_rank: int = 0) -> list[IterationCommitted]:
    """Return what every iteration reported, in the order in which they ran."""
    logged = read_events(folder / "events" / f"rank{global_rank:04d}.jsonl")
    return [entry.event for entry in logged if isinstance(entry.event, IterationCommitted)]
