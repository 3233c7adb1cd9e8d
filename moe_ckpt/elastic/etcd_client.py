"""A client of an etcd cluster over HTTP: transactions and watches.

Each member of a cluster has an HTTP gateway (/v3/) beside gRPC, and the standard
library suffices for the gateway. A client over gRPC has threads, which a supervisor
that forks must not have. etcd3gw asks one member only, and watches in a thread.
python-etcd uses an API that etcd 3.6 no longer has.

Every request may be sent again: a lost member may have carried out the request before,
and the end of a generation may shut down a connection that was opened while its groups
formed (`elastic.backends`). All keys of a job have one lease. Requests renew the lease
from time to time, so the keys outlive the job by `_LEASE_S`.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

Operation = dict[str, Any]

_ANSWER_S = 5.0  # limit for an answer of one member; an election takes less
_PATIENCE_S = 60.0  # limit for all members together
_AGAIN_S = 0.1
_LEASE_S = 7200
_RENEW_S = 600.0
# HTTP statuses: cancelled, too many requests. All statuses from 500 on are tried again,
# too, such as that of a cluster without a leader
_TRY_AGAIN = (408, 429)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the cluster."""

    value: bytes
    """Value of the key."""

    revision: int
    """Revision of the cluster at which the value was written."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a transaction."""

    succeeded: bool
    """Whether all conditions held."""

    revision: int
    """Revision of the cluster."""

    entries: list[Entry | None]
    """The entries that the transaction has read, in the order of the reads; None for a
    missing key.
    """

    num_deleted: int
    """Number of keys that the transaction has deleted."""


