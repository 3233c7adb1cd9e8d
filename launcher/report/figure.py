"""A plot as a value: plotly's own JSON, with colours by name, which the page looks up in the theme that is on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One plot. `choices`: what can be shown in it, with labels, the first one first; none: `missing` says why.

    `note`: what was left out to keep the page small.
    """

    key: str
    title: str
    means: str
    choices: tuple[tuple[str, dict[str, Any]], ...] = ()
    missing: str = ""
    note: str = ""


def figure(traces: Sequence[Trace], *, x: str, y: str, height: int = 340, **layout: Any) -> dict[str, Any]:
    """Return a figure with titled axes. `x` and `y` name quantity and unit."""
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for axis in axes:
        axes[axis] |= layout.pop(axis, {})
    return {"data": list(traces), "layout": {"height": height, **axes, **layout}}


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return values as JSON can have them, with six digits; None for what is none."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def run_color(number: int) -> str:
    """Return the name of the colour of a run among those compared."""
    return f"--run{number % 7}"


def left_out(shown: int, there: int, what: str) -> str:
    """Return the note of a plot that does not show all; nothing where it does."""
    return "" if shown >= there else f"{shown:,} of {there:,} {what}"
