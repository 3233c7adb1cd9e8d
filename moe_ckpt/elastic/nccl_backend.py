"""NCCL inside a process group, and its abort.

Owns: forming communicators, so that a rank that dies meanwhile keeps no other one
waiting; ending operations that wait for a dead peer; errors of NCCL, which are the
caller's. Must not: abort before the caller's flag says that the generation is over, as
an abort completes operations of peers with wrong data. docs/gpu.md has the reasons for
each order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.config import require
from moe_ckpt.elastic.backends import Mark, die, group_of
from moe_ckpt.elastic.generation_sockets import GenerationSockets
from moe_ckpt.elastic.rendezvous_store import meet
from moe_ckpt.errors import PeersLostError

_LOOK_AGAIN_S = 0.0001
_LAUNCH_S = 0.5  # many times what beginning an operation takes
_NOT_IN_A_GROUP = 5  # NCCL's answer to the end of a group of calls that was not begun
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # torch 2.15: ends the process in spite of the one above
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",
    # with 1 there is no watchdog, and no error is told
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # else torch's watchdog asks the store of an ended generation, or sleeps a minute
    # with a lock that operations need
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    # its thread would spin once a cut has shut its listening sockets down
    "NCCL_RAS_ENABLE": "0",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Made:
    """A group of the generation. `launch` is held while a thread begins an operation of
    it, or a batch of them.
    """

    backend: Any
    group: Any
    launch: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]


class NcclBackend:
    """NCCL, with communicators that block: torch's all-to-all fails on others where it
    has to wait for a peer.

    Kernels of aborted communicators finish, with garbage, on peers, too: the caller
    confirms results (`ElasticGroups.confirm`). An abort frees its communicator, so none
    begins while a thread begins an operation of it. Raises ConfigError where a setting
    lets torch's watchdog end this process, or an abort fail.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.completes_when_cut = True
        self.closing_s: float | None = None
        self._nccl = _open_nccl()
        self._lock = threading.Lock()
        self._sockets = GenerationSockets()
        self._made: list[_Made] = []
        self._aborts: list[threading.Thread] = []  # of these groups, in their order
        self._num_being_made = 0
        self._is_formed = True
        self._is_cut = False
        self._draining: threading.Thread | None = None
        _configure_nccl()

    def begin(self, kept: Collection[Any] = ()) -> None:  # noqa: ARG002 - none
        self._sockets.begin()
        with self._lock:
            self._is_cut = self._is_formed = False
        self._draining = None

    def keeps_idle(self, size: int) -> bool:  # noqa: ARG002
        # no group was seen to go on beside an aborted one of the same device
        return False

    def connects_late(self, size: int) -> bool:  # noqa: ARG002 - NCCL_RUNTIME_CONNECT=0
        return False

    def mark(self) -> Mark | None:
        return _PointOnDevice(self.device)

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=form_s)
        options.config.blocking = 1
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        # NCCL itself waits for a missing rank without limit
        meet(store, size)
        with self._making(), torch.cuda.device(self.device):
            backend.eager_connect_single_device(self.device)
            backend._set_default_timeout(timedelta(seconds=operation_s))
            made = _Made(
                backend=backend,
                group=group_of(
                    backend, store, self.device, dist.ProcessGroup.BackendType.NCCL
                ),
            )
            with self._lock:
                self._made.append(made)
                is_cut = self._is_cut
            if is_cut:  # it did not know this group
                self.cut(form_s)
                raise PeersLostError("forming process groups: other ranks were lost")
        return made.group

    def formed(self) -> None:
        with self._lock:
            self._is_formed = True
            # else a thread still opens connections, though another one has given up
            if not self._num_being_made:
                self._sockets.formed()

    def launching(self, inside: Any) -> contextlib.AbstractContextManager[object]:
        launches = (made.launch for made in self._made if made.group is inside)
        return next(launches, contextlib.nullcontext())  # none: its generation is over

    def discard(self, num_open: int = 0) -> None:
        if self._nccl is None:
            die(
                "an operation of NCCL has failed, and torch has left its group of calls"
                " open"
            )
        # torch leaves a group of calls open if one of them fails: later calls of this
        # thread would never run. A wrong call lets the end of the group drop all others
        self._nccl.ncclAllReduce(None, None, 0, 0, 0, None, None)
        while self._nccl.ncclGroupEnd() != _NOT_IN_A_GROUP:
            pass
        for _ in range(num_open):  # torch counts those that it has started
            self._nccl.ncclGroupStart()

    def wait(self, work: Any) -> None:
        # not `wait`, which aborts the communicator of an operation that has failed,
        # before the flag of the generation's end is set: this rank could add to a guard
        # afterwards, and confirm garbage. Nor `synchronize`, which keeps other threads
        # from running while the device has no room for a call
        work.block_current_stream()

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        done = _PointOnDevice(self.device)
        deadline_s = time.monotonic() + timeout_s
        while not done.query() and not is_over():
            if failure := self.failure():
                raise PeersLostError(failure)
            if time.monotonic() > deadline_s:
                raise PeersLostError(
                    f"operations on {self.device} took more than {timeout_s:g} s"
                )
            time.sleep(_LOOK_AGAIN_S)  # a blocking wait could not be left

    def failure(self) -> str | None:
        errors = (made.backend.get_error().name for made in tuple(self._made))
        error = next((error for error in errors if error != "SUCCESS"), None)
        return error and f"operations on {self.device}: NCCL reports {error}"

    def cut(self, limit_s: float, spared: Collection[Any] = ()) -> None:  # noqa: ARG002 - none
        with self._lock:
            self._is_cut = True
            # all at the same time: one after another, aborts of communicators can wait
            # for each other
            for made in self._made[len(self._aborts) :]:
                abort = threading.Thread(
                    target=self._abort, args=(made, limit_s), name="abort", daemon=True
                )
                self._aborts.append(abort)
                abort.start()
            is_making = self._num_being_made > 0
        # a rank that dies leaves the others in NCCL's bootstrap, which torch cannot
        # abort
        if is_making:
            self._sockets.shut_down()

    def is_quiet(self) -> bool:
        with self._lock:
            if self._num_being_made or any(
                thread.is_alive() for thread in self._aborts
            ):
                return False
            made, self._made, self._aborts = self._made, [], []
        if self._draining is None:
            # in a thread, as each abort: the thread that leaves must see
            # runtime.abort_s pass while a call hangs
            self._draining = threading.Thread(
                target=_drain, args=(self.device, made), name="drain", daemon=True
            )
            self._draining.start()
        return not self._draining.is_alive()

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """Until the end of the context a group is being made. Raises PeersLostError
        after a cut.
        """
        with self._lock:
            if self._is_cut:
                raise PeersLostError("forming process groups: other ranks were lost")
            self._num_being_made += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_being_made -= 1
                if self._is_formed and not self._num_being_made:
                    self._sockets.formed()

    def _abort(self, made: _Made, limit_s: float) -> None:
        """Abort a group once no thread begins an operation of it: the generation is
        over, and none begins later.
        """
        if not _is_free_within(made.launch, _LAUNCH_S):
            # one that begins a transfer may wait for its peer to connect
            self._sockets.shut_down()
            if not _is_free_within(made.launch, limit_s):
                die(
                    f"an operation on {self.device} has not begun in"
                    f" runtime.abort_s={limit_s:g} seconds after a cut"
                )
        made.group.abort()


