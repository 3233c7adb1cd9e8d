"""The parts of a rank's time."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class PagePart(IntEnum):
    """The use of a stretch of a rank's time.

    `EXPLAINED` has the meaning of each part.
    """

    COMPUTE = 0
    STALL = 1
    LOST = 2
    DETECTION = 3
    REBUILD = 4
    FETCH = 5
    WAITING = 6
    REPLAY = 7
    EVALUATION = 8
    STARTUP = 9
    OTHER = 10
    UNKNOWN = 11

    @property
    def label(self) -> str:
        return self.name.lower()


EXPLAINED: Mapping[PagePart, str] = {
    PagePart.COMPUTE: (
        "iterations that count: forward, backward, gradients, step; each is counted"
        " once"
    ),
    PagePart.STALL: "what checkpointing took from iterations, on the training thread",
    PagePart.LOST: (
        "iterations that a fault cut off, or whose outcome was given up and had to be"
        " computed again"
    ),
    PagePart.DETECTION: (
        "from the last sign of life of what failed to the finding that it is dead"
    ),
    PagePart.REBUILD: (
        "from that finding until all ranks are together again; where torchrun restarts"
        " all ranks, all time from the last event before the fault until the model is"
        " built again: no event has the time of the fault"
    ),
    PagePart.FETCH: "getting lost state back, out of other ranks' memory or from disk",
    PagePart.WAITING: (
        "in a recovery without replaying: for others who replay, and for all to agree"
    ),
    PagePart.REPLAY: "running iterations again to rebuild lost state",
    PagePart.EVALUATION: "held-out batches between iterations",
    PagePart.STARTUP: (
        "before the first iteration: processes, model, data, the first evaluation"
    ),
    PagePart.OTHER: "between iterations: logging, scalars, and what no event explains",
    PagePart.UNKNOWN: (
        "after a rank's last event: an iteration that has not ended yet, or a rank that"
        " is gone"
    ),
}
"""The meaning of each part, for readers of a report."""

RECOVERY = (
    PagePart.DETECTION,
    PagePart.REBUILD,
    PagePart.FETCH,
    PagePart.WAITING,
    PagePart.REPLAY,
)
"""The parts of a recovery, in the usual order."""

OF_FAULTS = (PagePart.LOST, *RECOVERY)
"""The parts that a fault costs."""

NOT_IN_ETTR = (PagePart.STARTUP, PagePart.EVALUATION, PagePart.UNKNOWN)
"""The parts that do not count in the ETTR.

No checkpoint policy changes these parts. Counted as lost, these parts would hide the
parts that a policy changes.
"""
