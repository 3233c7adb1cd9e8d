"""One rank's snapshots in host memory: the kept windows, and the window in flight.

Owns: the buffers of payloads, the windows, and the time at which a buffer is free
again. Must not: look into payloads, copy, or communicate. MoEvement, section 3.2,
"Persisting Snapshots"; MoC, section 5.1. A window is one version of the state: W slots
of operators or, in one slot, the units of a partial checkpoint (`snapshot.units`).

    begin    add slot 0 .. slot W-1    keep_in_flight         a later keep_in_flight
    in flight ---------- complete ---> kept (older released) ---> released
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.snapshot.adam_update import Gradients
from moe_ckpt.snapshot.codec import ROLES, Snapshot, scaled_role
from moe_ckpt.snapshot.units import StorageLevel, compose, needed_for, without_torn
from moe_ckpt.types import CORE, Version

_BYTES = {
    "master": "full_bytes",
    "exp_avg": "full_bytes",
    "exp_avg_sq": "full_bytes",
    "compute": "compute_bytes",
}
BYTES_OF_ROLE = {role: _BYTES.get(scaled_role(role), "buffer_bytes") for role in ROLES}


class HostMemory(Protocol):
    """Allocates buffers, for any thread."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return new memory, which belongs to the caller until `free`.

        Returns:
            uint8, [nbytes], contiguous, of arbitrary contents.

        Raises:
            CheckpointSaveError: There is no such memory.
        """
        ...

    def free(self, tensor: torch.Tensor) -> None:
        """Free memory. Neither the memory nor a view of it may be used afterwards.

        Args:
            tensor: The same object that was allocated.
        """
        ...


class PrivateMemory:
    """Memory that ends with the process."""

    def __init__(self, *, pinned: bool) -> None:
        """Choose the kind of memory.

        Args:
            pinned: Whether to allocate page-locked memory if there is a GPU to copy
                from.
        """
        self._pin_memory = pinned and torch.cuda.is_available()

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pin_memory
            )
        except RuntimeError as error:
            raise CheckpointSaveError(
                f"no host memory for a snapshot of {nbytes} bytes: {error}"
            ) from error

    def free(self, tensor: torch.Tensor) -> None:
        """Do nothing: the memory ends with the last tensor that uses the memory."""


class HostBuffers:
    """A pool of uint8 buffers in host memory, for any thread.

    Free and used buffers together never exceed the most bytes that were in use at one
    time. A run with recurring sizes therefore finds a buffer of every size, and
    allocates nothing after its first windows. A run whose sizes drift frees the buffers
    that were unused for longest.
    """

    def __init__(self, memory: HostMemory, limit_bytes: int | None = None) -> None:
        """Begin with an empty pool.

        Args:
            memory: Allocates the buffers.
            limit_bytes: Most bytes that may be in use at one time; None for no limit.
        """
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._lock = Lock()
        # a tensor's hash is its identity: a view of a buffer is not in this set
        self._in_use: set[torch.Tensor] = set()
        # kept as a sum: each logged tensor asks for this number, and a log has
        # thousands of buffers
        self._in_use_bytes = 0
        self._free: list[torch.Tensor] = []  # the one released first comes first
        self._peak_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the buffers in use."""
        with self._lock:
            return self._in_use_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffers in use and of the free buffers."""
        with self._lock:
            return self._in_use_bytes + _total(self._free)

    def acquire(self, nbytes: int) -> torch.Tensor:
        """Return a buffer, which belongs to the caller until `release`.

        Returns:
            A buffer of at least `nbytes` bytes, of arbitrary contents.

        Raises:
            CheckpointSaveError: The buffer would exceed `limit_bytes`, or the machine
                has no such memory.
        """
        with self._lock:
            buffer = self._take_free(nbytes)
            buffer = self._allocate(nbytes) if buffer is None else buffer
            self._use(buffer)
            return buffer

    def adopt(self, buffer: torch.Tensor) -> None:
        """Count a buffer that the memory has handed out already as acquired.

        The limit does not apply to the buffer.
        """
        with self._lock:
            assert buffer not in self._in_use, "adopted a buffer in use"
            self._use(buffer)

    def release(self, buffer: torch.Tensor) -> None:
        """Release a buffer. Neither the buffer nor a view of it may be read afterwards.

        Args:
            buffer: The same object that was acquired.
        """
        with self._lock:
            assert buffer in self._in_use, (
                "released a tensor that is not a buffer in use"
            )
            self._in_use.remove(buffer)
            self._free.append(buffer)
            self._in_use_bytes -= buffer.numel()

    def free_unused(self) -> None:
        """Free the memory of all buffers that are not in use."""
        with self._lock:
            while self._free:
                self._memory.free(self._free.pop())

    def _use(self, buffer: torch.Tensor) -> None:
        self._in_use.add(buffer)
        self._in_use_bytes += buffer.numel()
        self._peak_bytes = max(self._peak_bytes, self._in_use_bytes)

    def _take_free(self, nbytes: int) -> torch.Tensor | None:
        """Return the smallest free buffer that is large enough.

        None if the snapshot would waste too much of each such buffer. Under a limit no
        byte is wasted, since forecasts count exact sizes.
        """
        most_bytes = 1.25 * nbytes + 4096 if self._limit_bytes is None else nbytes
        sizes = [buffer.numel() for buffer in self._free]
        fitting = [size for size in sizes if nbytes <= size <= most_bytes]
        return self._free.pop(sizes.index(min(fitting))) if fitting else None

    def _allocate(self, nbytes: int) -> torch.Tensor:
        used_bytes = self._in_use_bytes
        if self._limit_bytes is not None and used_bytes + nbytes > self._limit_bytes:
            raise CheckpointSaveError(
                f"host memory for snapshots: got {used_bytes} bytes in use and {nbytes}"
                " more to hold, wanted at most"
                f" ckpt.memory_budget_bytes={self._limit_bytes}"
            )
        while (
            self._free and used_bytes + _total(self._free) > self._peak_bytes - nbytes
        ):
            # the buffer that has been free for longest
            self._memory.free(self._free.pop(0))
        return self._memory.allocate(nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Snapshots of one version that this rank has."""

    version: Version
    """Version of the state."""

    num_snapshots: int
    """Number of snapshots that make the version whole."""

    snapshots: tuple[Snapshot, ...] = ()
    """Snapshots so far, ordered by slot. Slot k of a sparse window is the state after
    iteration `start` + k.
    """

    @property
    def start(self) -> int:
        return self.version.iteration

    @property
    def complete(self) -> bool:
        return len(self.snapshots) == self.num_snapshots

    @property
    def is_whole_state(self) -> bool:
        """Whether one snapshot holds the whole state.

        False for a window of several slots, and for the units of a partial checkpoint.
        """
        return (
            self.complete
            and self.num_snapshots == 1
            and self.snapshots[0].header.unit is None
        )

    def __str__(self) -> str:
        return (
            f"the window from {self.version} ({len(self.snapshots)} of"
            f" {self.num_snapshots} snapshots)"
        )


