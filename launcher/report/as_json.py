"""A report as JSON, for other programs.

The report has the quantities, parts and recoveries of each run, with units in the
names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from launcher.report.episodes import Episode
from launcher.report.facts import Facts
from launcher.report.parts import PagePart
from launcher.report.summary import QUANTITIES, headline

_VERSION = 1


def to_json(runs: Sequence[Facts]) -> str:
    """Return the whole report; unknown numbers are null."""
    # allow_nan=False, because parsers of other programs refuse NaN
    return (
        json.dumps(
            {"version": _VERSION, "runs": [_run(facts) for facts in runs]},
            indent=1,
            allow_nan=False,
        )
        + "\n"
    )


def _run(facts: Facts) -> dict[str, Any]:
    return {
        "name": facts.run.name,
        "path": str(facts.run.path),
        "policy": facts.run.policy,
        "state": facts.run.state,
        "world_size": facts.run.world_size,
        "problems": list(facts.run.problems),
        "summary": headline(facts),
        "quantities": {each.key: _known(each.of(facts)) for each in QUANTITIES},
        "seconds_by_rank": {
            str(rank): {part.label: of[part] / 1e6 for part in PagePart}
            for rank, of in sorted(facts.totals_us.items())
        },
        "faults": dict(facts.faults),
        "recoveries": [_recovery(episode) for episode in facts.episodes],
        "result": {key: _known(value) for key, value in facts.run.result.items()},
    }


def _recovery(episode: Episode) -> dict[str, Any]:
    return {
        "start_s": episode.start_us / 1e6,
        "end_s": episode.end_us / 1e6,
        "causes": list(episode.causes),
        "goes_on_after_iteration": episode.iteration,
        "replayed_iters": episode.replayed_iters,
        "replaying_ranks": list(episode.replaying_ranks),
        "fetched_bytes": episode.fetched_bytes,
        "mean_seconds": {
            part.label: value / 1e6 for part, value in episode.mean_us.items()
        },
        "ranks": [
            {
                "rank": each.rank,
                "part": each.part.label,
                "start_s": each.start_us / 1e6,
                "end_s": each.end_us / 1e6,
                "note": each.note,
            }
            for each in episode.stretches
        ],
    }


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value
