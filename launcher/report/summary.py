"""The numbers by which runs are compared, and a few sentences that sum up a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.promise import exactness_of
from launcher.report.facts import Facts
from launcher.report.parts import OF_FAULTS, RECOVERY, PagePart
from moe_ckpt.events import WorkerStarted

MIB = 1 << 20
_BECAME = {
    "finished": "is finished",
    "running": "is still going; this is what there was when it was read",
    "ended": "ended without a result, or goes on where this machine does not see it",
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of each run."""

    key: str
    """Name in JSON."""

    label: str
    """Name in tables and on the page."""

    unit: str
    """Unit; empty for a count."""

    means: str
    """Explanation, shown on hover."""

    of: Callable[[Facts], float | None]
    """Returns the number of a run, or None if the run has no data."""


def headline(facts: Facts) -> str:
    """Return a few sentences on the outcome of the run and the use of its time."""
    ettr = facts.ettr
    if ettr is None:
        return (
            f"The run {_BECAME[facts.run.state]}. No event tells of an iteration that"
            " was committed."
        )
    launch_s = _launch_s(facts)
    before = f", after {duration(launch_s)} of launch" if launch_s else ""
    last = int(facts.series.iteration[-1]) if len(facts.series.iteration) else 0
    said = [
        f"{100 * ettr:.1f} % of the time without startup and evaluation was training: "
        f"{last:,} iterations in {duration(facts.end_us / 1e6)} of wall time{before}."
    ]
    lost_s = facts.mean_us(*OF_FAULTS) / 1e6
    if facts.episodes:
        faults = (
            "1 recovery"
            if len(facts.episodes) == 1
            else f"{len(facts.episodes):,} recoveries"
        )
        promise = exactness_of(
            noted.event for rank in facts.run.ranks for noted in rank.events
        )
        kept = f" (run.exactness={promise})" if promise else ""
        said.append(
            f"{faults} cost {duration(lost_s)}, with what had to be computed"
            f" again{kept}."
        )
    else:
        said.append("No rank had to recover.")
    said.append(
        f"Checkpointing took {duration(facts.mean_us(PagePart.STALL) / 1e6)} from"
        " iterations."
    )
    if facts.run.state != "finished":
        said.append(f"The run {_BECAME[facts.run.state]}.")
    return " ".join(said)


