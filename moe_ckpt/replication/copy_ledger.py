"""The copies of one rank's blobs on peers, by the key of the blob.

Owns: which blobs peers have or are receiving, and when peers delete blobs. Must not:
store or withdraw blobs, or know what a key means.

    STOPPED --begin--> COPYING --begin--> COPYING --stop--> STOPPED

    in STOPPED   `add`: noted as changed   `drop`: noted as withdrawn
    in COPYING   `add`: sent to peers      `drop`: deleted on peers

Blobs from before `begin` that a peer lacks are sent one by one, while no other copy is
under way. Training waits for new blobs, and would wait for all the earlier ones that
were sent first: after the loss of a node, for whole windows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTimeError
from enum import Enum, auto
from functools import partial
from threading import RLock
from typing import Any, Protocol

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.copy_waits import CopyWaits

_log = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies own blobs to peers in the background."""

    def copy(self, keys: list[str]) -> Future[Any]:
        """Start copying blobs to all peers.

        Args:
            keys: Keys of the blobs.

        Returns:
            A future that completes once all peers have all of the blobs, or fails with
            a CheckpointSaveError. The result is the servers' work, if servers report
            any.
        """
        ...

    def drop(self, keys: list[str]) -> None:
        """Make peers delete their copies of blobs.

        Args:
            keys: Keys of the blobs.
        """
        ...


class NoCopies:
    """Copies without peers: blobs in this node's memory count as copied."""

    def copy(self, keys: list[str]) -> Future[Any]:  # noqa: ARG002
        return _done()

    def drop(self, keys: list[str]) -> None:
        """Do nothing: no peer holds copies."""


class CopyState(Enum):
    """Whether peers receive a rank's blobs."""

    STOPPED = auto()
    """Peers' copies stay as they are, since they may be the last ones."""

    COPYING = auto()
    """Peers receive each added blob, and delete each dropped blob."""


