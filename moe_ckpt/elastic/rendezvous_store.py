"""A store for rendezvous, whose waits can end.

torch's own client blocks inside a wait, with its one connection, until a timeout. A new
connection costs the server a look-up of the client's name, which now and then takes
seconds. So all threads of a process share one client here, and a wait polls over the
client's connection, which no wait blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock
from typing import TypeVar

import torch.distributed as dist

from moe_ckpt.elastic.checked_store import CheckedStore
from moe_ckpt.errors import PeersLostError

T = TypeVar("T")
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.05
_PAUSE_A_RANK_S = 1.5e-4
"""Seconds between two requests of a wait, for each rank of the job. If four threads of
every rank wait, their requests take half of the capacity of torch's store, at 17 us a
request.
"""


class PollingStore(dist.Store):
    """A part of the job's store, over one client under a lock.

    Each request raises PeersLostError once the generation is over. A wait also raises
    PeersLostError after its time limit.
    """

    def __init__(
        self,
        client: dist.Store,
        lock: Lock,
        prefix: str,
        is_over: Callable[[], bool],
        timeout_s: float,
        *,
        num_ranks: int = 1,
    ) -> None:
        """Open a part of the store.

        Args:
            client: The client of the job's store.
            lock: Held for each request.
            prefix: In front of all keys.
            is_over: Returns whether the generation is over.
            timeout_s: The time limit of a wait, in seconds.
            num_ranks: The number of ranks that may wait at the same time.
        """
        super().__init__()
        self._client = client
        self._lock = lock
        self._prefix = prefix
        self._is_over = is_over
        self._timeout_s = timeout_s
        self._num_ranks = num_ranks

    @property
    def direct(self) -> dist.Store:
        """The same part of the store, over torch's own client.

        The client waits without end, and raises no error of Python's. gloo's threads
        need this: if a Python error is raised there a second time, the process ends.
        """
        client = (
            self._client.inside
            if isinstance(self._client, CheckedStore)
            else self._client
        )
        return dist.PrefixStore(self._prefix, client)

    def part(self, name: str) -> PollingStore:
        """Return a part of this part."""
        prefix = f"{self._prefix}{name}/"
        return PollingStore(
            self._client,
            self._lock,
            prefix,
            self._is_over,
            self._timeout_s,
            num_ranks=self._num_ranks,
        )

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._client.set(self._prefix + key, value))

    def get(self, key: str) -> bytes:
        # torch's `get` would wait for the key inside the client, under the lock
        self.wait([key])
        return self._ask(lambda: self._client.get(self._prefix + key))

    def add(self, key: str, value: int) -> int:
        return self._ask(lambda: self._client.add(self._prefix + key, value))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._ask(
            lambda: self._client.compare_set(
                self._prefix + key, expected_value, desired_value
            )
        )

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(
            lambda: self._client.check([self._prefix + key for key in keys])
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        wanted_s = (
            self._timeout_s
            if timeout is None
            else min(timeout.total_seconds(), self._timeout_s)
        )
        most_pause_s = max(_MOST_PAUSE_S, self._num_ranks * _PAUSE_A_RANK_S)
        begun_s = time.monotonic()
        while not self.check(keys):
            waited_s = time.monotonic() - begun_s
            if waited_s > wanted_s:
                raise PeersLostError(f"rendezvous: got no {keys} in {wanted_s:g} s")
            # A pause, as a blocking wait could not be left. The pause is a quarter of
            # the time so far, as all ranks ask one server
            time.sleep(min(max(_LEAST_PAUSE_S, waited_s / 4), most_pause_s))

    def _ask(self, request: Callable[[], T]) -> T:
        with self._lock:
            # under the lock: the generation may end while this thread waits for another
            # thread's request
            if self._is_over():
                raise PeersLostError("rendezvous: other ranks were lost")
            return request()


def meet(store: dist.Store, size: int) -> None:
    """Return once `size` ranks have called this function.

    Args:
        store: A part of the store that only these ranks use.
        size: The number of ranks.

    Raises:
        PeersLostError: As in `PollingStore`.
    """
    if store.add("here", 1) == size:
        store.set("all here", "")
    store.wait(["all here"])
