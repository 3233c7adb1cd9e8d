"""This machine's constants from real runs: `python -m launcher.cluster_profile RUN... [--write FILE]`; `make profile`.

Takes medians of the runs' events, and the mean for `rerun_ratio`; constants that they did not measure keep the values
of conf/cluster/local.yaml. A run with `ckpt=moevement` and a few kills measures the most (MoEvement, Appendix C: costs
from real training runs).
"""

from __future__ import annotations

import argparse
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
from moe_ckpt.errors import exit_status
from moe_ckpt.events import (
    CheckpointSaved,
    Event,
    IterationCommitted,
    LoggedEvent,
    Rejoined,
    SnapshotTaken,
    StageRecovered,
    StateResumed,
    WorkerStarted,
)
from moe_ckpt.sim.generation import Kept
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.sim.pace import Pace
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.recovering import replay_s

_WHAT = "Print the constants of this machine as real runs measured them."
_OF_A_FAULT = ("detect_s", "rebuild_s", "resume_s", "restart_s")
_ENOUGH_BYTES = 1e18
_TEMPLATE = CONF_DIR / "cluster" / "local.yaml"


def main(arguments: Sequence[str]) -> int:
    """Print or write the constants of the machine that some runs ran on; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m launcher.cluster_profile", description=_WHAT)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a real run on this machine")
    parser.add_argument("--write", type=Path, help="file for the constants (default: standard output)")
    options = parser.parse_args(arguments)

    def profile() -> None:
        runs = [read_run(folder) for folder in options.runs]
        cluster, _ = compose_machine(["cluster=local"])
        text = fill_in(_TEMPLATE.read_text(), measure(runs, cluster), options.runs)
        if options.write:
            options.write.write_text(text)
        else:
            print(text, end="")

    return exit_status(profile)


def constants_of(runs: Sequence[RealRun], others: ClusterConfig | None = None) -> ClusterConfig:
    """Return this machine as runs measured it; constants that they did not measure are those of `others`.

    Without `others` they are those of conf/cluster/local.yaml.
    """
    cluster = others or compose_machine(["cluster=local"])[0]
    found = measure(runs, cluster)
    kinds = {name: type(getattr(cluster, name)) for name in found}
    return replace(cluster, **{name: kinds[name](value) for name, value in found.items()})


def measure(runs: Sequence[RealRun], cluster: ClusterConfig) -> dict[str, str]:
    """Return the constants that these runs measured, by name."""
    ranks = [rank for run in runs for rank in run.ranks]
    snapshots = [event for run in runs for event in _copied_freely(run)]
    rates, whole = _rates(snapshots), _rates([event for event in snapshots if event.num_slots == 1])
    stalls = [stall_s for run in runs for stall_s in _stalls_s(run)]
    speeds = [_flops_per_s(run, cluster) for run in runs]
    cluster = replace(cluster, flops_per_s=statistics.median(speeds))
    reruns = [times for run in runs for times in (*_reruns(run), *_replays(run, cluster))]
    if reruns:
        rerun_s, first_s = map(sum, zip(*reruns, strict=True))
        cluster = replace(cluster, rerun_ratio=rerun_s / first_s)
    costs = [each for run in runs for each in _costs_of(run, cluster)]
    saved = [event for event in events_of(ranks, CheckpointSaved) if event.seconds > 0]
    loaded = [event for event in events_of(ranks, StateResumed) if event.seconds > 0 and event.iteration > 0]
    measured = {
        "copy_bytes_per_s": rates,
        "whole_copy_bytes_per_s": whole or rates,
        "take_s": stalls,
        "rerun_ratio": [cluster.rerun_ratio] if reruns else [],
        **{name: [each[name] for each in costs if name in each] for name in _OF_A_FAULT},
        "disk_bytes_per_s": [event.size_bytes / event.seconds for event in saved],
        # the event of a load has no size: whole checkpoints of a run are all alike
        "disk_read_bytes_per_s": [saved[0].size_bytes / event.seconds for event in loaded if saved],
        "flops_per_s": speeds,
    }
    # a disk's speed is no constant: the same checkpoint has taken 2.7 s and 6.5 s within an hour
    found = {name: f"{statistics.median(values):.3g}" for name, values in measured.items() if values}
    if stalls:
        found["interference"] = "0.0"  # in take_s: what overlaps cannot be told from what does not
    return {"name": "measured", "nodes": str(runs[0].world_size), **found}


def fill_in(template: str, constants: dict[str, str], runs: Sequence[Path]) -> str:
    """Return a cluster's YAML with these constants in it; the comments stay."""
    names = ", ".join(run.name for run in runs)
    head = (
        f"# Measured by `python -m launcher.cluster_profile` from {names}; what it could not measure is local.yaml's.\n"
    )
    text = head + template[re.search(r"(?m)^name:", template).start() :]  # type: ignore[union-attr]
    for name, value in constants.items():
        text = re.sub(rf"(?m)^{name}: \S+ *#", lambda _, n=name, v=value: f"{n}: {v}".ljust(31) + " #", text)
    return text


