"""Plots of one run by itself. Pure: facts in, plotly's JSON out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launcher.report.columns import Columns
from launcher.report.episodes import Episode
from launcher.report.facts import Facts
from launcher.report.figure import (
    Plot,
    Trace,
    figure,
    left_out,
    numbers,
    only,
    part_bars,
    points,
    rows,
)
from launcher.report.parts import RECOVERY, PagePart
from launcher.report.plots_of_experts import plots_of_experts
from launcher.report.summary import MIB, duration

_MOST_RANKS = 64  # a bar takes 20 pixels: more bars fill several screens
_MOST_EPISODES = 20
_GRID = 300
_MEMORY_PARTS = {
    "full_bytes": "full state",
    "compute_bytes": "compute weights",
    "buffer_bytes": "buffers",
    "boundary_log_bytes": "boundary logs",
    "step_log_bytes": "step logs",
    "gradient_log_bytes": "logged gradients",
}


def plots_of_run(facts: Facts) -> tuple[Plot, ...]:
    """Return the plots of one run."""
    return (by_rank(facts), recoveries(facts), *plots_of_experts(facts), memory(facts))


def by_rank(facts: Facts) -> Plot:
    """Return the plot of where each rank's time went."""
    of_ranks = facts.totals_us
    ranks = sorted(
        sorted(of_ranks, key=lambda rank: of_ranks[rank][PagePart.COMPUTE])[
            :_MOST_RANKS
        ]
    )
    names = [f"rank {rank}" for rank in ranks]
    traces = [
        part_bars(
            part,
            "%{x:.3f} s",
            y=names,
            x=numbers(of_ranks[rank][part] / 1e6 for rank in ranks),
        )
        for part in PagePart
        if any(of_ranks[rank][part] for rank in ranks)
    ]
    return Plot(
        key="ranks",
        title="Time of each rank",
        means="The same parts as above, rank by rank; each bar is the whole wall time.",
        choices=only(rows(traces, x="time, s", height=_height(ranks)), ranks),
        missing="no events",
        note=left_out(len(ranks), len(of_ranks), "ranks: those that computed least"),
    )


def _height(ranks: Sequence[int]) -> int:
    return 170 + 20 * max(len(ranks), 3)


def recoveries(facts: Facts) -> Plot:
    """Return the plot of each rank's parts in a recovery; each recovery is a choice."""
    longest = sorted(facts.episodes, key=lambda each: each.start_us - each.end_us)[
        :_MOST_EPISODES
    ]
    chosen = sorted(longest, key=lambda each: each.number)
    ranks = max((len({s.rank for s in each.stretches}) for each in chosen), default=0)
    notes = (
        left_out(len(chosen), len(facts.episodes), "recoveries: the longest"),
        left_out(
            min(ranks, _MOST_RANKS), ranks, "ranks: those that replayed come first"
        ),
    )
    return Plot(
        key="recoveries",
        title="Recoveries",
        means=(
            "What each rank did, from the last sign of life of what failed until the"
            " last rank went on: who waited, who replayed which iterations. A rank"
            " without a bar went on with its iteration."
        ),
        choices=tuple((_label(each), _gantt(each)) for each in chosen),
        missing="no rank had to recover",
        note="; ".join(filter(None, notes)),
    )


def _label(episode: Episode) -> str:
    causes = "; ".join(episode.causes)
    what = causes if len(causes) <= 70 else causes[:67] + "..."
    took = duration((episode.end_us - episode.start_us) / 1e6)
    return f"{episode.number}, at {episode.start_us / 1e6:.1f} s, {took}: {what}"


def _gantt(episode: Episode) -> dict:
    all_ranks = sorted({each.rank for each in episode.stretches})
    ranks = sorted(
        sorted(all_ranks, key=lambda rank: rank not in episode.replaying_ranks)[
            :_MOST_RANKS
        ]
    )
    traces = []
    for part in RECOVERY:
        if mine := [
            each
            for each in episode.stretches
            if each.part is part and each.rank in ranks
        ]:
            columns = {
                "y": [f"rank {each.rank}" for each in mine],
                "base": numbers(
                    (each.start_us - episode.start_us) / 1e6 for each in mine
                ),
                "x": numbers((each.end_us - each.start_us) / 1e6 for each in mine),
                "text": [each.note for each in mine],
            }
            traces.append(
                part_bars(part, "%{x:.4f} s<br>%{text}", **columns, textposition="none")
            )
    # without these keys plotly orders rows by the first trace of each rank, and leaves
    # out ranks without a trace
    order = {
        "categoryorder": "array",
        "categoryarray": [f"rank {rank}" for rank in ranks],
    }
    return rows(
        traces,
        x="time since the last sign of life, s",
        height=_height(ranks),
        barmode="overlay",
        **order,
    )


def memory(facts: Facts) -> Plot:
    """Return the plot of host memory by part over time, summed over ranks."""
    tables = [rank.memory for rank in facts.run.ranks if len(rank.memory)]
    begin_us = min((table.at_us[0] for table in tables), default=0)
    grid_us = np.linspace(begin_us, facts.end_us, _GRID)
    traces = [
        _area(tables, grid_us, column, label) for column, label in _MEMORY_PARTS.items()
    ]
    traces = [trace for trace in traces if any(trace["y"])]
    longest = max(map(len, tables), default=0)
    traces.append(_area(tables, grid_us, "allocated_bytes", "allocated", dash="solid"))
    traces.append(
        _area(
            tables,
            grid_us,
            "double_buffered_dense_bytes",
            "two dense copies",
            dash="dot",
        )
    )
    return Plot(
        key="memory",
        title="Host memory",
        means=(
            "What ranks keep for snapshots and logs, by part, all ranks together;"
            " allocated: with buffers to reuse; dotted: what two dense snapshots would"
            " take."
        ),
        choices=only(
            figure(
                traces,
                x="time since the start, s",
                y="MiB",
                yaxis={"rangemode": "tozero"},
            ),
            tables,
        ),
        missing=(
            "this run's policy keeps nothing in host memory, or did not come to it"
            " (event HostMemoryUsed)"
        ),
        note=f"drawn at {_GRID} moments" if longest > _GRID else "",
    )


def _area(
    tables: Sequence[Columns],
    grid_us: np.ndarray,
    column: str,
    label: str,
    *,
    dash: str = "",
) -> Trace:
    """Return the sum of a column over all ranks, over time.

    Args:
        tables: The host memory of each rank.
        grid_us: The moments, in microseconds since the run's origin.
        column: The column to sum, in bytes.
        label: The name in the legend.
        dash: The dash of a line. Without a dash, the trace is an area on top of the
            previous areas.
    """
    total = np.zeros(len(grid_us))
    for table in tables:
        # a rank holds nothing before its first event
        known = np.append(0.0, np.nan_to_num(table[column]))
        total += known[np.searchsorted(table.at_us, grid_us, side="right")]
    # compute weights have a colour name of their own, because `--compute` is the colour
    # of a part of time, and that of the full state
    color = (
        "--compute-weights"
        if column == "compute_bytes"
        else f"--{column.removesuffix('_bytes').replace('_', '-')}"
    )
    area = {
        "stackgroup": "parts",
        "line": {"width": 0.5, "color": color},
        "fillcolor": color,
    }
    style = {"line": {"color": "--text", "width": 1.3, "dash": dash}} if dash else area
    at: Trace = {"x": numbers(grid_us / 1e6), "y": numbers(total / MIB)}
    return (
        points(label, "lines", f"{label}: %{{y:.4g}} MiB at %{{x:.1f}} s", **at) | style
    )
