"""Measurements of a real run's folder, and the setup and faults for its simulation.

The simulation has the same job and the same faults. The module imports no torch.
"""

from __future__ import annotations

import bisect
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from launcher.config import AUTO, Settings, read_settings
from launcher.faults.log import InjectedFault, read_faults
from launcher.layout import fit_layout
from launcher.simulator.config import shape_of
from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import (
    Event,
    GenerationEnded,
    GradientsSent,
    HostMemoryUsed,
    IntervalChosen,
    IterationCommitted,
    LoggedEvent,
    Rejoined,
    SnapshotTaken,
    StateResumed,
    WindowChosen,
    WorkerStarted,
    read_events,
)
from moe_ckpt.faults.schedule import KILL_PHASES, Kill
from moe_ckpt.sim.costs import TimingConfig, estimate
from moe_ckpt.sim.faults import LateKill
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.job import (
    STEP_LOG_BYTES,
    STEP_LOG_BYTES_ON_CPU,
    BatchConfig,
    FormatsConfig,
    Job,
)
from moe_ckpt.sim.pace import EVEN, Pace
from moe_ckpt.sim.saving import Setup
from moe_ckpt.state_format import BYTES

T = TypeVar("T")
_RECOVERING = ("build", "join", "recovery")
# phases between iterations count as the last point of an iteration
_ENDED = {"between": "snapshot", "done": "snapshot"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Measurements of a run, real or simulated."""

    iterations: int
    """Number of iterations."""

    iteration_s: float
    """Mean time of an iteration's first run, without stalls, in seconds."""

    wall_s: float
    """Time from the end of the first iteration to the end of the last iteration, in
    seconds.

    The first iteration is slow by itself.
    """

    stall_s: float
    """Median stall of an iteration, in seconds."""

    num_recoveries: int
    """Number of recoveries."""

    recovery_s: float
    """Mean cost of a recovery, in seconds; 0 without recoveries."""

    trained_again: int
    """Number of iterations that all ranks ran again."""

    interval: float
    """Median of the iterations between windows or whole snapshots; 0 if none was
    chosen.
    """

    snapshot_bytes: float
    """Bytes of the largest snapshot of a rank after iteration 0."""

    host_bytes: float
    """Host memory allocated on the rank with the most, in bytes."""

    @property
    def ettr(self) -> float:
        return (self.iterations - 1) * self.iteration_s / self.wall_s


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRecovery:
    """The price of a fault.

    The recovery lasts from the last iteration before the fault to the next new
    iteration. Meanwhile all ranks run `again` iterations a second time, or some ranks
    replay `replayed` iterations.
    """

    before: int
    """Last iteration before the fault."""

    until_s: float
    """End of the next new iteration, in seconds since the run's clock origin."""

    cost_s: float
    """Time between the ends of these two iterations, less the time of an iteration, in
    seconds.
    """

    again: int
    """Number of iterations that all ranks ran again."""

    replayed: int
    """Number of iterations that some ranks replayed."""

    resumed_s: float
    """Time to load from disk, in seconds."""

    rejoined: Rejoined | None
    """Event of the rank that joined last; None if no rank rejoined."""

    after_s: float
    """Time from that event to the end of the next new iteration, in seconds."""

    stalled_s: float
    """Part of `after_s` in which snapshots stopped training, in seconds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RealRun:
    """The content of a run folder."""

    settings: Settings
    """Settings of the run."""

    world_size: int
    """Number of ranks."""

    kills: tuple[Kill, ...]
    """Faults since the first commit, as they were carried out."""

    ranks: Sequence[Sequence[LoggedEvent]]
    """Events of each rank. Stalls of iterations are those of snapshots, see
    `stalled_by_snapshots`.
    """


def read_run(folder: Path, until: int | None = None) -> RealRun:
    """Return the content of a run folder.

    Args:
        folder: The folder.
        until: Faults after the first commit of this iteration are left out. None: all
            faults count.

    Raises:
        ConfigError: The folder is not that of a run. The error names the folder.
    """
    try:
        settings = read_settings(folder / "config.yaml")
        about = json.loads((folder / "run.json").read_text())
        world_size, origin_unix_s = (
            int(about["world_size"]),
            float(about["clock_origin_unix_s"]),
        )
        paths = sorted((folder / "events").glob("rank*.jsonl"))
        ranks = [stalled_by_snapshots(list(read_events(path))) for path in paths]
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"real: {str(folder)!r} is not the folder of a run ({error!r})"
        ) from error
    require(
        len(ranks) == world_size,
        "real",
        f"events of {len(ranks)} ranks",
        f"those of all {world_size}",
    )
    kills = kills_of(read_faults(folder), ranks, origin_unix_s, until)
    return RealRun(settings=settings, world_size=world_size, kills=kills, ranks=ranks)


def stalled_by_snapshots(rank: Sequence[LoggedEvent]) -> list[LoggedEvent]:
    """Return a rank's events, with only the stalls that snapshots cause.

    Such a stall is the part above the median stall of iterations without a snapshot.
    Logs and votes take that median in every iteration, so the median is a part of the
    iteration.
    """
    caused = {event.iteration + 1 for event in events_of([rank], SnapshotTaken)}
    caused |= {event.iteration for event in events_of([rank], GradientsSent)}
    commits = events_of([rank], IterationCommitted)
    usual_s = statistics.median(
        [event.stall_s for event in commits if event.iteration not in caused] or [0.0]
    )

    def stalled(event: Event) -> Event:
        if isinstance(event, IterationCommitted):
            return replace(event, stall_s=max(0.0, event.stall_s - usual_s))
        return event

    return [replace(each, event=stalled(each.event)) for each in rank]


def kills_of(
    faults: Sequence[InjectedFault],
    ranks: Sequence[Sequence[LoggedEvent]],
    origin_unix_s: float,
    until: int | None = None,
) -> tuple[Kill, ...]:
    """Return the faults of a run, for a simulation.

    The simulation meets the faults one after another. A fault becomes a kill in the
    recovery from the previous fault if both faults hit the same generation, or if the
    fault came before all ranks were together again. Any other fault becomes a kill in
    the phase of its iteration, as long after the start of the iteration as in the run.

    Args:
        faults: The faults, as they were carried out.
        ranks: The events of each rank.
        origin_unix_s: The run's clock origin, in seconds since the epoch.
        until: Faults after the first commit of this iteration are left out, as are
            faults before the first commit of the run. None: all later faults count.
    """
    logged = [
        each
        for rank in ranks
        for each in rank
        if isinstance(each.event, IterationCommitted | Rejoined)
    ]
    joined_s = {
        each.event.generation: origin_unix_s + each.t_s
        for each in logged
        if isinstance(each.event, Rejoined)
    }
    begins_s = sorted(origin_unix_s + each.t_s for each in logged)
    kills: list[Kill] = []
    for before, fault in _measured(faults, ranks, origin_unix_s, until):
        # after the join a worker takes its first snapshot and only then reports an
        # iteration, so the phase alone does not show a recovery
        is_recovering = fault.phase in _RECOVERING
        is_alone = (
            is_recovering and joined_s.get(fault.generation, math.inf) > fault.unix_s
        )
        if before and (
            is_alone or _are_together(before, fault, has_generations=bool(joined_s))
        ):
            kills.append(_kill_in_recovery(before, fault))
            continue
        number = None if before and is_recovering else max(1, fault.iteration or 1)
        begun = bisect.bisect_right(begins_s, fault.unix_s)
        kills.append(_kill_in(number, fault, begins_s[begun - 1] if begun else None))
    return tuple(kills)


def _measured(
    faults: Sequence[InjectedFault],
    ranks: Sequence[Sequence[LoggedEvent]],
    origin_unix_s: float,
    until: int | None,
) -> Iterator[tuple[InjectedFault | None, InjectedFault]]:
    """Yield the faults from the first commit to that of iteration `until`.

    Each fault comes with the previous fault. A fault that ended the generation of the
    last commit came after that commit, however soon. An ordered fault always counts.
    The order comes long before the fault, so an ordered fault is placed where its point
    was reached.
    """
    commits_s = first_commits(ranks)
    # measurements start at the end of the first iteration, and a job without a commit
    # begins anew after a fault
    first_s = origin_unix_s + min(commits_s.values(), default=0.0)
    last_s, ended = math.inf, None
    if until is not None:
        last_s, ended = (
            origin_unix_s + commits_s[until],
            _generation_at(commits_s[until], ranks),
        )
    in_order = sorted(faults, key=lambda fault: _came_s(fault, ranks, origin_unix_s))
    for before, fault in pairwise([None, *in_order]):
        assert fault is not None
        if fault.ordered or (
            first_s <= fault.unix_s <= last_s and fault.generation != ended
        ):
            yield before, fault


def _came_s(
    fault: InjectedFault, ranks: Sequence[Sequence[LoggedEvent]], origin_unix_s: float
) -> float:
    """Return the time of a fault, on the run's clock.

    The time of an ordered fault is when the point was first reached after the order.
    """
    told_s = fault.unix_s - origin_unix_s
    if not fault.ordered:
        return told_s
    is_recovering = fault.phase in _RECOVERING
    if not is_recovering and (fault.iteration is None or fault.iteration == 1):
        return told_s

    def is_there(event: Event) -> bool:
        """Return whether the event shows that the point is reached.

        Either ranks recover, or the previous iteration has ended.
        """
        if is_recovering:
            return isinstance(event, GenerationEnded) or (
                isinstance(event, WorkerStarted) and event.incarnation > 0
            )
        return (
            isinstance(event, IterationCommitted)
            and event.iteration + 1 == fault.iteration
        )

    later = (each for rank in ranks for each in rank if each.t_s >= told_s)
    return min((each.t_s for each in later if is_there(each.event)), default=math.inf)


def _generation_at(t_s: float, ranks: Sequence[Sequence[LoggedEvent]]) -> int | None:
    """Return the generation at a time on the run's clock.

    None for a job that restarts, which has no generations.
    """
    logged = [
        each
        for rank in ranks
        for each in rank
        if isinstance(each.event, GenerationEnded | Rejoined)
    ]
    joined = [
        each.event.generation
        for each in logged
        if isinstance(each.event, Rejoined) and each.t_s <= t_s
    ]
    return max(joined, default=1) if logged else None


def _are_together(
    before: InjectedFault, fault: InjectedFault, *, has_generations: bool
) -> bool:
    """Return whether a fault hit the generation that the previous fault had ended."""
    if before.ordered or fault.ordered:
        return False
    return fault.unix_s == before.unix_s or (
        has_generations and fault.generation == before.generation
    )


def _kill_in_recovery(before: InjectedFault, fault: InjectedFault) -> Kill:
    point = {
        "rank": fault.rank,
        "signal": fault.signal,
        "scope": fault.scope,
        "phase": "recovery",
    }
    if before.ordered or fault.ordered:  # the times are those of the orders
        return Kill(**point)
    return LateKill(**point, late_s=fault.unix_s - before.unix_s)


def _kill_in(
    iteration: int | None, fault: InjectedFault, begun_unix_s: float | None
) -> Kill:
    """Return the kill of a fault in an iteration.

    Args:
        iteration: The iteration. None: the next iteration.
        fault: The fault.
        begun_unix_s: The start of the iteration, in seconds since the epoch. None:
            unknown.
    """
    phase = _ENDED.get(fault.phase, fault.phase)
    phase = phase if phase in KILL_PHASES and phase not in _RECOVERING else "forward"
    point = {
        "rank": fault.rank,
        "signal": fault.signal,
        "scope": fault.scope,
        "iteration": iteration,
        "phase": phase,
    }
    # an ordered fault came at the start of its phase, and the last point of an
    # iteration comes after the commit
    if fault.ordered or phase == "snapshot" or begun_unix_s is None:
        return Kill(**point)
    return LateKill(**point, late_s=fault.unix_s - begun_unix_s)


def setup_of(
    run: RealRun, cluster: ClusterConfig, iteration_s: float | None, pace: Pace = EVEN
) -> Setup:
    """Return the run's job on a cluster with as many nodes and spares as the run had.

    Args:
        run: The real run.
        cluster: The cluster, whose numbers of nodes, GPUs and spares are replaced.
        iteration_s: The mean seconds of an iteration. None: by the cluster's constants.
        pace: The lengths of single iterations.
    """
    settings, train = run.settings, run.settings.train
    wanted = settings.parallel.ranks_per_node
    # on one machine each rank counts as a node
    ranks_per_node = 1 if wanted == AUTO else int(wanted)
    nodes = run.world_size // ranks_per_node
    cluster = replace(
        cluster,
        nodes=nodes,
        gpus_per_node=ranks_per_node,
        spares=settings.runtime.spare_nodes,
    )
    stored = settings.precision.state_format
    is_on_cpu = any(
        event.device == "cpu" for event in events_of(run.ranks, WorkerStarted)
    )
    batch = BatchConfig(
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        sequence_length=train.sequence_length,
    )
    job = Job(
        shape_of(settings.model, sequence_length=train.sequence_length),
        fit_layout(
            settings.parallel, run.world_size, num_experts=settings.model.num_experts
        ),
        batch,
        FormatsConfig(
            compute_bytes=float(stored.compute_bytes),
            full_bytes=float(stored.full_bytes),
            activation_bytes=float(BYTES[settings.precision.dtype]),
            step_log_bytes=STEP_LOG_BYTES_ON_CPU if is_on_cpu else STEP_LOG_BYTES,
        ),
    )
    costs = estimate(job, cluster, TimingConfig(iteration_s=iteration_s, interleave=1))
    return Setup(job=job, cluster=cluster, costs=costs, mtbf_s=None, pace=pace)


def facts_of(ranks: Sequence[Sequence[LoggedEvent]]) -> RunFacts:
    """Return the measurements of a run.

    Args:
        ranks: The events of each rank.

    Raises:
        ConfigError: The run committed no iteration.
    """
    first = ranks[0]
    commits = [
        (logged.t_s, logged.event)
        for logged in first
        if isinstance(logged.event, IterationCommitted)
    ]
    iteration_s = mean_seconds(first)
    iterations = max(event.iteration for _, event in commits)
    commits_s = first_commits(ranks)
    recoveries = [recovered.cost_s for recovered in recoveries_of(ranks, iteration_s)]
    snapshots = [
        event for event in events_of(ranks, SnapshotTaken) if event.iteration > 0
    ]
    return RunFacts(
        iterations=iterations,
        iteration_s=iteration_s,
        wall_s=commits_s[iterations] - commits_s[1],
        stall_s=statistics.median(event.stall_s for _, event in commits),
        num_recoveries=len(recoveries),
        recovery_s=statistics.fmean(recoveries) if recoveries else 0.0,
        trained_again=len(commits) - iterations,
        interval=_interval(ranks[:1]),
        snapshot_bytes=max((event.size_bytes for event in snapshots), default=0),
        host_bytes=max(
            (event.allocated_bytes for event in events_of(ranks, HostMemoryUsed)),
            default=0,
        ),
    )


def events_of(ranks: Iterable[Sequence[LoggedEvent]], kind: type[T]) -> list[T]:
    """Return the events of a kind, rank by rank."""
    return [
        logged.event
        for rank in ranks
        for logged in rank
        if isinstance(logged.event, kind)
    ]


def recoveries_of(
    ranks: Sequence[Sequence[LoggedEvent]], iteration_s: float
) -> list[MeasuredRecovery]:
    """Return the price of each fault, in order.

    Faults without a new iteration between them count as one.

    Args:
        ranks: The events of each rank.
        iteration_s: The mean seconds of an iteration.
    """
    logged = sorted(
        (each for rank in ranks for each in rank), key=lambda each: each.t_s
    )
    born_s = [
        each.t_s
        for each in logged
        if isinstance(each.event, WorkerStarted) and each.event.incarnation > 0
    ]
    commits_s = sorted(first_commits(ranks).items())
    found = []
    for (before, since_s), (_, until_s) in pairwise(commits_s):
        if any(since_s < each_s <= until_s for each_s in born_s):
            between = [each for each in logged if since_s < each.t_s <= until_s]
            # a rank that is ready steps as soon as the rank joins: the first commit may
            # come before other ranks log their `Rejoined`
            generations = {
                each.event.generation
                for each in between
                if isinstance(each.event, Rejoined)
            }
            between += [
                each
                for each in logged
                if each.t_s > until_s
                and isinstance(each.event, Rejoined)
                and each.event.generation in generations
            ]
            found.append(
                _recovered(
                    before,
                    until_s,
                    until_s - since_s - iteration_s,
                    between,
                    len(ranks),
                )
            )
    return found


def _recovered(
    before: int,
    until_s: float,
    cost_s: float,
    logged: Sequence[LoggedEvent],
    num_ranks: int,
) -> MeasuredRecovery:
    again = Counter(
        each.global_rank
        for each in logged
        if isinstance(each.event, IterationCommitted) and each.event.iteration <= before
    )
    rejoined = [
        (each.event, each.t_s) for each in logged if isinstance(each.event, Rejoined)
    ]
    last, rejoined_s = max(
        rejoined,
        key=lambda pair: pair[0].detect_s + pair[0].rebuild_s,
        default=(None, until_s),
    )
    resumed = [each.event for each in logged if isinstance(each.event, StateResumed)]
    stalled_s = [0.0] * num_ranks
    for each in logged:
        if isinstance(each.event, IterationCommitted) and each.t_s > rejoined_s:
            stalled_s[each.global_rank] += each.event.stall_s
    return MeasuredRecovery(
        before=before,
        until_s=until_s,
        cost_s=cost_s,
        # only iterations that all ranks ran again: `replayed` covers single stages
        again=min(again[rank] for rank in range(num_ranks)),
        replayed=max((event.executed_iters for event, _ in rejoined), default=0),
        resumed_s=max((event.seconds for event in resumed), default=0.0),
        rejoined=last,
        after_s=max(0.0, until_s - rejoined_s),
        stalled_s=max(stalled_s),
    )


def first_commits(ranks: Sequence[Sequence[LoggedEvent]]) -> dict[int, float]:
    """Return the time of the first commit of each iteration by any rank.

    The times are in seconds since the run's clock origin.
    """
    commits = [
        (e.t_s, e.event.iteration)
        for rank in ranks
        for e in rank
        if isinstance(e.event, IterationCommitted)
    ]
    return {iteration: t_s for t_s, iteration in sorted(commits, reverse=True)}


def mean_seconds(rank: Sequence[LoggedEvent]) -> float:
    """Return the mean seconds of an iteration's first run on a rank, without stalls.

    The first iteration of the run is left out if there are others.

    Args:
        rank: The events of the rank.

    Raises:
        ConfigError: The rank committed no iteration.
    """
    seconds = [*first_seconds(rank).values()]
    require(bool(seconds), "real", "no iteration", "the folder of a run that trained")
    # the first iteration is slow by itself
    return statistics.fmean(seconds[1:] or seconds)


def first_seconds(rank: Sequence[LoggedEvent]) -> dict[int, float]:
    """Return the seconds of each iteration's first run on a rank, without stalls.

    The iterations are in order.
    """
    seconds: dict[int, float] = {}
    for event in events_of([rank], IterationCommitted):
        seconds.setdefault(event.iteration, event.seconds - event.stall_s)
    return seconds


def _interval(ranks: Sequence[Sequence[LoggedEvent]]) -> float:
    """Return the median of the iterations between windows or snapshots; 0 if none."""
    windows = [
        event.num_slots + event.pause_iters for event in events_of(ranks, WindowChosen)
    ]
    intervals = [event.every_iters for event in events_of(ranks, IntervalChosen)]
    return statistics.median(windows or intervals or [0])