def _flops_per_s(run: RealRun, cluster: ClusterConfig) -> float:
    """Return the speed at which a simulated iteration takes as long as the run's."""
    seconds = mean_seconds(run.ranks[0])
    own = replace(cluster, efficiency=1.0)
    low, high = 1e6, 1e18
    while high / low > 1.001:  # more is never slower
        # bisection on a logarithmic scale: the answer may lie anywhere in twelve orders of magnitude
        middle = (low * high) ** 0.5
        estimated = setup_of(run, replace(own, flops_per_s=middle), None).costs.iteration_s
        low, high = (middle, high) if estimated > seconds else (low, middle)
    return high


def _costs_of(run: RealRun, cluster: ClusterConfig) -> list[dict[str, float]]:
    """Return what of each fault's cost is which constant; what a replay takes follows from the others."""
    usual_s, load_s = _usual_s(run), _load_s(run, cluster)
    restarts = not events_of(run.ranks, Rejoined)
    found = []
    for recovered in recoveries_of(run.ranks, 0.0):
        rejoined, before = recovered.rejoined, recovered.before
        # the new iteration is taken to need as long as the one before it
        ratio = 1.0 if restarts else cluster.rerun_ratio
        trained_s = ratio * sum(map(usual_s, range(before - recovered.again + 1, before + 1))) + usual_s(before)
        if restarts:
            rest_s = recovered.cost_s - trained_s - recovered.resumed_s - cluster.detect_s
            found.append({"restart_s": max(0.0, rest_s)})
        elif rejoined:
            costs = {"detect_s": rejoined.detect_s, "rebuild_s": rejoined.rebuild_s}
            if not (recovered.replayed or rejoined.fetched_bytes):
                slower_s = recovered.after_s - recovered.stalled_s - trained_s
                costs["resume_s"] = max(0.0, rejoined.fetch_s + rejoined.replay_s - load_s + slower_s)
            found.append(costs)
    return found


def _usual_s(run: RealRun) -> Callable[[int], float]:
    """Return the seconds of an iteration by itself when it ran first, of any number; the mean for the first one."""
    iteration_s, first = mean_seconds(run.ranks[0]), first_seconds(run.ranks[0])
    return lambda number: first.get(number, iteration_s) if number > 1 else iteration_s


def _load_s(run: RealRun, cluster: ClusterConfig) -> float:
    """Return the seconds in which a rank loads its whole state from host memory."""
    rates = _rates(_copied_freely(run)) or [cluster.copy_bytes_per_s]
    whole_bytes = max((event.dense_bytes for event in events_of(run.ranks, SnapshotTaken)), default=0)
    return whole_bytes / statistics.median(rates)


