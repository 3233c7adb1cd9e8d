"""A real run beside the simulation of the same job under the same faults: prediction,
truth, deviation. No torch.
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

LONG_S = 1e9  # a run ends with its last iteration
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
    """Return a table for people. Iterations are taken to be as long as those of the
    run, where nothing is given.

    Raises ConfigError, naming the folder, for one that is not that of a run.
    """
    run = read_run(folder)
    # the real iteration's seconds are given to the simulation: what is compared is the
    # price of saving and of faults
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
    """Return what a simulation says of the same job, faults and iterations, read like a
    real run's events.

    Without `iteration_s` an iteration takes what the cluster's constants say.
    """
    return facts_of(
        predict_events(run, setup_of(run, cluster, iteration_s), iterations)
    )


def predict_events(
    run: RealRun, setup: Setup, iterations: int
) -> list[list[LoggedEvent]]:
    """Return each rank's events in a simulation of a run's job, in this setup, under
    the same faults.
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
