"""The death of a worker, as its supervisor recorded it, and the classes of faults that
end a generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultClass(StrEnum):
    """The kind of a fault that ends a generation."""

    SIGNAL = "signal"
    HANG = "hang"
    EXCEPTION = "exception"
    DAEMON = "daemon"  # a replica daemon died
    RESTART = "restart"  # torchrun started a rank again
    CONNECTION = "connection"  # connections broke though no process died


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The cause of the end of a generation: a rank's process ended in a phase of an
    iteration.

    `signal` names the signal that ended it; empty if an exception did.
    """

    fault: FaultClass
    global_rank: int
    pid: int
    signal: str
    why: str
    iteration: int
    phase: str
    last_seen_unix_s: float
    found_unix_s: float

    @property
    def detect_s(self) -> float:
        """Seconds from the last sign of life to the detection by the supervisor."""
        return self.found_unix_s - self.last_seen_unix_s

    def __str__(self) -> str:
        where = f" of iteration {self.iteration}" if self.iteration else ""
        found = f"found {1e3 * self.detect_s:.0f} ms after its last sign of life"
        return (
            f"rank {self.global_rank} (pid {self.pid}) {self.why} in"
            f" {self.phase}{where}, {found}"
        )
