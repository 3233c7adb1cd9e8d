"""The backend inside a process group, and how it ends all operations at once; gloo's,
which shuts its sockets down.
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
"""The most ranks of a group of gloo that all connect as the group forms. Pipelines have
fewer, so their transfers never wait for a connection.
"""

_HOST = torch.device("cpu")
_UNHELD = contextlib.nullcontext()


class Mark(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return, without waiting, whether the device has reached it."""
        ...


class Backend(Protocol):
    """Forms the inner groups of one generation after another."""

    device: torch.device
    completes_when_cut: bool
    """Whether `cut` completes operations, with wrong data, here and on ranks that have
    not cut theirs yet.

    Else an operation may continue to wait after `cut`, so that it must be abandoned.
    """
    closing_s: float | None
    """Seconds to wait for quiet after `cut`, then continue without it; None: never
    continue without it.
    """

    def begin(self, kept: Collection[Any] = ()) -> None:
        """A generation is about to be formed: connections opened from now on belong to
        it, and those of `kept`.
        """
        ...

    def keeps_idle(self, size: int) -> bool:
        """Return whether an idle group of this size may outlive its generation."""
        ...

    def connects_late(self, size: int) -> bool:
        """Return whether a transfer in a group of this size may wait, as it begins,
        until its peer connects.
        """
        ...

    def mark(self) -> Mark | None:
        """Return the point behind the operations that this thread has begun; None if
        they are complete.
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
    ) -> Any:
        """Return the inner group. Collective over its members, for which it waits up to
        `form_s` seconds.

        A member that is lost then may block it until `cut`.
        """
        ...

    def formed(self) -> None:
        """All groups of this generation exist: no further connection is opened for it."""
        ...

    def launching(self, inside: Any) -> contextlib.AbstractContextManager[object]:
        """Return a context in which no cut frees an inner group.

        Threads enter it, one in another, whenever they begin an operation of the group.
        """
        ...

    def discard(self, num_open: int = 0) -> None:
        """Drop the operations that the calling thread has given to a group and that
        have not begun.

        `num_open` batches stay open, for the group to end.
        """
        ...

    def wait(self, work: Any) -> None:
        """Wait for an operation; on a device, let the calling thread's stream wait for
        it.
        """
        ...

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Wait until awaited operations are complete on the device, too, or `is_over`
        returns True.

        Raises PeersLostError after `timeout_s` seconds, or where an operation has
        failed.
        """
        ...

    def failure(self) -> str | None:
        """Return the failure of an operation of the generation, from any thread; None
        if none has failed.
        """
        ...

    def cut(self, limit_s: float, spared: Collection[Any] = ()) -> None:
        """End all operations of the generation, from any thread; may be repeated.

        `spared` groups stay as they are: they have no operation. A thread that still
        begins an operation of another one after `limit_s` seconds ends the process.
        """
        ...

    def is_quiet(self) -> bool:
        """Return, after `cut`, whether no further byte can arrive in a tensor of an
        operation.
        """
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _Made:
    """A group of gloo's, from before its first socket."""

    sockets: LoopSockets = field(default_factory=LoopSockets)
    """The sockets of its loops."""

    group: Callable[[], Any] = lambda: None
    """Returns the group while somebody uses it; None before it is made."""

    def is_one_of(self, groups: Collection[Any]) -> bool:
        """Return whether it is one of these groups."""
        own = self.group()
        return any(own is group for group in groups)