def _is_free_within(lock: threading.RLock, limit_s: float) -> bool:  # type: ignore[valid-type]
    """Return whether no thread holds a lock any more, after at most so many seconds."""
    if not lock.acquire(timeout=limit_s):
        return False
    lock.release()
    return True


def _open_nccl() -> Any:
    """Return the library that torch uses; None if its functions cannot be called from
    here.
    """
    # None: torch itself, where NCCL is a part of it
    for name in ("libnccl.so.2", None):
        with contextlib.suppress(OSError):
            # never a second one
            library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            if hasattr(library, "ncclGroupEnd"):
                pointer = ctypes.c_void_p
                library.ncclAllReduce.argtypes = [
                    pointer,
                    pointer,
                    ctypes.c_size_t,
                    *[ctypes.c_int] * 2,
                    *[pointer] * 2,
                ]
                return library
    return None


class _PointOnDevice:
    """A point in the work of a CUDA device, for any thread to query."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def query(self) -> bool:
        # a thread has the first device, until it is given another one
        with torch.cuda.device(self._device):
            return self._event.query()


def _configure_nccl() -> None:
    """Set what NCCL and torch's watchdog read as a first group is made. Raises
    ConfigError.

    torchrun sets the opposite: then the watchdog would end the survivors of a peer's
    loss.
    """
    level = dist.get_debug_level()
    wanted = (
        "INFO or OFF with runtime.backend=nccl: with it, torch's watchdog ends the"
        " survivors of a loss"
    )
    require(
        level != dist.DebugLevel.DETAIL, "TORCH_DISTRIBUTED_DEBUG", level.name, wanted
    )
    os.environ.update(_ENVIRONMENT)
    # with 1, the default, a first collective waits inside its launch for all ranks to
    # begin it: no abort is safe then
    connects = os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    require(
        connects == "0",
        "NCCL_RUNTIME_CONNECT",
        connects,
        "0 with runtime.backend=nccl: connections at the start",
    )


def _drain(device: torch.device, made: list[_Made]) -> None:
    """Wait for all streams of a device: after an abort, only that proves that no kernel
    writes any more.

    Then drop the groups, whose destructors wait for threads of torch.
    """
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        # it stays: every call from now on fails, and only a new process gets the device
        # back
        die(f"{device} cannot be used any more: {error}")
    made.clear()
