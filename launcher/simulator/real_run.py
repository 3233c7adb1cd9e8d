"""A real run's measurements, from its folder, and the simulation of the same job under
the same faults. No torch.
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
_ENDED = {"between": "snapshot", "done": "snapshot"}  # the last point of an iteration


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """A run's measurements, real or simulated. `iteration_s`: an iteration on average
    as it ran first, without stalls.

    `wall_s` is from the end of the first iteration, which is slow by itself, to that of
    the last one. `recovery_s` is what a fault costs on average. Bytes are those of the
    rank with the most.
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
        return (self.iterations - 1) * self.iteration_s / self.wall_s


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRecovery:
    """The price of a fault: seconds from the last iteration before it to the next new
    one, without an iteration's own.

    `before` is that last iteration; the next one ended at `until_s`, on the run's
    clock. In that time all ranks ran `again` iterations a second time, or some ranks
    `replayed` iterations, and loading from disk took `resumed_s`. `rejoined` is the
    event of the rank that joined last, `after_s` before the end of the next new
    iteration; snapshots stopped training for `stalled_s` of these.
    """

    before: int
    until_s: float
    cost_s: float
    again: int
    replayed: int
    resumed_s: float
    rejoined: Rejoined | None
    after_s: float
    stalled_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RealRun:
    """A run folder: its settings, the faults since its first commit as they were
    carried out, its ranks' events.

    Stalls of iterations are those of snapshots (`stalled_by_snapshots`).
    """

    settings: Settings
    world_size: int
    kills: tuple[Kill, ...]
    ranks: Sequence[Sequence[LoggedEvent]]


def read_run(folder: Path, until: int | None = None) -> RealRun:
    """Read a run's folder; faults after the first commit of iteration `until` are left
    out.

    Raises ConfigError, naming the folder, for one that is not that of a run.
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
    """Return a rank's events with those stalls alone that snapshots cause, beyond the
    median of iterations without any.

    Logs and votes take that median in every iteration: it is a part of the iteration.
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
    """Return the faults of a run, as they were carried out, at points of a run that
    meets them one after another.

    A fault in the generation of the one before, or before all ranks were together
    again, comes in the recovery from that. Others come in the phase of their iteration,
    and as long after its begin, as they came in the run. Those before the first commit
    are left out, and those after the first commit of iteration `until`.
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
        # a worker that has joined takes its first snapshot before it tells of an
        # iteration
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
    """Yield the faults from the first commit to that of iteration `until`, each with
    the one before it.

    A fault that ended the generation of the last commit came after it, however soon. An
    ordered fault, which was told long before it came, always counts, and comes when its
    point was reached.
    """
    commits_s = first_commits(ranks)
    # a run is measured from the end of its first iteration, and a job without any
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
    """Return when a fault came, on the run's clock: if it was ordered, when its point
    was reached after that.
    """
    told_s = fault.unix_s - origin_unix_s
    if not fault.ordered:
        return told_s
    is_recovering = fault.phase in _RECOVERING
    if not is_recovering and (fault.iteration is None or fault.iteration == 1):
        return told_s

    def is_there(event: Event) -> bool:
        """Return whether the point is reached with an event: ranks recover, or the
        iteration before has ended.
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
    """Return the generation at a time on the run's clock; None for a job that restarts,
    and so has none.
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
    """Return whether a fault came before the end of the generation that the one before
    it had ended.
    """
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
    if before.ordered or fault.ordered:  # their times are those at which they were told
        return Kill(**point)
    return LateKill(**point, late_s=fault.unix_s - before.unix_s)


def _kill_in(
    iteration: int | None, fault: InjectedFault, begun_unix_s: float | None
) -> Kill:
    """Return a fault in an iteration, which began at that time if it is known; None: in
    the next iteration.
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
    # an ordered fault came as its phase began, and what an iteration ends with comes
    # after its commit
    if fault.ordered or phase == "snapshot" or begun_unix_s is None:
        return Kill(**point)
    return LateKill(**point, late_s=fault.unix_s - begun_unix_s)


def setup_of(
    run: RealRun, cluster: ClusterConfig, iteration_s: float | None, pace: Pace = EVEN
) -> Setup:
    """Return the run's job on a cluster with as many nodes as it had, and iterations of
    so many seconds on average.
    """
    settings, train = run.settings, run.settings.train
    wanted = settings.parallel.ranks_per_node
    # on one machine each rank counts as a node
    ranks_per_node = 1 if wanted == AUTO else int(wanted)
    nodes = run.world_size // ranks_per_node
    cluster = replace(cluster, nodes=nodes, gpus_per_node=ranks_per_node)
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
    """Return what a run took. Raises ConfigError for one that committed nothing."""
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
    """Return what each fault cost, in order; faults with no new iteration between them
    count as one.
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
            # ranks that were ready step as they join: the first may have done so before
            # others have written of theirs
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
        # that all ranks ran again: what a single stage replays is counted beside
        again=min(again[rank] for rank in range(num_ranks)),
        replayed=max((event.executed_iters for event, _ in rejoined), default=0),
        resumed_s=max((event.seconds for event in resumed), default=0.0),
        rejoined=last,
        after_s=max(0.0, until_s - rejoined_s),
        stalled_s=max(stalled_s),
    )


def first_commits(ranks: Sequence[Sequence[LoggedEvent]]) -> dict[int, float]:
    """Return the time of the first commit of each iteration, by any rank."""
    commits = [
        (e.t_s, e.event.iteration)
        for rank in ranks
        for e in rank
        if isinstance(e.event, IterationCommitted)
    ]
    return {iteration: t_s for t_s, iteration in sorted(commits, reverse=True)}


def mean_seconds(rank: Sequence[LoggedEvent]) -> float:
    """Return the seconds of an iteration on average as a rank ran it first, without
    stalls.

    Raises ConfigError for a rank that committed nothing.
    """
    seconds = [*first_seconds(rank).values()]
    require(bool(seconds), "real", "no iteration", "the folder of a run that trained")
    # the first iteration is slow by itself
    return statistics.fmean(seconds[1:] or seconds)


def first_seconds(rank: Sequence[LoggedEvent]) -> dict[int, float]:
    """Return the seconds of each iteration as a rank ran it first, without stalls, in
    order.
    """
    seconds: dict[int, float] = {}
    for event in events_of([rank], IterationCommitted):
        seconds.setdefault(event.iteration, event.seconds - event.stall_s)
    return seconds


def _interval(ranks: Sequence[Sequence[LoggedEvent]]) -> float:
    """Return the iterations between windows or snapshots, the median where that
    changed; 0 where none was chosen.
    """
    windows = [
        event.num_slots + event.pause_iters for event in events_of(ranks, WindowChosen)
    ]
    intervals = [event.every_iters for event in events_of(ranks, IntervalChosen)]
    return statistics.median(windows or intervals or [0])
