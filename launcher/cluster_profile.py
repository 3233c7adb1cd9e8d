"""Measures this machine's constants for the simulator from real runs (`make profile`).

    python -m launcher.cluster_profile RUN... [--write FILE]

The constants are medians over the events of the runs; `rerun_ratio`, `take_s` and
`disk_bytes_per_s` are means. Constants that the runs did not measure keep the values of
conf/cluster/local.yaml. A run with `ckpt=moevement` and a few kills measures the most
constants (MoEvement, Appendix C: costs from real training runs).
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from launcher.config import CONF_DIR
from launcher.simulator.config import compose_machine
from launcher.simulator.real_run import (
    RealRun,
    events_of,
    first_seconds,
    mean_seconds,
    read_run,
    recoveries_of,
    setup_of,
)
from moe_ckpt.arguments import Parser
from moe_ckpt.elastic.process_failure import FaultClass
from moe_ckpt.errors import exit_status
from moe_ckpt.events import (
    CheckpointSaved,
    IterationCommitted,
    LoggedEvent,
    Rejoined,
    SnapshotTaken,
    StageRecovered,
    StateResumed,
    WorkerStarted,
)
from moe_ckpt.sim.costs import update_bytes
from moe_ckpt.sim.generation import Kept
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.pace import Pace
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.recovering import replay_s

_WHAT = "Print the constants of this machine as real runs measured them."
_OF_A_FAULT = ("detect_s", "rebuild_s", "resume_s", "restart_s", "spare_s")
_ENOUGH_BYTES = 1e18
_TEMPLATE = CONF_DIR / "cluster" / "local.yaml"


def main(arguments: Sequence[str]) -> int:
    """Print or write the constants of the machine on which the given runs ran.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status.
    """
    parser = Parser(prog="python -m launcher.cluster_profile", description=_WHAT)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a real run on this machine",
    )
    parser.add_argument(
        "--write", type=Path, help="file for the constants (default: standard output)"
    )

    def profile() -> None:
        options = parser.parse_args(arguments)
        runs = [read_run(folder) for folder in options.runs]
        cluster, _ = compose_machine(["cluster=local"])
        text = fill_in(_TEMPLATE.read_text(), measure(runs, cluster), options.runs)
        if options.write:
            options.write.write_text(text)
        else:
            print(text, end="")

    return exit_status(profile)


def constants_of(
    runs: Sequence[RealRun], others: ClusterConfig | None = None
) -> ClusterConfig:
    """Return this machine as runs measured it.

    Args:
        runs: Real runs on this machine.
        others: The constants that the runs did not measure; None: those of
            conf/cluster/local.yaml.
    """
    cluster = others or compose_machine(["cluster=local"])[0]
    found = measure(runs, cluster)
    kinds = {name: type(getattr(cluster, name)) for name in found}
    return replace(
        cluster, **{name: kinds[name](value) for name, value in found.items()}
    )


def measure(runs: Sequence[RealRun], cluster: ClusterConfig) -> dict[str, str]:
    """Return the constants that runs measured, as text, by name.

    A constant is the median of its measurements, or the mean if a few long ones count.

    Args:
        runs: Real runs on one machine.
        cluster: The constants that the runs did not measure.
    """
    ranks = [rank for run in runs for rank in run.ranks]
    snapshots = [event for run in runs for event in _copied_freely(run)]
    rates, whole = (
        _rates(snapshots),
        _rates([event for event in snapshots if event.num_slots == 1]),
    )
    stalls = [stall_s for run in runs for stall_s in _stalls_s(run)]
    updates = [rate for run in runs for rate in _update_rates(run, cluster)]
    if updates:
        cluster = replace(cluster, gpu_bytes_per_s=statistics.median(updates))
    speeds = [_flops_per_s(run, cluster) for run in runs]
    cluster = replace(cluster, flops_per_s=statistics.median(speeds))
    reruns = [
        times for run in runs for times in (*_reruns(run), *_replays(run, cluster))
    ]
    means: dict[str, float] = {}
    if reruns:
        rerun_s, first_s = map(sum, zip(*reruns, strict=True))
        cluster = replace(cluster, rerun_ratio=rerun_s / first_s)
        means["rerun_ratio"] = cluster.rerun_ratio
    if stalls:
        means["take_s"] = max(0.0, statistics.fmean(stalls))
        # `take_s` includes interference: runs do not separate the two
        means["interference"] = 0.0
    costs = [each for run in runs for each in _costs_of(run, cluster)]
    saved = [event for event in events_of(ranks, CheckpointSaved) if event.seconds > 0]
    # a mean, because a disk's speed is no constant: the same checkpoint has taken 2.7 s
    # and 6.5 s within an hour
    if saved:
        means["disk_bytes_per_s"] = sum(event.size_bytes for event in saved) / sum(
            event.seconds for event in saved
        )
    loaded = [
        event
        for event in events_of(ranks, StateResumed)
        if event.seconds > 0 and event.iteration > 0
    ]
    measured = {
        "copy_bytes_per_s": rates,
        "whole_copy_bytes_per_s": whole or rates,
        **{
            name: [each[name] for each in costs if name in each] for name in _OF_A_FAULT
        },
        # the event of a load has no size, but all whole checkpoints of a run have the
        # same size
        "disk_read_bytes_per_s": [
            saved[0].size_bytes / event.seconds for event in loaded if saved
        ],
        "flops_per_s": speeds,
        "gpu_bytes_per_s": updates,
    }
    medians = {
        name: statistics.median(values) for name, values in measured.items() if values
    }
    found = {name: f"{value:.3g}" for name, value in {**medians, **means}.items()}
    return {"name": "measured", "nodes": str(runs[0].world_size), **found}


def fill_in(template: str, constants: dict[str, str], runs: Sequence[Path]) -> str:
    """Put constants into a cluster's YAML; comments stay.

    Args:
        template: The text of a cluster's YAML.
        constants: Values as text, by name.
        runs: The folders of the runs, for the head of the file.
    """
    names = ", ".join(run.name for run in runs)
    head = (
        f"# Measured by `python -m launcher.cluster_profile` from {names}; what it"
        " could not measure is local.yaml's.\n"
    )
    text = head + template[re.search(r"(?m)^name:", template).start() :]  # type: ignore[union-attr]
    for name, value in constants.items():
        text = re.sub(
            rf"(?m)^{name}: \S+ *#",
            lambda _, n=name, v=value: f"{n}: {v}".ljust(31) + " #",
            text,
        )
    return text


def _flops_per_s(run: RealRun, cluster: ClusterConfig) -> float:
    """Return the speed at which a simulated iteration takes as long as the run's."""
    seconds = mean_seconds(run.ranks[0])
    own = replace(cluster, efficiency=1.0)
    low, high = 1e6, 1e18
    while high / low > 1.001:  # a higher speed never makes an iteration slower
        # bisection on a logarithmic scale: the answer may lie anywhere in twelve orders
        # of magnitude
        middle = (low * high) ** 0.5
        estimated = setup_of(
            run, replace(own, flops_per_s=middle), None
        ).costs.iteration_s
        low, high = (middle, high) if estimated > seconds else (low, middle)
    return high


