"""A store for rendezvous with waits that can end: it polls over a connection that no other wait blocks.

torch's own client blocks in a wait, with its one connection, until a timeout; and every new connection costs the server
a look-up of the client's name, which now and then takes seconds. So all threads of a process share one client here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock
from typing import TypeVar

import torch.distributed as dist

from moe_ckpt.errors import PeersLostError

T = TypeVar("T")
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.05


class PollingStore(dist.Store):
    """`client` under a lock. Every request raises PeersLostError once `is_over` returns True.

    A wait also ends so after `timeout_s` seconds.
    """

    def __init__(
        self, client: dist.Store, lock: Lock, prefix: str, is_over: Callable[[], bool], timeout_s: float
    ) -> None:
        super().__init__()
        self._client = client
        self._lock = lock
        self._prefix = prefix
        self._is_over = is_over
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._client.set(self._prefix + key, value))

    def get(self, key: str) -> bytes:
        self.wait([key])  # torch's `get` would wait for the key inside the client, under the lock
        return self._ask(lambda: self._client.get(self._prefix + key))

    def add(self, key: str, value: int) -> int:
        return self._ask(lambda: self._client.add(self._prefix + key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: self._client.check([self._prefix + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        wanted_s = self._timeout_s if timeout is None else min(timeout.total_seconds(), self._timeout_s)
        begun_s = time.monotonic()
        while not self.check(keys):
            waited_s = time.monotonic() - begun_s
            if waited_s > wanted_s:
                raise PeersLostError(f"rendezvous: got no {keys} in {wanted_s:g} s")
            # a blocking wait could not be left; a quarter of the time so far, as all ranks ask one server
            time.sleep(min(max(_LEAST_PAUSE_S, waited_s / 4), _MOST_PAUSE_S))

    def _ask(self, request: Callable[[], T]) -> T:
        with self._lock:
            # under the lock: the generation may end while this thread waits for another one's request
            if self._is_over():
                raise PeersLostError("rendezvous: other ranks were lost")
            return request()
