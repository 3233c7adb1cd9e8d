"""The agent that started this process, and the end of this process with it.

Owns: the pid of torchrun's agent. The pid is read at the start of this process, because
the kernel reports another parent once the agent has ended. Must not: import slow
modules, because this module runs before them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal

_PR_SET_PDEATHSIG = 1


@functools.cache
def agent_pid() -> int:
    """Return the agent's pid, as read on the first call.

    Forked processes inherit the value.
    """
    return os.getppid()


def end_with_agent() -> None:
    """Let the kernel send this process SIGTERM when the agent ends.

    If the agent has already ended, this process gets SIGTERM at once.
    """
    die_with_parent(signal.SIGTERM, parent=agent_pid())


def die_with_parent(number: signal.Signals, *, parent: int | None = None) -> None:
    """Let the kernel send this process a signal when its parent dies.

    Args:
        number: The signal.
        parent: The pid of the parent, if known. If that process is already dead, the
            signal is sent at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    # the kernel sends nothing for a parent that had died before the call
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
