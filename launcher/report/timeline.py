"""A timeline for Perfetto (Chrome's trace format): a process for each rank, a lane for each kind of work.

Iterations are shown one by one near recoveries, and in blocks elsewhere in a long run, so that the file can be opened.
What has no times of its own in the events is shown where it was told: counters for bytes, a mark for a fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from launcher.report.account import Tiling, account
from launcher.report.columns import Columns
from launcher.report.facts import Facts
from launcher.report.parts import OF_FAULTS, Part
from launcher.report.rank_log import RankLog
from moe_ckpt.events import CheckpointSaved, StageRecovered, WindowPersisted

_LANES = ("compute", "copy", "replication", "log", "recovery")
_MOST_PER_RUN = 200_000
_NEAR = 200  # stretches before and after a recovery that are shown one by one
_RANKS_PER_RUN = 100_000  # process ids of the next run begin there
Slice = dict[str, Any]


def to_trace(runs: Sequence[Facts]) -> str:
    """Return the trace of all runs; their ranks are processes."""
    events = [event for number, facts in enumerate(runs) for event in _run(facts, number)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False) + "\n"


def _run(facts: Facts, number: int) -> Iterator[Slice]:
    most = _MOST_PER_RUN // max(len(facts.run.ranks), 1)
    for log in facts.run.ranks:
        pid = number * _RANKS_PER_RUN + log.rank
        yield from _names(facts, log.rank, pid)
        for slice_ in _rank(facts, log, most):
            yield slice_ | {"pid": pid}


def _names(facts: Facts, rank: int, pid: int) -> Iterator[Slice]:
    name = f"{facts.run.name} rank {rank}"
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, lane in enumerate(_LANES):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _rank(facts: Facts, log: RankLog, most: int) -> Iterator[Slice]:
    tiling = account(log, facts.end_us)
    is_near = _near(tiling)
    yield from _compute(tiling, is_near if len(tiling.parts) > most else np.ones(len(tiling.parts), bool), most)
    yield from _recovery(tiling)
    yield from _copies(log.snapshots, most)
    yield from _logs(log.commits, most)
    for noted in log.events:
        event = noted.event
        if isinstance(event, WindowPersisted):
            yield _slice("replication", f"window {event.window_start} to disk", noted.at_us, event.seconds)
        elif isinstance(event, CheckpointSaved):
            args = {"MiB": event.size_bytes / (1 << 20)}
            yield _slice("replication", f"checkpoint {event.iteration}", noted.at_us, event.seconds, args)
        elif isinstance(event, StageRecovered):
            what = f"{event.replayed_iters} iterations up to {event.iteration}"
            yield {
                "ph": "i",
                "s": "t",
                "tid": _LANES.index("recovery"),
                "ts": noted.at_us,
                "name": f"recovered: {what}",
            }
    for episode in facts.episodes:
        if any(each.rank == log.rank for each in episode.stretches):
            mark = {"ph": "i", "s": "p", "tid": _LANES.index("recovery"), "ts": episode.start_us}
            yield mark | {"name": "; ".join(episode.causes)}


def _slice(lane: str, name: str, end_us: int, seconds: float, args: dict[str, Any] | None = None) -> Slice:
    length_us = round(1e6 * seconds) if np.isfinite(seconds) and seconds > 0 else 0
    length_us = min(length_us, end_us)
    found: Slice = {"ph": "X", "tid": _LANES.index(lane), "ts": end_us - length_us, "dur": length_us, "name": name}
    return found | {"args": args} if args else found


def _near(tiling: Tiling) -> np.ndarray:
    """Return which stretches lie near a recovery or lost work."""
    special = np.isin(tiling.parts, OF_FAULTS).astype(float)
    return np.convolve(special, np.ones(2 * _NEAR + 1), "same") > 0.5


def _compute(tiling: Tiling, singly: np.ndarray, most: int) -> Iterator[Slice]:
    """Yield stretches of training one by one where `singly` says so, the others in blocks."""
    mine = np.flatnonzero(~np.isin(tiling.parts, OF_FAULTS) | (tiling.parts == Part.LOST))
    block = max(1, -(-len(mine) // most))
    starts_us, ends_us = tiling.starts_us, tiling.ends_us
    begin = 0
    while begin < len(mine):
        end = begin + 1
        while not singly[mine[begin]] and end < len(mine) and end - begin < 3 * block and not singly[mine[end]]:
            end += 1
        stretch = mine[begin:end]
        start_us = int(starts_us[stretch[0]])
        name = _name(tiling, stretch)
        yield {"ph": "X", "tid": 0, "ts": start_us, "dur": int(ends_us[stretch[-1]]) - start_us, "name": name}
        begin = end


def _name(tiling: Tiling, stretch: np.ndarray) -> str:
    iterations = tiling.iterations[stretch][tiling.iterations[stretch] >= 0]
    if len(stretch) > 1:
        return f"iterations {iterations.min()} to {iterations.max()}" if len(iterations) else "between iterations"
    label = Part(int(tiling.parts[stretch[0]])).label
    return f"{label}, iteration {iterations[0]}" if len(iterations) else label


def _recovery(tiling: Tiling) -> Iterator[Slice]:
    for i in np.flatnonzero(np.isin(tiling.parts, OF_FAULTS) & (tiling.parts != Part.LOST)):
        start_us, part = int(tiling.starts_us[i]), Part(int(tiling.parts[i]))
        length_us = int(tiling.ends_us[i]) - start_us
        yield {"ph": "X", "tid": _LANES.index("recovery"), "ts": start_us, "dur": length_us, "name": part.label}


def _copies(snapshots: Columns, most: int) -> Iterator[Slice]:
    at_us, copy_s = snapshots.at_us, snapshots["copy_s"]
    for i in _even(len(snapshots), most):
        args = {"MiB": float(np.nan_to_num(snapshots["size_bytes"][i])) / (1 << 20)}
        yield _slice("copy", f"snapshot {snapshots.iteration[i]}", int(at_us[i]), float(copy_s[i]), args)


def _logs(commits: Columns, most: int) -> Iterator[Slice]:
    """Yield counters: when within an iteration bytes are logged, nothing tells."""
    at_us = commits.at_us
    names = {"activations": "sent_activation_bytes", "gradients": "sent_gradient_bytes"}
    sizes = {name: np.nan_to_num(commits[column]) for name, column in names.items()}
    for i in _even(len(commits), most):
        args = {f"{name}, bytes": float(size[i]) for name, size in sizes.items()}
        yield {"ph": "C", "tid": _LANES.index("log"), "ts": int(at_us[i]), "name": "boundary log", "args": args}


def _even(count: int, most: int) -> Sequence[int]:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist() if count else []
