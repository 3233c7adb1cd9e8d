"""The recorded death of a worker, and the classes of faults that end a generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultClass(StrEnum):
    """The class of a fault that ends a generation."""

    SIGNAL = "signal"
    """A worker died of a signal."""

    HANG = "hang"
    """A worker hung, and its supervisor killed it."""

    EXCEPTION = "exception"
    """A worker failed by an exception."""

    DAEMON = "daemon"
    """A replica daemon died."""

    RESTART = "restart"
    """torchrun started a rank again."""

    NODE = "node"
    """A node was lost, and a spare one has taken its ranks."""

    CONNECTION = "connection"
    """Connections broke although no process died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The death of a rank's process, which ended a generation.

    A lost node is the death of each of its ranks. Nothing is known of these processes:
    pid and iteration are 0, and all ranks of the node have the same text.
    """

    fault: FaultClass
    """Class of the fault."""

    global_rank: int
    """Rank of the process."""

    pid: int
    """Pid of the process."""

    signal: str
    """Name of the signal that ended the process; empty if an exception did."""

    why: str
    """Cause of the death, in words, for messages: a predicate of the process, or for
    `FaultClass.NODE` a sentence about the node.
    """

    iteration: int
    """Iteration in which the process died; 0 before the first one."""

    phase: str
    """Phase in which the process died: the name of a `Phase`, in lower case."""

    last_seen_unix_s: float
    """Time of the last sign of life, in seconds of Unix time."""

    found_unix_s: float
    """Time at which the supervisor detected the death, in seconds of Unix time."""

    @property
    def detect_s(self) -> float:
        """Seconds from the last sign of life to the detection by the supervisor."""
        return self.found_unix_s - self.last_seen_unix_s

    def __str__(self) -> str:
        found = f"found {1e3 * self.detect_s:.0f} ms after its last sign of life"
        if self.fault is FaultClass.NODE:
            return f"{self.why}, {found}"
        where = f" of iteration {self.iteration}" if self.iteration else ""
        return (
            f"rank {self.global_rank} (pid {self.pid}) {self.why} in"
            f" {self.phase}{where}, {found}"
        )


def classes_of(deaths: Iterable[Death]) -> dict[str, FaultClass]:
    """Return the class of each death by the death's text, for events.

    A lost node counts once, not once for each of its ranks.
    """
    return {str(death): death.fault for death in deaths}


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as `rank 3` or `ranks 0 to 3, 6`.

    Args:
        ranks: The ranks, ascending.
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    named = [
        f"{span[0]} to {span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans
    ]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(named)}"
