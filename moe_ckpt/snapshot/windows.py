"""The sparse snapshots of one rank in host memory: the persisted windows, and the one being taken.

Owns: the buffers of payloads, the windows, and the time at which a buffer is free again. Must not: look into payloads,
copy, or communicate. MoEvement, section 3.2, "Persisting Snapshots".

    begin    add slot 0 .. slot W-1    confirm                    the next window
    in flight ---------- complete ---> persisted (older released) ---- begin, add, ... confirm ---> released
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from threading import Lock
from typing import Protocol

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.snapshot.adam_update import Gradients
from moe_ckpt.snapshot.codec import ROLES, Snapshot, scaled_role

_BYTES = {"master": "full_bytes", "exp_avg": "full_bytes", "exp_avg_sq": "full_bytes", "compute": "compute_bytes"}
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
        """Free memory: the same object that was allocated. Neither it nor a view of it may be used afterwards."""
        ...


class PrivateMemory:
    """Memory that ends with the process. `pinned` requests page-locked memory if there is a GPU to copy from."""

    def __init__(self, *, pinned: bool) -> None:
        self._pin_memory = pinned and torch.cuda.is_available()

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pin_memory)
        except RuntimeError as error:
            raise CheckpointSaveError(f"no host memory for a snapshot of {nbytes} bytes: {error}") from error

    def free(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the memory ends with its last tensor."""


