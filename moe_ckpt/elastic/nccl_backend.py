"""NCCL inside a process group, and the abort of its communicators.

Owns: forming communicators, so that a rank that dies meanwhile keeps no other rank
waiting; ending operations that wait for a dead peer; NCCL's errors, which reach the
caller. Must not: abort before the caller's flag says that the generation is over, as an
abort completes operations of peers with wrong data. docs/gpu.md has the reasons for
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
_LAUNCH_S = 0.5  # many times the duration of beginning an operation
_NOT_IN_A_GROUP = 5  # ncclGroupEnd without ncclGroupStart returns this
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # torch 2.15: would end the process in spite of the variable above
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",
    # with 1 there is no watchdog, and no error is reported
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # otherwise torch's watchdog asks the store of an ended generation, or sleeps for a
    # minute while it holds a lock that operations need
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    # the thread of RAS would spin once a cut has shut its listening sockets down
    "NCCL_RAS_ENABLE": "0",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _NcclGroup:
    """A group of the generation."""

    backend: Any
    """torch's `ProcessGroupNCCL`."""

    group: Any
    """The process group around the backend."""

    launch: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]
    """Held while a thread begins an operation of the group, or a batch of operations.
    """


class NcclBackend:
    """NCCL, with blocking communicators.

    With non-blocking communicators, torch's all-to-all fails if the call has to wait
    for a peer.

    Kernels of aborted communicators finish with garbage, also on peers. So the caller
    confirms results (`ElasticGroups.confirm`). An abort frees its communicator. So no
    abort begins while a thread begins an operation of that communicator.
    """

    def __init__(self) -> None:
        """Open the backend on the current CUDA device.

        Raises:
            ConfigError: A setting lets torch's watchdog end this process, or an abort
                fail.
        """
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.sends_gloo_frames = False
        self.completes_when_cut = True
        self.closing_s: float | None = None
        self._nccl = _open_nccl()
        self._lock = threading.Lock()
        self._sockets = GenerationSockets()
        self._made: list[_NcclGroup] = []
        self._aborts: list[threading.Thread] = []  # of the groups in `_made`, in order
        self._num_being_made = 0
        self._is_formed = True
        self._is_cut = False
        self._draining: threading.Thread | None = None
        _configure_nccl()

    def begin(self, kept: Collection[Any] = ()) -> None:  # noqa: ARG002
        # `kept` is empty: see `keeps_idle`
        self._sockets.begin()
        with self._lock:
            self._is_cut = self._is_formed = False
        self._draining = None

    def keeps_idle(self, size: int) -> bool:  # noqa: ARG002
        # a group was never seen to continue beside an aborted group of the same device
        return False

    def connects_late(self, size: int) -> bool:  # noqa: ARG002
        # NCCL_RUNTIME_CONNECT=0
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
    ) -> dist.ProcessGroup:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=form_s)
        options.config.blocking = 1
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        # the members meet first, as NCCL itself waits for a missing rank without limit
        meet(store, size)
        with self._making(), torch.cuda.device(self.device):
            backend.eager_connect_single_device(self.device)
            backend._set_default_timeout(timedelta(seconds=operation_s))
            made = _NcclGroup(
                backend=backend,
                group=group_of(
                    backend, store, self.device, dist.ProcessGroup.BackendType.NCCL
                ),
            )
            with self._lock:
                self._made.append(made)
                is_cut = self._is_cut
            if is_cut:  # the cut did not know this group
                self.cut(form_s)
                raise PeersLostError("forming process groups: other ranks were lost")
        return made.group

    def formed(self) -> None:
        with self._lock:
            self._is_formed = True
            # otherwise a thread still opens connections, although another thread has
            # given up
            if not self._num_being_made:
                self._sockets.formed()

    def launching(self, inside: Any) -> contextlib.AbstractContextManager[object]:
        launches = (made.launch for made in self._made if made.group is inside)
        # no group: its generation is over
        return next(launches, contextlib.nullcontext())

    def discard(self, num_open: int = 0) -> None:
        if self._nccl is None:
            die(
                "an operation of NCCL has failed, and torch has left its group of calls"
                " open"
            )
        # If one call of a group of calls fails, torch leaves the group of calls open,
        # and later calls of this thread would never run. A wrong call makes the end of
        # the group of calls drop all other calls
        self._nccl.ncclAllReduce(None, None, 0, 0, 0, None, None)
        while self._nccl.ncclGroupEnd() != _NOT_IN_A_GROUP:
            pass
        for _ in range(num_open):  # torch counts its open groups of calls
            self._nccl.ncclGroupStart()

    def wait(self, work: Any) -> None:
        # Not `wait`: it aborts the communicator of a failed operation before the flag
        # of the generation's end is set. This rank could add to a guard afterwards, and
        # confirm garbage. Not `synchronize`: it keeps other threads from running while
        # the device has no room for a call
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

    def cut(self, limit_s: float, spared: Collection[Any] = ()) -> None:  # noqa: ARG002
        # `spared` is empty: see `keeps_idle`
        with self._lock:
            self._is_cut = True
            # all at the same time: aborts of communicators one after another can wait
            # for each other
            for made in self._made[len(self._aborts) :]:
                abort = threading.Thread(
                    target=self._abort, args=(made, limit_s), name="abort", daemon=True
                )
                self._aborts.append(abort)
                abort.start()
            is_making = self._num_being_made > 0
        # a rank that dies leaves the other ranks in NCCL's bootstrap, which torch
        # cannot abort
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
            # in a thread, like each abort: while a call hangs, the leaving thread must
            # see runtime.abort_s pass
            self._draining = threading.Thread(
                target=_drain, args=(self.device, made), name="drain", daemon=True
            )
            self._draining.start()
        return not self._draining.is_alive()

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """Mark the block as making a group.

        Raises:
            PeersLostError: A cut came before the block.
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

    def _abort(self, made: _NcclGroup, limit_s: float) -> None:
        """Abort a group once no thread begins an operation of the group.

        The generation is over, so no later operation begins.
        """
        if not _is_free_within(made.launch, _LAUNCH_S):
            # a thread that begins a transfer may wait for its peer to connect
            self._sockets.shut_down()
            if not _is_free_within(made.launch, limit_s):
                die(
                    f"an operation on {self.device} has not begun in"
                    f" runtime.abort_s={limit_s:g} seconds after a cut"
                )
        made.group.abort()


def _is_free_within(lock: threading.RLock, limit_s: float) -> bool:  # type: ignore[valid-type]
    """Wait up to `limit_s` seconds; return whether no thread holds a lock then."""
    if not lock.acquire(timeout=limit_s):
        return False
    lock.release()
    return True


def _open_nccl() -> Any:
    """Return the NCCL library that torch uses.

    Returns:
        None if the library's functions cannot be called from here.
    """
    # None: torch itself, if NCCL is part of torch's library
    for name in ("libnccl.so.2", None):
        with contextlib.suppress(OSError):
            # RTLD_NOLOAD: never load a second NCCL
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
    """A point in the work of a CUDA device. Any thread may query the point."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def query(self) -> bool:
        # a thread uses the first device until another one is set
        with torch.cuda.device(self._device):
            return self._event.query()


def _configure_nccl() -> None:
    """Set the variables that NCCL and torch's watchdog read with the first group.

    torchrun sets the opposite: the watchdog would end the survivors of a peer's loss.

    Raises:
        ConfigError: A variable of the user's contradicts.
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
    # with 1, NCCL's default, a first collective waits inside its launch for all ranks
    # to begin the collective, and no abort is safe then
    connects = os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    require(
        connects == "0",
        "NCCL_RUNTIME_CONNECT",
        connects,
        "0 with runtime.backend=nccl: connections at the start",
    )


def _drain(device: torch.device, made: list[_NcclGroup]) -> None:
    """Wait for all streams of a device; then drop the groups.

    After an abort, only this wait proves that no kernel writes any more. The groups'
    destructors wait for threads of torch.
    """
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        # the error is permanent: every later call fails, and only a new process gets
        # the device back
        die(f"{device} cannot be used any more: {error}")
    made.clear()
