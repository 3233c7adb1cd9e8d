"""The log of inflicted faults, RUN/faults.jsonl, for reports and benchmarks.

Each line is one fault.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_ckpt.private_files import open_private


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """A signal to one worker, with the worker's activity.

    The fault is written just before the signal is sent.
    """

    unix_s: float
    """Unix time of the signal, or of the order, in seconds."""

    rank: int
    """Global rank of the worker."""

    pid: int
    """Process id of the worker."""

    signal: str
    """Name of the signal, as `KILL`, or `RAISE`."""

    scope: str
    """`process` or `node`."""

    generation: int
    """Generation of the worker."""

    iteration: int | None
    """Iteration of the worker, or of the point of an order; None: the next iteration
    that reaches the point.
    """

    phase: str
    """Phase of the worker, or of the point of an order."""

    ordered: bool
    """Whether the fault is an order: the worker sends the signal to itself as it enters
    `phase` of `iteration`. If the worker dies of another cause before, the order is
    written again.
    """


def append_faults(run: Path, faults: Iterable[InjectedFault]) -> None:
    """Append faults to the log of a run, all in one write."""
    lines = "".join(json.dumps(asdict(fault)) + "\n" for fault in faults).encode()
    fd = open_private(run / "faults.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        # one write with O_APPEND, because several processes append to the file
        os.write(fd, lines)
    finally:
        os.close(fd)


def read_faults(run: Path) -> list[InjectedFault]:
    """Return the faults of a run, in the order of the log.

    Empty if there is no log.
    """
    path = run / "faults.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [InjectedFault(**json.loads(line)) for line in lines]