class HostBuffers:
    """A pool of uint8 buffers in host memory, for any thread.

    Free and used buffers together never exceed the most bytes that were in use at one time. So a run with recurring
    sizes finds a buffer of every size and allocates nothing after its first windows, and a run whose sizes drift frees
    the buffers that were unused for longest.
    """

    def __init__(self, memory: HostMemory, limit_bytes: int | None = None) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._lock = Lock()
        self._in_use: dict[int, torch.Tensor] = {}  # by id
        self._free: list[torch.Tensor] = []  # the one released first comes first
        self._peak_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        with self._lock:
            return _total(self._in_use.values())

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return self._total_bytes()

    def acquire(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes` bytes of arbitrary contents.

        It belongs to the caller until it is released.

        Raises CheckpointSaveError if that would exceed `limit_bytes`, or the machine has no such memory.
        """
        with self._lock:
            buffer = self._take_free(nbytes)
            if buffer is None:
                buffer = self._allocate(nbytes)
            self._use(buffer)
            return buffer

    def adopt(self, buffer: torch.Tensor) -> None:
        """Count a buffer that the memory has handed out already as acquired, regardless of the limit."""
        with self._lock:
            assert id(buffer) not in self._in_use, "adopted a buffer in use"
            self._use(buffer)

    def release(self, buffer: torch.Tensor) -> None:
        """Release a buffer: the same object that was acquired. Neither it nor a view of it may be read afterwards."""
        with self._lock:
            assert id(buffer) in self._in_use, "released a tensor that is not a buffer in use"
            self._free.append(self._in_use.pop(id(buffer)))

    def _use(self, buffer: torch.Tensor) -> None:
        self._in_use[id(buffer)] = buffer
        self._peak_bytes = max(self._peak_bytes, _total(self._in_use.values()))

    def _take_free(self, nbytes: int) -> torch.Tensor | None:
        """Return the smallest free buffer that is large enough, unless the snapshot would waste too much of it.

        Under a limit no byte is wasted: forecasts count exact sizes.
        """
        most_bytes = 1.25 * nbytes + 4096 if self._limit_bytes is None else nbytes
        fitting = [buffer for buffer in self._free if nbytes <= buffer.numel() <= most_bytes]
        if not fitting:
            return None
        best = min(fitting, key=torch.Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best

    def _allocate(self, nbytes: int) -> torch.Tensor:
        used_bytes = _total(self._in_use.values())
        if self._limit_bytes is not None and used_bytes + nbytes > self._limit_bytes:
            raise CheckpointSaveError(
                f"host memory for snapshots: got {used_bytes} bytes in use and {nbytes} more to hold, "
                f"wanted at most ckpt.memory_budget_bytes={self._limit_bytes}"
            )
        self._drop_free(self._peak_bytes - nbytes)
        return self._memory.allocate(nbytes)

    def _drop_free(self, allowed_bytes: int) -> None:
        """Drop free buffers, the longest free first, until the pool has the allowed size or all of it is in use."""
        while self._free and self._total_bytes() > allowed_bytes:
            self._memory.free(self._free.pop(0))

    def _total_bytes(self) -> int:
        return _total(self._in_use.values()) + _total(self._free)


class WindowState(Enum):
    """The progress of a window."""

    IN_FLIGHT = "in flight"
    PERSISTED = "persisted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The snapshots of one window, ordered by slot; slot k is the state after iteration `start` + k."""

    start: int
    num_slots: int
    state: WindowState
    snapshots: tuple[Snapshot, ...] = ()

    @property
    def complete(self) -> bool:
        return len(self.snapshots) == self.num_slots

    def __str__(self) -> str:
        return f"the window from {self.start} ({len(self.snapshots)} of {self.num_slots} slots, {self.state.value})"


class SnapshotPublisher(Protocol):
    """Stores snapshots elsewhere as well, for as long as this process has them; for any thread."""

    def add_snapshot(self, snapshot: Snapshot, gradients: Gradients | None = None) -> None:
        """A snapshot has been taken; `gradients` are those of the step that led to it.

        Raises CheckpointSaveError if it cannot be stored.
        """
        ...

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """The snapshot is not needed any more, and its memory is about to be reused."""
        ...


class SnapshotMemory:
    """The snapshots of this rank, for one thread; payloads are buffers acquired from `buffers`.

    An added snapshot belongs to the memory. With its window, the memory tells `daemon` to drop it and releases its
    buffer. Windows that a method returned may be read only until the next call that changes the memory.
    """

    def __init__(self, buffers: HostBuffers, keep_windows: int, daemon: SnapshotPublisher | None = None) -> None:
        assert keep_windows >= 1, keep_windows
        self._buffers = buffers
        self._daemon = daemon
        self._keep_windows = keep_windows
        self._windows: list[Window] = []  # newest first; only the first may be in flight

    @property
    def complete(self) -> bool:
        """Whether a window is in flight and has the snapshots of all its slots."""
        window = self.in_flight()
        return window is not None and window.complete

    def in_flight(self) -> Window | None:
        """Return the window in flight, with its snapshots so far."""
        return next((window for window in self._windows if window.state is WindowState.IN_FLIGHT), None)

    def windows(self) -> list[Window]:
        """Return the persisted windows, newest first."""
        return [window for window in self._windows if window.state is WindowState.PERSISTED]

    def oldest_needed_iteration(self) -> int | None:
        """Return the start of the oldest persisted window: logs of later iterations are still needed.

        None without windows: a recovery would then begin before all snapshots in this memory.
        """
        return min((window.start for window in self.windows()), default=None)

    def begin(self, window_start: int, num_slots: int) -> None:
        """Start a window; one that is still in flight is dropped."""
        assert num_slots >= 1, num_slots
        window = Window(start=window_start, num_slots=num_slots, state=WindowState.IN_FLIGHT)
        self._hold([window, *self.windows()])

    def add(self, snapshot: Snapshot) -> None:
        """Add a finished snapshot to the window in flight, in place of one of the same slot."""
        window, header = self.in_flight(), snapshot.header
        assert window is not None, f"{header}: no window is in flight"
        assert (header.window_start, header.num_slots) == (window.start, window.num_slots), f"{header}: not of {window}"
        assert 0 <= header.slot < window.num_slots, f"{header}: no such slot"
        assert header.iteration == window.start + header.slot, f"{header}: of another iteration"
        others = [other for other in window.snapshots if other.header.slot != header.slot]
        snapshots = tuple(sorted([*others, snapshot], key=lambda snapshot: snapshot.header.slot))
        self._hold([replace(window, snapshots=snapshots), *self.windows()])

    def adopt(self, snapshots: Sequence[Snapshot]) -> None:
        """Take over the complete windows of an earlier process; all other snapshots are dropped.

        Their buffers count as acquired from the pool.
        """
        assert not self._windows, self._windows
        for snapshot in snapshots:
            self._buffers.adopt(snapshot.payload)
        self._windows = group_windows(snapshots)
        complete = {window.start: window for window in self._windows if window.complete}
        self._hold([complete[start] for start in sorted(complete, reverse=True)])

    def clear(self) -> None:
        """Drop all snapshots."""
        self._hold([])

    def confirm(self) -> None:
        """The window in flight is persisted: keep it and the newest before it, `keep_windows` in all.

        Windows with the same or a later start were taken before a rollback, and are dropped.
        """
        window = self.in_flight()
        assert window is not None, "no window is in flight"
        assert window.complete, f"not complete: {window}"
        before = [older for older in self.windows() if older.start < window.start]
        persisted = replace(window, state=WindowState.PERSISTED)
        self._hold([persisted, *before][: self._keep_windows])

    def abandon(self) -> None:
        """Drop the window in flight, if there is one."""
        self._hold(self.windows())

    def keep_complete(self) -> None:
        """Keep the window in flight beside the others if it is complete: other ranks may have confirmed it already."""
        window, others = self.in_flight(), self.windows()
        if window is None or not window.complete or any(other.start == window.start for other in others):
            self.abandon()
            return
        windows = [replace(window, state=WindowState.PERSISTED), *others]
        self._hold(sorted(windows, key=lambda window: window.start, reverse=True))

    def keep_only(self, starts: Sequence[int]) -> None:
        """Keep the first `keep_windows` of the persisted windows with these starts; drop all others."""
        self._hold([window for window in self.windows() if window.start in starts[: self._keep_windows]])

    def drop(self, window_start: int) -> None:
        """Drop every window, persisted or in flight, with this start: it is damaged."""
        kept = [window for window in self._windows if window.start != window_start]
        assert len(kept) < len(self._windows), f"no window starts at iteration {window_start}"
        self._hold(kept)

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of full state, of compute weights of frozen operators, and of module buffers."""
        totals = dict.fromkeys(BYTES_OF_ROLE.values(), 0)
        for snapshot in _snapshots(self._windows):
            for part in snapshot.header.parts:
                totals[BYTES_OF_ROLE[part.key.role]] += part.nbytes
        return totals

    def _hold(self, windows: list[Window]) -> None:
        """Keep exactly these windows, and release the buffers of all snapshots that are in none of them."""
        kept = {id(snapshot.payload) for snapshot in _snapshots(windows)}
        gone = [snapshot for snapshot in _snapshots(self._windows) if id(snapshot.payload) not in kept]
        self._windows = windows
        for snapshot in gone:
            if self._daemon:
                self._daemon.drop_snapshot(snapshot)
            self._buffers.release(snapshot.payload)


def group_windows(snapshots: Iterable[Snapshot]) -> list[Window]:
    """Return windows that together hold all these snapshots, each slot at most once in a window."""
    groups: dict[tuple[int, int, int], dict[int, Snapshot]] = {}
    for snapshot in snapshots:
        header, copy = snapshot.header, 0
        while header.slot in groups.setdefault((header.window_start, header.num_slots, copy), {}):
            copy += 1
        groups[header.window_start, header.num_slots, copy][header.slot] = snapshot
    return [
        Window(
            start=start, num_slots=num, state=WindowState.PERSISTED, snapshots=tuple(slots[k] for k in sorted(slots))
        )
        for (start, num, _), slots in groups.items()
    ]


def _total(buffers: Iterable[torch.Tensor]) -> int:
    return sum(buffer.numel() for buffer in buffers)


def _snapshots(windows: Iterable[Window]) -> list[Snapshot]:
    return [snapshot for window in windows for snapshot in window.snapshots]
