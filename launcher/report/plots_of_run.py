"""Plots of one run by itself. Pure: facts in, plotly's JSON out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from launcher.report.columns import Columns
from launcher.report.episodes import Episode
from launcher.report.facts import Facts
from launcher.report.figure import Plot, Trace, figure, numbers
from launcher.report.parts import RECOVERY, Part
from launcher.report.rank_log import ExpertPopularity
from launcher.report.summary import duration

_MIB = 1 << 20
_MOST_RANKS = 64
_MOST_EPISODES = 20
_MOST_CELLS = 60_000
_GRID = 300
_MEMORY_PARTS = {
    "full_bytes": "full state",
    "compute_bytes": "compute weights",
    "buffer_bytes": "buffers",
    "boundary_log_bytes": "boundary logs",
    "step_log_bytes": "step logs",
}


def plots_of_run(facts: Facts) -> tuple[Plot, ...]:
    """Return what a page shows of a run alone."""
    return (by_rank(facts), recoveries(facts), memory(facts), popularity(facts), order(facts), *tokens_lost(facts))


def by_rank(facts: Facts) -> Plot:
    """Return where each rank's time went."""
    ranks = _few(sorted(facts.totals_us, key=lambda rank: facts.totals_us[rank][Part.COMPUTE]), _MOST_RANKS)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part.label,
            "y": [f"rank {rank}" for rank in ranks],
            "x": numbers(facts.totals_us[rank][part] / 1e6 for rank in ranks),
            "marker": {"color": f"--{part.label}"},
            "hovertemplate": f"%{{y}}<br>{part.label}: %{{x:.3f}} s<extra></extra>",
        }
        for part in Part
        if any(facts.totals_us[rank][part] for rank in ranks)
    ]
    return Plot(
        key="ranks",
        title="Time of each rank",
        means="The same parts as above, rank by rank; each bar is the whole wall time.",
        choices=(("", _rank_bars(traces, len(ranks), x="time, s")),) if ranks else (),
        missing="no events",
        note=_left_out(len(ranks), len(facts.totals_us), "ranks: those that computed least"),
    )


def _few(ranks: Sequence[int], most: int) -> list[int]:
    return sorted(ranks[:most])


def _rank_bars(traces: Sequence[Trace], count: int, *, x: str) -> dict:
    rows = {"autorange": "reversed", "automargin": True, "type": "category", "title": {"text": ""}}
    return figure(traces, x=x, y="", height=170 + 20 * max(count, 3), barmode="stack", yaxis=rows, hovermode="closest")


def _left_out(shown: int, there: int, what: str) -> str:
    return "" if shown >= there else f"{shown:,} of {there:,} {what}"


def recoveries(facts: Facts) -> Plot:
    """Return who did what in each recovery, to choose from."""
    longest = sorted(facts.episodes, key=lambda each: each.start_us - each.end_us)[:_MOST_EPISODES]
    chosen = sorted(longest, key=lambda each: each.number)
    ranks = max((len({s.rank for s in each.stretches}) for each in chosen), default=0)
    notes = (
        _left_out(len(chosen), len(facts.episodes), "recoveries: the longest"),
        _left_out(min(ranks, _MOST_RANKS), ranks, "ranks: those that replayed come first"),
    )
    return Plot(
        key="recoveries",
        title="Recoveries",
        means="What each rank did, from the first sign of a fault until the last rank went on: who waited, who "
        "replayed which iterations. A rank without a bar went on with its iteration.",
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
    ranks = _few(sorted(all_ranks, key=lambda rank: rank not in episode.replaying_ranks), _MOST_RANKS)
    traces = []
    for part in RECOVERY:
        mine = [each for each in episode.stretches if each.part is part and each.rank in ranks]
        if mine:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": part.label,
                    "y": [f"rank {each.rank}" for each in mine],
                    "base": numbers((each.start_us - episode.start_us) / 1e6 for each in mine),
                    "x": numbers((each.end_us - each.start_us) / 1e6 for each in mine),
                    "text": [each.note for each in mine],
                    "textposition": "none",
                    "marker": {"color": f"--{part.label}"},
                    "hovertemplate": f"%{{y}}<br>{part.label}: %{{x:.4f}} s<br>%{{text}}<extra></extra>",
                }
            )
    shown = _rank_bars(traces, len(ranks), x="time since the first sign, s")
    shown["layout"]["barmode"] = "overlay"
    shown["layout"]["yaxis"] |= {"categoryorder": "array", "categoryarray": [f"rank {rank}" for rank in ranks]}
    return shown


