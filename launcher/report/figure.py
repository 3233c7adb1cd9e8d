"""A plot as a value: plotly's own JSON, with colours by name, which the page looks up
in the theme that is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.report.parts import PagePart

Trace = dict[str, Any]
Choices = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One plot. `choices`: what can be shown in it, with labels, the first one first;
    none: `missing` says why.

    `note`: what was left out to keep the page small.
    """

    key: str
    title: str
    means: str
    choices: Choices = ()
    missing: str = ""
    note: str = ""


def only(shown: dict[str, Any], there: object) -> Choices:
    """Return the figure as a plot's one choice, which needs no label; no choice where
    nothing is there.
    """
    return (("", shown),) if there else ()


def figure(
    traces: Sequence[Trace], *, x: str, y: str, height: int = 340, **layout: Any
) -> dict[str, Any]:
    """Return a figure with titled axes. `x` and `y` name quantity and unit."""
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
    """Return a figure of horizontal bars, a row for each name, the first one at the
    top.
    """
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
    """Return a line or marks; `text` is shown on hover, with `extra` beside it."""
    hover = {"hovertemplate": f"{text}<extra>{extra}</extra>"}
    return {"type": "scatter", "mode": mode, "name": name, **columns, **hover}


def part_bars(part: PagePart, text: str, /, **columns: Any) -> Trace:
    """Return bars in the colour of a part of time."""
    hover = {"hovertemplate": f"%{{y}}<br>{part.label}: {text}<extra></extra>"}
    kind = {"type": "bar", "orientation": "h", "name": part.label}
    return kind | columns | {"marker": {"color": f"--{part.label}"}} | hover


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return values as JSON can have them, with six digits; None for what is none."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def run_color(number: int) -> str:
    """Return the name of the colour of a run among those compared."""
    return f"--run{number % 7}"


def left_out(shown: int, there: int, what: str) -> str:
    """Return the note of a plot that does not show all; nothing where it does."""
    return "" if shown >= there else f"{shown:,} of {there:,} {what}"