class GlooBackend:
    """gloo over TCP. It has no abort; shutting its sockets down makes operations fail
    within milliseconds.

    All ranks of a group connect as the group forms, as gloo does by itself. In groups
    of more than `most_connected` ranks, two ranks connect as an operation first needs
    both: else a rank reads the addresses of all others from the one store, which for
    1,024 ranks takes longer than `runtime.form_s`.

    Tensors are on `device`; for one that is not the host, `wrap` makes a group of
    gloo's that copies them.
    """

    def __init__(
        self,
        device: torch.device = _HOST,
        wrap: Callable[[Any], Any] = lambda group: group,
        *,
        most_connected: int = MOST_CONNECTED,
    ) -> None:
        self.device = device
        self._most_connected = most_connected
        self.wrap = wrap
        self.completes_when_cut = False
        self.closing_s: float | None = 0.5
        self._made: list[_Made] = []

    def begin(self, kept: Collection[Any] = ()) -> None:
        # the loops of others end with their groups
        self._made = [made for made in self._made if made.is_one_of(kept)]

    def keeps_idle(self, size: int) -> bool:
        # operations of a group that connects late read addresses in the store of its
        # generation
        return not self.connects_late(size)

    def connects_late(self, size: int) -> bool:
        return size > self._most_connected

    def mark(self) -> Mark | None:
        # an awaited operation is complete, but for copies of results in the order of
        # the stream
        return None

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        options: Any = cast("Any", dist.ProcessGroupGloo)._Options()
        options._timeout = timedelta(seconds=form_s)
        # a group's own: where groups share a device that connects later, gloo takes
        # pairs of one for those of another
        is_late = self.connects_late(size)
        made = _Made()
        self._made.append(made)
        options._devices = made.sockets.add(
            functools.partial(_open_devices, lazy_init=is_late)
        )
        asked = store.direct if is_late and isinstance(store, PollingStore) else store
        backend = dist.ProcessGroupGloo(asked, rank, size, options)
        if is_late:
            # from here on the addresses of all ranks are there: an operation that reads
            # one does not wait for it
            meet(store, size)
        backend._set_default_timeout(timedelta(seconds=operation_s))
        group = self.wrap(
            group_of(backend, store, _HOST, dist.ProcessGroup.BackendType.GLOO)
        )
        made.group = weakref.ref(group)
        return group

    def formed(self) -> None:
        # a cut finds connections, also those that are opened later, in the loops that
        # watch them
        pass

    def launching(self, inside: Any) -> contextlib.AbstractContextManager[object]:  # noqa: ARG002 - a cut frees none
        return _UNHELD

    def discard(self, num_open: int = 0) -> None:
        pass  # operations begin at once

    def wait(self, work: Any) -> None:
        work.wait()

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        pass  # as for `mark`: nothing can be lost any more

    def failure(self) -> str | None:
        return None  # a wait for the operation raises it

    def cut(self, limit_s: float, spared: Collection[Any] = ()) -> None:  # noqa: ARG002 - sockets end waits at once
        for made in tuple(self._made):
            if not made.is_one_of(spared):
                made.sockets.shut_down()

    def is_quiet(self) -> bool:
        # gloo's thread goes on reading, into tensors, the bytes that came before the
        # socket was shut down
        return not any(made.sockets.have_unread_bytes() for made in self._made)


def _open_devices(*, lazy_init: bool) -> list[Any]:
    """Return gloo's devices, for the interfaces that GLOO_SOCKET_IFNAME names, as torch
    would make them.
    """
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
    """Let `torch.distributed` make groups of a class of ours, which has no backend
    registered inside.

    Turns torch's flight recorder off, in this process and in those that it starts.

    Args:
        name: Of the backend, for `torch.distributed`.
        create: Returns a group; takes torch's options, and the caller's.
        device_types: Types of devices whose tensors these groups take.
    """
    # torch 2.15 attaches the recorder to each such group, under a name that only a
    # group with a registered backend has. A recorder would also hold operations of
    # generations that are over, and with them the groups' sockets
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.Backend.register_backend(
        name, create, extended_api=True, devices=list(device_types)
    )


def die(reason: str) -> NoReturn:
    """End this process as if it had been killed: the supervisor replaces it, while an
    error would end the job.
    """
    _log.error("worker ends: %s", reason)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def group_of(
    backend: Any, store: dist.Store, device: torch.device, kind: Any
) -> dist.ProcessGroup:
    """Return the group that torch makes of a backend, with the operations that
    `torch.distributed` calls.
    """
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group
