"""A figure of panels with lines as SVG, written without a plotting library. Pure.

The figure is readable on light and dark pages, and its source in a text editor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 500.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 62.0, 46.0
_TICKS_WANTED = 6
_STYLES = {
    "none": ("#b9c1cb", "#59636f", 8.0),
    "gemini": ("#e0a36b", "#a5652a", 4.5),
    "moevement": ("#123a5e", "#9fd0f8", 1.4),
    "first": ("#2a7a4b", "#62c08a", 1.6),
    "second": ("#7b4397", "#c493dd", 1.6),
    "third": ("#c2185b", "#ff79b0", 1.6),
}
_STYLE = """\
.page {{ fill: {page}; }} .frame {{ fill: none; stroke: {faint}; }} .grid {{ stroke: {grid}; }}
.band {{ fill: {grid}; }} text {{ fill: {text}; }} .faint {{ fill: {faint}; }}
.fault {{ stroke: {fault}; stroke-dasharray: 2 3; stroke-opacity: 0.7; }} text.fault {{ fill: {fault}; stroke: none; }}
.dashed {{ stroke-dasharray: 5 2; }}
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points joined by a line."""

    name: str
    """Name in the legend."""

    style: str
    """Key of `_STYLES`, with " dashed" or not."""

    points: Points
    """Pairs of x and y, in the order of the line."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Axes with lines."""

    title: str
    """Title above the axes."""

    y: str
    """Title of the vertical axis."""

    lines: Sequence[Line]
    """Lines; the first line lies below all others."""

    marks: Sequence[tuple[float, str]]
    """Pairs of a fault's iteration and the rank or node that was hit."""

    has_legend: bool = False
    """Whether the panel has a legend of the lines."""

    band: Points = ()
    """Half the width of a band about zero, by x.

    The band is cut off at the ends of the vertical axis.
    """


def draw(rows: Sequence[Sequence[Panel]], x: str) -> str:
    """Return panels as one SVG.

    Args:
        rows: The panels, row by row.
        x: The title of all horizontal axes.
    """
    width, height = _WIDTH * max(map(len, rows)), _HEIGHT * len(rows)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g}'
            f' {height:g}" width="{width:g}" height="{height:g}"'
            ' font-family="system-ui, sans-serif" font-size="12">'
        ),
        f"<style>\n{_style()}</style>",
        f'<rect class="page" width="{width:g}" height="{height:g}" rx="8"/>',
    ]
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            parts.append(
                f'<g transform="translate({column * _WIDTH:g} {row * _HEIGHT:g})">'
            )
            parts += [*_panel(panel, x), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers at equal distances between two others.

    `low` and `high` are included if they are round: 0 and 400 make 0, 100, 200, 300,
    400.
    """
    rough = (high - low) / _TICKS_WANTED
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        factor * power
        for factor in (1, 2, 5, 10)
        if factor * power >= rough * (1 - 1e-9)
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _style() -> str:
    light = {
        "page": "#ffffff",
        "text": "#1c2430",
        "faint": "#59636f",
        "grid": "#e6e9ee",
        "fault": "#b3261e",
    }
    dark = {
        "page": "#0f1318",
        "text": "#e4e8ed",
        "faint": "#a0aab6",
        "grid": "#29313b",
        "fault": "#ff7b70",
    }
    strokes = [
        "".join(
            f".{style} {{ stroke: {colors[theme]}; stroke-width: {width}; fill: none;"
            " }\n"
            for style, (*colors, width) in _STYLES.items()
        )
        for theme in (0, 1)
    ]
    night = _STYLE.format(**dark) + strokes[1]
    return (
        f"{_STYLE.format(**light)}{strokes[0]}@media (prefers-color-scheme: dark)"
        f" {{\n{night}}}\n"
    )


class _Scale:
    """Maps data to a panel's own coordinates."""

    def __init__(self, panel: Panel) -> None:
        xs = [x for line in panel.lines for x, _ in line.points]
        ys = [y for line in panel.lines for _, y in line.points] + [
            sign * half for _, half in panel.band[-1:] for sign in (-1, 1)
        ]
        margin = (max(ys) - min(ys)) * 0.04 or 1.0
        self.low_x, self.high_x = min(xs), max([*xs, min(xs) + 1])
        self.low_y, self.high_y = min(ys) - margin, max(ys) + margin
        self._panel_width, self._panel_height = (
            _WIDTH - _LEFT - _RIGHT,
            _HEIGHT - _TOP - _BOTTOM,
        )

    def x(self, value: float) -> float:
        return round(
            _LEFT
            + self._panel_width * (value - self.low_x) / (self.high_x - self.low_x),
            2,
        )

    def y(self, value: float) -> float:
        return round(
            _TOP
            + self._panel_height * (self.high_y - value) / (self.high_y - self.low_y),
            2,
        )

    def points(self, points: Points) -> str:
        """Return points as SVG has them.

        Points above or below the vertical axis are moved to its end.
        """
        return " ".join(
            f"{self.x(x)},{self.y(min(max(y, self.low_y), self.high_y))}"
            for x, y in points
        )


def _panel(panel: Panel, x_title: str) -> Iterator[str]:
    scale = _Scale(panel)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    if panel.band:
        outline = [*panel.band, *((x, -half) for x, half in reversed(panel.band))]
        yield f'<polygon class="band" points="{scale.points(outline)}"/>'
    yield from _axes(scale, x_title, panel.y)
    for at, who in panel.marks:
        x = scale.x(at)
        yield f'<line class="fault" x1="{x}" x2="{x}" y1="{_TOP - 4}" y2="{bottom}"/>'
        yield (
            f'<text class="fault" x="{x}" y="{_TOP - 9}" text-anchor="middle"'
            f' font-size="10">{escape(who)}</text>'
        )
    for line in panel.lines:
        yield f'<polyline class="{line.style}" points="{scale.points(line.points)}"/>'
    yield (
        f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}"'
        f' height="{bottom - _TOP}"/>'
    )
    yield (
        f'<text x="{_LEFT}" y="26" font-size="14"'
        f' font-weight="600">{escape(panel.title)}</text>'
    )
    if panel.has_legend:
        yield from _legend(panel.lines)


def _axes(scale: _Scale, x_title: str, y_title: str) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value in ticks(scale.low_x, scale.high_x):
        yield (
            f'<text class="faint" x="{scale.x(value)}" y="{bottom + 16}"'
            f' text-anchor="middle">{value:g}</text>'
        )
    for value in ticks(scale.low_y, scale.high_y):
        y = scale.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield (
            f'<text class="faint" x="{_LEFT - 6}" y="{y + 4}"'
            f' text-anchor="end">{value:g}</text>'
        )
    yield (
        f'<text x="{(_LEFT + right) / 2}" y="{bottom + 36}"'
        f' text-anchor="middle">{escape(x_title)}</text>'
    )
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 16 {middle})"'
    yield (
        f'<text x="16" y="{middle}" text-anchor="middle"'
        f" {turned}>{escape(y_title)}</text>"
    )


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    x = _WIDTH - _RIGHT - 188
    yield (
        f'<rect class="page" x="{x - 8}" y="{_TOP + 6}" width="190"'
        f' height="{18 * len(lines) + 6}" rx="4"/>'
    )
    for number, line in enumerate(lines):
        y = _TOP + 18 + 18 * number
        yield f'<line class="{line.style}" x1="{x}" x2="{x + 28}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{x + 36}" y="{y + 4}">{escape(line.name)}</text>'