def _reruns(run: RealRun) -> Iterator[tuple[float, float]]:
    """Yield the seconds of each iteration that ran again in processes that lived on, and those of its first run.

    The first iteration after ranks have joined is left out: `resume_s` has what it takes longer.
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
    """Yield the seconds of each replay, and those of a simulated one at a `rerun_ratio` of 1."""
    # once, and not once a rank
    replays = {(event.first_stage, event.iteration): event for event in events_of(run.ranks, StageRecovered)}
    if not replays:
        return
    usual_s, iteration_s = _usual_s(run), mean_seconds(run.ranks[0])
    pace = Pace([usual_s(number) / iteration_s for number in range(1, 1 + max(last for _, last in replays))])
    # a run that has been fits into memory
    machine = replace(cluster, rerun_ratio=1.0, host_memory_bytes=_ENOUGH_BYTES)
    setup = setup_of(run, machine, iteration_s, pace)
    saving = plan_saving(run.settings.ckpt, setup)
    load_s = _load_s(run, cluster)
    num_slots = {event.window_start: event.num_slots for event in events_of(run.ranks, SnapshotTaken)}
    for replay in replays.values():
        start, stages = replay.window_start, range(replay.first_stage, replay.last_stage + 1)
        window = Kept(start=start, end=start + num_slots.get(start, 1) - 1)
        done = replay.iteration - replay.replayed_iters - start
        first_s = replay_s(setup, saving, stages, window, replay.iteration, done)
        if replay.seconds > load_s and first_s:
            yield replay.seconds - load_s, first_s


def _copied_freely(run: RealRun) -> list[SnapshotTaken]:
    """Return the snapshots whose copies tell the machine's rate: none where a cap holds for them."""
    in_memory = run.settings.ckpt.in_memory
    if in_memory and in_memory.max_bytes_per_s.host is not None:
        return []
    return [event for event in events_of(run.ranks, SnapshotTaken) if event.size_bytes]


def _rates(snapshots: Sequence[SnapshotTaken]) -> list[float]:
    return [event.size_bytes / max(event.copy_s, 1e-9) for event in snapshots]


def _stalls_s(run: RealRun) -> Iterator[float]:
    """Yield what each snapshot stopped training for, from the iteration that it was copied in to the next snapshot.

    Iterations without a snapshot count for what exceeds their median stall, which logs and counts of tokens take. The
    wait for a copy that takes longer than an iteration is left out: it follows from sizes and rates. So is a job's
    first snapshot: training waits for all of it.
    """
    iteration_s = mean_seconds(run.ranks[0])
    for rank in run.ranks:
        usual_s = _usual_stall_s(rank)
        for events in _generations(rank):
            stalls = {event.iteration: event.stall_s for event in events if isinstance(event, IterationCommitted)}
            copies = {event.iteration: event.copy_s for event in events if isinstance(event, SnapshotTaken)}
            for first, last in pairwise(sorted(copies)):
                if first > 0:
                    later_s = sum(max(0.0, stalls.get(number, 0.0) - usual_s) for number in range(first + 2, last + 1))
                    waited_s = max(0.0, copies[first] - iteration_s)
                    yield max(0.0, stalls.get(first + 1, 0.0) + later_s - waited_s)


def _usual_stall_s(rank: Sequence[LoggedEvent]) -> float:
    """Return the median stall of a rank's iterations without a snapshot; 0 if each has one."""
    with_snapshot = {event.iteration + 1 for event in events_of([rank], SnapshotTaken)}
    commits = events_of([rank], IterationCommitted)
    stalls = [event.stall_s for event in commits if event.iteration not in with_snapshot]
    return statistics.median(stalls) if stalls else 0.0


def _generations(rank: Sequence[LoggedEvent]) -> Iterator[list[Event]]:
    """Yield a rank's events between recoveries: an iteration may run again after one, without the snapshot in it."""
    events: list[Event] = []
    for each in rank:
        if isinstance(each.event, Rejoined | WorkerStarted):
            yield events
            events = []
        events.append(each.event)
    yield events


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