class CopyLedger:
    """Copies of one rank's blobs on peers, for any thread.

    Attributes:
        state: Whether peers receive blobs.
        num_peers: Number of peers when copying last began.
        has_failed: Whether `wait_until_copied` was in vain since copying last began.
    """

    def __init__(self, peers: Copies, waits: CopyWaits, lock: RLock) -> None:
        """Begin without copying.

        Args:
            peers: Copies blobs to peers.
            waits: Waits for copies. An interruption lasts until `begin`.
            lock: The lock under which the owner adds a blob to its folder and to this
                ledger in one step. Without peers each copy is done at once, and its
                callback runs inside the lock.
        """
        self._peers = peers
        self._waits = waits
        self._lock = lock
        self.state = CopyState.STOPPED
        self.num_peers = 0
        self.has_failed = False
        # copies since copying began; done if peers had the blob before. Empty while
        # copying is stopped, and another dict after each transition
        self._copies: dict[str, Future[Any]] = {}
        # keys of this rank's blobs when copying last began
        self._begun: frozenset[str] = frozenset()
        # copies of such blobs that are not requested yet, in the order of requests
        self._waiting: dict[str, Future[Any]] = {}
        self._is_sending_waiting = False
        # keys added since copying stopped, or whose copies had not arrived by then:
        # peers may hold other contents under such a key
        self._changed: set[str] = set()
        # keys dropped while copying was stopped, until peers drop stale blobs: peers
        # may still receive copies of such blobs
        self._withdrawn: set[str] = set()
        # keys that peers hold, and delete once they hold this rank's blobs
        self._stale: set[str] = set()

    def stop(self) -> None:
        """Leave the peers' copies unchanged from now on."""
        with self._lock:
            self.state = CopyState.STOPPED
            self._changed.update(
                key
                for key, copy in self._copies.items()
                if not copy.done() or copy.exception()
            )
            # peers may still receive copies of stale blobs, too
            self._withdrawn |= self._stale
            self._copies, self._stale, self._waiting = {}, set(), {}

    def begin(
        self,
        keys: Collection[str],
        held: Sequence[Collection[str]],
        *,
        drop_stale: bool,
    ) -> None:
        """Copy these blobs to peers while no other copy is under way, and later ones.

        If a copy fails, peers keep all blobs until copying begins again.

        Args:
            keys: Keys of this rank's blobs for peers.
            held: The keys that each peer has.
            drop_stale: Whether peers delete all other blobs once they have this rank's
                blobs.
        """
        with self._lock:
            self.stop()
            # the same key is not enough: a record that was logged again has other
            # contents
            everywhere = set(keys).intersection(*held).difference(self._changed)
            self._copies = {key: _done() for key in everywhere}
            self._changed = set()
            self.state = CopyState.COPYING
            self.num_peers = len(held)
            self.has_failed = False
            self._begun = frozenset(keys)
            self._waits.allow()
            self._waiting = {key: Future() for key in keys if key not in everywhere}
            self._copies |= self._waiting
            if drop_stale:
                # withdrawn keys count as held: a copy may have been on its way when
                # peers listed their keys
                self._stale = self._withdrawn.union(*held).difference(keys)
                self._withdrawn = set()
                self._drop_stale_later()
            self._send_waiting()

    def add(self, key: str, *, by: str | None = None) -> Future[Any] | None:
        """Start copying a blob, or note that the blob has changed.

        Args:
            key: Key of the blob.
            by: Key of another blob to send instead, from which peers make the blob.
                None: send the blob itself.

        Returns:
            The copy. None while copying is stopped.
        """
        with self._lock:
            if self.state is CopyState.STOPPED:
                self._changed.add(key)
                return None
            # not stale any more: after another copy peers would delete the blob that
            # they now receive
            self._stale.discard(key)
            return self._request(key, by or key)

    def drop(self, keys: list[str]) -> None:
        """Make peers delete blobs, or note that the blobs are withdrawn.

        Args:
            keys: Keys of the blobs.
        """
        with self._lock:
            if self.state is CopyState.STOPPED:
                self._withdrawn.update(keys)
                return
            for key in keys:
                self._copies.pop(key, None)
                if waiting := self._waiting.pop(key, None):
                    waiting.set_result(None)  # nothing is left to send
            self._peers.drop(keys)

    def copy_of(self, key: str) -> Future[Any] | None:
        """Return the copy of a blob, which is done if peers had the blob before.

        A blob that waits for other copies is sent now: the caller needs it.

        Returns:
            The copy. None if the blob was not added since copying began, was dropped,
            or if copying is stopped.
        """
        with self._lock:
            if key in self._waiting:
                self._request(key, key)
            return self._copies.get(key)

    def is_under_way(self, keys: Iterable[str]) -> bool:
        """Return whether a wait for the copies of these blobs would take time."""
        self._require_begun()
        copies = [self._copies.get(key) for key in keys]
        return any(copy is not None and not copy.done() for copy in copies)

    def has_begun_blobs(self) -> bool:
        """Return whether peers have all blobs with which copying last began.

        Blobs that were dropped since do not count.
        """
        self._require_begun()
        with self._lock:
            copies = [self._copies.get(key) for key in self._begun]
        return all(
            copy is None or (copy.done() and not copy.exception()) for copy in copies
        )

    def wait_until_copied(self, keys: Iterable[str]) -> bool:
        """Wait until peers hold these blobs.

        Returns:
            Whether peers hold all of the blobs.

        Raises:
            PeersLostError: Ranks were lost during the wait.
        """
        self._require_begun()
        try:
            copies = [self._copy_to_wait_for(key) for key in keys]
            self._waits.wait_for(copies)
            for copy in copies:
                copy.result(0.0)
        except (CheckpointSaveError, NotInTimeError) as error:
            _log.warning(
                "not copied, training goes on: %s",
                str(error) or f"no answer in {self._waits.copy_s:g} s",
            )
            self.has_failed = True
            return False
        return True

    def _copy_to_wait_for(self, key: str) -> Future[Any]:
        copy = self.copy_of(key)
        if copy is None:  # the folder had no room for a step, for example
            raise CheckpointSaveError(f"blob {key} was not sent")
        return copy

    def _request(self, key: str, sent: str) -> Future[Any]:
        """Ask peers for a copy of a blob, which no longer waits."""
        waiting = self._waiting.pop(key, None)
        copy = self._copies[key] = self._peers.copy([sent])
        if waiting:
            copy.add_done_callback(partial(_end_as, waiting))
        copy.add_done_callback(self._ended)
        return copy

    def _ended(self, copy: Future[Any]) -> None:
        # a failure does not take the lock, whose holder may wait for this thread: the
        # next copy that arrives sends what waits
        if not copy.exception():
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send the next blob that waits, unless another copy is under way."""
        with self._lock:
            # a copy that ends at once calls this method again, inside the loop
            if self._is_sending_waiting:
                return
            self._is_sending_waiting = True
            try:
                while self._waiting and not self._is_busy():
                    key = next(iter(self._waiting))
                    self._request(key, key)
            finally:
                self._is_sending_waiting = False

    def _is_busy(self) -> bool:
        return any(
            not copy.done()
            for key, copy in self._copies.items()
            if key not in self._waiting
        )

    def _require_begun(self) -> None:
        assert self.state is CopyState.COPYING, (
            "asked for copies before peers were told of anything"
        )

    def _drop_stale_later(self) -> None:
        """Make peers delete stale blobs once all copies until now are complete.

        Until then a stale blob may be the last source.
        """
        copying = self._copies
        copies = list(copying.values())

        def drop(copied: Future[Any]) -> None:
            if copied.exception():
                return  # without the lock, whose holder may wait for this thread
            with self._lock:
                # after copying has stopped or begun anew, stale blobs stay: they may be
                # the last source again
                if self._copies is copying and all(
                    copy.done() and not copy.exception() for copy in copies
                ):
                    self._peers.drop(sorted(self._stale))
                    self._stale = set()

        for copy in copies or [_done()]:
            copy.add_done_callback(drop)


def _end_as(waiting: Future[Any], copy: Future[Any]) -> None:
    """Give the end of a copy to a future that was handed out before the request."""
    if reason := copy.exception():
        waiting.set_exception(reason)
    else:
        waiting.set_result(copy.result())


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
