"""A timeline for Perfetto, in Chrome's trace format.

A rank is a process, and each kind of work has a lane. Of a long run, iterations near
recoveries are shown one by one and the other iterations in blocks, so that Perfetto can
open the file. Entries without a time of their own are shown at their event: a fault as
a mark, the bytes of logs with the iteration. Entries of a lane do not overlap: no entry
begins before the previous entry of the lane ends. Numbers of processes and lanes begin
with 1, because Perfetto takes all entries of number 0 for one idle thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from launcher.report.account import Tiling, account
from launcher.report.columns import Columns
from launcher.report.facts import Facts
from launcher.report.parts import RECOVERY, PagePart
from launcher.report.rank_log import RankLog, read_rank
from launcher.report.read import map_ranks
from launcher.report.thin import evenly
from launcher.report.walk import us
from moe_ckpt.events import CheckpointSaved, StageRecovered, WindowPersisted

_LANES = dict(
    enumerate(
        ("compute", "copy", "replication", "log", "recovery", "disk", "checkpoint"),
        start=1,
    )
)
_COMPUTE, _COPY, _REPLICATION, _LOG, _RECOVERY, _DISK, _CHECKPOINT = _LANES
_MOST_SLICES = 150_000  # of all ranks, about 15 MB
_RANKS_PER_RUN = 100_000  # process ids of the next run begin there
Slice = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunRows:
    """The rows of one run in the trace."""

    first_pid: int
    """Process number of rank 0."""

    name: str
    """Name of the run."""

    end_us: int
    """End of the run, in microseconds since the run's origin."""

    most: int
    """Number of slices for each rank, at most."""


