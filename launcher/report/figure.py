"""A plot as a value: plotly's own JSON, with colours by name.

The page looks up each colour in the theme that is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.report.parts import PagePart

Trace = dict[str, Any]
Choices = tuple[tuple[str, dict[str, Any]], ...]
"""Pairs of a label and a figure, the default first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One plot of the page."""

    key: str
    """Identifier, unique on the page."""

    title: str
    """Title above the plot."""

    means: str
    """Explanation, shown on hover."""

    choices: Choices = ()
    """Figures that the plot can show; empty if there is no data."""

    missing: str = ""
    """Reason why `choices` is empty."""

    note: str = ""
    """Data left out to keep the page small; empty if all data is shown."""


def only(shown: dict[str, Any], there: object) -> Choices:
    """Return the figure as the only choice of a plot, without a label.

    Returns:
        No choice if `there` is empty or false.
    """
    return (("", shown),) if there else ()


def figure(
    traces: Sequence[Trace], *, x: str, y: str, height: int = 340, **layout: Any
) -> dict[str, Any]:
    """Return a figure with titled axes.

    Args:
        traces: The traces.
        x: The quantity and unit of the horizontal axis.
        y: The quantity and unit of the vertical axis.
        height: The height in pixels.
        layout: Other keys of plotly's layout.
    """
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for axis in axes:
        axes[axis] |= layout.pop(axis, {})
    return {"data": list(traces), "layout": {"height": height, **axes, **layout}}


def rows(
    traces: Sequence[Trace],
    *,
    x: str,
    height: int,
    barmode: str = "stack",
    **order: Any,
) -> dict[str, Any]:
    """Return a figure of horizontal bars, a row for each name, the first at the top."""
    axis = {
        "autorange": "reversed",
        "automargin": True,
        "type": "category",
        "title": {"text": ""},
        **order,
    }
    return figure(
        traces,
        x=x,
        y="",
        height=height,
        barmode=barmode,
        yaxis=axis,
        hovermode="closest",
    )


def points(
    name: str, mode: str, text: str, /, *, extra: str = "", **columns: Any
) -> Trace:
    """Return a trace of lines or markers.

    Args:
        name: The name in the legend.
        mode: The mode of plotly: lines, markers, or both.
        text: The text shown on hover.
        extra: The text beside `text`.
        columns: The coordinates, and other keys of the trace.
    """
    hover = {"hovertemplate": f"{text}<extra>{extra}</extra>"}
    return {"type": "scatter", "mode": mode, "name": name, **columns, **hover}


def part_bars(part: PagePart, text: str, /, **columns: Any) -> Trace:
    """Return a trace of bars in the colour of a part of time.

    Args:
        part: The part.
        text: The text shown on hover, after the row and the part.
        columns: The lengths and rows of the bars, and other keys of the trace.
    """
    hover = {"hovertemplate": f"%{{y}}<br>{part.label}: {text}<extra></extra>"}
    kind = {"type": "bar", "orientation": "h", "name": part.label}
    return kind | columns | {"marker": {"color": f"--{part.label}"}} | hover


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return values for JSON, with six digits; None for NaN and infinity."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def run_color(number: int) -> str:
    """Return the name of the colour of a run among the compared runs."""
    return f"--run{number % 7}"


def left_out(shown: int, there: int, what: str) -> str:
    """Return the note of a plot that does not show all data; empty if all is shown.

    Args:
        shown: The number of items shown.
        there: The number of all items.
        what: The items.
    """
    return "" if shown >= there else f"{shown:,} of {there:,} {what}"
