"""Compares a real run with a simulation of the same job under the same faults.

The table has the prediction, the truth and the deviation. The module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from launcher.simulator.real_run import RealRun, RunFacts, facts_of, read_run, setup_of
from moe_ckpt.events import LoggedEvent
from moe_ckpt.sim.cluster import simulate
from moe_ckpt.sim.emit import rank_events
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.saving import Setup

LONG_S = 1e9
"""Duration of a simulation that no run reaches, so that a run ends with its last
iteration.
"""

_NAMES = {
    "iterations": "iterations",
    "iteration_s": "iteration, s (given)",
    "wall_s": "all iterations but the first, s",
    "stall_s": "stall, s an iteration",
    "num_recoveries": "recoveries",
    "recovery_s": "a fault, s",
    "trained_again": "iterations trained again by all",
    "interval": "window or interval, iterations",
    "snapshot_bytes": "largest snapshot, bytes",
    "host_bytes": "host memory, bytes",
}


def compare(
    folder: Path, cluster: ClusterConfig, iteration_s: float | None
) -> list[str]:
    """Return the lines of a table for people.

    Args:
        folder: The folder of the real run.
        cluster: The cluster of the simulation.
        iteration_s: The seconds of an iteration. None: as in the real run.

    Raises:
        ConfigError: The folder is not that of a run (the error names the folder), or
            the run committed no iteration.
    """
    run = read_run(folder)
    # the simulation takes the real iteration's seconds, because the comparison is about
    # the price of saving and of faults
    truth = facts_of(run.ranks)
    predicted = predict_run(
        run, cluster, iteration_s or truth.iteration_s, truth.iterations
    )
    form = "{:<34} {:>14} {:>14} {:>10}"
    return [
        form.format("", "predicted", "true", "deviation"),
        *(form.format(*row) for row in _rows(predicted, truth)),
    ]


def predict_run(
    run: RealRun, cluster: ClusterConfig, iteration_s: float | None, iterations: int
) -> RunFacts:
    """Return the facts of a simulation of the same job, faults and iterations.

    The simulation's events are read like the events of a real run.

    Args:
        run: The real run.
        cluster: The cluster of the simulation.
        iteration_s: The seconds of an iteration. None: by the cluster's constants.
        iterations: The number of iterations to simulate.
    """
    return facts_of(
        predict_events(run, setup_of(run, cluster, iteration_s), iterations)
    )


def predict_events(
    run: RealRun, setup: Setup, iterations: int
) -> list[list[LoggedEvent]]:
    """Return each rank's events in a simulation of a run's job under the run's faults.

    Args:
        run: The real run.
        setup: The job on a cluster.
        iterations: The number of iterations to simulate.
    """
    saving = plan_saving(run.settings.ckpt, setup)
    outcome = simulate(
        setup,
        saving,
        run.kills,
        duration_s=LONG_S,
        last_iteration=iterations,
        in_order=True,
    )
    return [rank_events(setup, saving, outcome, rank) for rank in range(run.world_size)]


def _rows(predicted: RunFacts, truth: RunFacts) -> Iterator[tuple[str, str, str, str]]:
    pairs = [
        (_NAMES[field.name], getattr(predicted, field.name), getattr(truth, field.name))
        for field in fields(RunFacts)
    ]
    for name, guess, fact in [("ETTR", predicted.ettr, truth.ettr), *pairs]:
        deviation = f"{(guess - fact) / fact:+.1%}" if fact else "-"
        yield name, f"{guess:.5g}", f"{fact:.5g}", deviation
