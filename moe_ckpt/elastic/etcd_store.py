"""A torch store on an etcd cluster, which outlives every node of a job.

The store outlives the node that hosts torchrun's rendezvous, too. Keys, values and
errors are those of torch's TCPStore, as `elastic.generations` and its neighbours use
them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from moe_ckpt.elastic.etcd_client import (
    Entry,
    EtcdClient,
    delete,
    is_at,
    is_missing,
    is_value,
    read,
)

_MOST_OPERATIONS = 100  # in one transaction; etcd's own limit is 128
# time after which a wait asks again: a member may disappear silently, and the lease
# must be renewed
_LOOK_AGAIN_S = 10.0


class EtcdStore(dist.Store):
    """The keys of an etcd cluster below a prefix, as a torch store.

    Any thread may call any method, also while other threads wait. A wait raises
    DistStoreError when its time is over. All methods raise DistNetworkError if etcd
    does not answer. Values must not be empty, and each key has one writer at a time.
    """

    def __init__(self, client: EtcdClient, prefix: str, timeout_s: float) -> None:
        """Open the keys below a prefix.

        Args:
            client: The client of the cluster.
            prefix: In front of all keys.
            timeout_s: Limit, in seconds, of each wait that has no timeout of its own.
        """
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._client.transact([], [self._client.put(self._prefix + key, _bytes(value))])

    def get(self, key: str) -> bytes:
        return self._wait([key], self._timeout)[0].value

    def add(self, key: str, value: int) -> int:
        """Add to a number, once, even if the request is sent again.

        A second key records that the addition was carried out, as the connection may
        end before the answer arrives.

        Args:
            key: The key of the number, which begins with 0.
            value: The summand; 0: only read the number.

        Returns:
            The sum.
        """
        number, done = self._prefix + key, f"{self._prefix}{key}/{uuid.uuid4().hex}"
        before = self._read([key])[0][0] if value == 0 else None
        # The first attempt assumes that the number is missing. If the number exists,
        # the answer contains the number
        while value:
            total = str(_number(before) + value).encode()
            writes = [self._client.put(number, total), self._client.put(done, total)]
            conditions = [
                is_at(number, before.revision if before else 0),
                is_missing(done),
            ]
            answer = self._client.transact(
                conditions, writes, [read(number), read(done)]
            )
            if answer.succeeded:
                return int(total)
            before, earlier = answer.entries
            if earlier:
                return _number(earlier)
        return _number(before)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key if its present value is the expected one.

        Args:
            key: The key.
            expected_value: The expected value; empty: the key must not exist.
            desired_value: The new value.

        Returns:
            The value of the key afterwards; `expected_value` if the key does not exist,
            as in torch's store.
        """
        name, old, new = (
            self._prefix + key,
            _bytes(expected_value),
            _bytes(desired_value),
        )
        condition = is_value(name, old) if old else is_missing(name)
        answer = self._client.transact(
            [condition], [self._client.put(name, new)], [read(name)]
        )
        if answer.succeeded:
            return new
        [entry] = answer.entries
        # a swap that is sent again after a lost answer fails, and finds its own value
        # here
        return entry.value if entry else old

    def delete_key(self, key: str) -> bool:
        return self._client.transact([], [delete(self._prefix + key)]).num_deleted > 0

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._read(keys)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout or self._timeout)

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[Entry]:
        until_s = time.monotonic() + timeout.total_seconds()
        while True:
            entries, revision = self._read(keys)
            missing = [
                key for key, entry in zip(keys, entries, strict=True) if entry is None
            ]
            if not missing:
                return [entry for entry in entries if entry]
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise dist.DistStoreError(
                    f"wait: got no {missing[0]!r} in {timeout.total_seconds():g}"
                    " seconds"
                )
            # from the revision of the read on: a key that is written before the watch
            # begins ends the watch at once
            self._client.watch(
                self._prefix + missing[0], revision + 1, min(left_s, _LOOK_AGAIN_S)
            )

    def _read(self, keys: Sequence[str]) -> tuple[list[Entry | None], int]:
        """Read keys.

        Returns:
            The entries, and a revision up to which none of the missing keys exists.
        """
        parts = [
            keys[first : first + _MOST_OPERATIONS]
            for first in range(0, len(keys), _MOST_OPERATIONS)
        ]
        answers = [
            self._client.transact([], [read(self._prefix + key) for key in part])
            for part in parts
        ]
        entries = [entry for answer in answers for entry in answer.entries]
        return entries, min((answer.revision for answer in answers), default=0)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _number(entry: Entry | None) -> int:
    return int(entry.value) if entry else 0
