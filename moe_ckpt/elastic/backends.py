"""The backend inside a process group, and how it ends all operations at once: gloo's sockets, NCCL's abort."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from moe_ckpt.config import require
from moe_ckpt.elastic.generation_sockets import GenerationSockets
from moe_ckpt.errors import PeersLostError

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.0001
_HOST = torch.device("cpu")
_LAUNCH_S = 0.5  # many times what beginning an operation takes
_NCCL_NEVER_ENDS_THE_PROCESS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # else torch's watchdog asks the store of an ended generation, or sleeps a minute with a lock that operations need
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}


class Mark(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return, without waiting, whether the device has reached it."""
        ...


class Backend(Protocol):
    """Forms the inner groups of one generation after another."""

    device: torch.device
    completes_when_cut: bool
    """Whether `cut` completes operations, with wrong data, here and on ranks that have not cut theirs yet.

    Else an operation may continue to wait after `cut`, so that it must be abandoned.
    """
    closing_s: float | None
    """Seconds to wait for quiet after `cut`, then continue without it; None: never continue without it."""
    launching: contextlib.AbstractContextManager[object]
    """Held by a thread that begins an operation; inside, the generation is known not to be over."""

    def begin(self) -> None:
        """A generation is about to be formed: connections opened from now on belong to it."""
        ...

    def mark(self) -> Mark | None:
        """Return the point behind the operations that this thread has begun; None if they are complete."""
        ...

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        """Return the inner group. Collective over its members, for which it waits up to `form_s` seconds.

        A member that is lost then may block it until `cut`.
        """
        ...

    def formed(self) -> None:
        """All groups of this generation exist: no further connection is opened for it."""
        ...

    def wait(self, work: Any) -> None:
        """Wait for an operation; on a device, let the calling thread's stream wait for it."""
        ...

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Wait until awaited operations are complete on the device, too, or `is_over` returns True.

        Raises PeersLostError after `timeout_s` seconds, or where an operation has failed.
        """
        ...

    def cut(self) -> None:
        """End all operations of the generation, from any thread; may be repeated."""
        ...

    def is_quiet(self) -> bool:
        """Return, after `cut`, whether no further byte can arrive in a tensor of an operation."""
        ...


class GlooBackend:
    """gloo over TCP. It has no abort; shutting its sockets down makes operations fail within milliseconds.

    Tensors are on `device`; for one that is not the host, `wrap` makes a group of gloo's that copies them.
    """

    def __init__(self, device: torch.device = _HOST, wrap: Callable[[Any], Any] = lambda group: group) -> None:
        self.device = device
        self.wrap = wrap
        self.completes_when_cut = False
        self.closing_s: float | None = 0.5
        self.launching: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._sockets = GenerationSockets()

    def begin(self) -> None:
        self._sockets.begin()

    def mark(self) -> Mark | None:
        return None  # an awaited operation is complete, but for copies of results in the order of the stream

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=form_s))
        backend._set_default_timeout(timedelta(seconds=operation_s))
        return self.wrap(group_of(backend, store, _HOST, dist.ProcessGroup.BackendType.GLOO))

    def formed(self) -> None:
        self._sockets.formed()

    def wait(self, work: Any) -> None:
        work.wait()

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        pass  # as for `mark`: nothing can be lost any more

    def cut(self) -> None:
        self._sockets.shut_down()

    def is_quiet(self) -> bool:
        # gloo's thread goes on reading, into tensors, the bytes that came before the socket was shut down
        return not self._sockets.have_unread_bytes()


class NcclBackend:
    """NCCL, with communicators that block: torch's all-to-all fails on others where it has to wait for a peer.

    Kernels of aborted communicators finish, with garbage, on peers, too: after a synchronization the caller asks
    whether the generation has ended. An abort frees its communicator, so none begins while a thread begins an
    operation. Raises ConfigError where a setting of torch lets its watchdog end this process.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.completes_when_cut = True
        self.closing_s: float | None = None
        self._launch = threading.RLock()  # a batch of operations holds it as a whole, and each of them
        self.launching: contextlib.AbstractContextManager[object] = self._launch
        self._lock = threading.Lock()
        self._sockets = GenerationSockets()
        self._made: list[tuple[Any, Any]] = []  # backends of this generation, with their groups
        self._aborts: list[threading.Thread] = []  # of these groups, in their order
        self._num_being_made = 0
        self._is_cut = False
        self._draining: threading.Thread | None = None
        _configure_nccl()

    def begin(self) -> None:
        self._sockets.begin()
        with self._lock:
            self._aborts.clear()
            self._made.clear()
            self._is_cut = False
        self._draining = None

    def mark(self) -> Mark | None:
        return _PointOnDevice(self.device)

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=form_s)
        options.config.blocking = 1
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        # NCCL itself waits for a missing rank without limit
        _meet(store, size)
        with self._making(), torch.cuda.device(self.device):
            backend.eager_connect_single_device(self.device)
            backend._set_default_timeout(timedelta(seconds=operation_s))
            group = group_of(backend, store, self.device, dist.ProcessGroup.BackendType.NCCL)
            with self._lock:
                self._made.append((backend, group))
                is_cut = self._is_cut
            if is_cut:  # it did not know this group
                self.cut()
                raise PeersLostError("forming process groups: other ranks were lost")
        return group

    def formed(self) -> None:
        self._sockets.formed()

    def wait(self, work: Any) -> None:
        # not `wait`, which aborts the communicator of an operation that has failed: peers could take garbage for the
        # result before the end of the generation is in the store, where they ask for it
        work.synchronize()

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        deadline_s = time.monotonic() + timeout_s
        while not done.query() and not is_over():
            for backend, _ in self._made:
                error = backend.get_error().name
                if error != "SUCCESS":
                    raise PeersLostError(f"operations on {self.device}: NCCL reports {error}")
            if time.monotonic() > deadline_s:
                raise PeersLostError(f"operations on {self.device} took more than {timeout_s:g} s")
            time.sleep(_LOOK_AGAIN_S)  # a blocking wait could not be left

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            # all at the same time: one after another, aborts of communicators can wait for each other
            for _, group in self._made[len(self._aborts) :]:
                self._aborts.append(threading.Thread(target=self._abort, args=(group,), name="abort", daemon=True))
                self._aborts[-1].start()
            is_making = self._num_being_made > 0
        if is_making:  # a rank that dies leaves the others in NCCL's bootstrap, which torch cannot abort
            self._sockets.shut_down(listening=True)

    def is_quiet(self) -> bool:
        with self._lock:
            if self._num_being_made or any(thread.is_alive() for thread in self._aborts):
                return False
            self._made.clear()
            self._aborts.clear()
        if self._draining is None:
            # in a thread, as each abort: the thread that leaves must see runtime.abort_s pass while a call hangs
            self._draining = threading.Thread(target=_drain, args=(self.device,), name="drain", daemon=True)
            self._draining.start()
        return not self._draining.is_alive()

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """Until the end of the context a group is being made. Raises PeersLostError after a cut."""
        with self._lock:
            if self._is_cut:
                raise PeersLostError("forming process groups: other ranks were lost")
            self._num_being_made += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_being_made -= 1

    def _abort(self, inside: Any) -> None:
        """Abort a group once no thread begins an operation: the generation is over, and no later one begins any."""
        if not self._launches_end():
            self._sockets.shut_down(listening=True)  # one that begins a transfer may wait for its peer to connect
            if not self._launches_end():
                die(f"an operation on {self.device} has not begun in {2 * _LAUNCH_S:g} seconds")
        inside.abort()

    def _launches_end(self) -> bool:
        """Return whether no thread begins an operation any more, within `_LAUNCH_S`."""
        if not self._launch.acquire(timeout=_LAUNCH_S):
            return False
        self._launch.release()
        return True


