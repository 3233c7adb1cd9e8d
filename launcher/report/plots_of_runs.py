"""Plots in which all runs are compared. Pure: facts in, plotly's JSON out."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

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
    run_color,
)
from launcher.report.parts import EXPLAINED, PagePart
from launcher.report.summary import MIB, duration
from launcher.report.thin import MOST_POINTS, thin

_MOST_LINES = 60  # dotted lines, one for each fault: more lines are a grey area
_NO_COMMIT = "no iteration was committed"
_FROM_ZERO = {"rangemode": "tozero"}
Values = np.ndarray


def plots_of_runs(runs: Sequence[Facts]) -> tuple[Plot, ...]:
    """Return the plots of all runs together."""
    plots = (where_time_went, loss, progress, ettr, iteration_time, stall, moved)
    return tuple(plot(runs) for plot in plots)


def where_time_went(runs: Sequence[Facts]) -> Plot:
    """Return the plot of the parts of the wall time, a bar for each run."""
    there = [facts for facts in runs if facts.totals_us]
    traces = [
        _part_bar(there, part)
        for part in PagePart
        if any(facts.mean_us(part) for facts in there)
    ]
    return Plot(
        key="time",
        title="Where the time went",
        means="Wall time of each run by what it was spent on; mean over ranks. "
        + " ".join(f"{part.label}: {EXPLAINED[part]}." for part in PagePart),
        choices=only(rows(traces, x="time, s", height=150 + 44 * len(there)), there),
        missing="no run has events",
    )


def _part_bar(runs: Sequence[Facts], part: PagePart) -> Trace:
    shares = [
        100 * facts.mean_us(part) / facts.end_us if facts.end_us else 0.0
        for facts in runs
    ]
    names, lengths = (
        [facts.run.name for facts in runs],
        numbers(facts.mean_us(part) / 1e6 for facts in runs),
    )
    return part_bars(
        part,
        "%{x:.3f} s, %{customdata:.2f} %",
        y=names,
        x=lengths,
        customdata=numbers(shares),
    )


def loss(runs: Sequence[Facts]) -> Plot:
    """Return the plot of training and evaluation loss, with the faults."""
    traces, shapes, notes = [], [], set()
    dotted = {"color": "--fault", "width": 1, "dash": "dot"}
    for number, facts in enumerate(runs):
        line, note = _line(facts, number, facts.series.loss, "loss %{y:.4f}", name="")
        notes.add(note)
        traces += [line, *_evaluations(facts, number), *_fault_marks(facts, number)]
        # lines of several runs would look alike; crosses have the colours of the runs
        lines = [each.struck for each in facts.episodes] if len(runs) == 1 else []
        shapes += [
            {
                "type": "line",
                "x0": at,
                "x1": at,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": dotted,
            }
            for at in lines
        ]
    there = any(len(facts.series.iteration) for facts in runs)
    return Plot(
        key="loss",
        title="Loss",
        means=(
            "Training loss of each iteration, the last time it was computed; circles:"
            " cross-entropy on held-out batches; crosses: the iteration that a fault"
            " fell into."
        ),
        choices=only(
            figure(
                traces,
                x="iteration",
                y="loss, nats per token",
                shapes=shapes[:_MOST_LINES],
            ),
            there,
        ),
        missing=_NO_COMMIT,
        note=_joined(notes),
    )


def _line(
    facts: Facts, number: int, values: Values, hover: str, *, name: str, **style: object
) -> tuple[Trace, str]:
    """Return a line over iterations, and the note of the iterations left out."""
    keep = thin(values)
    label = f"{facts.run.name} {name}".strip()
    line = {
        "x": facts.series.iteration[keep].tolist(),
        "y": numbers(values[keep]),
        "line": {"color": run_color(number), "width": 1.8, **style},
    }
    trace = points(
        label, "lines" if len(keep) > 1 else "markers", hover, extra=label, **line
    )
    shown = "iterations are shown, with the least and the most of each stretch"
    return trace, left_out(len(keep), int(np.isfinite(values).sum()), shown)


def _evaluations(facts: Facts, number: int) -> list[Trace]:
    values = np.array([each.loss for each in facts.evaluated], float)
    keep = thin(values, MOST_POINTS // 4)
    marks = {
        "x": [facts.evaluated[i].iteration for i in keep],
        "y": numbers(values[keep]),
        "marker": {"color": run_color(number), "symbol": "circle-open", "size": 8},
    }
    text, name = "evaluation loss %{y:.4f}", facts.run.name
    return (
        [points(f"{name}, held-out", "markers", text, extra=name, **marks)]
        if facts.evaluated
        else []
    )


def _fault_marks(facts: Facts, number: int) -> list[Trace]:
    """Return crosses on the loss curve at the faults, with cause and cost on hover."""
    series = facts.series
    if not facts.episodes or not len(series.iteration):
        return []
    at = [each.struck for each in facts.episodes]
    # a fault in an iteration that was never committed has no loss: take a near one
    where = np.clip(np.searchsorted(series.iteration, at), 0, len(series.iteration) - 1)
    marks = {
        "x": at,
        "y": numbers(series.loss[where]),
        "text": [_fault_text(each) for each in facts.episodes],
        "marker": {
            "color": "--fault",
            "symbol": "x",
            "size": 9,
            "line": {"width": 1.5, "color": run_color(number)},
        },
    }
    return [
        points(
            f"{facts.run.name}, faults",
            "markers",
            "%{text}",
            extra=facts.run.name,
            **marks,
        )
    ]


def _fault_text(episode: Episode) -> str:
    escaped = (cause.replace("<", "&lt;") for cause in episode.causes[:4])
    lines = (
        textwrap.wrap(cause, 60, break_long_words=False, break_on_hyphens=False)
        for cause in escaped
    )
    causes = "<br>".join(itertools.chain.from_iterable(lines))
    took = duration((episode.end_us - episode.start_us) / 1e6)
    return (
        f"{causes}<br>recovered in {took}, cost {duration(episode.cost_us / 1e6)} a"
        " rank"
    )


def progress(runs: Sequence[Facts]) -> Plot:
    """Return the plot of iterations against time.

    Slopes are speed; steps down are work that was given up.
    """
    traces, notes = [], set()
    for number, facts in enumerate(runs):
        time, name = facts.over_time, facts.run.name
        shown = "commits are shown, with all that ranks went back from"
        notes.add(left_out(len(time.iteration), time.num_commits, shown))
        line = {"color": run_color(number), "width": 1.8, "shape": "hv"}
        at = {"x": numbers(time.committed_s), "y": time.iteration.tolist()}
        traces.append(
            points(
                name,
                "lines",
                "iteration %{y} at %{x:.2f} s",
                extra=name,
                **at,
                line=line,
            )
        )
    return Plot(
        key="progress",
        title="Progress",
        means=(
            "The iteration that was just committed, against wall time. Flat: nothing"
            " got on. Down: ranks went back."
        ),
        choices=only(
            figure(traces, x="time since the start, s", y="iteration"),
            _has_commits(runs),
        ),
        missing=_NO_COMMIT,
        note=_joined(notes),
    )


def ettr(runs: Sequence[Facts]) -> Plot:
    """Return the plot of the ETTR so far, against time."""
    traces = []
    for number, facts in enumerate(runs):
        at = {
            "x": numbers(facts.over_time.grid_s),
            "y": numbers(100 * facts.over_time.ettr),
        }
        line = {"color": run_color(number), "width": 1.8}
        text, name = "ETTR %{y:.2f} % until %{x:.1f} s", facts.run.name
        traces.append(points(name, "lines", text, extra=name, **at, line=line))
    shown = figure(traces, x="time since the start, s", y="ETTR, %", yaxis=_FROM_ZERO)
    return Plot(
        key="ettr",
        title="Effective training time ratio so far",
        means=(
            "ETTR from the start until each moment: compute / (wall time - startup -"
            " evaluation - unknown)."
        ),
        choices=only(shown, _has_commits(runs)),
        missing=_NO_COMMIT,
    )


def iteration_time(runs: Sequence[Facts]) -> Plot:
    """Return the plot of the length of iterations."""
    means = "Length of each iteration with its stall; mean over ranks."
    plot = Plot(key="iteration", title="Iteration time", means=means)
    return _over_iterations(
        plot,
        runs,
        [("", lambda facts: facts.series.seconds, {})],
        y="iteration, s",
        unit="s",
    )


def stall(runs: Sequence[Facts]) -> Plot:
    """Return the plot of the time that checkpointing takes from iterations."""
    lines = [
        ("mean", lambda facts: 1e3 * facts.series.stall_mean_s, {}),
        (
            "worst rank",
            lambda facts: 1e3 * facts.series.stall_max_s,
            {"dash": "dot", "width": 1},
        ),
    ]
    means = (
        "What checkpointing took from each iteration on the training thread: mean over"
        " ranks, worst rank."
    )
    plot = Plot(key="stall", title="Stall per iteration", means=means)
    return _over_iterations(plot, runs, lines, y="stall, ms", unit="ms")


def moved(runs: Sequence[Facts]) -> Plot:
    """Return the plot of the bytes that each iteration moves."""
    lines = [
        ("snapshots", lambda facts: facts.series.snapshot_bytes / MIB, {}),
        (
            "between stages",
            lambda facts: _none_where_zero(facts.series.sent_bytes / MIB),
            {"dash": "dash", "width": 1},
        ),
    ]
    means = (
        "Copied to host memory by snapshots, and sent between pipeline stages (which"
        " boundary logs keep); all ranks together. Diamonds: whole windows sent to"
        " peers; squares: whole checkpoints on disk."
    )
    plot = Plot(key="bytes", title="Bytes per iteration", means=means)
    plot = _over_iterations(plot, runs, lines, y="MiB per iteration", unit="MiB")
    for number, facts in enumerate(runs if plot.choices else ()):
        keep, saved = thin(facts.series.peer_bytes), facts.saved[-MOST_POINTS:]
        windows = dict(
            zip(
                facts.series.iteration[keep].tolist(),
                facts.series.peer_bytes[keep] / MIB,
                strict=True,
            )
        )
        checkpoints = {each.iteration: each.size_bytes / MIB for each in saved}
        plot.choices[0][1]["data"] += [
            *_marks(
                facts,
                number,
                "windows to peers",
                "diamond",
                "the window from %{x} to peers",
                windows,
            ),
            *_marks(
                facts,
                number,
                "checkpoints",
                "square",
                "checkpoint at %{x}",
                checkpoints,
            ),
        ]
    return plot


def _marks(
    facts: Facts,
    number: int,
    what: str,
    symbol: str,
    text: str,
    sizes_mib: Mapping[int, float],
) -> list[Trace]:
    """Return marks of sizes at some iterations; empty if there are no sizes."""
    name, marker = (
        facts.run.name,
        {"color": run_color(number), "symbol": symbol, "size": 7},
    )
    trace = points(
        f"{name} {what}",
        "markers",
        f"{text}: %{{y:.4g}} MiB",
        extra=name,
        marker=marker,
    )
    return (
        [trace | {"x": list(sizes_mib), "y": numbers(sizes_mib.values())}]
        if sizes_mib
        else []
    )


def _over_iterations(
    plot: Plot,
    runs: Sequence[Facts],
    lines: Sequence[tuple[str, Callable[[Facts], Values], dict[str, object]]],
    *,
    y: str,
    unit: str,
) -> Plot:
    """Return the plot with these lines for each run.

    Args:
        plot: The plot without figures.
        runs: The runs.
        lines: The name, the values and the style of each line of a run.
        y: The quantity and unit of the vertical axis.
        unit: The unit of a value shown on hover.
    """
    found = [
        _line(
            facts,
            number,
            of(facts),
            f"iteration %{{x}}: %{{y:.4g}} {unit}",
            name=name,
            **style,
        )
        for number, facts in enumerate(runs)
        for name, of, style in lines
    ]
    traces, notes = (
        [trace for trace, _ in found if trace["x"]],
        {note for _, note in found},
    )
    choices = only(figure(traces, x="iteration", y=y, yaxis=_FROM_ZERO), traces)
    return replace(plot, choices=choices, missing=_NO_COMMIT, note=_joined(notes))


def _none_where_zero(values: Values) -> Values:
    return values if np.nansum(values) > 0 else np.full_like(values, np.nan)


def _has_commits(runs: Sequence[Facts]) -> bool:
    return any(len(facts.over_time.iteration) for facts in runs)


def _joined(notes: set[str]) -> str:
    return "; ".join(sorted(notes - {""}))
