"""Work of a peer for one update, as the peer's answer reports it.

Values only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateWork:
    """Times of a peer for one update."""

    busy_us: int
    """Time of copy, concatenation, steps and checksums, in microseconds."""

    after_us: int
    """Time from the last byte to the end of the work, in microseconds."""


NO_WORK = UpdateWork(busy_us=0, after_us=0)


def slowest(works: Iterable[UpdateWork]) -> UpdateWork:
    """Return the longest of both times over all works; `NO_WORK` without works."""
    found = [NO_WORK, *works]
    return UpdateWork(
        busy_us=max(work.busy_us for work in found),
        after_us=max(work.after_us for work in found),
    )
