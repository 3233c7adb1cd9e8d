"""Faults in the logs of runs that were never made."""

from __future__ import annotations

from typing import Any

from launcher.faults.log import InjectedFault


def injected(
    rank: int, iteration: int, scope: str = "process", generation: int = 1
) -> InjectedFault:
    """Return the log's record of a kill in a forward pass."""
    where: dict[str, Any] = {
        "generation": generation,
        "iteration": iteration,
        "phase": "forward",
    }
    return InjectedFault(
        unix_s=1005.0,
        rank=rank,
        pid=1,
        signal="KILL",
        scope=scope,
        ordered=True,
        **where,
    )
