"""What a real run took, from its folder, and the simulation of the same job under the same faults. No torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from launcher.config import AUTO, Settings, read_settings
from launcher.faults.log import read_faults
from launcher.layout import fit_layout
from launcher.simulation import popularity_of, shape_of
from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import (
    Event,
    HostMemoryUsed,
    IntervalChosen,
    IterationCommitted,
    LoggedEvent,
    Rejoined,
    SnapshotTaken,
    WindowChosen,
    read_events,
)
from moe_ckpt.faults import KILL_PHASES, Kill
from moe_ckpt.sim.costs import TimingConfig, estimate
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.job import BatchConfig, FormatsConfig, Job
from moe_ckpt.sim.saving import Setup

T = TypeVar("T")
FORMATS = {"bf16": (2.0, 12.0), "fp16": (2.0, 12.0), "fp32": (4.0, 12.0)}
"""Bytes of a parameter by `precision.dtype`: as forward uses it, and in its whole state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a run took, real or simulated. `iteration_s`: an iteration without what checkpointing adds.

    `wall_s` is from the first iteration's start to the last one's end. Bytes are those of the rank with the most.
    """

    iterations: int
    iteration_s: float
    wall_s: float
    stall_s: float
    num_recoveries: int
    recovery_s: float
    trained_again: int
    interval: float
    snapshot_bytes: float
    host_bytes: float

    @property
    def ettr(self) -> float:
        return self.iterations * self.iteration_s / self.wall_s


@dataclass(frozen=True, kw_only=True, eq=False)
class RealRun:
    """A run folder: its settings, its faults as they were carried out, and its ranks' events."""

    settings: Settings
    world_size: int
    kills: tuple[Kill, ...]
    ranks: Sequence[Sequence[LoggedEvent]]


def read_run(folder: Path) -> RealRun:
    """Read a run's folder. Raises ConfigError, naming it, for one that is not that of a run."""
    try:
        settings = read_settings(folder / "config.yaml")
        world_size = int(json.loads((folder / "run.json").read_text())["world_size"])
        ranks = [list(read_events(path)) for path in sorted((folder / "events").glob("rank*.jsonl"))]
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"real: {str(folder)!r} is not the folder of a run ({error!r})") from error
    require(len(ranks) == world_size, "real", f"events of {len(ranks)} ranks", f"those of all {world_size}")
    kills = tuple(
        Kill(
            rank=fault.rank, signal=fault.signal, scope=fault.scope, iteration=max(1, fault.iteration or 1), phase=phase
        )
        for fault in read_faults(folder)
        if (phase := fault.phase if fault.phase in KILL_PHASES else "forward")
    )
    return RealRun(settings=settings, world_size=world_size, kills=kills, ranks=ranks)


def setup_of(run: RealRun, cluster: ClusterConfig, iteration_s: float | None) -> Setup:
    """Return the run's job on a cluster with as many nodes as it had, and iterations of so many seconds."""
    settings, train = run.settings, run.settings.train
    wanted = settings.parallel.ranks_per_node
    ranks_per_node = 1 if wanted == AUTO else int(wanted)  # on one machine each rank counts as a node
    nodes = run.world_size // ranks_per_node
    cluster = replace(cluster, nodes=nodes, gpus_per_node=ranks_per_node)
    compute_bytes, full_bytes = FORMATS[settings.precision.dtype]
    batch = BatchConfig(
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        sequence_length=train.sequence_length,
    )
    job = Job(
        shape_of(settings.model, sequence_length=train.sequence_length, popularity=popularity_of(settings.model)),
        fit_layout(settings.parallel, run.world_size, num_experts=settings.model.num_experts),
        batch,
        FormatsConfig(compute_bytes=compute_bytes, full_bytes=full_bytes),
    )
    costs = estimate(job, cluster, TimingConfig(iteration_s=iteration_s, interleave=1))
    return Setup(job=job, cluster=cluster, costs=costs, mtbf_s=None)


def facts_of(ranks: Sequence[Sequence[LoggedEvent]]) -> Facts:
    """Return what a run took. Raises ConfigError for one that committed nothing."""
    first = ranks[0]
    commits = [(logged.t_s, logged.event) for logged in first if isinstance(logged.event, IterationCommitted)]
    require(bool(commits), "real", "no iteration", "the folder of a run that trained")
    events = [[logged.event for logged in rank] for rank in ranks]
    iterations = max(event.iteration for _, event in commits)
    last_s = next(t_s for t_s, event in commits if event.iteration == iterations)
    recoveries = _recoveries(events)
    snapshots = [event for event in _all(events, SnapshotTaken) if event.iteration > 0]
    return Facts(
        iterations=iterations,
        iteration_s=statistics.median(event.seconds - event.stall_s for _, event in commits),
        wall_s=last_s - commits[0][0] + commits[0][1].seconds,
        stall_s=statistics.median(event.stall_s for _, event in commits),
        num_recoveries=len(recoveries),
        recovery_s=statistics.median(recoveries) if recoveries else 0.0,
        trained_again=len(commits) - iterations,
        interval=_interval(events[0]),
        snapshot_bytes=max((event.size_bytes for event in snapshots), default=0),
        host_bytes=max((event.allocated_bytes for event in _all(events, HostMemoryUsed)), default=0),
    )


def _all(ranks: Sequence[Sequence[Event]], kind: type[T]) -> list[T]:
    return [event for rank in ranks for event in rank if isinstance(event, kind)]


def _recoveries(ranks: Sequence[Sequence[Event]]) -> list[float]:
    """Return the seconds of each recovery, on the rank that it took longest; of restarts nothing is told."""
    by_generation: dict[int, float] = {}
    for event in _all(ranks, Rejoined):
        seconds = event.detect_s + event.rebuild_s + event.fetch_s + event.replay_s
        by_generation[event.generation] = max(seconds, by_generation.get(event.generation, 0.0))
    return list(by_generation.values())


def _interval(events: Sequence[Event]) -> float:
    """Return the window or the interval that was chosen, the median where that changed; 0 where none was."""
    windows = [event.num_slots for event in events if isinstance(event, WindowChosen)]
    intervals = [event.every_iters for event in events if isinstance(event, IntervalChosen)]
    return statistics.median(windows or intervals or [0])
