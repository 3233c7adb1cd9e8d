"""Writes the folder of a simulated run, in the form of a real run, for reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launcher.simulator.runner import Result
from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import write_events
from moe_ckpt.sim.emit import SIMULATED, rank_events
from moe_ckpt.sim.timeline import Trained

MOST_LINES = 2_000_000
"""Number of events of a run that can be written, at most."""

_LINES_AN_ITERATION = 2  # a rank logs the iteration, and a snapshot


def write_run(folder: Path, result: Result) -> None:
    """Write the first simulated run into a new folder.

    Args:
        folder: The folder, which is new or empty.
        result: The result of the simulation.

    Raises:
        ConfigError: The run is too long, or the folder is not empty or cannot be
            written. The error names `out`.
    """
    world_size = result.simulation.setup.job.layout.world_size
    trained = sum(
        stretch.iterations
        for stretch in result.first.timeline
        if isinstance(stretch, Trained)
    )
    num_lines = _LINES_AN_ITERATION * trained * world_size
    wanted = (
        f"a run of at most {MOST_LINES} events: a shorter duration_s, or fewer ranks"
    )
    require(
        num_lines <= MOST_LINES,
        "out",
        f"about {num_lines} of {world_size} ranks",
        wanted,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require(
            not any(folder.iterdir()),
            "out",
            str(folder),
            "a folder that is new or empty",
        )
        _write(folder, result, world_size)
    except OSError as error:
        raise ConfigError(
            f"out: got {str(folder)!r}, wanted a folder that can be written ({error})"
        ) from error


def _write(folder: Path, result: Result, world_size: int) -> None:
    setup, outcome = result.simulation.setup, result.first
    (folder / "config.yaml").write_text(result.simulation.composed_yaml)
    described = {
        "run_id": SIMULATED,
        "clock_origin_unix_s": 0.0,
        "command": sys.argv,
        "world_size": world_size,
        "backend": SIMULATED,
    }
    (folder / "run.json").write_text(json.dumps(described, indent=1) + "\n")
    for rank in range(world_size):
        write_events(
            folder / "events" / f"rank{rank:04d}.jsonl",
            rank_events(setup, result.saving, outcome, rank),
        )
    summary = {
        "iteration": outcome.iterations,
        "loss": None,
        "eval_loss": None,
        "wall_s": round(outcome.ledger.wall_s, 3),
        "faults_survived": outcome.num_faults,
        "digest": SIMULATED,
        "ettr": outcome.ledger.ettr,
        "plt": outcome.plt,
        "mlt": outcome.mlt,
    }
    (folder / "result.json").write_text(json.dumps(summary, indent=1) + "\n")
