"""Plots of one run's experts. Pure.

The plots show the popularity of experts, the slots in which windows take experts, and
the cost of recoveries for experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from launcher.report.facts import Facts
from launcher.report.figure import (
    Plot,
    Trace,
    figure,
    left_out,
    numbers,
    only,
    points,
    run_color,
)
from launcher.report.thin import evenly
from moe_ckpt.events import ExpertPopularity

_MOST_CELLS = 60_000
_LEAST_COLUMNS = 20
_COLORS = ((0, "--heat-low"), (0.5, "--heat-middle"), (1, "--heat-high"))
_NO_POPULARITY = (
    "this run's policy does not ask which experts are popular (event ExpertPopularity)"
)
_NOTHING_LOST = "no tokens were lost, or this run does not tell (event TokensLost)"


def plots_of_experts(facts: Facts) -> tuple[Plot, ...]:
    """Return the plots of a run's experts."""
    return (
        popularity(facts),
        order(facts),
        lost_tokens(facts),
        lost_by_layer(facts),
        made_up(facts),
    )


def popularity(facts: Facts) -> Plot:
    """Return the plot of each expert's share of tokens over iterations."""
    note, choices = "", ()
    if facts.popularity:
        events = facts.popularity
        kept = [
            events[i] for i in evenly(len(events), _most_columns(events[-1].tokens))
        ]
        note = left_out(len(kept), len(events), "records")
        shares = [
            [100 * np.array(tokens) / (sum(tokens) or 1) for tokens in event.tokens]
            for event in kept
        ]
        text = (
            "%{y}<br>the window before iteration %{x}: %{z:.3g} % of the layer's"
            " tokens<extra></extra>"
        )
        map_ = _heat(
            events[-1].layers,
            [event.iteration for event in kept],
            shares,
            "% of<br>layer",
            text,
        )
        choices = only(map_, events)
    return Plot(
        key="popularity",
        title="Expert popularity",
        means=(
            "Share of its layer's tokens that each expert got in the window before."
            " Windows in which a rank was replaced are not told, as it had not counted"
            " all of them; nor are most of a long run. Neighbours stretch over them."
        ),
        choices=choices,
        missing=_NO_POPULARITY,
        note=note,
    )


def order(facts: Facts) -> Plot:
    """Return the plot of the slots that take each expert, and of final popularity."""
    choices = []
    if facts.orders:
        choices.append(("by slot of the window, over iterations", _slots(facts)))
    if facts.popularity:
        choices.append(
            ("by popularity, at the last record", _by_popularity(facts.popularity[-1]))
        )
    return Plot(
        key="order",
        title="Order of experts",
        means=(
            "Which slot of its window takes each expert with its whole state: the"
            " popular ones come last, so that a replay leaves them frozen longest. By"
            " popularity: the experts of each layer from the most popular to the least,"
            " and how unevenly tokens go to them."
        ),
        choices=tuple(choices),
        missing=_NO_POPULARITY,
    )


def _slots(facts: Facts) -> dict:
    orders = facts.orders
    kept = [orders[i] for i in evenly(len(orders), _most_columns(orders[-1].slots))]
    text = "%{y}<br>from iteration %{x}: slot %{z} of its window<extra></extra>"
    slots = [[np.array(of_layer, float) for of_layer in event.slots] for event in kept]
    return _heat(
        orders[-1].layers,
        [event.iteration for event in kept],
        slots,
        "slot",
        text,
        dtick=1,
    )


