"""Failure traces of real clusters, as text. Pure.

The first line of a trace determines which of three formats the trace has. Other events
than removals are ignored.

    480000,add,node1           milliseconds, add|remove, node
                               (AWS, in Bamboo's repository)
    2021-12-10, 13:07:45, 80   date, time, number of nodes (GCP): a fall is that many
                               removals
    t_s,event,arg              this header, and then lines like
    2679,remove,4              seconds, add|remove, how many
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError

_SUMMARY_HEADER = "t_s,event,arg"


@dataclass(frozen=True, kw_only=True, slots=True)
class Removals:
    """The removals of nodes at one time."""

    at_s: float
    """Time after the first event of the trace, in seconds."""

    count: int
    """Number of removed nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """One event of a trace."""

    at_ms: int
    """Time of the event, in milliseconds."""

    removed: int = 0
    """Number of nodes that the event removes."""

    there: int | None = None
    """Number of nodes after the event. None: the format has no such number."""


def read_removals(text: str) -> tuple[Removals, ...]:
    """Return the removals of nodes, in order of time.

    Lines need not be sorted; lines of one time keep their order. `0,add,a`,
    `5000,remove,a`, `5000,remove,b` make two removals at 5.0. Counts 80, 70, 75 make
    ten removals at the second line.

    Raises:
        ConfigError: The trace is empty, or a line is malformed. The message then has
            the line's number and content.
    """
    numbered = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    require(bool(numbered), "trace", text, "a line for each event")
    parse, wanted = _format_of(numbered[0][1])
    lines = [
        _parse(parse, wanted, number, line)
        for number, line in numbered
        if line != _SUMMARY_HEADER
    ]
    require(bool(lines), "trace", text, f"lines like '{wanted}' below the header")
    lines.sort(key=lambda line: line.at_ms)
    totals: Counter[int] = Counter()
    there = lines[0].there
    for line in lines:
        totals[line.at_ms] += (
            line.removed
            if there is None or line.there is None
            else max(0, there - line.there)
        )
        there = line.there
    # relative to the first event: the times of dated lines count from 1970
    begin_ms = lines[0].at_ms
    return tuple(
        Removals(at_s=(at_ms - begin_ms) / 1000, count=count)
        for at_ms, count in totals.items()
        if count
    )


def _format_of(first_line: str) -> tuple[Callable[[str, str, str], _Line], str]:
    if first_line == _SUMMARY_HEADER:
        return _parse_summary, "2679,remove,4"
    if re.match(r"\d+-", first_line):
        return _parse_count, "2021-12-10, 13:07:45, 80"
    return _parse_node, "480000,add|remove,node1"


def _parse(
    parse: Callable[[str, str, str], _Line], wanted: str, number: int, line: str
) -> _Line:
    try:
        first, second, third = fields = [field.strip() for field in line.split(",")]
        if not all(fields) or third.startswith("-"):
            raise ValueError(line)
        return parse(first, second, third)
    except ValueError:
        raise ConfigError(
            f"trace: line {number}: got {line!r}, wanted a line like '{wanted}'"
        ) from None


def _parse_node(at_ms: str, event: str, _node: str) -> _Line:
    return _Line(at_ms=int(at_ms), removed=int(_is_removal(event)))


def _parse_summary(at_s: str, event: str, count: str) -> _Line:
    return _Line(at_ms=1000 * int(at_s), removed=int(count) * _is_removal(event))


def _parse_count(day: str, time: str, count: str) -> _Line:
    # with a zone: otherwise the seconds depend on the machine's own zone, and jump with
    # its daylight saving
    moment = datetime.strptime(f"{day} {time} +0000", "%Y-%m-%d %H:%M:%S %z")
    return _Line(at_ms=1000 * int(moment.timestamp()), there=int(count))


def _is_removal(event: str) -> bool:
    if event not in ("add", "remove"):
        raise ValueError(event)
    return event == "remove"
