"""The snapshots of one rank in host memory: the persisted windows, and the one being
taken.

Owns: the buffers of payloads, the windows, and the time at which a buffer is free
again. Must not: look into payloads, copy, or communicate. MoEvement, section 3.2,
"Persisting Snapshots"; MoC, section 5.1. A window is one version of the state: W slots
of operators, or in one slot the units of a partial checkpoint (`snapshot.units`).

    begin    add slot 0 .. slot W-1    confirm                    the next window
    in flight ---------- complete ---> persisted (older released) ---- begin, add, ... confirm ---> released
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
        """Return new memory: uint8, [nbytes], contiguous, of arbitrary contents.

        It belongs to the caller until it is freed.

        Raises CheckpointSaveError if there is no such memory.
        """
        ...

    def free(self, tensor: torch.Tensor) -> None:
        """Free memory: the same object that was allocated. Neither it nor a view of it
        may be used afterwards.
        """
        ...


class PrivateMemory:
    """Memory that ends with the process. `pinned` requests page-locked memory if there
    is a GPU to copy from.
    """

    def __init__(self, *, pinned: bool) -> None:
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
        """Nothing to do: the memory ends with its last tensor."""


class HostBuffers:
    """A pool of uint8 buffers in host memory, for any thread.

    Free and used buffers together never exceed the most bytes that were in use at one
    time. So a run with recurring sizes finds a buffer of every size and allocates
    nothing after its first windows, and a run whose sizes drift frees the buffers that
    were unused for longest.
    """

    def __init__(self, memory: HostMemory, limit_bytes: int | None = None) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._lock = Lock()
        self._in_use: dict[int, torch.Tensor] = {}  # by id
        # kept, as each logged tensor asks, and a log has thousands of buffers
        self._in_use_bytes = 0
        self._free: list[torch.Tensor] = []  # the one released first comes first
        self._peak_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        with self._lock:
            return self._in_use_bytes

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return self._in_use_bytes + _total(self._free)

    def acquire(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes` bytes of arbitrary contents.

        It belongs to the caller until it is released.

        Raises CheckpointSaveError if that would exceed `limit_bytes`, or the machine
        has no such memory.
        """
        with self._lock:
            buffer = self._take_free(nbytes)
            buffer = self._allocate(nbytes) if buffer is None else buffer
            self._use(buffer)
            return buffer

    def adopt(self, buffer: torch.Tensor) -> None:
        """Count a buffer that the memory has handed out already as acquired, regardless
        of the limit.
        """
        with self._lock:
            assert id(buffer) not in self._in_use, "adopted a buffer in use"
            self._use(buffer)

    def release(self, buffer: torch.Tensor) -> None:
        """Release a buffer: the same object that was acquired. Neither it nor a view of
        it may be read afterwards.
        """
        with self._lock:
            assert id(buffer) in self._in_use, (
                "released a tensor that is not a buffer in use"
            )
            self._free.append(self._in_use.pop(id(buffer)))
            self._in_use_bytes -= buffer.numel()

    def free_unused(self) -> None:
        """Free the memory of all buffers that are not in use."""
        with self._lock:
            while self._free:
                self._memory.free(self._free.pop())

    def _use(self, buffer: torch.Tensor) -> None:
        self._in_use[id(buffer)] = buffer
        self._in_use_bytes += buffer.numel()
        self._peak_bytes = max(self._peak_bytes, self._in_use_bytes)

    def _take_free(self, nbytes: int) -> torch.Tensor | None:
        """Return the smallest free buffer that is large enough, unless the snapshot
        would waste too much of it.

        Under a limit no byte is wasted: forecasts count exact sizes.
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
            # the one that has been free for longest
            self._memory.free(self._free.pop(0))
        return self._memory.allocate(nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The snapshots of one version that this rank has, of the `num_snapshots` that make
    it whole, ordered by slot.

    Slot k of a sparse window is the state after iteration `start` + k.
    """

    version: Version
    num_snapshots: int
    snapshots: tuple[Snapshot, ...] = ()

    @property
    def start(self) -> int:
        return self.version.iteration

    @property
    def complete(self) -> bool:
        return len(self.snapshots) == self.num_snapshots

    @property
    def is_whole_state(self) -> bool:
        """Whether one snapshot holds the whole state: no slots, and no units of a
        partial checkpoint.
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
    """Stores snapshots elsewhere as well, for as long as this process has them; for any
    thread.
    """

    def add_snapshot(
        self, snapshot: Snapshot, gradients: Gradients | None = None
    ) -> None:
        """A snapshot has been taken; `gradients` are those of the step that led to it.

        Raises CheckpointSaveError if it cannot be stored.
        """
        ...

    def drop_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        """Drop snapshots that no window needs, before the memory of their payloads is
        reused.
        """
        ...


class SnapshotMemory:
    """The snapshots of this rank, for one thread; payloads are buffers acquired from
    `buffers`.

    An added snapshot belongs to the memory. Once no version needs it, the memory tells
    `daemon` to drop it and releases its buffer. Windows that a method returned may be
    read only until the next call that changes the memory.
    """

    def __init__(
        self,
        buffers: HostBuffers,
        keep_windows: int,
        daemon: SnapshotPublisher | None = None,
    ) -> None:
        assert keep_windows >= 1, keep_windows
        self._buffers = buffers
        self._daemon = daemon
        self._keep_windows = keep_windows
        self._in_flight: Window | None = None
        self._persisted: list[Version] = []  # newest first
        self._kept: list[Snapshot] = []  # of persisted versions

    def in_flight(self) -> Window | None:
        """Return the window in flight, with its snapshots so far."""
        return self._in_flight

    def windows(self) -> list[Window]:
        """Return the persisted windows, newest first; those of units have older units,
        too.
        """
        found = ((version, compose(self._kept, version)) for version in self._persisted)
        return [
            Window(version=version, num_snapshots=len(snapshots), snapshots=snapshots)
            for version, snapshots in found
            if snapshots
        ]

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots, needed in any version."""
        return [*self._kept, *(self._in_flight.snapshots if self._in_flight else ())]

    def oldest_needed_iteration(self) -> int | None:
        """Return the start of the oldest persisted window: logs of later iterations are
        still needed.

        None without windows: a recovery would then begin before all snapshots in this
        memory.
        """
        return min((version.iteration for version in self._persisted), default=None)

    @property
    def lacks_units(self) -> bool:
        """Whether units are missing in the newest complete version: the first snapshot
        of its epoch has failed.
        """
        in_flight = (
            [self._in_flight.version]
            if self._in_flight and self._in_flight.complete
            else []
        )
        return any(
            not compose(self.snapshots(), version)
            for version in [*in_flight, *self._persisted][:1]
        )

    def newest_start(self) -> int | None:
        """Return the start of the newest persisted window; None without windows."""
        return max((version.iteration for version in self._persisted), default=None)

    def begin(self, version: Version, num_snapshots: int) -> None:
        """Start a window; one that is still in flight is dropped."""
        assert num_snapshots >= 1, num_snapshots
        self._hold(
            Window(version=version, num_snapshots=num_snapshots),
            self._persisted,
            self._kept,
        )

    def add(self, *snapshots: Snapshot) -> None:
        """Add finished snapshots to the window in flight, in place of those of the same
        slots or units.
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
        self._hold(replace(window, snapshots=in_order), self._persisted, self._kept)

    def adopt(self, snapshots: Sequence[Snapshot]) -> None:
        """Take over the snapshots of an earlier process: all units, and complete
        windows; others are dropped.

        Their buffers count as acquired from the pool.
        """
        assert not self.snapshots(), self.snapshots()
        for snapshot in snapshots:
            self._buffers.adopt(snapshot.payload)
        self._kept = list(snapshots)
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

    def confirm(
        self, also: Collection[Version] = (), *, lacks_units: bool = False
    ) -> None:
        """The window in flight is persisted: keep it and the newest before it,
        `keep_windows` in all, and `also`.

        Windows with the same or a later start were taken before a rollback, and are
        dropped. As long as any rank `lacks_units` in the new one, the newest whole one
        of an earlier epoch stays, too.
        """
        window = self._in_flight
        assert window is not None, "no window is in flight"
        assert window.complete, f"not complete: {window}"
        before = [older for older in self._persisted if older < window.version]
        earlier = (
            [older for older in before if older.epoch != window.version.epoch]
            if lacks_units
            else []
        )
        whole = [older for older in earlier if compose(self._kept, older)][:1]
        self._keep(
            [*[window.version, *before][: self._keep_windows], *whole, *also],
            landed=window.snapshots,
        )

    def abandon(self) -> None:
        """Drop the window in flight, if there is one."""
        self._hold(None, self._persisted, self._kept)

    def keep_complete(self) -> None:
        """Keep the window in flight beside the others if it is complete: other ranks
        may have confirmed it already.
        """
        window = self._in_flight
        if window is None or not window.complete or window.version in self._persisted:
            self.abandon()
            return
        self._keep([window.version, *self._persisted], landed=window.snapshots)

    def keep_only(self, starts: Sequence[int]) -> None:
        """Keep the first `keep_windows` of the persisted windows with these starts;
        drop all others.
        """
        wanted = starts[: self._keep_windows]
        self._keep(
            [version for version in self._persisted if version.iteration in wanted]
        )

    def drop(self, window_start: int) -> None:
        """Drop every window, persisted or in flight, with this start: it is damaged."""
        window = (
            self._in_flight
            if self._in_flight and self._in_flight.start != window_start
            else None
        )
        kept = [
            snapshot
            for snapshot in self._kept
            if snapshot.header.window_start != window_start
        ]
        versions = [
            version for version in self._persisted if version.iteration != window_start
        ]
        assert (window, versions) != (self._in_flight, self._persisted), (
            f"no window starts at iteration {window_start}"
        )
        self._hold(window, versions, kept)

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of full state, of compute weights of frozen operators, and
        of module buffers.
        """
        totals = dict.fromkeys(BYTES_OF_ROLE.values(), 0)
        for snapshot in self.snapshots():
            for part in snapshot.header.parts:
                totals[BYTES_OF_ROLE[part.key.role]] += part.nbytes
        return totals

    def _keep(
        self, versions: Collection[Version], landed: Sequence[Snapshot] = ()
    ) -> None:
        """Keep these versions. `landed`: the snapshots of the window in flight, in
        place of others of its version.
        """
        replaced = {snapshot.header.version for snapshot in landed}
        among = [
            *(
                snapshot
                for snapshot in self._kept
                if snapshot.header.version not in replaced
            ),
            *landed,
        ]
        needed = {
            id(snapshot)
            for version in versions
            for snapshot in needed_for(among, version)
        }
        self._hold(
            None, versions, [snapshot for snapshot in among if id(snapshot) in needed]
        )

    def _hold(
        self,
        in_flight: Window | None,
        versions: Iterable[Version],
        kept: list[Snapshot],
    ) -> None:
        """Keep exactly these snapshots, and release the buffers of all others."""
        before = self.snapshots()
        self._in_flight, self._persisted, self._kept = (
            in_flight,
            sorted(set(versions), reverse=True),
            kept,
        )
        stay = {id(snapshot.payload) for snapshot in self.snapshots()}
        dropped = [snapshot for snapshot in before if id(snapshot.payload) not in stay]
        # first: no peer may read a payload whose memory is filled anew
        if self._daemon and dropped:
            self._daemon.drop_snapshots(dropped)
        for snapshot in dropped:
            self._buffers.release(snapshot.payload)


def group_windows(snapshots: Iterable[Snapshot]) -> list[Window]:
    """Return sparse windows that together hold all these snapshots, each slot at most
    once in a window.
    """
    groups: dict[tuple[Version, int, int], dict[int, Snapshot]] = {}
    for snapshot in snapshots:
        header, copy = snapshot.header, 0
        # a folder may hold a slot twice, of before and after a rollback
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