class EtcdClient:
    """The requests of one process to an etcd cluster.

    A request goes to the member that answered last, or to the next member that answers.
    Any thread may call any method. `transact` and `put` raise DistNetworkError if no
    member answers in time, or a member refuses a request.
    """

    def __init__(self, members: Sequence[tuple[str, int]], lease_key: str) -> None:
        """Name the cluster; the first request connects.

        Args:
            members: Pairs of host and port.
            lease_key: The key that holds the job's lease.
        """
        self._members = deque(members)
        self._lease_key = lease_key
        self._lease = ""
        self._renewed_s = 0.0
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None

    def __str__(self) -> str:
        return ",".join(sorted(f"{host}:{port}" for host, port in self._members))

    def transact(
        self,
        conditions: Sequence[Operation],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> Answer:
        """Carry out operations as one change.

        Args:
            conditions: The conditions.
            then: The operations if all conditions hold.
            otherwise: The operations if a condition does not hold.

        Returns:
            The result, with the entries that the operations have read.
        """
        if self._lease and time.monotonic() > self._renewed_s + _RENEW_S:
            # before the request: other threads then do not renew the same lease
            # meanwhile
            self._renewed_s = time.monotonic()
            self._ask("/v3/lease/keepalive", {"ID": self._lease})
        request = {
            "compare": list(conditions),
            "success": list(then),
            "failure": list(otherwise),
        }
        answer = self._ask("/v3/kv/txn", request)
        parts = answer.get("responses", [])
        return Answer(
            succeeded=answer.get("succeeded", False),
            revision=int(answer["header"]["revision"]),
            entries=[
                _entry(part["response_range"])
                for part in parts
                if "response_range" in part
            ],
            num_deleted=sum(
                int(part.get("response_delete_range", {}).get("deleted", 0))
                for part in parts
            ),
        )

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        with self._lock:
            self._disconnect()

    def put(self, key: str, value: bytes) -> Operation:
        """Return the operation that writes a key, for the time of the job's lease."""
        self._lease = self._lease or self._find_lease()
        return _put(key, value, self._lease)

    def watch(self, key: str, revision: int, timeout_s: float) -> None:
        """Block until a key is written or deleted, for `timeout_s` at most.

        May return early: the caller must read the key again.

        Args:
            key: The key.
            revision: The first revision of the cluster that counts.
            timeout_s: The longest time to block, in seconds.
        """
        # a separate connection: other threads send requests while this thread blocks
        connection = http.client.HTTPConnection(*self._members[0], timeout=timeout_s)
        request = {
            "create_request": {"key": _text(key), "start_revision": str(revision)}
        }
        try:
            connection.request("POST", "/v3/watch", json.dumps(request))
            answer = connection.getresponse()
            while line := answer.readline():  # the first line confirms the watch
                result = json.loads(line).get("result", {"canceled": True})
                if "events" in result or "canceled" in result:
                    return
        except TimeoutError:
            return
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            connection.close()
        time.sleep(_AGAIN_S)  # the caller tries again, when the next member answers

    def _find_lease(self) -> str:
        """Return the job's lease. The first process that asks grants the lease."""
        [found] = self.transact([], [read(self._lease_key)]).entries
        if found is None:
            granted = self._ask("/v3/lease/grant", {"TTL": str(_LEASE_S)})["ID"]
            keep = _put(self._lease_key, granted.encode(), granted)
            answer = self.transact(
                [is_missing(self._lease_key)], [keep], [read(self._lease_key)]
            )
            # if another process was first, its lease counts, and the lease granted here
            # expires unused
            found = (
                Entry(granted.encode(), 0) if answer.succeeded else answer.entries[0]
            )
        assert found is not None, "a key of the job was deleted"
        return found.value.decode()

    def _ask(self, path: str, request: Operation) -> dict[str, Any]:
        body = json.dumps(request)
        until_s = time.monotonic() + _PATIENCE_S
        with self._lock:
            while True:
                try:
                    return self._exchange(path, body)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    self._disconnect()
                    self._members.rotate(-1)
                    if time.monotonic() > until_s:
                        wanted = (
                            f"got no answer in {_PATIENCE_S:g} seconds ({error!r}),"
                            " wanted one"
                        )
                        raise dist.DistNetworkError(
                            f"etcd at {self}: {wanted}"
                        ) from error
                # a lost member refuses at once, and the next member may still be
                # starting
                time.sleep(_AGAIN_S)

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None

    def _exchange(self, path: str, body: str) -> dict[str, Any]:
        """Return a member's answer.

        Raises:
            HTTPException: Another member may give a better answer.
            DistNetworkError: The cluster refuses the request.
        """
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                *self._members[0], timeout=_ANSWER_S
            )
        self._connection.request("POST", path, body)
        answer = self._connection.getresponse()
        # for every status: http.client sends no request over a connection with an
        # unread answer
        text = answer.read().decode()
        if answer.status in _TRY_AGAIN or answer.status >= 500:
            raise http.client.HTTPException(text)
        if answer.status != 200:
            raise dist.DistNetworkError(
                f"etcd at {self}: got status {answer.status} ({text}), wanted 200"
            )
        return json.loads(text)


def read(key: str) -> Operation:
    """Return the operation that reads a key's entry."""
    return {"request_range": {"key": _text(key)}}


def delete(key: str) -> Operation:
    """Return the operation that deletes a key."""
    return {"request_delete_range": {"key": _text(key)}}


def is_missing(key: str) -> Operation:
    """Return the condition that a key does not exist."""
    return {"key": _text(key), "target": "CREATE", "create_revision": "0"}


def is_value(key: str, value: bytes) -> Operation:
    """Return the condition that a key exists and has this value."""
    return {"key": _text(key), "target": "VALUE", "value": b64encode(value).decode()}


def is_at(key: str, revision: int) -> Operation:
    """Return the condition that a key was last written at a revision.

    Args:
        key: The key.
        revision: The revision; 0: the key does not exist.
    """
    return {"key": _text(key), "target": "MOD", "mod_revision": str(revision)}


def _put(key: str, value: bytes, lease: str) -> Operation:
    return {
        "request_put": {
            "key": _text(key),
            "value": b64encode(value).decode(),
            "lease": lease,
        }
    }


def _entry(found: dict[str, Any]) -> Entry | None:
    for entry in found.get("kvs", []):
        return Entry(b64decode(entry.get("value", "")), int(entry["mod_revision"]))
    return None


def _text(key: str) -> str:
    return b64encode(key.encode()).decode()