class SnapshotPublisher(Protocol):
    """Stores snapshots elsewhere as well, as long as this process has them.

    Every thread may call the methods.
    """

    def add_snapshot(
        self, snapshot: Snapshot, gradients: Gradients | None = None
    ) -> None:
        """Store a snapshot that has been taken.

        Args:
            snapshot: The snapshot.
            gradients: Gradients of the step that led to the snapshot.

        Raises:
            CheckpointSaveError: The snapshot cannot be stored.
        """
        ...

    def drop_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        """Drop snapshots that no window needs.

        The caller reuses the memory of the payloads only after this method returns.
        """
        ...


class SnapshotMemory:
    """Snapshots of this rank, for one thread.

    Added snapshots belong to `SnapshotMemory`. Once no version needs a snapshot,
    `SnapshotMemory` has `publisher` drop the snapshot, and releases the snapshot's
    buffer. The caller may read a returned window only until the next call that changes
    the memory.
    """

    def __init__(
        self,
        buffers: HostBuffers,
        keep_windows: int,
        publisher: SnapshotPublisher | None = None,
        *,
        keeps_oldest: bool = False,
    ) -> None:
        """Begin without snapshots.

        Args:
            buffers: Pool from which the payloads of all snapshots are acquired.
            keep_windows: Number of windows to keep, at least 1.
            publisher: Stores the snapshots elsewhere as well; None: nothing does.
            keeps_oldest: Whether the oldest window also stays, until `drop_superseded`.
        """
        assert keep_windows >= 1, keep_windows
        self._buffers = buffers
        self._publisher = publisher
        self._keep_windows = keep_windows
        self._keeps_oldest = keeps_oldest
        self._in_flight: Window | None = None
        self._kept_versions: list[Version] = []  # newest first
        self._kept_snapshots: list[Snapshot] = []  # of kept versions

    def in_flight(self) -> Window | None:
        """Return the window in flight with its snapshots so far, or None."""
        return self._in_flight

    def windows(self) -> list[Window]:
        """Return the kept windows, newest first.

        Windows of units include the older units that belong to the version.
        """
        found = (
            (version, compose(self._kept_snapshots, version))
            for version in self._kept_versions
        )
        return [
            Window(version=version, num_snapshots=len(snapshots), snapshots=snapshots)
            for version, snapshots in found
            if snapshots
        ]

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots that any version needs, also of the window in flight."""
        return [
            *self._kept_snapshots,
            *(self._in_flight.snapshots if self._in_flight else ()),
        ]

    def oldest_needed_iteration(self) -> int | None:
        """Return the start of the oldest kept window.

        Logs of later iterations are still needed.

        Returns:
            The start; None without windows. Without windows a recovery would begin
            before all snapshots in this memory.
        """
        return min((version.iteration for version in self._kept_versions), default=None)

    @property
    def lacks_units(self) -> bool:
        """Whether units are missing in the newest complete version.

        Units are missing if the first snapshot of the version's epoch has failed.
        """
        in_flight = (
            [self._in_flight.version]
            if self._in_flight and self._in_flight.complete
            else []
        )
        return any(
            not compose(self.snapshots(), version)
            for version in [*in_flight, *self._kept_versions][:1]
        )

    def newest_start(self) -> int | None:
        """Return the start of the newest kept window; None without windows."""
        return max((version.iteration for version in self._kept_versions), default=None)

    def begin(self, version: Version, num_snapshots: int) -> None:
        """Start a window. A window that is still in flight is dropped.

        Args:
            version: Version of the window.
            num_snapshots: Number of snapshots that make the window whole.
        """
        assert num_snapshots >= 1, num_snapshots
        self._hold(
            Window(version=version, num_snapshots=num_snapshots),
            self._kept_versions,
            self._kept_snapshots,
        )

    def add(self, *snapshots: Snapshot) -> None:
        """Add finished snapshots to the window in flight.

        A new snapshot takes the place of a snapshot of the same slot or unit.
        """
        window = self._in_flight
        assert window is not None, "no window is in flight"
        for header in (snapshot.header for snapshot in snapshots):
            assert header.version == window.version, f"{header}: not of {window}"
            assert header.unit or header.num_slots == window.num_snapshots, (
                f"{header}: not of {window}"
            )
            assert 0 <= header.slot < header.num_slots, f"{header}: no such slot"
            assert header.iteration == window.start + header.slot, (
                f"{header}: of another iteration"
            )
        by_name = {each.header.name: each for each in (*window.snapshots, *snapshots)}
        in_order = tuple(sorted(by_name.values(), key=lambda each: each.header.slot))
        self._hold(
            replace(window, snapshots=in_order),
            self._kept_versions,
            self._kept_snapshots,
        )

    def adopt(self, snapshots: Sequence[Snapshot]) -> None:
        """Take over the snapshots of an earlier process.

        All units and all complete windows stay; other snapshots are dropped. The
        buffers of the snapshots count as acquired from the pool.
        """
        assert not self.snapshots(), self.snapshots()
        for snapshot in snapshots:
            self._buffers.adopt(snapshot.payload)
        self._kept_snapshots = list(snapshots)
        units = [snapshot for snapshot in snapshots if snapshot.header.unit]
        cores = [
            each
            for each in without_torn(units, StorageLevel.IN_MEMORY)
            if each.header.name == CORE
        ]
        sparse = group_windows(
            snapshot for snapshot in snapshots if not snapshot.header.unit
        )
        windows = {window.version: window for window in sparse if window.complete}
        versions = [*(core.header.version for core in cores), *windows]
        self._hold(
            None,
            versions,
            [
                *units,
                *(each for window in windows.values() for each in window.snapshots),
            ],
        )

    def clear(self) -> None:
        """Drop all snapshots."""
        self._hold(None, [], [])

    def keep_in_flight(
        self, also: Collection[Version] = (), *, lacks_units: bool = False
    ) -> None:
        """Keep the window in flight, and drop superseded windows.

        The memory keeps the newest `keep_windows` windows, this window included, and
        the versions in `also`. Earlier windows of the same or a later version were
        taken before a rollback, and are dropped.

        Args:
            also: Versions to keep in addition.
            lacks_units: Whether any rank lacks units in this window. In that case the
                newest whole window of an earlier epoch stays too.
        """
        window = self._in_flight
        assert window is not None, "no window is in flight"
        assert window.complete, f"not complete: {window}"
        before = [older for older in self._kept_versions if older < window.version]
        earlier = (
            [older for older in before if older.epoch != window.version.epoch]
            if lacks_units
            else []
        )
        whole = [older for older in earlier if compose(self._kept_snapshots, older)][:1]
        oldest = before[-1:] if self._keeps_oldest else []
        newest = [window.version, *before][: self._keep_windows]
        self._keep([*newest, *whole, *oldest, *also], landed=window.snapshots)

    def abandon(self) -> None:
        """Drop the window in flight, if there is one."""
        self._hold(None, self._kept_versions, self._kept_snapshots)

    def keep_complete(self) -> None:
        """Keep the window in flight beside the kept windows if it is complete.

        Other ranks may have kept a complete window already. An incomplete window
        is dropped.
        """
        window = self._in_flight
        if (
            window is None
            or not window.complete
            or window.version in self._kept_versions
        ):
            self.abandon()
            return
        self._keep([window.version, *self._kept_versions], landed=window.snapshots)

    def keep_only(self, starts: Sequence[int]) -> None:
        """Keep the windows with these starts, and drop all other windows.

        Args:
            starts: Starts of windows, of which the first `keep_windows` count, and the
                oldest if the memory keeps the oldest window.
        """
        wanted = set(starts[: self._keep_windows])
        if self._keeps_oldest:
            wanted.add(min(starts))
        self._keep(
            [version for version in self._kept_versions if version.iteration in wanted]
        )

    def drop_superseded(self) -> None:
        """Keep the newest `keep_windows` windows, and the window in flight."""
        self._keep(self._kept_versions[: self._keep_windows], in_flight=self._in_flight)

    def drop(self, window_start: int) -> None:
        """Drop every window with this start, kept or in flight, as damaged."""
        window = (
            self._in_flight
            if self._in_flight and self._in_flight.start != window_start
            else None
        )
        kept = [
            snapshot
            for snapshot in self._kept_snapshots
            if snapshot.header.window_start != window_start
        ]
        versions = [
            version
            for version in self._kept_versions
            if version.iteration != window_start
        ]
        assert (window, versions) != (self._in_flight, self._kept_versions), (
            f"no window starts at iteration {window_start}"
        )
        self._hold(window, versions, kept)

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of all snapshots by kind.

        Returns:
            `full_bytes` of full state, `compute_bytes` of compute weights of frozen
            operators, and `buffer_bytes` of module buffers.
        """
        totals = dict.fromkeys(BYTES_OF_ROLE.values(), 0)
        for snapshot in self.snapshots():
            for part in snapshot.header.parts:
                totals[BYTES_OF_ROLE[part.key.role]] += part.nbytes
        return totals

    def _keep(
        self,
        versions: Collection[Version],
        landed: Sequence[Snapshot] = (),
        in_flight: Window | None = None,
    ) -> None:
        """Keep these versions.

        Args:
            versions: Versions to keep.
            landed: Snapshots of the window in flight, which replace others of the same
                version.
            in_flight: The window that is in flight from now on.
        """
        replaced = {snapshot.header.version for snapshot in landed}
        among = [
            *(
                snapshot
                for snapshot in self._kept_snapshots
                if snapshot.header.version not in replaced
            ),
            *landed,
        ]
        needed = {
            snapshot for version in versions for snapshot in needed_for(among, version)
        }
        self._hold(
            in_flight, versions, [snapshot for snapshot in among if snapshot in needed]
        )

    def _hold(
        self,
        in_flight: Window | None,
        versions: Iterable[Version],
        kept: list[Snapshot],
    ) -> None:
        """Keep exactly these snapshots, and release the buffers of all others."""
        before = self.snapshots()
        self._in_flight, self._kept_versions, self._kept_snapshots = (
            in_flight,
            sorted(set(versions), reverse=True),
            kept,
        )
        stay = {snapshot.payload for snapshot in self.snapshots()}
        dropped = [snapshot for snapshot in before if snapshot.payload not in stay]
        # dropped before the release: no peer may read a payload whose memory is filled
        # anew
        if self._publisher and dropped:
            self._publisher.drop_snapshots(dropped)
        for snapshot in dropped:
            self._buffers.release(snapshot.payload)


def group_windows(snapshots: Iterable[Snapshot]) -> list[Window]:
    """Return sparse windows that together hold all these snapshots.

    A window holds each slot at most once.
    """
    groups: dict[tuple[Version, int, int], dict[int, Snapshot]] = {}
    for snapshot in snapshots:
        header, copy = snapshot.header, 0
        # a folder may hold a slot twice: from before and from after a rollback
        while header.slot in groups.setdefault(
            (header.version, header.num_slots, copy), {}
        ):
            copy += 1
        groups[header.version, header.num_slots, copy][header.slot] = snapshot
    return [
        Window(
            version=version,
            num_snapshots=num_slots,
            snapshots=tuple(slots[k] for k in sorted(slots)),
        )
        for (version, num_slots, _), slots in groups.items()
    ]


def _total(buffers: Iterable[torch.Tensor]) -> int:
    return sum(buffer.numel() for buffer in buffers)