def to_trace(runs: Sequence[Facts]) -> str:
    """Return the trace of all runs.

    The function reads the events of the runs again, because facts lack data that a
    timeline shows.
    """
    parts: list[bytes] = []
    for number, facts in enumerate(runs):
        most = max(_MOST_SLICES // max(len(facts.run.ranks), 1), 100)
        first = 1 + number * _RANKS_PER_RUN
        rows = _RunRows(
            first_pid=first, name=facts.run.name, end_us=facts.end_us, most=most
        )
        parts += map_ranks(facts.run.path, partial(_rank_file, rows))
        parts.append(_packed(_faults(facts, rows)))
    return (
        '{"displayTimeUnit":"ms","traceEvents":['
        + b",".join(filter(None, parts)).decode()
        + "]}\n"
    )


def _packed(slices: Iterator[Slice]) -> bytes:
    """Return slices as JSON, without the brackets of their list."""
    return orjson.dumps(list(slices), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _rank_file(rows: _RunRows, rank: int, path: Path) -> bytes:
    pid = rows.first_pid + rank
    slices = _in_turn(_slices(read_rank(rank, path), rows))
    return _packed(
        slice_ | {"pid": pid}
        for chunk in (_names(f"{rows.name} rank {rank}", pid), slices)
        for slice_ in chunk
    )


def _names(name: str, pid: int) -> Iterator[Slice]:
    yield {"ph": "M", "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, lane in _LANES.items():
        yield {"ph": "M", "tid": tid, "name": "thread_name", "args": {"name": lane}}
        yield {
            "ph": "M",
            "tid": tid,
            "name": "thread_sort_index",
            "args": {"sort_index": tid},
        }


def _faults(facts: Facts, rows: _RunRows) -> Iterator[Slice]:
    """Yield a mark for each recovery, on each rank of the recovery."""
    for episode in facts.episodes:
        name = "; ".join(episode.causes)
        for rank in sorted({each.rank for each in episode.stretches}):
            mark = {
                "ph": "i",
                "s": "p",
                "tid": _RECOVERY,
                "ts": episode.start_us,
                "name": name,
            }
            yield mark | {"pid": rows.first_pid + rank}


def _in_turn(slices: Iterator[Slice]) -> list[Slice]:
    """Return slices by time, cut so that slices of a lane do not overlap."""
    found = sorted(slices, key=itemgetter("ts"))
    reached_us = dict.fromkeys(_LANES, 0)
    for each in found:
        if each["ph"] == "X":
            lane, end_us = each["tid"], each["ts"] + each["dur"]
            each["ts"] = min(max(each["ts"], reached_us[lane]), end_us)
            each["dur"] = end_us - each["ts"]
            reached_us[lane] = max(reached_us[lane], end_us)
    return sorted(found, key=itemgetter("ts"))


def _slices(log: RankLog, rows: _RunRows) -> Iterator[Slice]:
    tiling = account(log, rows.end_us)
    yield from _compute(tiling, rows.most // 2)
    yield from _recoveries(tiling)
    yield from _copies(log.tables["SnapshotTaken"], rows.most // 4)
    yield from _sent(log.tables["WindowReplicated"], rows.most // 8)
    yield from _logs(log.commits, rows.most // 16)
    for noted in log.events:
        at_us, event = noted.at_us, noted.event
        if isinstance(event, WindowPersisted):
            yield _ended(
                _DISK, f"window {event.window_start} to disk", at_us, event.seconds
            )
        elif isinstance(event, CheckpointSaved):
            saved = _ended(
                _CHECKPOINT, f"checkpoint {event.iteration}", at_us, event.seconds
            )
            yield saved | {"args": {"bytes": event.size_bytes}}
        elif isinstance(event, StageRecovered):
            name = (
                f"{event.replayed_iters} iterations were replayed up to"
                f" {event.iteration}"
            )
            yield {"ph": "i", "s": "t", "tid": _RECOVERY, "ts": at_us, "name": name}


def _slice(lane: int, name: str, start_us: int, end_us: int) -> Slice:
    return {
        "ph": "X",
        "tid": lane,
        "ts": start_us,
        "dur": end_us - start_us,
        "name": name,
    }


def _ended(lane: int, name: str, end_us: int, seconds: float) -> Slice:
    """Return a slice whose event is written when the slice ends."""
    return _slice(lane, name, max(end_us - us(seconds), 0), end_us)


def _compute(tiling: Tiling, most: int) -> Iterator[Slice]:
    """Yield slices of all time outside recoveries.

    Each stretch is a slice. If there are more than `most` stretches, some share a
    slice.
    """
    mine = np.flatnonzero(~np.isin(tiling.parts, RECOVERY))
    starts_us, bounds = tiling.starts_us, _blocks(tiling.parts, mine, most)
    for begin, end in pairwise(bounds):
        stretches = mine[begin:end]
        start_us, end_us = (
            int(starts_us[stretches[0]]),
            int(tiling.ends_us[stretches[-1]]),
        )
        yield _slice(_COMPUTE, _name(tiling, stretches), start_us, end_us)


def _blocks(parts: NDArray[np.int64], mine: NDArray[np.int64], most: int) -> list[int]:
    """Return the bounds of blocks of stretches.

    Near lost work and recoveries a block is one stretch; elsewhere blocks have equal
    lengths. No block contains a recovery.
    """
    if len(mine) <= most:
        return list(range(len(mine) + 1))
    lost, recovered = (
        np.flatnonzero(parts[mine] == PagePart.LOST),
        np.flatnonzero(np.diff(mine) > 1) + 1,
    )
    reach = most // (4 * (len(lost) + len(recovered) + 1))
    # iterations around faults are single blocks, because users open a timeline to see
    # these iterations
    near = np.concatenate([lost, recovered])[:, None] + np.arange(-reach, reach + 1)
    bounds = (
        evenly(len(mine) + 1, most // 2),
        recovered,
        np.clip(near, 0, len(mine)).ravel(),
    )
    return np.unique(np.concatenate(bounds)).tolist()


def _name(tiling: Tiling, stretches: NDArray[np.int64]) -> str:
    iterations = tiling.iterations[stretches]
    iterations = iterations[iterations >= 0]
    if len(stretches) > 1 and len(iterations):
        return f"iterations {iterations.min()} to {iterations.max()}"
    label = PagePart(int(tiling.parts[stretches[0]])).label
    return f"{label}, iteration {iterations[0]}" if len(iterations) else label


def _recoveries(tiling: Tiling) -> Iterator[Slice]:
    starts_us = tiling.starts_us
    for i in np.flatnonzero(np.isin(tiling.parts, RECOVERY)):
        yield _slice(
            _RECOVERY,
            PagePart(int(tiling.parts[i])).label,
            int(starts_us[i]),
            int(tiling.ends_us[i]),
        )


def _copies(snapshots: Columns, most: int) -> Iterator[Slice]:
    at_us, iteration, copy_s = snapshots.at_us, snapshots.iteration, snapshots["copy_s"]
    sizes = np.nan_to_num(snapshots["size_bytes"])
    for i in evenly(len(snapshots), most):
        copied = _ended(
            _COPY, f"snapshot {iteration[i]}", int(at_us[i]), float(copy_s[i])
        )
        yield copied | {"args": {"bytes": float(sizes[i])}}


def _sent(replicated: Columns, most: int) -> Iterator[Slice]:
    """Yield the windows that peers have received, from the start of the sending."""
    ends_us = np.maximum(replicated.at_us - replicated.us("ago_s"), 0)
    starts_us = np.maximum(ends_us - replicated.us("span_s"), 0)
    windows = replicated["window_start"]
    labels = {
        "bytes": "size_bytes",
        "peers": "num_peers",
        "seconds of sending": "seconds",
    }
    columns = {label: np.nan_to_num(replicated[name]) for label, name in labels.items()}
    for i in evenly(len(replicated), most):
        sent = _slice(
            _REPLICATION,
            f"window {windows[i]:.0f} to peers",
            int(starts_us[i]),
            int(ends_us[i]),
        )
        yield sent | {
            "args": {label: float(column[i]) for label, column in columns.items()}
        }


def _logs(commits: Columns, most: int) -> Iterator[Slice]:
    """Yield the bytes that boundary logs got in each iteration.

    No event tells the time within the iteration.
    """
    ends_us = commits.at_us
    starts_us = np.maximum(ends_us - commits.us("seconds"), 0)
    iterations = commits.iteration
    columns = {
        "activations, bytes": "sent_activation_bytes",
        "gradients, bytes": "sent_gradient_bytes",
    }
    sizes = {name: np.nan_to_num(commits[column]) for name, column in columns.items()}
    for i in evenly(len(commits), most):
        args = {name: float(size[i]) for name, size in sizes.items()}
        yield {
            "ph": "C",
            "tid": _LOG,
            "ts": int(ends_us[i]),
            "name": "boundary log",
            "args": args,
        }
        if any(args.values()):
            yield _slice(
                _LOG,
                f"log of iteration {iterations[i]}",
                int(starts_us[i]),
                int(ends_us[i]),
            ) | {"args": args}