def _costs_of(run: RealRun, cluster: ClusterConfig) -> list[dict[str, float]]:
    """Split the cost of each fault into constants.

    The time of a replay follows from other constants.

    Returns:
        For each fault, the seconds by the name of the constant.
    """
    usual_s, load_s = _usual_s(run), _load_s(run, cluster)
    restarts = not events_of(run.ranks, Rejoined)
    found = []
    for recovered in recoveries_of(run.ranks, 0.0):
        rejoined, before = recovered.rejoined, recovered.before
        # the next new iteration is assumed to take as long as the iteration before it
        ratio = 1.0 if restarts else cluster.rerun_ratio
        trained_s = ratio * sum(
            map(usual_s, range(before - recovered.again + 1, before + 1))
        ) + usual_s(before)
        if restarts:
            rest_s = (
                recovered.cost_s - trained_s - recovered.resumed_s - cluster.detect_s
            )
            found.append({"restart_s": max(0.0, rest_s)})
        elif rejoined:
            costs = {"detect_s": rejoined.detect_s, "rebuild_s": rejoined.rebuild_s}
            if FaultClass.NODE in rejoined.classes:
                usual = cluster.detect_s + cluster.rebuild_s
                costs = {"spare_s": max(0.0, sum(costs.values()) - usual)}
            if not (recovered.replayed or rejoined.fetched_bytes):
                slower_s = recovered.after_s - recovered.stalled_s - trained_s
                costs["resume_s"] = max(
                    0.0, rejoined.fetch_s + rejoined.replay_s - load_s + slower_s
                )
            found.append(costs)
    return found


def _usual_s(run: RealRun) -> Callable[[int], float]:
    """Return a function that gives the seconds of an iteration in its first run.

    The function returns the mean for iteration 1 and for iterations without a first
    run.
    """
    iteration_s, first = mean_seconds(run.ranks[0]), first_seconds(run.ranks[0])
    return lambda number: first.get(number, iteration_s) if number > 1 else iteration_s


def _load_s(run: RealRun, cluster: ClusterConfig) -> float:
    """Return the seconds in which a rank loads its whole state from host memory."""
    rates = _rates(_copied_freely(run)) or [cluster.copy_bytes_per_s]
    whole_bytes = max(
        (event.dense_bytes for event in events_of(run.ranks, SnapshotTaken)), default=0
    )
    return whole_bytes / statistics.median(rates)


def _reruns(run: RealRun) -> Iterator[tuple[float, float]]:
    """Yield the times of each iteration that ran again in surviving processes.

    The first iteration after ranks have joined is left out, because `resume_s` contains
    the additional time of that iteration.

    Yields:
        Seconds of the rerun, and seconds of the first run.
    """
    if not events_of(run.ranks, Rejoined):
        return
    usual_s, completed, is_first = _usual_s(run), set[int](), False
    for event in (each.event for each in run.ranks[0]):
        if isinstance(event, Rejoined):
            is_first = True
        elif isinstance(event, IterationCommitted):
            if event.iteration in completed and not is_first:
                yield event.seconds - event.stall_s, usual_s(event.iteration)
            completed.add(event.iteration)
            is_first = False


