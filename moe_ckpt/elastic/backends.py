"""The interface of backends for inner process groups, and the backend gloo.

A backend forms the inner groups of a generation, and ends all operations of the
generation at once. gloo's operations end when the backend shuts their sockets down.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist

from moe_ckpt.elastic.generation_sockets import LoopSockets
from moe_ckpt.elastic.rendezvous_store import PollingStore, meet

_log = logging.getLogger(__name__)

MOST_CONNECTED = 16
"""The largest gloo group whose ranks all connect while the group forms. Pipelines have
fewer ranks, so their transfers never wait for a connection.
"""

_HOST = torch.device("cpu")
_UNHELD = contextlib.nullcontext()


class Mark(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return, without waiting, whether the device has reached this point."""
        ...


class Backend(Protocol):
    """Forms the inner groups of one generation after another.

        keeps_idle, connects_late              fixed properties, asked at any time
        begin -> make, make, ... -> formed     the groups of a generation
        launching, wait, sync, mark            its operations, by any thread
        discard                                inside `launching`, after a failed call
        failure                                asked while operations are under way
        cut -> is_quiet                        the end of the generation; then begin

    `cut` may come at any time after `begin`, from any thread.
    """

    device: torch.device
    """Device of the tensors that the inner groups take."""

    sends_gloo_frames: bool
    """Whether operations cross the network as gloo's frames over TCP, which
    `flowcheck.mirror` parses.
    """

    completes_when_cut: bool
    """Whether an operation under way completes, with wrong data, once any rank of its
    group calls `cut`: on that rank and on all others.

    If False, an operation may continue to wait after `cut`, and must be abandoned.
    """

    closing_s: float | None
    """Seconds to wait for quiet after `cut`. The process then continues without quiet.
    None: the process must never continue without quiet.
    """

    def begin(self, kept: Collection[dist.ProcessGroup] = ()) -> None:
        """Start to form a generation.

        Connections that are opened from now on belong to the new generation.

        Args:
            kept: Inner groups of the last generation that may continue in the new one,
                with their connections.
        """
        ...

    def keeps_idle(self, size: int) -> bool:
        """Return whether an idle group of `size` ranks may outlive its generation."""
        ...

    def connects_late(self, size: int) -> bool:
        """Return whether transfers in a group of `size` ranks connect on first use.

        Such a transfer may block, as it begins, until its peer connects.
        """
        ...

    def mark(self) -> Mark | None:
        """Mark the point behind the operations that the calling thread has begun.

        Returns:
            The point; None if the operations are complete.
        """
        ...

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> dist.ProcessGroup:
        """Form an inner group. Collective over the members of the group.

        If a member is lost meanwhile, the call may block until `cut`.

        Args:
            store: The part of the job's store in which the members meet.
            rank: This process's position in the group.
            size: The number of members.
            form_s: The time limit for forming the group, in seconds.
            operation_s: The time limit of each operation of the group, in seconds.

        Returns:
            The inner group. `ElasticGroup` calls its methods of `OPERATIONS`, each of
            which returns a Work, or None if the operation is in the order of the
            current stream; `_get_sequence_number_for_group`; and
            `_get_backend(device).supports_coalescing`, with which the group also has
            `_start_coalescing` and `_end_coalescing`.

        Raises:
            RuntimeError: The members did not meet in time, or `cut` ended the call.
        """
        ...

    def formed(self) -> None:
        """End the forming of this generation's groups, successful or not.

        No further connection is opened for the generation, except in groups that
        connect late.
        """
        ...

    def launching(
        self, inside: dist.ProcessGroup
    ) -> contextlib.AbstractContextManager[object]:
        """Return a context that delays the release of an inner group by `cut`.

        While a thread is inside, `cut` does not free the group. A thread enters when it
        begins an operation of the group, and may enter again while it is inside.

        Args:
            inside: The inner group.
        """
        ...

    def discard(self, num_open: int = 0) -> None:
        """Drop operations that the calling thread has collected and not begun.

        Called after a call of an inner group has failed, and before a batch is given
        up: otherwise the library would collect later operations, too, and begin none.

        Args:
            num_open: The number of batches to open again, empty: the caller ends each
                by the inner group's `_end_coalescing`.
        """
        ...

    def wait(self, work: Any) -> None:
        """Wait for an operation.

        On a device, only the calling thread's current stream waits.
        """
        ...

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Wait until awaited operations are complete on the device as well.

        Args:
            is_over: Ends the wait early by returning True.
            timeout_s: The time limit, in seconds.

        Raises:
            PeersLostError: The operations took longer than `timeout_s`, or one has
                failed.
        """
        ...

    def failure(self) -> str | None:
        """Return why an operation of the generation has failed; None if none has.

        Any thread may call this method.
        """
        ...

    def cut(self, limit_s: float, spared: Collection[dist.ProcessGroup] = ()) -> None:
        """End all operations of the generation.

        Any thread may call this method, also repeatedly.

        Args:
            limit_s: Seconds that a thread may take to begin an operation of a group
                that is cut. A slower thread ends the process.
            spared: Groups that have no operation, and stay as they are.
        """
        ...

    def is_quiet(self) -> bool:
        """Return whether no further byte can arrive in a tensor of an operation.

        Call after `cut`.
        """
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _GlooGroup:
    """A gloo group, recorded before its first socket is opened."""

    sockets: LoopSockets = field(default_factory=LoopSockets)
    """Sockets that the group's event loops watch."""

    group: Callable[[], Any] = lambda: None
    """Returns the group while the group is in use; None before the group is made."""

    def is_one_of(self, groups: Collection[Any]) -> bool:
        """Return whether this group is one of `groups`."""
        own = self.group()
        return any(own is group for group in groups)


