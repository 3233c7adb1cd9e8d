"""`NcclBackend` calls CUDA, torch and NCCL in the right order, on a fake device.

Only tests marked `gpu` need a device.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.elastic import nccl_backend
from moe_ckpt.elastic.nccl_backend import NcclBackend
from moe_ckpt.errors import ConfigError, PeersLostError
from tests.harness.gloo.backends import passes
from tests.harness.gloo.ranks import RankFailedError, run_ranks
from tests.harness.gloo.workers import wait_until
from tests.waits import WAIT_S

ErrorType = cast("Any", torch._C)._distributed_c10d.ErrorType

NCCL_SWITCHES = (
    "NCCL_RAS_ENABLE",
    "NCCL_RUNTIME_CONNECT",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC",
    "TORCH_NCCL_PROPAGATE_ERROR",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)


class FakeEvent:
    """A point in a stream, which the device reaches after `looks` queries."""

    looks = 0

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        FakeEvent.looks -= 1
        return FakeEvent.looks <= 0


class FakeDevice:
    """A context that makes a device the thread's own, and records both in `entered`."""

    entered: ClassVar[list[tuple[str, torch.device]]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self.entered.append((threading.current_thread().name, self._device))

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> NcclBackend:
    for name in NCCL_SWITCHES:
        # torchrun sets some of the variables; the end of the test restores all of them
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    return nccl_without_cuda(monkeypatch)


def nccl_without_cuda(monkeypatch: pytest.MonkeyPatch) -> NcclBackend:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", FakeDevice)
    return NcclBackend()


def test_nccl_is_kept_from_ending_survivors(nccl: NcclBackend) -> None:
    assert {name: os.environ[name] for name in NCCL_SWITCHES} == dict.fromkeys(
        NCCL_SWITCHES, "0"
    )


def test_a_watchdog_that_ends_survivors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    with pytest.raises(
        ConfigError,
        match=(
            r"^TORCH_DISTRIBUTED_DEBUG: got 'DETAIL', wanted INFO or OFF with runtime"
        ),
    ):
        nccl_without_cuda(monkeypatch)


def test_a_point_is_asked_for_with_its_own_device(nccl: NcclBackend) -> None:
    """A thread without a device of its own would create a context on the first one."""
    FakeDevice.entered.clear()
    mark = nccl.mark()
    assert mark is not None
    asking = threading.Thread(target=mark.query, name="another thread")
    asking.start()
    asking.join()
    assert FakeDevice.entered == [("another thread", torch.device("cuda", 0))]


def test_launched_operations_are_waited_for_unless_all_is_over(
    nccl: NcclBackend,
) -> None:
    FakeEvent.looks = 5
    nccl.sync(lambda: False, WAIT_S)
    assert FakeEvent.looks == 0
    FakeEvent.looks = 1 << 60
    nccl.sync(lambda: True, WAIT_S)
    with pytest.raises(
        PeersLostError, match=r"operations on cuda:0 took more than 0\.01 s"
    ):
        nccl.sync(lambda: False, 0.01)


class Launched:
    """An operation of NCCL for which a stream can wait."""

    def __init__(self) -> None:
        self.is_awaited = False

    def block_current_stream(self) -> None:
        self.is_awaited = True

    def wait(self) -> None:
        raise AssertionError(
            "torch would abort a communicator here before the generation has ended"
        )


def test_a_failed_operation_aborts_nothing_before_its_generation_has_ended(
    nccl: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next wait for the device raises the error of the operation."""
    work = Launched()
    nccl.wait(work)
    assert work.is_awaited
    monkeypatch.setattr(Connected, "error", ErrorType.SUCCESS)
    hold(nccl, StuckGroup())
    FakeEvent.looks = 5
    nccl.sync(lambda: False, WAIT_S)
    monkeypatch.setattr(Connected, "error", ErrorType.COMM_ERROR)
    FakeEvent.looks = 5
    with pytest.raises(
        PeersLostError, match="operations on cuda:0: NCCL reports COMM_ERROR"
    ):
        nccl.sync(lambda: False, WAIT_S)


class StuckGroup:
    """A group whose abort lasts until `may_end` is set."""

    def __init__(self) -> None:
        self.aborts = 0
        self.may_end = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.may_end.wait(WAIT_S)


class Connected:
    """Stand-in for torch's NCCL backend, whose communicators connect at once."""

    error = ErrorType.SUCCESS

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None: ...

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    def get_error(self) -> Any:
        return self.error

    @staticmethod
    def Options() -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(config=SimpleNamespace())


def hold(nccl: NcclBackend, *groups: StuckGroup) -> None:
    """Make groups in the backend's generation."""
    for group in groups:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "ProcessGroupNCCL", Connected, raising=False)
            patch.setattr(nccl_backend, "group_of", lambda *_, group=group: group)
            store = dist.HashStore()
            assert nccl.make(store, 0, 1, form_s=WAIT_S, operation_s=WAIT_S) is group


def test_a_device_is_quiet_once_all_aborts_and_all_streams_are_done(
    nccl: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained, synchronized = threading.Event(), []
    monkeypatch.setattr(
        torch.cuda,
        "synchronize",
        lambda at: synchronized.append(at) or drained.wait(WAIT_S),
    )
    stuck = [StuckGroup(), StuckGroup()]
    for _ in range(2):
        nccl.begin()
        hold(nccl, *stuck)
        begun_s = time.monotonic()
        for _ in range(3):
            nccl.cut(WAIT_S)
            assert not nccl.is_quiet()
        assert not synchronized, "the device was asked before all was aborted"
        for group in stuck:
            group.may_end.set()
        assert wait_until(lambda: not nccl.is_quiet() and bool(synchronized))
        assert not nccl.is_quiet()
        drained.set()
        assert wait_until(nccl.is_quiet)
        assert time.monotonic() - begun_s < WAIT_S / 3, "a call blocked"
        assert ([group.aborts for group in stuck], synchronized) == (
            [1, 1],
            [torch.device("cuda", 0)],
        )
        stuck = [StuckGroup(), StuckGroup()]
        synchronized.clear()
        drained.clear()


def lose_the_device() -> str:
    def fail(device: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    nccl = nccl_without_cuda(monkeypatch)
    nccl.begin()
    wait_until(nccl.is_quiet)
    return "it went on"


def test_a_device_that_is_lost_ends_the_process_by_a_signal() -> None:
    with pytest.raises(RankFailedError, match="rank 0 died"):
        run_ranks(1, lose_the_device)


class Bootstrap:
    """Stand-in for torch's NCCL backend, whose communicator waits for a peer.

    If `another_end` has a function, making the communicator calls that function
    instead.
    """

    made: ClassVar[list[Bootstrap]] = []
    another_end: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.blocking, self.listening, self.aborts = options.config.blocking, False, 0
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            # so that the threads of a test end even if no cut ends the wait
            server.settimeout(WAIT_S / 6)
            self.listening = True
            try:
                (self.another_end or [server.accept])[0]()  # NCCL waits without limit
            except OSError as error:
                raise RuntimeError(f"NCCL: accept failed: {error}") from error

    def abort(self) -> None:
        self.aborts += 1

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    @staticmethod
    def Options() -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(config=SimpleNamespace(blocking=-1))


@pytest.fixture
def forming(
    nccl: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Future[Any]]]:
    """Return a function that begins to make a rank's group, in a thread."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Bootstrap, raising=False)
    monkeypatch.setattr(nccl_backend, "group_of", lambda backend, *_: backend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Bootstrap, "made", [])
    nccl.begin()

    def make(rank: int, size: int, store: dist.Store) -> Any:
        return nccl.make(store, rank, size, form_s=WAIT_S, operation_s=WAIT_S)

    with ThreadPoolExecutor(2) as threads:
        yield functools.partial(threads.submit, make)


def test_a_cut_ends_groups_that_are_being_formed(
    nccl: NcclBackend, forming: Callable[..., Future[Any]]
) -> None:
    group = forming(0, 1, dist.HashStore())
    assert wait_until(lambda: bool(Bootstrap.made) and Bootstrap.made[0].listening)
    assert not nccl.is_quiet(), "a communicator is being made"
    nccl.cut(WAIT_S)
    with pytest.raises(RuntimeError, match=r"accept failed: .*Invalid argument"):
        group.result(WAIT_S)
    assert Bootstrap.made[0].blocking == 1
    assert wait_until(nccl.is_quiet)
    with pytest.raises(PeersLostError, match="forming process groups"):
        forming(0, 1, dist.HashStore()).result(WAIT_S)


def test_a_group_that_is_made_as_its_generation_is_cut_is_aborted(
    nccl: NcclBackend,
    forming: Callable[..., Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend aborts the group.

    No handle has the group or will get the group.
    """
    monkeypatch.setattr(Bootstrap, "another_end", [lambda: nccl.cut(WAIT_S)])
    with pytest.raises(PeersLostError, match="forming process groups"):
        forming(0, 1, dist.HashStore()).result(WAIT_S)
    assert wait_until(lambda: Bootstrap.made[0].aborts == 1)


class WaitedForStore(dist.HashStore):
    """A store that records, at each wait, whether a rank makes its communicator."""

    def __init__(self) -> None:
        super().__init__()
        self.makes_at_waits: list[bool] = []

    def wait(
        self, keys: list[str], timeout: timedelta = timedelta(seconds=WAIT_S)
    ) -> None:
        self.makes_at_waits.append(any(each.listening for each in Bootstrap.made))
        super().wait(keys, timeout)


def test_ranks_meet_before_they_make_a_communicator(
    forming: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits without limit for a rank that has died before its arrival."""
    monkeypatch.setattr(Bootstrap, "another_end", [lambda: None])
    store = WaitedForStore()
    first = forming(0, 2, store)
    assert wait_until(lambda: store.makes_at_waits == [False])
    assert not first.done()
    second = forming(1, 2, store)
    assert {first.result(WAIT_S), second.result(WAIT_S)} == set(Bootstrap.made)


def begin_an_operation(
    nccl: NcclBackend, group: StuckGroup, operation: Callable[[], object]
) -> threading.Thread:
    """Begin an operation of a group in a thread, and return the thread.

    Returns once the thread is inside `launching`, where the thread calls `operation`.
    """
    is_inside = threading.Event()

    def begin() -> None:
        with nccl.launching(group):
            is_inside.set()
            operation()

    thread = threading.Thread(target=begin)
    thread.start()
    assert is_inside.wait(WAIT_S)
    return thread


def test_no_group_is_aborted_while_a_thread_begins_an_operation(
    nccl: NcclBackend,
) -> None:
    """An abort frees memory that the operation reads.

    Other groups are aborted at once: the operation may wait for the kernels of these
    groups.
    """
    group, other, may_end, seen = StuckGroup(), StuckGroup(), threading.Event(), []
    nccl.begin()
    hold(nccl, group, other)
    nccl.formed()
    thread = begin_an_operation(
        nccl, group, lambda: may_end.wait(WAIT_S) and seen.append(group.aborts)
    )
    nccl.cut(WAIT_S)
    assert wait_until(lambda: other.aborts == 1)
    assert not nccl.is_quiet()
    may_end.set()
    thread.join()
    assert seen == [0]
    other.may_end.set()
    assert wait_until(lambda: group.aborts == 1)
    group.may_end.set()


def cut_an_operation_that_waits_for_its_peer() -> int:
    """Return how often the group is aborted once the operation has failed."""
    nccl, group, failed = (
        nccl_without_cuda(pytest.MonkeyPatch()),
        StuckGroup(),
        threading.Event(),
    )
    nccl.begin()
    with socket.create_server(("127.0.0.1", 0)) as server:
        hold(nccl, group)
        nccl.formed()

        def accept() -> None:
            try:
                server.accept()
            except OSError:
                failed.set()

        begin_an_operation(nccl, group, accept)
        nccl.cut(WAIT_S)
        assert failed.wait(WAIT_S)
    wait_until(lambda: group.aborts > 0)
    return group.aborts


def test_an_operation_that_waits_for_its_peer_to_connect_is_ended_by_a_cut() -> None:
    assert run_ranks(1, cut_an_operation_that_waits_for_its_peer) == [1]


def test_connections_are_cut_until_the_last_group_has_been_made(
    nccl: NcclBackend,
    forming: Callable[..., Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread may still make a group, and open connections, after `formed`.

    The thread that waits for all forming threads calls `formed` once one of these
    threads gives up because its peer is lost.
    """
    late: list[socket.socket] = []

    def open_late() -> None:
        nccl.formed()
        late.extend(socket.socketpair())
        nccl.cut(WAIT_S)

    monkeypatch.setattr(Bootstrap, "another_end", [open_late])
    with pytest.raises(PeersLostError, match="forming process groups"):
        forming(0, 1, dist.HashStore()).result(WAIT_S)
    assert not passes((late[0], late[1]))
    later = socket.socketpair()
    nccl.cut(WAIT_S)
    assert passes(later)
    for end in (*late, *later):
        end.close()


class GroupedCalls:
    """NCCL's library in a thread that has left two groups of calls open."""

    def __init__(self) -> None:
        self.depth, self.is_wrong, self.launches = 2, False, 0
        # unlike a method, a partial takes attributes, as a function of ctypes does
        self.ncclAllReduce = functools.partial(self.all_reduce)

    def all_reduce(self, *arguments: Any) -> int:
        self.is_wrong |= self.depth > 0
        return 4

    def ncclGroupStart(self) -> int:  # noqa: N802 - NCCL's name
        self.depth += 1
        return 0

    def ncclGroupEnd(self) -> int:  # noqa: N802
        if self.depth == 0:
            return 5
        self.depth -= 1
        self.launches += self.depth == 0 and not self.is_wrong
        return 4 if self.is_wrong else 0


@pytest.mark.usefixtures("nccl")
def test_calls_of_a_group_that_was_left_open_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise NCCL only collects later calls of the thread, and never runs them."""
    calls = GroupedCalls()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: calls)
    nccl = nccl_without_cuda(monkeypatch)
    nccl.discard()
    assert (calls.depth, calls.launches) == (0, 0)
    nccl.discard(num_open=1)
    assert calls.depth == 1, "torch ends the batch that it counts"


@pytest.mark.gpu
def test_nccl_itself_drops_calls_of_a_group_that_was_left_open() -> None:
    library = ctypes.CDLL("libnccl.so.2")
    backend = NcclBackend()
    assert [library.ncclGroupStart() for _ in range(2)] == [0, 0]
    backend.discard()
    assert library.ncclGroupEnd() == 5, "no group is open"


def cut_an_operation_that_never_begins() -> str:
    nccl = nccl_without_cuda(pytest.MonkeyPatch())
    nccl.begin()
    group = StuckGroup()
    hold(nccl, group)
    nccl.formed()
    begin_an_operation(nccl, group, threading.Event().wait)
    nccl.cut(0.1)
    threading.Event().wait(WAIT_S)
    return "it went on"


def test_an_operation_that_never_begins_ends_the_process_by_a_signal() -> None:
    with pytest.raises(RankFailedError, match="rank 0 died"):
        run_ranks(1, cut_an_operation_that_never_begins)
