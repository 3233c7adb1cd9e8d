"""Processes that a test starts, exchanges messages with, and ends."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.harness.gloo.ranks import CONTEXT
from tests.waits import START_S, WAIT_S


class Child:
    """A process that runs `main`, and does not outlive the test.

    The first argument of `main` is the process's end of a connection to the test.
    """

    def __init__(
        self, stack: ExitStack, main: Callable[..., object], *arguments: Any
    ) -> None:
        self.stack = stack
        self.connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=main, args=(theirs, *arguments))
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid or 0
        stack.callback(self._end)

    def tell(self, order: object) -> None:
        self.connection.send(order)

    def hear(self) -> Any:
        assert self.connection.poll(START_S), "a process says nothing"
        return self.connection.recv()

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.kill()
        self._process.join()

    def exit_status(self) -> int | None:
        self._process.join(WAIT_S)
        return self._process.exitcode

    def _end(self) -> None:
        self.kill()
        self._process.close()
        self.connection.close()


class Watch:
    """A watch for the end of a process, which need not be a child of this process.

    The watch ends with `stack`.
    """

    def __init__(self, stack: ExitStack, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        stack.callback(os.close, self._fd)

    def wait_for_end(self, timeout_s: float = WAIT_S) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        assert poll.poll(1000 * timeout_s), "a process lives on"