class GlooBackend:
    """gloo over TCP.

    gloo has no abort. `cut` shuts gloo's sockets down, and operations fail within
    milliseconds.

    In groups of up to `most_connected` ranks, all ranks connect while the group forms,
    as gloo does by default. In larger groups, two ranks connect when an operation first
    needs both. Otherwise each rank would read the addresses of all others from the one
    store. For 1,024 ranks that takes longer than `runtime.form_s`.
    """

    def __init__(
        self,
        device: torch.device = _HOST,
        wrap: Callable[[dist.ProcessGroup], dist.ProcessGroup] = lambda group: group,
        *,
        most_connected: int = MOST_CONNECTED,
    ) -> None:
        """Open the backend.

        Args:
            device: Device of the tensors.
            wrap: Returns the inner group for a gloo group. For a `device` other than
                the host, the inner group must copy tensors through host memory.
            most_connected: The largest group whose ranks all connect while it forms.
        """
        self.device = device
        self._most_connected = most_connected
        self.wrap = wrap
        self.sends_gloo_frames = True
        self.completes_when_cut = False
        self.closing_s: float | None = 0.5
        self._made: list[_GlooGroup] = []

    def begin(self, kept: Collection[Any] = ()) -> None:
        # the event loops of other groups end with these groups
        self._made = [made for made in self._made if made.is_one_of(kept)]

    def keeps_idle(self, size: int) -> bool:
        # operations of a group that connects late read addresses in the store of the
        # group's generation
        return not self.connects_late(size)

    def connects_late(self, size: int) -> bool:
        return size > self._most_connected

    def mark(self) -> Mark | None:
        # an awaited operation is complete, except for copies of results, which are in
        # the order of the stream
        return None

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> dist.ProcessGroup:
        options: Any = cast("Any", dist.ProcessGroupGloo)._Options()
        options._timeout = timedelta(seconds=form_s)
        # each group has its own device: if groups share a device that connects late,
        # gloo takes connected pairs of one group for pairs of another
        is_late = self.connects_late(size)
        made = _GlooGroup()
        self._made.append(made)
        options._devices = made.sockets.add(
            functools.partial(_open_devices, lazy_init=is_late)
        )
        asked = store.direct if is_late and isinstance(store, PollingStore) else store
        backend = dist.ProcessGroupGloo(asked, rank, size, options)
        if is_late:
            # from here on the store has the addresses of all ranks, so an operation
            # that reads an address does not wait
            meet(store, size)
        backend._set_default_timeout(timedelta(seconds=operation_s))
        group = self.wrap(
            group_of(backend, store, _HOST, dist.ProcessGroup.BackendType.GLOO)
        )
        made.group = weakref.ref(group)
        return group

    def formed(self) -> None:
        # nothing to record: a cut finds connections, later ones included, in the event
        # loops that watch them
        pass

    def launching(self, inside: Any) -> contextlib.AbstractContextManager[object]:  # noqa: ARG002
        return _UNHELD  # no lock: a cut of gloo frees no group

    def discard(self, num_open: int = 0) -> None:
        pass  # gloo begins operations at once and holds none back

    def wait(self, work: Any) -> None:
        work.wait()

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        pass  # as in `mark`: an awaited operation is complete

    def failure(self) -> str | None:
        return None  # the wait for the operation raises its failure

    def cut(self, limit_s: float, spared: Collection[Any] = ()) -> None:  # noqa: ARG002
        # no limit is needed: shut-down sockets end waits at once
        for made in tuple(self._made):
            if not made.is_one_of(spared):
                made.sockets.shut_down()

    def is_quiet(self) -> bool:
        # after the shutdown, gloo's thread still reads bytes that arrived earlier into
        # tensors
        return not any(made.sockets.have_unread_bytes() for made in self._made)


def _open_devices(*, lazy_init: bool) -> list[Any]:
    """Create gloo's devices as torch does, for the interfaces in GLOO_SOCKET_IFNAME."""
    create = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [create.create_default_device(lazy_init=lazy_init)]
    return [
        create.create_device(interface=name, lazy_init=lazy_init)
        for name in interfaces.split(",")
    ]


def register_groups(
    name: str, create: Callable[[Any, Any], Any], device_types: Sequence[str]
) -> None:
    """Register a class of process groups with `torch.distributed` as a backend.

    Groups of the class have no backend of torch registered inside. The call also turns
    torch's flight recorder off, in this process and in processes that it starts.

    Args:
        name: The name of the backend for `torch.distributed`.
        create: Returns a group; receives torch's options and the caller's options.
        device_types: Device types of the tensors that the groups take.
    """
    # torch 2.15 attaches the recorder to each such group, under a name that only a
    # group with a registered backend has. A recorder would also keep operations of past
    # generations, and with them the sockets of their groups
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.Backend.register_backend(
        name, create, extended_api=True, devices=list(device_types)
    )


def die(reason: str) -> NoReturn:
    """End this process by SIGKILL, so that the supervisor replaces it.

    An error would end the job instead.

    Args:
        reason: The reason for the log.
    """
    _log.error("worker ends: %s", reason)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def group_of(
    backend: Any, store: dist.Store, device: torch.device, kind: Any
) -> dist.ProcessGroup:
    """Wrap a backend in the process group that `torch.distributed` expects.

    Args:
        backend: The backend, which carries out the operations.
        store: The store in which the members have met.
        device: A device of the type whose tensors the backend takes.
        kind: The `dist.ProcessGroup.BackendType` of the backend.
    """
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group