def memory(facts: Facts) -> Plot:
    """Return host memory by part over time, summed over ranks."""
    tables = [rank.memory for rank in facts.run.ranks if len(rank.memory)]
    begin_us = min((table.at_us[0] for table in tables), default=0)
    grid_us = np.linspace(begin_us, facts.end_us, _GRID)
    traces = [_area(tables, grid_us, column, label) for column, label in _MEMORY_PARTS.items()]
    traces = [trace for trace in traces if any(trace["y"])]
    traces.append(_area(tables, grid_us, "allocated_bytes", "allocated", stack=False, dash="solid"))
    dense = _area(tables, grid_us, "double_buffered_dense_bytes", "two dense copies", stack=False, dash="dot")
    return Plot(
        key="memory",
        title="Host memory",
        means="What ranks keep for snapshots and logs, by part, all ranks together; allocated: with buffers to reuse; "
        "dotted: what two dense snapshots would take.",
        choices=(("", figure([*traces, dense], x="time since the start, s", y="MiB", yaxis={"rangemode": "tozero"})),)
        if tables
        else (),
        missing="this run's policy keeps nothing in host memory, or did not come to it (event HostMemoryUsed)",
        note=_left_out(_GRID, max(map(len, tables), default=0), "moments are shown"),
    )


def _area(
    tables: Sequence[Columns], grid_us: np.ndarray, column: str, label: str, *, stack: bool = True, dash: str = ""
) -> Trace:
    total = np.zeros(len(grid_us))
    for table in tables:
        known = np.append(0.0, np.nan_to_num(table[column]))
        total += known[np.searchsorted(table.at_us, grid_us, side="right")]
    color = f"--{column.removesuffix('_bytes').replace('_', '-')}"
    style = {"stackgroup": "parts", "line": {"width": 0.5, "color": color}, "fillcolor": color} if stack else {}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": numbers(grid_us / 1e6),
        "y": numbers(total / _MIB),
        "hovertemplate": f"{label}: %{{y:.4g}} MiB at %{{x:.1f}} s<extra></extra>",
        **({"line": {"color": "--text", "width": 1.3, "dash": dash}} if not stack else style),
    }


