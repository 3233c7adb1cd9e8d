"""Processes in a PID namespace of their own, like the processes of a container.

Pids begin at 1, and all processes end with process 1.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable

import pytest

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def can_have_namespaces() -> bool:
    command = ["unshare", "--fork", "--pid", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not can_have_namespaces(), reason="this user cannot make a PID namespace"
)


def be_first_process(main: Callable[[], object]) -> int:
    """Run `main` as process 1 of a PID namespace that has its own /proc.

    To be called in a child process: the calling process can afterwards fork no process
    in the namespace from which the caller came.

    Returns:
        The exit status of process 1.
    """
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID))
    first = os.fork()
    if first == 0:
        status = 1
        try:
            _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
            _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None))
            main()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