class _PointOnDevice:
    """A point in the work of a CUDA device, for any thread to query."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def query(self) -> bool:
        with torch.cuda.device(self._device):  # a thread has the first device, until it is given another one
            return self._event.query()


def _configure_nccl() -> None:
    """Set what NCCL and torch's watchdog read as a first group is made. Raises ConfigError.

    torchrun sets the opposite: then the watchdog would end the survivors of a peer's loss.
    """
    level = dist.get_debug_level()
    wanted = "INFO or OFF with runtime.backend=nccl: with it, torch's watchdog ends the survivors of a loss"
    require(level != dist.DebugLevel.DETAIL, "TORCH_DISTRIBUTED_DEBUG", level.name, wanted)
    os.environ.update(_NCCL_NEVER_ENDS_THE_PROCESS)
    # with 1, the default, a first collective waits inside its launch for all ranks to begin it: no abort is safe then
    connects = os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    require(connects == "0", "NCCL_RUNTIME_CONNECT", connects, "0 with runtime.backend=nccl: connections at the start")


def _meet(store: dist.Store, size: int) -> None:
    """Return once all ranks of a group have come here. Raises PeersLostError, as `store` does."""
    if store.add("here", 1) == size:
        store.set("all here", "")
    store.wait(["all here"])


def die(reason: str) -> NoReturn:
    """End this process as if it had been killed: the supervisor replaces it, while an error would end the job."""
    _log.error("worker ends: %s", reason)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def _drain(device: torch.device) -> None:
    """Wait for all streams of a device: after an abort, only that proves that no kernel writes any more."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:  # it stays: every call from now on fails, and only a new process gets the device back
        die(f"{device} cannot be used any more: {error}")


def group_of(backend: Any, store: dist.Store, device: torch.device, kind: Any) -> dist.ProcessGroup:
    """Return the group that torch makes of a backend, with the operations that `torch.distributed` calls."""
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group
