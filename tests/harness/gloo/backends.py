"""Backends of groups that tests hold or count, or that stand in for a device's."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.elastic.backends import Mark
from tests.waits import WAIT_S


def passes(ends: tuple[socket.socket, socket.socket]) -> bool:
    """Return whether a byte that is sent at one end arrives at the other end."""
    try:
        ends[0].send(b"x")
        return ends[1].recv(1) == b"x"
    except OSError:
        return False


class HeldBackend:
    """A backend that opens nothing, and makes its groups once `held` is set.

    Attributes:
        held: Set by the test to let `make` return.
        made_by: The thread of each group that was made or is being made.
        when_formed: Called when the forming of groups ends.
    """

    def __init__(self) -> None:
        self.device, self.completes_when_cut = torch.device("cpu"), False
        self.sends_gloo_frames = False
        self.closing_s: float | None = 0.5
        self.held = threading.Event()
        self.made_by: list[threading.Thread] = []
        self.when_formed: Callable[[], object] = lambda: None

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        self.made_by.append(threading.current_thread())
        self.held.wait(WAIT_S)
        return object()

    def begin(self, kept: Collection[Any] = ()) -> None: ...

    def keeps_idle(self, size: int) -> bool:
        return False

    def connects_late(self, size: int) -> bool:
        return False

    def mark(self) -> Mark | None:
        return None

    def formed(self) -> None:
        self.when_formed()

    def launching(self, inside: Any) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def discard(self, num_open: int = 0) -> None: ...

    def failure(self) -> str | None:
        return None

    def wait(self, work: Any) -> None:
        work.wait()

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None: ...

    def cut(self, limit_s: float, spared: Collection[Any] = ()) -> None: ...

    def is_quiet(self) -> bool:
        return True
