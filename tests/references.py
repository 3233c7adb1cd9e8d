"""Reference runs: the outcome of a training without faults, run once for each configuration and read by all workers.

Outcomes are files of a folder that lives as long as the test session, named by a hash of the overrides. A lock beside
each file lets one worker run the training while the others wait for its result.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from moe_ckpt.events import IterationCommitted, StateDigest
from tests.training import events_of, train

FOLDER = "MOE_CKPT_TEST_REFERENCES"
"""The environment variable that names the session's folder of outcomes; tests/conftest.py sets it."""

_BY_ITERATION = ("losses", "digests")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The parts of a run that must equal those of the same training without faults, bit for bit.

    `digests`, of each rank's state by iteration, take no part in comparisons: most runs log none.
    """

    digest_per_rank: list[str]
    eval_loss: float
    losses: Mapping[int, float]
    digests: Mapping[int, Sequence[str]] = field(default_factory=dict, compare=False)


def outcome_of(run: Path, result: Mapping[str, Any]) -> Outcome:
    """Return the outcome of the run in folder `run`; ranks that logged the same iteration must agree on its loss."""
    losses: dict[int, float] = {}
    digests: dict[int, list[str]] = defaultdict(list)
    for rank in range(len(result["digest_per_rank"])):
        for event in events_of(run, IterationCommitted, rank):
            assert losses.setdefault(event.iteration, event.loss) == event.loss, (rank, event)
        for event in {event.iteration: event for event in events_of(run, StateDigest, rank)}.values():
            digests[event.iteration].append(event.digest)
    return Outcome(
        digest_per_rank=result["digest_per_rank"], eval_loss=result["eval_loss"], losses=losses, digests=dict(digests)
    )


@functools.cache
def uninterrupted(world_size: int, *overrides: str) -> Outcome:
    """Return the outcome of a run of these overrides without faults, supervisors and checkpoints."""
    content = json.dumps([world_size, *overrides])
    path = Path(os.environ[FOLDER]) / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder:
                result = train(world_size, Path(folder), *overrides, "run.digest_every_iters=1", timeout_s=240.0)
                outcome = outcome_of(Path(folder), result)
            path.write_text(json.dumps(asdict(outcome)))
    stored = json.loads(path.read_text())
    by_iteration = {name: {int(iteration): of for iteration, of in stored[name].items()} for name in _BY_ITERATION}
    return Outcome(**stored | by_iteration)
