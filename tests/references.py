"""Reference runs: outcomes of trainings without faults, each of which is run once in a
test session.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ckpt.events import IterationCommitted, StateDigest
from tests.made_once import made_once
from tests.training import events_of, train


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The parts of a run that must equal those of the same training without faults, bit
    for bit.

    `digests`, of each rank's state by iteration, take no part in comparisons: most runs
    log none.
    """

    digest_per_rank: list[str]
    eval_loss: float
    losses: Mapping[int, float]
    digests: Mapping[int, Sequence[str]] = field(default_factory=dict, compare=False)


def outcome_of(run: Path, result: Mapping[str, Any]) -> Outcome:
    """Return the outcome of the run in folder `run`; ranks that logged the same
    iteration must agree on its loss.
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
    """Return the outcome of a run of these overrides without faults, supervisors and
    checkpoints.
    """
    return made_once(_uninterrupted, world_size, *overrides)


def _uninterrupted(world_size: int, *overrides: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        result = train(world_size, Path(folder), *overrides, "run.digest_every_iters=1")
        return outcome_of(Path(folder), result)
