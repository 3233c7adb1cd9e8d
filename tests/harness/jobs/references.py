"""Reference runs: trainings without faults, each run once in a test session."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ckpt.events import IterationCommitted, StateDigest
from tests.harness.jobs.training import events_of, train
from tests.made_once import made_once


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a run that must equal those of the same training without faults.

    Equal means bit for bit.
    """

    digest_per_rank: list[str]
    """Digests of the states at the end, by rank."""

    eval_loss: float
    losses: Mapping[int, float]
    """Losses by iteration."""

    digests: Mapping[int, Sequence[str]] = field(default_factory=dict, compare=False)
    """By iteration: digests of the states, by rank.

    Excluded from comparisons, because most runs log no such digests.
    """


def outcome_of(run: Path, result: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a run.

    Args:
        run: The run folder. Ranks that logged the same iteration must have the same
            loss.
        result: The content of the run's result.json.
    """
    losses: dict[int, float] = {}
    digests: dict[int, list[str]] = defaultdict(list)
    for rank in range(len(result["digest_per_rank"])):
        for event in events_of(run, IterationCommitted, rank):
            assert losses.setdefault(event.iteration, event.loss) == event.loss, (
                rank,
                event,
            )
        for event in {
            event.iteration: event for event in events_of(run, StateDigest, rank)
        }.values():
            digests[event.iteration].append(event.digest)
    return Outcome(
        digest_per_rank=result["digest_per_rank"],
        eval_loss=result["eval_loss"],
        losses=losses,
        digests=dict(digests),
    )


def uninterrupted(world_size: int, *overrides: str) -> Outcome:
    """Return the outcome of a run without faults, supervisors and checkpoints.

    Args:
        world_size: The number of ranks.
        overrides: Settings of the launcher.
    """
    return made_once(_uninterrupted, world_size, *overrides)


def _uninterrupted(world_size: int, *overrides: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        result = train(world_size, Path(folder), *overrides, "run.digest_every_iters=1")
        return outcome_of(Path(folder), result)