def popularity(facts: Facts) -> Plot:
    """Return which experts got the tokens, over iterations."""
    events = facts.popularity
    rows = [(layer, expert) for layer, tokens in _layers(events[-1]) for expert in range(len(tokens))] if events else []
    columns = max(20, _MOST_CELLS // max(len(rows), 1))
    kept = (
        [events[i] for i in np.unique(np.linspace(0, len(events) - 1, min(columns, len(events))).astype(int))]
        if events
        else []
    )
    shares = [_shares(event) for event in kept]
    cells = [[of_event.get(row, np.nan) for of_event in shares] for row in rows]
    heat = {
        "type": "heatmap",
        "x": [event.iteration for event in kept],
        "y": [f"layer {layer}, expert {expert}" for layer, expert in rows],
        "z": [numbers(row) for row in cells],
        "colorscale": [[0, "--heat-low"], [0.5, "--heat-middle"], [1, "--heat-high"]],
        "colorbar": {"title": {"text": "% of layer"}, "thickness": 12},
        "hovertemplate": "%{y}<br>iteration %{x}: %{z:.3g} % of the layer's tokens<extra></extra>",
    }
    axis = {"autorange": "reversed", "automargin": True, "title": {"text": ""}}
    return Plot(
        key="popularity",
        title="Expert popularity",
        means="Share of its layer's tokens that each expert got.",
        choices=(("", figure([heat], x="iteration", y="", height=min(900, 180 + 16 * len(rows)), yaxis=axis)),)
        if kept
        else (),
        missing="this run has no data on the popularity of experts (event ExpertPopularity)",
        note=_left_out(len(kept), len(events), "records"),
    )


def _layers(event: ExpertPopularity) -> list[tuple[int, list[float]]]:
    return list(zip(event.layers, event.tokens, strict=False))


def _shares(event: ExpertPopularity) -> dict[tuple[int, int], float]:
    """Return the percentage of its layer's tokens that each (layer, expert) got."""
    return {
        (layer, expert): 100 * mine / total
        for layer, tokens in _layers(event)
        if (total := sum(tokens))
        for expert, mine in enumerate(tokens)
    }


def order(facts: Facts) -> Plot:
    """Return the experts of each layer from the most to the least popular, as last told."""
    traces: list[Trace] = []
    if facts.popularity:
        last = facts.popularity[-1]
        shares = _shares(last)
        for number, (layer, tokens) in enumerate(_layers(last)):
            by_share = sorted(range(len(tokens)), key=lambda expert: -tokens[expert])
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"layer {layer}",
                    "x": list(range(1, len(tokens) + 1)),
                    "y": numbers(shares.get((layer, expert), np.nan) for expert in by_share),
                    "text": [f"expert {expert}" for expert in by_share],
                    "line": {"color": f"--run{number % 7}", "width": 1.2},
                    "hovertemplate": f"layer {layer}, %{{text}}<br>place %{{x}}: %{{y:.3g}} %<extra></extra>",
                }
            )
    return Plot(
        key="order",
        title="Order of experts",
        means="The experts of each layer from the most popular to the least, at the last record: the order that "
        "popularity-ordered windows go by.",
        choices=(
            ("", figure(traces, x="place in the order", y="% of the layer's tokens", yaxis={"rangemode": "tozero"})),
        )
        if traces
        else (),
        missing="this run has no data on the popularity of experts (event ExpertPopularity)",
    )


def tokens_lost(facts: Facts) -> tuple[Plot, Plot]:
    """Return the measures of lost tokens over iterations, and in which layers they were lost."""
    missing = "no tokens were lost, or this run does not tell (event TokensLost)"
    measures = [_measure(facts, name, color) for name, color in (("PLT", "--run0"), ("MLT", "--run1"))]
    over_time = figure(measures, x="iteration", y="lost tokens, %", yaxis={"rangemode": "tozero"})
    return (
        Plot(
            key="plt",
            title="Lost tokens",
            means="PLT (MoC-System): proportion of tokens whose updates are lost, mean over MoE layers. MLT (MoEtion): "
            "momentary lost tokens, summed over MoE layers.",
            choices=(("", over_time),) if facts.lost else (),
            missing=missing,
        ),
        Plot(
            key="lost-by-layer",
            title="Lost tokens by layer",
            means="Tokens whose updates were lost in the whole run, by MoE layer.",
            choices=(("", figure([_lost_by_layer(facts)], x="MoE layer", y="tokens")),) if facts.lost else (),
            missing=missing,
        ),
    )


def _measure(facts: Facts, name: str, color: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [event.iteration for event in facts.lost],
        "y": numbers(100 * getattr(event, name.lower()) for event in facts.lost),
        "line": {"color": color, "shape": "hv"},
        "hovertemplate": f"{name} %{{y:.4g}} % at iteration %{{x}}<extra></extra>",
    }


def _lost_by_layer(facts: Facts) -> Trace:
    sums: Counter[int] = Counter()
    for event in facts.lost:
        sums.update(dict(zip(event.layers, event.lost_by_layer, strict=True)))
    layers = sorted(sums)
    return {
        "type": "bar",
        "x": layers,
        "y": [sums[layer] for layer in layers],
        "marker": {"color": "--lost"},
        "hovertemplate": "MoE layer %{x}: %{y:,} tokens<extra></extra>",
    }
