"""Faults that were inflicted on a run: RUN/faults.jsonl, a line each, for reports and
benchmarks.
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
    """A signal to one worker, written just before it is sent, with what the worker was
    doing.

    `ordered`: the worker was told to send it to itself as it enters `phase` of
    `iteration` (None: the next one); then `unix_s` is when it was told, and an order
    whose worker dies of something else before is written again.
    """

    unix_s: float
    rank: int
    pid: int
    signal: str
    scope: str
    generation: int
    iteration: int | None
    phase: str
    ordered: bool


def append_faults(run: Path, faults: Iterable[InjectedFault]) -> None:
    """Add these lines, all in one write."""
    lines = "".join(json.dumps(asdict(fault)) + "\n" for fault in faults).encode()
    fd = open_private(run / "faults.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        # one write with O_APPEND: several processes add to the file
        os.write(fd, lines)
    finally:
        os.close(fd)


def read_faults(run: Path) -> list[InjectedFault]:
    """Return the faults of a run, in the order in which they were written; none where
    there is no file.
    """
    path = run / "faults.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [InjectedFault(**json.loads(line)) for line in lines]