def duration(seconds: float) -> str:
    """Return a duration for people: 0.42 s, 12.3 s, 4 min 10 s, 3 h 5 min."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def shown(value: float | None) -> str:
    """Return a number with about four significant digits; a dash if there is none."""
    if value is None or not np.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else None


def _per_iteration(values: np.ndarray) -> float | None:
    return float(np.nansum(values)) / len(values) if np.isfinite(values).any() else None


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _stall_share(facts: Facts) -> float | None:
    both = facts.mean_us(PagePart.STALL, PagePart.COMPUTE)
    return 100 * facts.mean_us(PagePart.STALL) / both if both else None


def _peak_bytes(facts: Facts) -> float | None:
    peaks = [rank.peak_bytes for rank in facts.run.ranks if rank.peak_bytes is not None]
    return sum(peaks) if peaks else None


def _first(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _launch_s(facts: Facts) -> float | None:
    started = [
        noted.event
        for rank in facts.run.ranks
        for noted in rank.events
        if isinstance(noted.event, WorkerStarted)
    ]
    return max(
        (event.launch_s for event in started if event.launch_s is not None),
        default=None,
    )


def _tokens_lost(facts: Facts) -> float | None:
    return (
        float(sum(map(sum, (event.lost_by_layer for event in facts.lost))))
        if facts.lost
        else None
    )


QUANTITIES = (
    Quantity(
        "ettr",
        "ETTR",
        "%",
        "effective training time ratio: compute / (wall time - startup - evaluation -"
        " unknown), mean over ranks",
        lambda facts: _times(100, facts.ettr),
    ),
    Quantity(
        "wall_s",
        "wall time",
        "s",
        "from the start of the run to its last event",
        lambda facts: facts.end_us / 1e6,
    ),
    Quantity(
        "launch_s",
        "launch",
        "s",
        "before the wall time: from the start of the slowest rank's process to its"
        " first event, mostly imports",
        _launch_s,
    ),
    Quantity(
        "iterations",
        "iterations",
        "",
        "the last iteration that was committed",
        lambda facts: _last(facts.series.iteration),
    ),
    Quantity(
        "recoveries",
        "recoveries",
        "",
        "how often ranks had to recover; faults that overlap count once",
        lambda facts: float(len(facts.episodes)),
    ),
    Quantity(
        "faults_cost_s",
        "cost of faults",
        "s",
        "detection, rebuild, fetch, waiting, replay, and work that was lost; mean over"
        " ranks",
        lambda facts: facts.mean_us(*OF_FAULTS) / 1e6,
    ),
    Quantity(
        "recovery_s",
        "per recovery",
        "s",
        "from the last sign of life until the last rank goes on; mean over recoveries",
        lambda facts: _mean(
            [(each.end_us - each.start_us) / 1e6 for each in facts.episodes]
        ),
    ),
    Quantity(
        "recovering_s",
        "in recoveries",
        "s",
        "detection, rebuild, fetch, waiting and replay; mean over ranks",
        lambda facts: facts.mean_us(*RECOVERY) / 1e6,
    ),
    Quantity(
        "lost_s",
        "work lost",
        "s",
        "iterations cut off or given up; mean over ranks",
        lambda facts: facts.mean_us(PagePart.LOST) / 1e6,
    ),
    Quantity(
        "stall_percent",
        "stall",
        "%",
        "stall / (stall + compute), mean over ranks",
        _stall_share,
    ),
    Quantity(
        "stall_ms",
        "stall per iteration",
        "ms",
        "what checkpointing took from an iteration; mean over ranks and iterations",
        lambda facts: _times(1e3, _mean(facts.series.stall_mean_s)),
    ),
    Quantity(
        "iteration_s",
        "iteration",
        "s",
        "length of an iteration with its stall; mean over ranks and iterations",
        lambda facts: _mean(facts.series.seconds),
    ),
    Quantity(
        "snapshot_mib",
        "snapshots",
        "MiB/iteration",
        "copied to host memory, all ranks together; mean over iterations that took one",
        lambda facts: _times(1 / MIB, _mean(facts.series.snapshot_bytes)),
    ),
    Quantity(
        "peers_mib",
        "to peers",
        "MiB/iteration",
        "copies of windows sent to peers' memory, all ranks and all copies together;"
        " mean over iterations",
        lambda facts: _times(1 / MIB, _per_iteration(facts.series.peer_bytes)),
    ),
    Quantity(
        "boundary_mib",
        "between stages",
        "MiB/iteration",
        "activations and gradients sent to other pipeline stages, all ranks together;"
        " what a boundary log holds",
        lambda facts: _times(1 / MIB, _mean(facts.series.sent_bytes)),
    ),
    Quantity(
        "memory_mib",
        "host memory",
        "MiB",
        "the most that each rank has allocated for snapshots and logs, all ranks"
        " together",
        lambda facts: _times(1 / MIB, _peak_bytes(facts)),
    ),
    Quantity(
        "window_iters",
        "window",
        "iterations",
        "iterations in which every operator is taken once, as last chosen",
        lambda facts: _first(rank.window_iters for rank in facts.run.ranks),
    ),
    Quantity(
        "interval_iters",
        "interval",
        "iterations",
        "from one whole snapshot to the next, as last chosen",
        lambda facts: _first(rank.interval_iters for rank in facts.run.ranks),
    ),
    Quantity(
        "checkpoints",
        "checkpoints",
        "",
        "whole checkpoints that were committed",
        lambda facts: float(len(facts.saved)),
    ),
    Quantity(
        "checkpoints_failed",
        "checkpoints failed",
        "",
        "checkpoints that could not be saved",
        lambda facts: float(len(facts.failed)),
    ),
    Quantity(
        "loss",
        "loss",
        "nats/token",
        "training loss of the last iteration",
        lambda facts: _last(facts.series.loss),
    ),
    Quantity(
        "eval_loss",
        "evaluation loss",
        "nats/token",
        "cross-entropy on held-out batches, the last time",
        lambda facts: facts.evaluated[-1].loss if facts.evaluated else None,
    ),
    Quantity(
        "tokens_lost",
        "tokens lost",
        "tokens",
        "tokens whose updates were lost, over all MoE layers",
        _tokens_lost,
    ),
    Quantity(
        "deficit_tokens",
        "yet to make up",
        "tokens",
        "lost tokens that experts with more capacity (MoEtion) have not had again yet,"
        " over all MoE layers",
        lambda facts: (
            float(sum(points[-1][1] for points in facts.deficits.values()))
            if facts.deficits
            else None
        ),
    ),
    Quantity(
        "plt_percent",
        "PLT",
        "%",
        "proportion of lost tokens (MoC-System), mean over MoE layers, the last that"
        " was told",
        lambda facts: _times(100, facts.lost[-1].plt) if facts.lost else None,
    ),
    Quantity(
        "mlt_percent",
        "MLT",
        "%",
        "momentary lost tokens (MoEtion), summed over MoE layers, the last that was"
        " told",
        lambda facts: _times(100, facts.lost[-1].mlt) if facts.lost else None,
    ),
)
"""The numbers by which runs are compared, in order of interest."""
