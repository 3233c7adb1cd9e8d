"""The work of a checkpoint server for one iteration, as its answer reports it. Values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerWork:
    """Microseconds: `busy_us` of copy, concatenation, steps and checksums; `after_us`
    from the last byte to the end.
    """

    busy_us: int
    after_us: int


NO_WORK = ServerWork(busy_us=0, after_us=0)


def slowest(works: Iterable[ServerWork]) -> ServerWork:
    """Return the most of both times; no work for none."""
    found = [NO_WORK, *works]
    return ServerWork(
        busy_us=max(work.busy_us for work in found),
        after_us=max(work.after_us for work in found),
    )
