"""Plots in which all runs are compared. Pure: facts in, plotly's JSON out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from launcher.report.episodes import Episode
from launcher.report.facts import Facts
from launcher.report.figure import Plot, Trace, figure, numbers, run_color
from launcher.report.parts import EXPLAINED, PagePart
from launcher.report.summary import duration
from launcher.report.thin import MOST_POINTS, said, thin

_MIB = 1 << 20
_MOST_LINES = 60
Values = np.ndarray


def plots_of_runs(runs: Sequence[Facts]) -> tuple[Plot, ...]:
    """Return what a page shows of all runs together."""
    return (
        where_time_went(runs),
        loss(runs),
        progress(runs),
        ettr(runs),
        iteration_time(runs),
        stall(runs),
        moved(runs),
    )


def where_time_went(runs: Sequence[Facts]) -> Plot:
    """Return the parts of the wall time, a bar for each run."""
    there = [facts for facts in runs if facts.totals_us]
    traces = [_part_bar(there, part) for part in PagePart if any(facts.mean_us(part) for facts in there)]
    return Plot(
        key="time",
        title="Where the time went",
        means="Wall time of each run by what it was spent on; mean over ranks. "
        + " ".join(f"{part.label}: {EXPLAINED[part]}." for part in PagePart),
        choices=(("", _bars(traces, len(there))),) if there else (),
        missing="no run has events",
    )


def _bars(traces: Sequence[Trace], count: int) -> dict:
    rows = {"autorange": "reversed", "automargin": True, "type": "category", "title": {"text": ""}}
    return figure(traces, x="time, s", y="", height=150 + 44 * count, barmode="stack", yaxis=rows, hovermode="closest")


def _part_bar(runs: Sequence[Facts], part: PagePart) -> Trace:
    shares = [100 * facts.mean_us(part) / facts.end_us if facts.end_us else 0.0 for facts in runs]
    return {
        "type": "bar",
        "orientation": "h",
        "name": part.label,
        "y": [facts.run.name for facts in runs],
        "x": numbers(facts.mean_us(part) / 1e6 for facts in runs),
        "customdata": numbers(shares),
        "marker": {"color": f"--{part.label}"},
        "hovertemplate": f"%{{y}}<br>{part.label}: %{{x:.3f}} s, %{{customdata:.2f}} %<extra></extra>",
    }


def loss(runs: Sequence[Facts]) -> Plot:
    """Return training and evaluation loss, with the faults."""
    traces, shapes, notes = [], [], set()
    for number, facts in enumerate(runs):
        series = facts.series
        line, note = _line(facts, number, series.loss, "loss %{y:.4f}", name="")
        notes.add(note)
        traces += [line, *_evaluations(facts, number), *_fault_marks(facts, number)]
        shapes += [_fault_line(each) for each in facts.episodes] if len(runs) == 1 else []
    return Plot(
        key="loss",
        title="Loss",
        means="Training loss of each iteration, the last time it was computed; circles: cross-entropy on held-out "
        "batches; crosses: the iteration that a fault fell into.",
        choices=(("", figure(traces, x="iteration", y="loss, nats per token", shapes=shapes[:_MOST_LINES])),)
        if any(len(facts.series.iteration) for facts in runs)
        else (),
        missing="no iteration was committed",
        note=_joined(notes),
    )


def _line(facts: Facts, number: int, values: Values, hover: str, *, name: str, **style: object) -> tuple[Trace, str]:
    """Return a line over iterations and what was left out of it."""
    keep = thin(values)
    label = f"{facts.run.name} {name}".strip()
    trace = {
        "type": "scatter",
        "mode": "lines" if len(keep) > 1 else "markers",
        "name": label,
        "x": facts.series.iteration[keep].tolist(),
        "y": numbers(values[keep]),
        "line": {"color": run_color(number), "width": 1.8, **style},
        "hovertemplate": f"{hover}<extra>{label}</extra>",
    }
    return trace, said(len(keep), int(np.isfinite(values).sum()), "iterations")


def _evaluations(facts: Facts, number: int) -> list[Trace]:
    if not facts.evaluated:
        return []
    values = np.array([each.loss for each in facts.evaluated], float)
    keep = thin(values, MOST_POINTS // 4)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{facts.run.name}, held-out",
            "x": [facts.evaluated[i].iteration for i in keep],
            "y": numbers(values[keep]),
            "marker": {"color": run_color(number), "symbol": "circle-open", "size": 8},
            "hovertemplate": f"evaluation loss %{{y:.4f}}<extra>{facts.run.name}</extra>",
        }
    ]


def _fault_marks(facts: Facts, number: int) -> list[Trace]:
    """Return crosses on the loss curve where faults fell, which say what happened and what it cost."""
    series = facts.series
    if not facts.episodes or not len(series.iteration):
        return []
    at = [each.struck for each in facts.episodes]
    where = np.clip(np.searchsorted(series.iteration, at), 0, len(series.iteration) - 1)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{facts.run.name}, faults",
            "x": at,
            "y": numbers(series.loss[where]),
            "text": [_fault_text(each) for each in facts.episodes],
            "marker": {
                "color": "--fault",
                "symbol": "x",
                "size": 9,
                "line": {"width": 1.5, "color": run_color(number)},
            },
            "hovertemplate": f"%{{text}}<extra>{facts.run.name}</extra>",
        }
    ]


def _fault_text(episode: Episode) -> str:
    causes = "<br>".join(_wrapped(cause) for cause in episode.causes[:4])
    took = duration((episode.end_us - episode.start_us) / 1e6)
    return f"{causes}<br>recovered in {took}, cost {duration(episode.cost_us / 1e6)} a rank"


def _wrapped(text: str, width: int = 60) -> str:
    lines, line = [], ""
    for word in text.replace("<", "&lt;").split():
        if line and len(line) + len(word) >= width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "<br>".join([*lines, line])


def _fault_line(episode: Episode) -> Trace:
    at = episode.struck
    return {
        "type": "line",
        "x0": at,
        "x1": at,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "--fault", "width": 1, "dash": "dot"},
    }


def progress(runs: Sequence[Facts]) -> Plot:
    """Return iterations against time: slopes are speed, steps down are work that was given up."""
    traces, notes = [], set()
    for number, facts in enumerate(runs):
        time = facts.over_time
        notes.add(_some(len(time.iteration), time.num_commits))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": facts.run.name,
                "x": numbers(time.committed_s),
                "y": time.iteration.tolist(),
                "line": {"color": run_color(number), "width": 1.8, "shape": "hv"},
                "hovertemplate": f"iteration %{{y}} at %{{x:.2f}} s<extra>{facts.run.name}</extra>",
            }
        )
    return Plot(
        key="progress",
        title="Progress",
        means="The iteration that was just committed, against wall time. Flat: nothing got on. Down: ranks went back.",
        choices=(("", figure(traces, x="time since the start, s", y="iteration")),) if _has_commits(runs) else (),
        missing="no iteration was committed",
        note=_joined(notes),
    )


def ettr(runs: Sequence[Facts]) -> Plot:
    """Return the ETTR so far against time."""
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": facts.run.name,
            "x": numbers(facts.over_time.grid_s),
            "y": numbers(100 * facts.over_time.ettr),
            "line": {"color": run_color(number), "width": 1.8},
            "hovertemplate": f"ETTR %{{y:.2f}} % until %{{x:.1f}} s<extra>{facts.run.name}</extra>",
        }
        for number, facts in enumerate(runs)
    ]
    return Plot(
        key="ettr",
        title="Effective training time ratio so far",
        means="ETTR from the start until each moment: compute / (wall time - startup - evaluation - unknown).",
        choices=(("", figure(traces, x="time since the start, s", y="ETTR, %", yaxis={"rangemode": "tozero"})),)
        if _has_commits(runs)
        else (),
        missing="no iteration was committed",
    )


def iteration_time(runs: Sequence[Facts]) -> Plot:
    """Return how long iterations take."""
    return _over_iterations(
        runs,
        [("", lambda facts: facts.series.seconds, {})],
        Plot(
            key="iteration", title="Iteration time", means="Length of each iteration with its stall; mean over ranks."
        ),
        y="iteration, s",
        hover="iteration %{x}: %{y:.4g} s",
    )


def stall(runs: Sequence[Facts]) -> Plot:
    """Return what checkpointing takes from iterations."""
    return _over_iterations(
        runs,
        [
            ("mean", lambda facts: 1e3 * facts.series.stall_mean_s, {}),
            ("worst rank", lambda facts: 1e3 * facts.series.stall_max_s, {"dash": "dot", "width": 1}),
        ],
        Plot(
            key="stall",
            title="Stall per iteration",
            means="What checkpointing took from each iteration on the training thread: mean over ranks, worst rank.",
        ),
        y="stall, ms",
        hover="iteration %{x}: %{y:.4g} ms",
    )


def moved(runs: Sequence[Facts]) -> Plot:
    """Return the bytes that go with an iteration."""
    plot = _over_iterations(
        runs,
        [
            ("snapshots", lambda facts: facts.series.snapshot_bytes / _MIB, {}),
            (
                "between stages",
                lambda facts: _none_where_zero(facts.series.sent_bytes / _MIB),
                {"dash": "dash", "width": 1},
            ),
        ],
        Plot(
            key="bytes",
            title="Bytes per iteration",
            means="Copied to host memory by snapshots, and sent between pipeline stages (which boundary logs keep); "
            "all ranks together. Diamonds: whole windows sent to peers; squares: whole checkpoints on disk.",
        ),
        y="MiB per iteration",
        hover="iteration %{x}: %{y:.4g} MiB",
    )
    marked = [
        trace
        for number, facts in enumerate(runs)
        for trace in (*_windows_to_peers(facts, number), *_checkpoints(facts, number))
    ]
    if plot.choices:
        plot.choices[0][1]["data"].extend(marked)
    return plot


def _windows_to_peers(facts: Facts, number: int) -> list[Trace]:
    keep = thin(facts.series.peer_bytes)
    text = "the window from %{x} to peers: %{y:.4g} MiB"
    marks = _marks(facts, number, "windows to peers", "diamond", text)
    sizes = facts.series.peer_bytes[keep] / _MIB
    return [marks | {"x": facts.series.iteration[keep].tolist(), "y": numbers(sizes)}] if len(keep) else []


def _checkpoints(facts: Facts, number: int) -> list[Trace]:
    saved = facts.saved[-MOST_POINTS:]
    marks = _marks(facts, number, "checkpoints", "square", "checkpoint at %{x}: %{y:.4g} MiB")
    sizes = numbers(each.size_bytes / _MIB for each in saved)
    return [marks | {"x": [each.iteration for each in saved], "y": sizes}] if saved else []


def _marks(facts: Facts, number: int, what: str, symbol: str, text: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{facts.run.name} {what}",
        "marker": {"color": run_color(number), "symbol": symbol, "size": 7},
        "hovertemplate": f"{text}<extra>{facts.run.name}</extra>",
    }


def _over_iterations(
    runs: Sequence[Facts],
    lines: Sequence[tuple[str, Callable[[Facts], Values], dict[str, object]]],
    plot: Plot,
    *,
    y: str,
    hover: str,
) -> Plot:
    """Return the plot with these lines for each run."""
    found = [
        _line(facts, number, of(facts), hover, name=name, **style)
        for number, facts in enumerate(runs)
        for name, of, style in lines
    ]
    traces = [trace for trace, _ in found if trace["x"]]
    return Plot(
        key=plot.key,
        title=plot.title,
        means=plot.means,
        choices=(("", figure(traces, x="iteration", y=y, yaxis={"rangemode": "tozero"})),) if traces else (),
        missing="no iteration was committed",
        note=_joined({note for _, note in found}),
    )


def _none_where_zero(values: Values) -> Values:
    return values if np.nansum(values) > 0 else np.full_like(values, np.nan)


def _has_commits(runs: Sequence[Facts]) -> bool:
    return any(len(facts.over_time.iteration) for facts in runs)


def _joined(notes: set[str]) -> str:
    return "; ".join(sorted(notes - {""}))


def _some(shown: int, there: int) -> str:
    return "" if shown >= there else f"{shown:,} of {there:,} commits are shown, with all that ranks went back from"
