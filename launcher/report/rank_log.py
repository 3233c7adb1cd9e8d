"""One rank's event file: tables for kinds that come with iterations, else typed events.

No content of a file may raise an error: the module counts unreadable content by the
kind of defect.
"""

from __future__ import annotations

import gc
import json
import math
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from launcher.report.columns import KEYS, Columns, join
from moe_ckpt.events import (
    KINDS,
    Event,
    EventsLost,
    GenerationEnded,
    HostMemoryUsed,
    Rejoined,
    RunFinished,
    WindowReplicated,
    WorkerStarted,
)

_COMMITTED = (
    "t_s",
    "iteration",
    "seconds",
    "stall_s",
    "loss",
    "sent_activation_bytes",
    "sent_gradient_bytes",
)
_TABLES = {
    "IterationCommitted": _COMMITTED,
    "SnapshotTaken": ("t_s", "iteration", "size_bytes", "copy_s"),
    "HostMemoryUsed": ("t_s", *(field.name for field in fields(HostMemoryUsed))),
    "WindowChosen": ("t_s", "iteration", "num_slots"),
    "WindowReplicated": ("t_s", *(field.name for field in fields(WindowReplicated))),
    "IntervalChosen": ("t_s", "iteration", "every_iters"),
}
_KIND_OF = itemgetter("event")
_BLOCK_BYTES = 128 << 10  # so small that a block's parsed records stay in CPU caches
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """An event with its position in the file."""

    at_us: int
    """Time of the event, in microseconds since the run's origin."""

    after_commits: int
    """Number of commits before the event in the file."""

    event: Event
    """The event."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankLog:
    """The events of one rank."""

    rank: int
    """Global rank."""

    tables: Mapping[str, Columns]
    """Events of the kinds that come with iterations, by kind."""

    events: tuple[Noted, ...]
    """All other events, in the order of the file."""

    unknown: Mapping[str, int]
    """Number of deviations from this version's events, by description."""

    problems: tuple[str, ...]
    """Other defects of the file, for people."""

    @property
    def commits(self) -> Columns:
        return self.tables["IterationCommitted"]

    @property
    def num_events(self) -> int:
        return len(self.events) + sum(map(len, self.tables.values()))

    @property
    def has_finished(self) -> bool:
        return any(isinstance(noted.event, RunFinished) for noted in self.events)

    @property
    def end_us(self) -> int:
        """The time of the rank's last event, in microseconds since the run's origin."""
        ends = [int(table.at_us[-1]) for table in self.tables.values() if len(table)]
        return max([0, *ends, *(noted.at_us for noted in self.events)])


def read_rank(rank: int, path: Path) -> RankLog:
    """Return the content of one rank's event file.

    The call pauses garbage collection of the process. A rank is read in one go, so each
    rank can have a process of its own.

    Args:
        rank: The global rank.
        path: The file. If the file cannot be read, the log has a problem.
    """
    reader = _Reader(rank)
    gc.disable()  # a collection would visit millions of objects that are in no cycle
    try:
        with path.open("rb") as file:
            rest = b""
            while read := file.read(_BLOCK_BYTES):
                lines, newline, rest = (rest + read).rpartition(b"\n")
                if newline:
                    reader.add(lines)
            if rest:
                reader.problems.append(
                    f"rank {rank}: the last line is half-written, left out"
                )
    except OSError as error:
        reader.problems.append(f"rank {rank}: could not be read ({error})")
    finally:
        gc.enable()
    return reader.finish()