def _most_columns(rows: Sequence[Sequence[float]]) -> int:
    return max(_LEAST_COLUMNS, _MOST_CELLS // max(sum(map(len, rows)), 1))


def _heat(
    layers: Sequence[str],
    iterations: Sequence[int],
    values: Sequence[Sequence[np.ndarray]],
    unit: str,
    text: str,
    **bar: object,
) -> dict:
    """Return a heat map with a row for each expert.

    Args:
        layers: The names of the layers.
        iterations: The iteration of each column.
        values: The values, [iterations][layers], each of all experts of the layer.
        unit: The title of the colour bar.
        text: The text shown on hover.
        bar: Other keys of the colour bar.
    """
    num_experts = [len(of_layer) for of_layer in values[-1]]
    like_last = [
        number
        for number, each in enumerate(values)
        if list(map(len, each)) == num_experts
    ]
    cells = np.stack([np.concatenate(values[number]) for number in like_last], axis=1)
    heat = {
        "type": "heatmap",
        "x": [iterations[number] for number in like_last],
        "y": [
            f"{layer}, expert {n}"
            for layer, count in zip(layers, num_experts, strict=True)
            for n in range(count)
        ],
        "z": [numbers(row) for row in cells],
        "colorscale": [list(each) for each in _COLORS],
        "colorbar": {"title": {"text": unit}, "thickness": 12, **bar},
        "hovertemplate": text,
    }
    rows = {"autorange": "reversed", "automargin": True, "title": {"text": ""}}
    return figure(
        [heat], x="iteration", y="", height=min(900, 180 + 16 * len(cells)), yaxis=rows
    )


def _by_popularity(last: ExpertPopularity) -> dict:
    traces = []
    for number, (layer, tokens) in enumerate(
        zip(last.layers, last.tokens, strict=True)
    ):
        by_share = sorted(range(len(tokens)), key=lambda expert: -tokens[expert])
        columns = {
            "x": list(range(1, len(tokens) + 1)),
            "y": numbers(
                100 * tokens[expert] / (sum(tokens) or 1) for expert in by_share
            ),
            "text": [f"expert {expert}" for expert in by_share],
            "line": {"color": run_color(number), "width": 1.2},
        }
        traces.append(
            points(
                layer,
                "lines+markers",
                f"{layer}, %{{text}}<br>place %{{x}}: %{{y:.3g}} %",
                **columns,
            )
        )
    return figure(
        traces,
        x="place in the order",
        y="% of the layer's tokens",
        yaxis={"rangemode": "tozero"},
    )


def lost_tokens(facts: Facts) -> Plot:
    """Return the plot of the measures of lost tokens, over iterations."""
    measures = []
    for name, color in (("PLT", "--run0"), ("MLT", "--run1")):
        shares = numbers(100 * getattr(event, name.lower()) for event in facts.lost)
        at = {
            "x": [event.iteration for event in facts.lost],
            "y": shares,
            "line": {"color": color, "shape": "hv"},
        }
        measures.append(
            points(
                name, "lines+markers", f"{name} %{{y:.4g}} % at iteration %{{x}}", **at
            )
        )
    whole_run = (
        [0, int(facts.series.iteration[-1]) + 1]
        if len(facts.series.iteration)
        else None
    )
    axes = {"xaxis": {"range": whole_run}, "yaxis": {"rangemode": "tozero"}}
    over_time = figure(measures, x="iteration", y="lost tokens, %", **axes)
    return Plot(
        key="plt",
        title="Lost tokens",
        means=(
            "PLT (MoC-System): proportion of tokens whose updates are lost, mean over"
            " MoE layers. MLT (MoEtion): momentary lost tokens, summed over MoE layers."
        ),
        choices=only(over_time, facts.lost),
        missing=_NOTHING_LOST,
    )


def lost_by_layer(facts: Facts) -> Plot:
    """Return the plot of lost tokens by layer."""
    sums: Counter[int] = Counter()
    for event in facts.lost:
        sums.update(dict(zip(event.layers, event.lost_by_layer, strict=True)))
    layers = sorted(sums)
    bars = {
        "type": "bar",
        "x": layers,
        "y": [sums[layer] for layer in layers],
        "marker": {"color": "--lost"},
        "hovertemplate": "layer %{x}: %{y:,} tokens<extra></extra>",
    }
    return Plot(
        key="lost-by-layer",
        title="Lost tokens by layer",
        means="Tokens whose updates were lost in the whole run, by MoE layer.",
        choices=only(
            figure([bars], x="layer", y="tokens", xaxis={"type": "category"}), layers
        ),
        missing=_NOTHING_LOST,
    )


def made_up(facts: Facts) -> Plot:
    """Return the plot of lost tokens that more capacity has yet to make up."""
    traces = []
    for number, (layer, left) in enumerate(facts.deficits.items()):
        at: Trace = {
            "x": [iteration for iteration, _ in left],
            "y": [deficit for _, deficit in left],
        }
        text, line = (
            f"{layer}: %{{y:,}} tokens left after iteration %{{x}}",
            {"color": run_color(number), "width": 1.5},
        )
        traces.append(points(layer, "lines+markers", text, **at, line=line))
    return Plot(
        key="made-up",
        title="Lost tokens yet to be made up",
        means=(
            "MoEtion: after a recovery, experts that have lost tokens may take more"
            " than others, out of capacity that these leave, until they have had as"
            " many tokens again. Over all ranks, by MoE layer."
        ),
        choices=only(
            figure(traces, x="iteration", y="tokens", yaxis={"rangemode": "tozero"}),
            traces,
        ),
        missing="no expert was given more capacity (event CapacityBoosted)",
    )