def _replays(run: RealRun, cluster: ClusterConfig) -> Iterator[tuple[float, float]]:
    """Yield the times of each replay.

    Yields:
        Seconds of the replay without loading, and seconds of a simulated replay at a
        `rerun_ratio` of 1.
    """
    # all ranks of a stage log the replay: count it once
    replays = {
        (event.first_stage, event.iteration): event
        for event in events_of(run.ranks, StageRecovered)
    }
    if not replays:
        return
    usual_s, iteration_s = _usual_s(run), mean_seconds(run.ranks[0])
    pace = Pace(
        [
            usual_s(number) / iteration_s
            for number in range(1, 1 + max(last for _, last in replays))
        ]
    )
    # a run that took place fits into memory
    machine = replace(cluster, rerun_ratio=1.0, host_memory_bytes=_ENOUGH_BYTES)
    setup = setup_of(run, machine, iteration_s, pace)
    saving = plan_saving(run.settings.ckpt, setup)
    load_s = _load_s(run, cluster)
    num_slots = {
        event.window_start: event.num_slots
        for event in events_of(run.ranks, SnapshotTaken)
    }
    for replay in replays.values():
        start, stages = (
            replay.window_start,
            range(replay.first_stage, replay.last_stage + 1),
        )
        window = Kept(start=start, end=start + num_slots.get(start, 1) - 1)
        done = replay.iteration - replay.replayed_iters - start
        first_s = replay_s(setup, saving, stages, window, replay.iteration, done)
        if replay.seconds > load_s and first_s:
            yield replay.seconds - load_s, first_s


def _copied_freely(run: RealRun) -> list[SnapshotTaken]:
    """Return the snapshots whose copies show the machine's rate.

    Empty if a bandwidth cap limited the copies of the run.
    """
    in_memory = run.settings.ckpt.in_memory
    if in_memory and in_memory.max_bytes_per_s.host is not None:
        return []
    return [event for event in events_of(run.ranks, SnapshotTaken) if event.size_bytes]


def _rates(snapshots: Sequence[SnapshotTaken]) -> list[float]:
    return [event.size_bytes / max(event.copy_s, 1e-9) for event in snapshots]


def _stalls_s(run: RealRun) -> Iterator[float]:
    """Yield how long each snapshot stopped training, in seconds.

    The span of a snapshot is from the iteration in which it was copied to the next
    snapshot. If a copy takes longer than the iteration up to its update, training waits
    for the rest: this wait is left out, because it follows from sizes and rates. The
    first snapshot of a job is left out, too: training waits for all of it.
    """
    update_s = statistics.median([*_updates_s(run)] or [0.0])
    for logged in _generations(run):
        commits = {
            event.iteration: event for event in events_of([logged], IterationCommitted)
        }
        copies = {
            event.iteration: event.copy_s
            for event in events_of([logged], SnapshotTaken)
        }
        for first, last in pairwise(sorted(copies)):
            if first > 0 and first + 1 in commits:
                stalled_s = sum(
                    commits[number].stall_s
                    for number in range(first + 1, last + 1)
                    if number in commits
                )
                overlap_s = (
                    commits[first + 1].seconds - commits[first + 1].stall_s - update_s
                )
                yield stalled_s - max(0.0, copies[first] - overlap_s)


def _update_rates(run: RealRun, cluster: ClusterConfig) -> Iterator[float]:
    """Yield the bytes per second of each update that `_updates_s` finds."""
    if updates_s := [*_updates_s(run)]:
        moved_bytes = update_bytes(setup_of(run, cluster, None).job)
        yield from (moved_bytes / seconds for seconds in updates_s)


def _updates_s(run: RealRun) -> Iterator[float]:
    """Yield the seconds of each update that waited for a copy.

    An update surely waited for a copy that took longer than the mean iteration. The
    seconds count from the end of the copy to the end of the iteration.
    """
    iteration_s = mean_seconds(run.ranks[0])
    for logged in _generations(run):
        copies = {
            event.iteration + 1: event.copy_s
            for event in events_of([logged], SnapshotTaken)
        }
        commits = [
            (each.event.iteration, each.t_s)
            for each in logged
            if isinstance(each.event, IterationCommitted)
        ]
        for (_, since_s), (iteration, until_s) in pairwise(commits):
            if iteration_s < copies.get(iteration, 0.0) < until_s - since_s:
                yield until_s - since_s - copies[iteration]


def _generations(run: RealRun) -> Iterator[list[LoggedEvent]]:
    """Yield each rank's events between recoveries.

    After a recovery an iteration may run again, without the snapshot in it.
    """
    for rank in run.ranks:
        logged: list[LoggedEvent] = []
        for each in rank:
            if isinstance(each.event, Rejoined | WorkerStarted):
                yield logged
                logged = []
            logged.append(each)
        yield logged


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
