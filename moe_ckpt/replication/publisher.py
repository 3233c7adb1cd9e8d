"""Host memory of a rank that outlives the worker: snapshots and step log, copied.

Owns: the keys of blobs. Must not: store snapshots or steps itself (`snapshot.windows`
and `snapshot.step_log` do), decide how long snapshots and steps stay, or keep account
of copies (`replication.copy_ledger` does). Snapshots and steps are in shared memory.
The boundary log is not: a lost rank replays, and logs again all that the rank sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from threading import RLock
from typing import Any

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.copy_ledger import Copies, CopyLedger, CopyState
from moe_ckpt.replication.copy_times import CopyTimes, SentCopy
from moe_ckpt.replication.copy_waits import CopyWaits
from moe_ckpt.replication.local_disk import LocalDisk
from moe_ckpt.replication.update_work import NO_WORK, UpdateWork
from moe_ckpt.snapshot.adam_update import (
    AdamStep,
    Gradients,
    ObservedGradients,
    Update,
    can_be_updated,
    pack_gradients,
    steps_of,
    update_to_bytes,
)
from moe_ckpt.snapshot.blob_keys import (
    belongs_to,
    gradients_key,
    is_gradients,
    is_local,
    is_snapshot,
    is_update,
    new_snapshot_key,
    older_step_key,
    start_key,
    step_key,
    update_key,
)
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.codec import (
    Snapshot,
    SnapshotHeader,
    header_to_json,
)
from moe_ckpt.snapshot.folder_contents import FolderContents, contents_of
from moe_ckpt.snapshot.step_codec import (
    start_to_bytes,
    step_to_bytes,
)
from moe_ckpt.snapshot.step_log import StepRecord, window_replay, window_steps
from moe_ckpt.snapshot.windows import HostBuffers

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes one rank's snapshots and steps in a folder of shared memory.

    Any thread may add snapshots. All other methods are for one thread.

    Peers receive nothing before `begin_copying` and after `stop_copying`: the peers'
    copies may be the last ones. Methods that wait for a copy raise PeersLostError as
    soon as ranks are lost.

    Attributes:
        folder: Folder of the rank's own blobs.
        waits: Waits for copies, which another thread interrupts after a loss of ranks.
            Copying that begins again allows waits again.
        updates: Buffers of gradients on their way to peers. A `GradientStream` acquires
            memory here, too.
    """

    def __init__(
        self,
        folder: BlobFolder,
        copies: Copies,
        copy_s: float,
        on_wait: Callable[[bool], None],
        *,
        copies_gradients: bool = True,
    ) -> None:
        """Begin without copying.

        Args:
            folder: Folder of the rank's own blobs.
            copies: Copies blobs to peers.
            copy_s: Longest time of a copy, in seconds.
            on_wait: Called with True when a wait for peers begins, and with False when
                the wait ends.
            copies_gradients: Whether peers receive logged gradients, too.
        """
        self.folder = folder
        self._copies_gradients = copies_gradients
        self.waits = CopyWaits(copy_s, on_wait)
        # reentrant: without peers each copy is done at once, and its callback runs
        # inside the lock
        self._lock = RLock()
        self._ledger = CopyLedger(copies, self.waits, self._lock)
        self._times = CopyTimes()
        self._keys: dict[torch.Tensor, str] = {}  # keys of snapshots, by payload
        # by unit: key of the newest snapshot for peers
        self._newest: dict[str | None, str] = {}
        self._logged: set[int] = set()  # iterations whose gradients are published
        self.updates = HostBuffers(folder)
        self._packed: dict[str, torch.Tensor] = {}  # buffers by the update's key

    @property
    def num_peers(self) -> int:
        """Number of peers when copying last began."""
        return self._ledger.num_peers

    def add_snapshot(
        self, snapshot: Snapshot, gradients: Gradients | None = None
    ) -> None:
        """Publish a finished snapshot.

        Args:
            snapshot: The snapshot. Its payload is memory of the folder.
            gradients: Gradients and Adam's numbers of the snapshot's iteration. Peers
                that have the unit of the previous iteration receive no more than these
                gradients. None: peers receive the snapshot.

        Raises:
            CheckpointSaveError: The snapshot cannot be published.
        """
        header = snapshot.header
        is_local = header.unit is not None and not header.unit.on_peers
        key = new_snapshot_key(header.window_start, header.slot, is_local=is_local)
        with self._lock:
            content = header_to_json(header)
            self.folder.publish(
                key, content, snapshot.payload, header.payload_bytes, header.checksum
            )
            self._keys[snapshot.payload] = key
            if not is_local:
                unit = header.unit.name if header.unit else None
                base, self._newest[unit] = self._newest.get(unit), key
                sent = (
                    self._publish_update(base, key, header, gradients)
                    if base and gradients
                    else key
                )
                self._copy(key, header.payload_bytes, sent)

    def _publish_update(
        self, base: str, key: str, header: SnapshotHeader, gradients: Gradients
    ) -> str:
        """Publish the update that leads from snapshot `base` to snapshot `key`.

        Returns:
            The update's key. Instead, `key` itself if peers did not receive the base,
            if the snapshot cannot be computed from the base, or if there is no room for
            the update.
        """
        if self._ledger.copy_of(base) is None or not can_be_updated(header):
            return key
        steps = {part: step for part, (_, step) in gradients.items()}
        update = Update(
            base=base, target=key, steps=steps_of(header, steps), header=header
        )
        try:
            packed, packed_bytes = pack_gradients(
                header, gradients, self.updates.acquire
            )
            self._packed[update_key(key)] = packed
            self.folder.publish(
                update_key(key), update_to_bytes(update), packed, packed_bytes
            )
        except CheckpointSaveError as error:
            _log.warning("%s goes to peers as a whole: %s", header, error)
            self._drop_update(update_key(key))
            return key
        return update_key(key)

    def begin_states(self, base: Snapshot) -> str:
        """Begin a series of states that peers compute.

        Args:
            base: The first state, which is published here.

        Returns:
            The key of the first state.
        """
        with self._lock:
            key = self._newest[None] = self._keys[base.payload]
            return key

    def hand_over(
        self,
        header: SnapshotHeader,
        steps: Sequence[AdamStep | None],
        packed: torch.Tensor,
        packed_bytes: int,
        observed: ObservedGradients | None = None,
    ) -> str:
        """Let peers compute a state from the state before.

        The folder does not store the new state.

        Args:
            header: Header of the new state.
            steps: Adam's step of each master weight, in the header's order. None: the
                weight takes no step.
            packed: Gradients, then buffers: memory of `updates`. The publisher releases
                this memory once peers have the gradients, or after an error.
            packed_bytes: Bytes of `packed` that belong to the update.
            observed: Gradients that peers observe, and that are not in `packed`.

        Returns:
            The key of the new state.

        Raises:
            CheckpointSaveError: Peers have no state to begin with, or the update cannot
                be published.
        """
        key = new_snapshot_key(header.window_start, header.slot)
        with self._lock:
            self._packed[update_key(key)] = packed
            base = self._newest.get(None)
            try:
                if base is None or self._ledger.copy_of(base) is None:
                    raise CheckpointSaveError(
                        f"{header}: peers have no state that it follows from"
                    )
                update = Update(
                    base=base,
                    target=key,
                    steps=tuple(steps),
                    header=header,
                    seals=True,
                    observed=observed,
                )
                self.folder.publish(
                    update_key(key), update_to_bytes(update), packed, packed_bytes
                )
            except CheckpointSaveError:
                self._drop_update(update_key(key))
                raise
            self._newest[None] = key
            self._copy(key, packed_bytes, update_key(key))
        return key

    def has_state(self, key: str, iteration: int, *, wait: bool) -> bool:
        """Return whether peers have a state, and the start of the next iteration.

        Args:
            key: Key of the state.
            iteration: Iteration of the state.
            wait: Whether to wait for the state and the start.

        Raises:
            CheckpointSaveError: The state or the start was not sent, or peers cannot
                compute the state.
            PeersLostError: Ranks were lost during the wait.
        """
        keys = (key, start_key(iteration + 1))
        with self._lock:
            copies = [self._ledger.copy_of(each) for each in keys]
        if wait:
            # outside the lock: other threads add snapshots during the wait
            self.waits.wait_for([copy for copy in copies if copy])
        for copy in copies:
            if copy is None:
                raise CheckpointSaveError(
                    f"the state of iteration {iteration} was not sent"
                )
            if copy.done() and (reason := copy.exception()):
                raise CheckpointSaveError(
                    f"the state of iteration {iteration}: {reason}"
                )
        return all(copy is not None and copy.done() for copy in copies)

    def work_for(self, key: str) -> UpdateWork:
        """Return the work of the slowest server for a state that all servers have.

        Returns:
            The work, or `NO_WORK` if servers reported none.
        """
        copy = self._ledger.copy_of(key)
        return (
            copy.result()
            if copy and copy.done() and isinstance(copy.result(), UpdateWork)
            else NO_WORK
        )

    def _drop_update(self, key: str) -> None:
        """Withdraw an update, and release the update's memory for reuse."""
        with self._lock:
            self.folder.withdraw(key)
            packed = self._packed.pop(key, None)
        if packed is not None:
            self.updates.release(packed)

    def drop_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        """Withdraw snapshots before the owner reuses the memory of their payloads."""
        with self._lock:
            keys = [self._keys.pop(snapshot.payload) for snapshot in snapshots]
            for key in keys:
                self._times.drop(key)
            self.drop(keys)

    def add_start(self, iteration: int, start: Mapping[str, torch.Tensor]) -> None:
        """Publish the state that an iteration starts from, without a record."""
        self._put(start_key(iteration), start_to_bytes(start))

    def add_step(
        self, record: StepRecord, start: Mapping[str, torch.Tensor] | None
    ) -> None:
        """Publish an iteration's record.

        Args:
            record: The record.
            start: Start of the same iteration, published with the record. None: no
                start.
        """
        self._put(step_key(record.iteration), step_to_bytes(record, start))

    def add_gradients(self, entry: Snapshot) -> None:
        """Publish an entry of the gradient log.

        Args:
            entry: The entry. Its payload is memory of the folder.

        Raises:
            CheckpointSaveError: The entry cannot be published.
        """
        header = entry.header
        key = gradients_key(header.iteration)
        with self._lock:
            self.folder.publish(
                key,
                header_to_json(header),
                entry.payload,
                header.payload_bytes,
                header.checksum,
            )
            self._logged.add(header.iteration)
            if self._copies_gradients:
                self._copy(key)

    def drop_gradients(self, iterations: Iterable[int]) -> None:
        """Withdraw entries of the gradient log before their memory is used again."""
        dropped = list(iterations)
        self._logged.difference_update(dropped)
        self.drop([*map(gradients_key, dropped)])

    def drop_steps(self, starts: Iterable[int], steps: Iterable[int]) -> None:
        """Withdraw starts and steps.

        Args:
            starts: Iterations whose starts were published without a record.
            steps: Iterations whose records were published.
        """
        self.drop([*map(start_key, starts), *map(step_key, steps)])

    def await_copies_of_step(self, iteration: int) -> bool:
        """Wait until peers hold the record of an iteration, with its start.

        Returns:
            Whether peers hold the record. False without a wait if a copy has failed
            since copying began: training would otherwise wait in every iteration.

        Raises:
            PeersLostError: Ranks were lost during the wait.
        """
        return not self._ledger.has_failed and self._ledger.wait_until_copied(
            [step_key(iteration)]
        )

    def await_copies(self, snapshots: Sequence[Snapshot]) -> bool:
        """Wait until peers hold these snapshots of a window, and the window's steps.

        Returns:
            Whether peers hold all of the blobs.

        Raises:
            PeersLostError: Ranks were lost during the wait.
        """
        return self._ledger.wait_until_copied(self._copied_keys_of(snapshots))

    def awaits_copies(self, snapshots: Sequence[Snapshot]) -> bool:
        """Return whether `await_copies` would wait for these snapshots."""
        return self._ledger.is_under_way(self._copied_keys_of(snapshots))

    def has_begun_blobs(self) -> bool:
        """Return whether peers have all blobs that the folder had as copying began.

        Blobs that were dropped since do not count.
        """
        return self._ledger.has_begun_blobs()

    def persist(
        self, disk: LocalDisk, snapshots: Sequence[Snapshot], *, keep: int | None
    ) -> Future[None]:
        """Start copying a window to disk, with the window's steps.

        Args:
            disk: The rank's disk.
            snapshots: Snapshots of the window.
            keep: Start of the only other window that stays on disk. None: all windows
                stay.

        Returns:
            A future that completes once the window is on disk, or fails with a
            CheckpointSaveError.

        Raises:
            CheckpointLoadError: A key on disk is none of a window.
        """
        keys = self._keys_of(snapshots)
        there = BlobFolder(disk.path).keys()
        stale = (
            []
            if keep is None
            else [key for key in there if key not in keys and not belongs_to(key, keep)]
        )
        return disk.persist(keys, stale)

    def persist_units(
        self,
        disk: LocalDisk,
        units: Sequence[Snapshot],
        *,
        also: Sequence[Snapshot] | None,
    ) -> Future[None]:
        """Start copying units of a partial checkpoint to disk.

        Args:
            disk: The rank's disk.
            units: The units.
            also: Units whose blobs stay on disk, while all others are deleted. None:
                all blobs stay.

        Returns:
            A future that completes once the units are on disk, or fails with a
            CheckpointSaveError.
        """
        keys = self._keys_of(units)
        there = BlobFolder(disk.path).keys()
        needed = {*keys, *(self._keys_of(also) if also is not None else there)}
        return disk.persist(keys, [key for key in there if key not in needed])

    def wait_for(self, persisted: Future[None]) -> None:
        """Wait for a write that `persist` or `persist_units` has started.

        Raises:
            CheckpointSaveError: The write failed, or takes longer than a copy may take.
            PeersLostError: Ranks were lost during the wait.
        """
        self.waits.wait_for([persisted])
        if not persisted.done():
            raise CheckpointSaveError(f"not on disk after {self.waits.copy_s:g} s")
        persisted.result()

    def copy_bytes_per_s(self) -> float:
        """Return the recent rate of copies of snapshots, in bytes per second.

        A copy ends when all peers have the snapshot. The rate includes waits. Returns
        inf if no copy has ended yet.
        """
        return self._times.bytes_per_s()

    def sent(self, snapshots: Sequence[Snapshot]) -> SentCopy | None:
        """Return the time in which these snapshots reached all peers.

        Returns:
            The time. None without peers, and for snapshots that an earlier worker has
            sent.
        """
        return (
            self._times.of(self._copied_keys_of(snapshots)) if self.num_peers else None
        )

    def num_copies(
        self, snapshots: Sequence[Snapshot], held: Iterable[Collection[str]]
    ) -> int:
        """Return the number of peers that have all of a window, with its steps.

        Args:
            snapshots: Snapshots of the window.
            held: The keys that each peer has.
        """
        wanted = set(self._copied_keys_of(snapshots))
        return sum(wanted.issubset(keys) for keys in held)

    def stop_copying(self) -> None:
        """Leave the peers' copies unchanged from now on; only this folder changes."""
        self._ledger.stop()

    def begin_copying(
        self, held: Sequence[Collection[str]], *, drop_stale: bool
    ) -> None:
        """Copy the folder's blobs to peers, now and from now on.

        If a copy fails, peers keep all blobs until copying begins again.

        Args:
            held: The keys that each peer has.
            drop_stale: Whether peers delete all other blobs once they have the folder's
                blobs.
        """
        with self._lock:
            here = self.folder.keys()
            kept = [key for key in here if self._is_for_peers(key)]
            self._ledger.begin(kept, held, drop_stale=drop_stale)

    def adopt(self) -> FolderContents:
        """Take over the folder's contents from an earlier process, or after a fetch.

        If an earlier process has begun a replacement of the contents, the new contents
        count only if they are whole.

        Returns:
            The contents.
        """
        self.folder.finish_replacement()
        for key in filter(is_update, self.folder.keys()):
            # left by a process that died before the copy was complete
            self.folder.discard(key)
        blobs = self.folder.adopt()
        self._keys = {
            blob.payload: key
            for key, blob in blobs.items()
            if is_snapshot(key) and blob.payload is not None
        }
        kept = contents_of(blobs)
        self._logged = {entry.header.iteration for entry in kept.gradients}
        for iteration, record in kept.records.items():
            if (older := older_step_key(iteration)) in blobs:
                self.add_step(record, kept.starts.get(iteration))
                self.folder.withdraw(older)
        return kept

    def replace(
        self, fetch: Callable[[BlobFolder], int], forget: Callable[[], None]
    ) -> int:
        """Replace the folder's contents.

        Until the new contents are whole, the old contents stay, even if this process
        dies.

        Args:
            fetch: Brings the new contents into the folder that it receives, and checks
                them.
            forget: Makes all holders of the old blobs drop them.

        Returns:
            The result of `fetch`.

        Raises:
            Exception: An error of `fetch`. The folder then has the old contents.
        """
        assert self._ledger.state is CopyState.STOPPED, (
            "peers would drop what is being fetched"
        )
        incoming = self.folder.incoming()
        with self.waits.waiting():
            try:
                result = fetch(incoming)
            except BaseException:
                self.folder.sweep()  # delete the blobs that have arrived
                raise
        self.folder.keep_incoming()
        forget()
        self.folder.finish_replacement()
        self.folder.sweep()
        return result

    def _keys_of(self, snapshots: Sequence[Snapshot]) -> list[str]:
        logged = self._logged.intersection(window_replay(snapshots))
        return [
            *window_steps(snapshots),
            *map(gradients_key, sorted(logged)),
            *(self._keys[snapshot.payload] for snapshot in snapshots),
        ]

    def _copied_keys_of(self, snapshots: Sequence[Snapshot]) -> list[str]:
        return list(filter(self._is_for_peers, self._keys_of(snapshots)))

    def _is_for_peers(self, key: str) -> bool:
        if is_gradients(key):
            return self._copies_gradients
        return not (is_local(key) or is_update(key))

    def _put(self, key: str, content: bytes) -> None:
        try:
            self.folder.publish(key, content, None, 0)
        except CheckpointSaveError as error:  # a failed save never stops training
            _log.warning("%s is not kept: %s", key, error)
            return
        self._copy(key)

    def _copy(self, key: str, measured_bytes: int = 0, by: str | None = None) -> None:
        """Start copying a blob to peers, if copying has begun.

        Args:
            key: Key of the blob.
            measured_bytes: Bytes that count for the rate of copies. 0: the copy does
                not count.
            by: Key of another blob to send instead, which is withdrawn afterwards.
                None: send the blob itself.
        """
        began_s, sent = time.monotonic(), by or key

        def finish(copied: Future[Any]) -> None:
            if measured_bytes and not copied.exception():
                self._times.ended(key, measured_bytes, since_s=began_s)
            if sent != key:
                self._drop_update(sent)

        copy = self._ledger.add(key, by=sent)
        if copy is not None:
            copy.add_done_callback(finish)

    def drop(self, keys: list[str]) -> None:
        """Withdraw blobs, and make peers delete copies and computed states."""
        for key in keys:
            self.folder.withdraw(key)
        self._ledger.drop(keys)
