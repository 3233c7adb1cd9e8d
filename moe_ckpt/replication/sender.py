"""Copies one rank's blobs to the rank's peers while training continues.

Owns: two sending threads per peer, the order of requests, yielding to training traffic,
and waits for the cap. Must not: choose the blobs, or keep a payload mapped longer than
its copy takes. A chunk waits a bounded time while training communicates. Unlike Gemini
(section 5), the replicator does not profile idle spans of the network.

    copy a, copy b, drop a   in this order to each peer, each peer at its own speed;
                             confirmed when all peers have a blob

Each peer has two lanes, each of which is a thread with a connection. The step lane
carries the small blobs of the step log (`snapshot.step_log`). An iteration may wait,
before the optimizer's step, until peers have the blob of the iteration. In the other
lane the blob would arrive behind the snapshots that were requested before.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.connection import Connection, RefusedError
from moe_ckpt.replication.messages import Address, Done, Drop, Put, Ticket
from moe_ckpt.replication.retrying_client import RetryingClient
from moe_ckpt.replication.transfer import send_blob
from moe_ckpt.replication.update_work import NO_WORK, UpdateWork, slowest
from moe_ckpt.snapshot.adam_update import update_from_bytes
from moe_ckpt.snapshot.blob_keys import is_step, is_update
from moe_ckpt.snapshot.blobs import Blob, BlobFolder
from moe_ckpt.snapshot.token_bucket import Throttle

# longest wait of a chunk: copies continue at 50 MB/s or more, however busy training is
_LONGEST_YIELD_S = 0.02
# polled: the training process writes a flag in memory, which is no event to wait for
_YIELD_S = 0.005
# interval of checks, while a chunk waits for tokens, that the snapshot is still wanted
_LOOK_EVERY_S = 0.1
# refused updates in a row: a peer whose arithmetic differs never computes the same
# state
_MOST_REFUSED = 3

_log = logging.getLogger(__name__)


class Replicator:
    """Copies a rank's blobs to peers, for any thread.

    Copies go to the peers of the last `use_peers`.
    """

    def __init__(
        self,
        own: BlobFolder,
        owner_rank: int,
        ticket: Ticket,
        *,
        may_send: Callable[[], bool],
        deadline_s: float,
        throttle: Throttle | None = None,
    ) -> None:
        """Begin without peers.

        Args:
            own: Folder of the rank's own blobs.
            owner_rank: The rank.
            ticket: The run, and the run's secret.
            may_send: Returns whether copies may be sent without a wait. While the
                result is False, every chunk waits up to 20 ms.
            deadline_s: Longest time from a request to all confirmations, in seconds.
                After this time the copy has failed.
            throttle: Cap on the bytes to all peers together, steps excepted. None: no
                cap.
        """
        self._own = own
        self._owner_rank = owner_rank
        self._ticket = ticket
        self._may_send = may_send
        self._deadline_s = deadline_s
        self._throttle = throttle or Throttle()
        self._lock = Lock()
        self._peers: dict[Address, tuple[_Lane, _Lane]] | None = None
        self._why_no_peers = "got no peers yet, wanted to be told which to use"

    def use_peers(self, addresses: Sequence[Address]) -> None:
        """Copy to these peers from now on.

        Copies to other peers fail, including copies in progress.

        Args:
            addresses: Addresses of the peers' servers.
        """
        with self._lock:
            before = self._peers or {}
            # a peer that stays keeps its lanes, so that requests to the peer stay in
            # order
            self._peers = {
                address: before.get(address) or self._peer(address)
                for address in addresses
            }
            gone = [
                peer for address, peer in before.items() if address not in self._peers
            ]
        for lane in itertools.chain(*gone):
            lane.close()

    def copy(self, keys: Sequence[str]) -> Future[UpdateWork]:
        """Start copying blobs to all peers.

        Args:
            keys: Keys of the blobs.

        Returns:
            A future that completes once all peers hold all of the blobs, or fails with
            a CheckpointSaveError. Without keys, the future completes once all earlier
            requests have ended. The result is the work of the slowest checkpoint server
            among the peers.
        """
        until_s = time.monotonic() + self._deadline_s
        with self._lock:
            if self._peers is None and keys:
                failed: Future[UpdateWork] = Future()
                failed.set_exception(
                    CheckpointSaveError(f"copies: {self._why_no_peers}")
                )
                return failed
            return _all_done(
                [lane.copy(part, until_s) for lane, part in self._split(keys)]
            )

    def drop(self, keys: Sequence[str]) -> None:
        """Make all peers delete their copies of blobs.

        A peer deletes copies after all earlier requests of the same kind; the kinds are
        steps and all other blobs. The replicator logs a failure.

        Args:
            keys: Keys of the blobs.
        """
        until_s = time.monotonic() + self._deadline_s
        with self._lock:
            for lane, part in self._split(keys):
                lane.drop(part, until_s).add_done_callback(_log_failure)

    def close(self) -> None:
        """End all threads. Unconfirmed and later requests fail."""
        self.use_peers([])
        with self._lock:
            self._peers = None
            self._why_no_peers = "got a request after the end, wanted none"

    def _peer(self, address: Address) -> tuple[_Lane, _Lane]:
        """Return the two lanes to a peer: the step lane, and that of other blobs."""
        steps, others = (
            RetryingClient(address, self._ticket, CheckpointSaveError) for _ in range(2)
        )
        common = self._own, self._owner_rank, self._may_send, self._throttle
        return _Lane(steps, *common), _Lane(others, *common)

    def _split(self, keys: Sequence[str]) -> Iterator[tuple[_Lane, list[str]]]:
        """Yield the lanes of all peers, each with the lane's keys.

        Lanes without keys are left out, unless `keys` is empty.
        """
        for peer in (self._peers or {}).values():
            for lane, is_mine in zip(peer, (True, False), strict=True):
                part = [key for key in keys if is_step(key) == is_mine]
                if part or not keys:
                    yield lane, part


class _Lane:
    """A sending thread to one peer, and its connection."""

    def __init__(
        self,
        caller: RetryingClient,
        own: BlobFolder,
        owner_rank: int,
        may_send: Callable[[], bool],
        throttle: Throttle,
    ) -> None:
        self._throttle = throttle
        self._own = own
        self._owner_rank = owner_rank
        self._caller = caller
        self._may_send = may_send
        self._refused = Counter[str]()  # refused updates in a row, by unit
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="replicator"
        )

    def copy(self, keys: Sequence[str], until_s: float) -> Future[UpdateWork]:
        return self._thread.submit(self._copy_all, tuple(keys), until_s)

    def drop(self, keys: Sequence[str], until_s: float) -> Future[None]:
        return self._thread.submit(self._drop, tuple(keys), until_s)

    def close(self) -> None:
        self._caller.shut_down()
        # on the lane's thread, which owns the connection
        self._thread.submit(self._caller.close)
        # no wait: the thread may try to connect until its deadline
        self._thread.shutdown(wait=False)

    def _copy_all(self, keys: Sequence[str], until_s: float) -> UpdateWork:
        return slowest(
            self._caller.call(f"copy of {key}", partial(self._put, key), until_s)
            for key in keys
        )

    def _drop(self, keys: Sequence[str], until_s: float) -> None:
        request = Drop(owner_rank=self._owner_rank, keys=tuple(keys))
        self._caller.call(
            f"dropping {', '.join(keys)}", lambda link: link.ask(request, Done), until_s
        )

    def _put(self, key: str, link: Connection) -> UpdateWork:
        if not is_update(key):
            return self._send(link, key)
        update = update_from_bytes(self._own.get(key).header)
        # an update that seals leads to a state that only the peer computes, a
        # checkpoint server: after a refusal this rank would have no state to send
        if update.seals:
            return self._send(link, key)
        if not self._try_update(link, key, update.unit):
            self._send(link, update.target)
        return NO_WORK

    def _try_update(self, link: Connection, key: str, unit: str) -> bool:
        """Send gradients, from which the peer computes the state of a unit.

        Nothing is sent if the peer has refused the last _MOST_REFUSED of the unit.

        Returns:
            Whether the peer has the state now. If not, the state itself must be sent.
        """
        if self._refused[unit] == _MOST_REFUSED:
            return False
        try:
            self._send(link, key)
        except RefusedError as error:
            # damage on the way is no difference in arithmetic: the client sends the
            # update again
            if error.garbled:
                raise
            self._refused[unit] += 1
            _log.warning(
                "the whole state goes to %s, not its gradients: %s",
                self._caller.address,
                error,
            )
            return False
        self._refused[unit] = 0
        return True

    def _send(self, link: Connection, key: str) -> UpdateWork:
        blob = self._own.get(key)

        def pace(nbytes: int) -> None:
            # no cap on steps: few bytes, for which every iteration waits
            if not is_step(key):
                self._throttle.wait(
                    nbytes, lambda seconds: self._sleep(seconds, key, blob)
                )
            self._yield_to_training()

        send_blob(
            link, self._own, key, blob, pace, Put(owner_rank=self._owner_rank, key=key)
        )
        done = link.expect(Done)
        return UpdateWork(busy_us=done.busy_us, after_us=done.after_us)

    def _sleep(self, seconds: float, key: str, blob: Blob) -> bool:
        """Wait for tokens, while the peer is in use and the blob is published.

        After an error the throttle takes the tokens back.

        Returns:
            False: the copy uses the tokens.

        Raises:
            OSError: The peer is given up.
            CheckpointSaveError: The blob was withdrawn.
        """
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._caller.pause(min(left_s, _LOOK_EVERY_S))
            if not self._own.is_current(key, blob):
                raise CheckpointSaveError(f"blob {key} was withdrawn while it was sent")
        return False

    def _yield_to_training(self) -> None:
        until_s = time.monotonic() + _LONGEST_YIELD_S
        # without a wait: raises an error if the peer has been given up
        self._caller.pause(0)
        while not self._may_send() and time.monotonic() < until_s:
            self._caller.pause(_YIELD_S)


def _all_done(parts: Sequence[Future[UpdateWork]]) -> Future[UpdateWork]:
    """Return a future for a whole copy.

    Returns:
        A future that completes once all parts have completed, and fails with all
        reasons if any part has failed.
    """
    whole: Future[UpdateWork] = Future()
    whole.set_running_or_notify_cancel()  # no caller can cancel the future from here on
    lock, num_left = Lock(), len(parts)

    def finish(_: Future[UpdateWork]) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            if num_left:
                return
        _complete(whole, parts)

    for part in parts:
        part.add_done_callback(finish)
    if not parts:
        whole.set_result(NO_WORK)
    return whole


def _complete(whole: Future[UpdateWork], parts: Sequence[Future[UpdateWork]]) -> None:
    reasons = [reason for part in parts if (reason := part.exception())]
    if not reasons:
        whole.set_result(slowest([part.result() for part in parts]))
        return
    error = CheckpointSaveError("; ".join(str(reason) for reason in reasons))
    error.__cause__ = reasons[0]
    whole.set_exception(error)


def _log_failure(future: Future[None]) -> None:
    if reason := future.exception():
        _log.warning("copies stay that are not needed any more: %s", reason)