class _Reader:
    def __init__(self, rank: int) -> None:
        self.problems: list[str] = []
        self._rank = rank
        self._parts: dict[str, list[NDArray[np.float64]]] = {
            kind: [] for kind in _TABLES
        }
        self._events: list[Noted] = []
        self._unknown = Counter[str]()
        self._num_damaged = 0
        self._num_commits = 0

    def add(self, lines: bytes) -> None:
        """Take whole lines, without the newline of the last line."""
        records = _together(lines)
        # one damaged line makes the parse of the whole block fail: then parse each line
        # by itself
        if records is None:
            records = [
                record
                for line in lines.split(b"\n")
                if (record := self._checked(_parsed(line)))
            ]
        numbers: dict[str, list[int]] = {}
        for number, kind in enumerate(map(_KIND_OF, records)):
            numbers.setdefault(kind, []).append(number)
        for kind in _TABLES.keys() & numbers.keys():
            numbers[kind] = self._add_rows(
                kind, numbers[kind], [records[number] for number in numbers[kind]]
            )
        commits = numbers.get("IterationCommitted", [])
        # back in the order of the file: the number of commits before an event places
        # the event in time
        for number in sorted(
            chain.from_iterable(
                numbers[kind] for kind in numbers.keys() - _TABLES.keys()
            )
        ):
            self._add_event(
                records[number], self._num_commits + bisect(commits, number)
            )
        self._num_commits += len(commits)

    def finish(self) -> RankLog:
        if self._num_damaged:
            self.problems.append(
                f"rank {self._rank}: damaged, left out: {self._num_damaged} lines"
            )
        lost = sum(
            noted.event.count
            for noted in self._events
            if isinstance(noted.event, EventsLost)
        )
        if lost:
            self.problems.append(
                f"rank {self._rank}: {lost} events could not be written when they"
                " happened"
            )
        return RankLog(
            rank=self._rank,
            tables={
                kind: join(_TABLES[kind], parts) for kind, parts in self._parts.items()
            },
            events=tuple(_without_late_ends(self._events)),
            unknown=dict(self._unknown),
            problems=tuple(self.problems),
        )

    def _add_rows(
        self, kind: str, numbers: list[int], records: Sequence[Record]
    ) -> list[int]:
        """Add the records of a kind to the table of the kind.

        If any record is defective, the records are added one by one.

        Returns:
            The numbers of the records that were added.
        """
        names = _TABLES[kind]
        try:
            rows = _numbers(map(itemgetter(*names), records), len(records), len(names))
        except (ValueError, KeyError, TypeError):
            found = {
                number: row
                for number, each in zip(numbers, records, strict=True)
                if (row := self._row(each))
            }
            numbers, rows = (
                list(found),
                _numbers(found.values(), len(found), len(names)),
            )
        self._parts[kind].append(rows)
        return numbers

    def _row(self, record: Record) -> tuple[float, ...] | None:
        """Return the numbers of a record; None without a time or an iteration."""
        if self._checked(record) is None:
            return None
        names = _TABLES[record["event"]]
        self._unknown.update(
            f"{record['event']} without {column}"
            for column in names
            if column not in record
        )
        row = tuple(_number(record.get(column)) for column in names)
        return (
            row
            if all(math.isfinite(row[names.index(key)]) for key in KEYS if key in names)
            else None
        )

    def _add_event(self, record: Record, after_commits: int) -> None:
        if self._checked(record) is None:
            return
        name = record["event"]
        if name not in KINDS:
            self._unknown[f"event {name}"] += 1
            return
        known = {
            "t_s",
            "global_rank",
            "event",
            *(field.name for field in fields(KINDS[name])),
        }
        self._unknown.update(f"{name} with {field}" for field in record.keys() - known)
        try:
            event = msgspec.convert(record, KINDS[name])
        except msgspec.ValidationError as error:
            # the error names only the first field: "missing required field `X`", or
            # "got `str` - at `$.X[0]`"
            [(lacks, field)] = re.findall(r"(field `|\$\.)(\w+)", str(error))
            self._unknown[
                f"{name} {'without' if lacks == 'field `' else 'with another kind of'}"
                f" {field}"
            ] += 1
            return
        self._events.append(
            Noted(
                at_us=round(record["t_s"] * 1e6),
                after_commits=after_commits,
                event=event,
            )
        )

    def _checked(self, record: Any) -> Record | None:
        """Return a record that has a time and a kind; count any other as damaged."""
        if (
            isinstance(record, dict)
            and isinstance(record.get("event"), str)
            and math.isfinite(_number(record.get("t_s")))
        ):
            return record
        self._num_damaged += 1
        return None


def _without_late_ends(events: Iterable[Noted]) -> Iterator[Noted]:
    """Yield events, without ends of generations that a replaced worker logs late.

    A node that was silent for a while may have been given up meanwhile. Its worker then
    leaves a generation that its successor, on a spare node, has left behind.
    """
    generation = 0
    for noted in events:
        event = noted.event
        if isinstance(event, WorkerStarted):
            generation = 0  # a later start of the run counts anew
        elif isinstance(event, Rejoined):
            generation = event.generation
        elif isinstance(event, GenerationEnded) and event.generation < generation:
            continue
        yield noted


def _together(lines: bytes) -> list[Record] | None:
    """Return the records in these lines, parsed in one go.

    None unless each line is one record with a kind.
    """
    try:
        records = orjson.loads(b"[%b]" % lines.replace(b"\n", b","))
        kinds = set(map(_KIND_OF, records))
    except (ValueError, KeyError, TypeError):
        return None
    is_one_each = len(records) == lines.count(b"\n") + 1
    return (
        records
        if is_one_each and all(isinstance(kind, str) for kind in kinds)
        else None
    )


def _parsed(line: bytes) -> Any:
    """Return the content of a line; None if the line is not JSON.

    NaN and infinity are accepted, because a loss may have such a value.
    """
    for parse in (orjson.loads, json.loads):
        try:
            return parse(line)
        except ValueError:
            continue
    return None


def _numbers(
    rows: Iterable[tuple[Any, ...]], num_rows: int, num_columns: int
) -> NDArray[np.float64]:
    values = np.fromiter(chain.from_iterable(rows), np.float64, num_rows * num_columns)
    return values.reshape(num_rows, num_columns)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
