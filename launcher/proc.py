"""Whether a process that was told to stop has."""

from __future__ import annotations

from moe_ckpt.linux import thread_states


def stands_still(pid: int) -> bool:
    """Return whether every thread of a process is stopped or gone."""
    return all(state in "TtZX" for state in thread_states(pid))
