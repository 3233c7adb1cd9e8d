"""One rank's event file: columns for the kinds that come with iterations, typed events
for all others.

Must not raise on content: what cannot be read is counted, by what is wrong with it.
"""

from __future__ import annotations

import gc
import json
import math
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    HostMemoryUsed,
    RunFinished,
    WindowReplicated,
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
_BLOCK_BYTES = 128 << 10  # what it is taken apart into stays in caches
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """An event, when it was written, in microseconds since the run's origin, and after
    how many commits.
    """

    at_us: int
    after_commits: int
    event: Event


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankLog:
    """One rank's events. `unknown`: the number of another version's; `problems`: other
    defects.
    """

    rank: int
    tables: Mapping[str, Columns]
    events: tuple[Noted, ...]
    unknown: Mapping[str, int]
    problems: tuple[str, ...]

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
        """When this rank wrote its last event."""
        ends = [int(table.at_us[-1]) for table in self.tables.values() if len(table)]
        return max([0, *ends, *(noted.at_us for noted in self.events)])


def read_rank(rank: int, path: Path) -> RankLog:
    """Return what a file holds. A call of its own for each process: a rank is read in
    one go.
    """
    reader = _Reader(rank)
    gc.disable()  # millions of small objects that are in no cycle
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
        """Take whole lines, without the newline of the last."""
        records = _together(lines)
        # a damaged line spoils the whole block for one parse: then each line is parsed
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
        # in the order of the file again: how many commits came before an event places
        # it in time
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
            events=tuple(self._events),
            unknown=dict(self._unknown),
            problems=tuple(self.problems),
        )

    def _add_rows(
        self, kind: str, numbers: list[int], records: Sequence[Record]
    ) -> list[int]:
        """Take the numbers in these records, one by one where any is not as it should
        be; return which had them.
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
        """Return the numbers in a record; None where it does not say when, or for which
        iteration.
        """
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
            # it tells of the first field only: "missing required field `X`", or "got
            # `str` - at `$.X[0]`"
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
        """Return the entries that are records with a time and a kind."""
        if (
            isinstance(record, dict)
            and isinstance(record.get("event"), str)
            and math.isfinite(_number(record.get("t_s")))
        ):
            return record
        self._num_damaged += 1
        return None


def _together(lines: bytes) -> list[Record] | None:
    """Return what lines hold, one record each, parsed in one go; None where any is not
    one with a kind.
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
    """Return what a line holds, None where it is no JSON; with NaN and infinity, which
    a loss may be.
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
