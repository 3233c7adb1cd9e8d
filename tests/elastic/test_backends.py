"""What belongs to a generation's transport: its sockets, and NCCL's way of ending."""

from __future__ import annotations

import functools
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.elastic import backends
from moe_ckpt.elastic.backend_choice import open_backend
from moe_ckpt.elastic.backends import GlooBackend, NcclBackend
from moe_ckpt.errors import ConfigError, PeersLostError
from tests.elastic.transports import passes
from tests.elastic.workers import wait_until
from tests.ranks import RankFailedError, run_ranks
from tests.waits import WAIT_S

ErrorType = cast("Any", torch._C)._distributed_c10d.ErrorType

# The sockets that are a generation's.


@pytest.fixture
def pair(stack: ExitStack) -> Callable[[], tuple[socket.socket, ...]]:
    """Return a function that opens two connected sockets."""
    return lambda: tuple(map(stack.enter_context, socket.socketpair()))


@pytest.mark.parametrize(
    ("begins", "is_formed", "left"),
    [
        pytest.param(True, True, [True, False, True], id="formed"),
        pytest.param(True, False, [True, False, False], id="being formed"),
        pytest.param(False, False, [True, True, True], id="not begun on this rank, which is new"),
    ],
)
def test_only_sockets_of_the_generation_are_cut(pair, begins: bool, is_formed: bool, left: list[bool]) -> None:
    transport = GlooBackend()
    before = pair()
    if begins:
        transport.begin()
    during = pair()
    if is_formed:
        transport.formed()
    after = pair()
    transport.cut()
    assert [passes(ends) for ends in (before, during, after)] == left


def test_a_socket_that_gets_the_number_of_another_is_not_cut(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets are closed and opened by other threads while a cut goes on."""
    transport = GlooBackend()
    transport.begin()
    during = pair()
    transport.formed()
    later: list[Any] = []

    def close_and_dup(fd: int, *, dup: Callable[[int], int] = os.dup) -> int:
        if not later:
            numbers = {end.fileno() for end in during}
            for end in during:
                end.close()
            later.append(pair())
            assert {end.fileno() for end in later[0]} == numbers
        return dup(fd)

    monkeypatch.setattr(os, "dup", close_and_dup)
    transport.cut()
    monkeypatch.undo()
    assert passes(later[0])


def test_a_listening_socket_is_not_cut() -> None:
    transport = GlooBackend()
    transport.begin()
    with socket.create_server(("127.0.0.1", 0)) as server:
        transport.cut()
        socket.create_connection(server.getsockname(), WAIT_S).close()
        server.accept()[0].close()


def test_a_transport_is_quiet_once_all_bytes_are_read(pair) -> None:
    transport = GlooBackend()
    transport.begin()
    left, right = pair()
    transport.formed()
    others = pair()
    others[0].send(b"not the generation's")
    assert transport.is_quiet()
    left.send(b"late")
    transport.cut()
    assert not transport.is_quiet()
    right.recv(4)
    assert transport.is_quiet()


# NCCL's transport, on a device that is not there: what it asks of CUDA.


NCCL_SWITCHES = (
    *("TORCH_FR_BUFFER_SIZE", "NCCL_RUNTIME_CONNECT"),
    *(
        f"TORCH_NCCL_{name}"
        for name in (
            *("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "RETHROW_CUDA_ERRORS", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR"),
            *("DESYNC_DEBUG", "EXTRA_DUMP_ON_EXEC", "WAIT_TIMEOUT_DUMP_MILSEC", "TRACE_BUFFER_SIZE"),
        )
    ),
)


class FakeEvent:
    """A point in a stream, reached after some looks."""

    looks = 0

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        FakeEvent.looks -= 1
        return FakeEvent.looks <= 0


class FakeDevice:
    """A device that a thread makes its own."""

    entered: ClassVar[list[tuple[str, torch.device]]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self.entered.append((threading.current_thread().name, self._device))

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> NcclBackend:
    for name in NCCL_SWITCHES:
        monkeypatch.setenv(name, "1")  # as torchrun sets some; undone when the test ends
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    return nccl_without_cuda(monkeypatch)


def nccl_without_cuda(monkeypatch: pytest.MonkeyPatch) -> NcclBackend:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", FakeDevice)
    return NcclBackend()


def test_nccl_is_kept_from_ending_survivors(nccl: NcclBackend) -> None:
    assert {name: os.environ[name] for name in NCCL_SWITCHES} == dict.fromkeys(NCCL_SWITCHES, "0")


def test_a_watchdog_that_ends_survivors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    with pytest.raises(ConfigError, match=r"^TORCH_DISTRIBUTED_DEBUG: got 'DETAIL', wanted INFO or OFF with runtime"):
        nccl_without_cuda(monkeypatch)


def test_a_point_is_asked_for_with_its_own_device(nccl: NcclBackend) -> None:
    """A thread that has no device of its own would make a context on the first one."""
    FakeDevice.entered.clear()
    mark = nccl.mark()
    assert mark is not None
    asking = threading.Thread(target=mark.query, name="another thread")
    asking.start()
    asking.join()
    assert FakeDevice.entered == [("another thread", torch.device("cuda", 0))]


def test_launched_operations_are_waited_for_unless_all_is_over(nccl: NcclBackend) -> None:
    FakeEvent.looks = 5
    nccl.sync(lambda: False, WAIT_S)
    assert FakeEvent.looks == 0
    FakeEvent.looks = 1 << 60
    nccl.sync(lambda: True, WAIT_S)
    with pytest.raises(PeersLostError, match=r"operations on cuda:0 took more than 0\.01 s"):
        nccl.sync(lambda: False, 0.01)


class Launched:
    """An operation of NCCL for which a stream can wait."""

    def __init__(self) -> None:
        self.is_awaited = False

    def synchronize(self) -> None:
        self.is_awaited = True

    def wait(self) -> None:
        raise AssertionError("torch would abort a communicator here before the generation has ended")


def test_a_failed_operation_aborts_nothing_before_its_generation_has_ended(
    nccl: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is told by the next look at the device."""
    work, backend = Launched(), SimpleNamespace(get_error=lambda: ErrorType.SUCCESS)
    nccl.wait(work)
    assert work.is_awaited
    monkeypatch.setattr(nccl, "_made", [(backend, None)])
    FakeEvent.looks = 5
    nccl.sync(lambda: False, WAIT_S)
    backend.get_error = lambda: ErrorType.COMM_ERROR
    FakeEvent.looks = 5
    with pytest.raises(PeersLostError, match="operations on cuda:0: NCCL reports COMM_ERROR"):
        nccl.sync(lambda: False, WAIT_S)


class StuckGroup:
    """A group whose abort takes its time."""

    def __init__(self) -> None:
        self.aborts = 0
        self.may_end = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.may_end.wait(WAIT_S)


def hold(nccl: NcclBackend, *groups: StuckGroup) -> None:
    """Let these be the groups of the generation."""
    nccl._made.extend((None, group) for group in groups)


def test_a_device_is_quiet_once_all_aborts_and_all_streams_are_done(
    nccl: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained, synchronized = threading.Event(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda at: synchronized.append(at) or drained.wait(WAIT_S))
    stuck = [StuckGroup(), StuckGroup()]
    for _ in range(2):
        nccl.begin()
        hold(nccl, *stuck)
        begun_s = time.monotonic()
        for _ in range(3):
            nccl.cut()
            assert not nccl.is_quiet()
        assert not synchronized, "the device was asked before all was aborted"
        for group in stuck:
            group.may_end.set()
        assert wait_until(lambda: not nccl.is_quiet() and bool(synchronized))
        assert not nccl.is_quiet()
        drained.set()
        assert wait_until(nccl.is_quiet)
        assert time.monotonic() - begun_s < WAIT_S / 3, "a call blocked"
        assert ([group.aborts for group in stuck], synchronized) == ([1, 1], [torch.device("cuda", 0)])
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
    """A backend of NCCL whose communicator waits for a peer, unless there is `another_end` to its making."""

    made: ClassVar[list[Bootstrap]] = []
    another_end: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.blocking, self.listening, self.aborts = options.config.blocking, False, 0
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(WAIT_S / 6)  # where no cut ends it: the test's own threads do end
            self.listening = True
            try:
                (self.another_end or [server.accept])[0]()  # NCCL's waits without limit
            except OSError as error:
                raise RuntimeError(f"NCCL: accept failed: {error}") from error

    def abort(self) -> None:
        self.aborts += 1

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

    @staticmethod
    def Options() -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(config=SimpleNamespace(blocking=-1))


@pytest.fixture
def forming(nccl: NcclBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Future[Any]]]:
    """Return a function that begins to make a rank's group, in a thread."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Bootstrap, raising=False)
    monkeypatch.setattr(backends, "group_of", lambda backend, *_: backend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Bootstrap, "made", [])
    nccl.begin()

    def make(rank: int, size: int, store: dist.Store) -> Any:
        return nccl.make(store, rank, size, form_s=WAIT_S, operation_s=WAIT_S)

    with ThreadPoolExecutor(2) as threads:
        yield functools.partial(threads.submit, make)


def test_a_cut_ends_groups_that_are_being_formed(nccl: NcclBackend, forming: Callable[..., Future[Any]]) -> None:
    group = forming(0, 1, dist.HashStore())
    assert wait_until(lambda: bool(Bootstrap.made) and Bootstrap.made[0].listening)
    assert not nccl.is_quiet(), "a communicator is being made"
    nccl.cut()
    with pytest.raises(RuntimeError, match=r"accept failed: .*Invalid argument"):
        group.result(WAIT_S)
    assert Bootstrap.made[0].blocking == 1
    assert wait_until(nccl.is_quiet)
    with pytest.raises(PeersLostError, match="forming process groups"):
        forming(0, 1, dist.HashStore()).result(WAIT_S)


def test_a_group_that_is_made_as_its_generation_is_cut_is_aborted(
    nccl: NcclBackend, forming: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No handle has it, nor will one."""
    monkeypatch.setattr(Bootstrap, "another_end", [lambda: nccl.cut()])
    with pytest.raises(PeersLostError, match="forming process groups"):
        forming(0, 1, dist.HashStore()).result(WAIT_S)
    assert wait_until(lambda: Bootstrap.made[0].aborts == 1)


class WaitedForStore(dist.HashStore):
    """Notes at each wait whether a rank is making its communicator."""

    def __init__(self) -> None:
        super().__init__()
        self.makes_at_waits: list[bool] = []

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=WAIT_S)) -> None:
        self.makes_at_waits.append(any(each.listening for each in Bootstrap.made))
        super().wait(keys, timeout)


def test_ranks_meet_before_they_make_a_communicator(
    forming: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits without limit for a rank that died before it came."""
    monkeypatch.setattr(Bootstrap, "another_end", [lambda: None])
    store = WaitedForStore()
    first = forming(0, 2, store)
    assert wait_until(lambda: store.makes_at_waits == [False])
    assert not first.done()
    second = forming(1, 2, store)
    assert {first.result(WAIT_S), second.result(WAIT_S)} == set(Bootstrap.made)


def begin_an_operation(nccl: NcclBackend, operation: Callable[[], object]) -> threading.Thread:
    """Begin an operation in a thread that takes its time; return the thread once it is inside."""
    is_inside = threading.Event()

    def begin() -> None:
        with nccl.launching:
            is_inside.set()
            operation()

    thread = threading.Thread(target=begin)
    thread.start()
    assert is_inside.wait(WAIT_S)
    return thread


def test_no_group_is_aborted_while_a_thread_begins_an_operation(nccl: NcclBackend) -> None:
    """An abort frees memory that the operation reads."""
    group, may_end, seen = StuckGroup(), threading.Event(), []
    nccl.begin()
    hold(nccl, group)
    nccl.formed()
    thread = begin_an_operation(nccl, lambda: may_end.wait(WAIT_S) and seen.append(group.aborts))
    nccl.cut()
    assert not nccl.is_quiet()
    may_end.set()
    thread.join()
    assert seen == [0]
    assert wait_until(lambda: group.aborts == 1)
    group.may_end.set()


def cut_an_operation_that_waits_for_its_peer() -> int:
    """Return how often the group was aborted once the operation has failed."""
    nccl, group, failed = nccl_without_cuda(pytest.MonkeyPatch()), StuckGroup(), threading.Event()
    nccl.begin()
    with socket.create_server(("127.0.0.1", 0)) as server:
        hold(nccl, group)
        nccl.formed()

        def accept() -> None:
            try:
                server.accept()
            except OSError:
                failed.set()

        begin_an_operation(nccl, accept)
        nccl.cut()
        assert failed.wait(WAIT_S)
    wait_until(lambda: group.aborts > 0)
    return group.aborts


def test_an_operation_that_waits_for_its_peer_to_connect_is_ended_by_a_cut() -> None:
    assert run_ranks(1, cut_an_operation_that_waits_for_its_peer) == [1]


def cut_an_operation_that_never_begins() -> str:
    nccl = nccl_without_cuda(pytest.MonkeyPatch())
    nccl.begin()
    hold(nccl, StuckGroup())
    nccl.formed()
    begin_an_operation(nccl, threading.Event().wait)
    nccl.cut()
    threading.Event().wait(WAIT_S)
    return "it went on"


def test_an_operation_that_never_begins_ends_the_process_by_a_signal() -> None:
    with pytest.raises(RankFailedError, match="rank 0 died"):
        run_ranks(1, cut_an_operation_that_never_begins)


NUM_GROUPS, NUM_FIRST = 50, 10


def make_and_end_groups(kind: str) -> tuple[list[int], list[int]]:
    """Return files, threads and MiB of the device in use after the first groups of one rank, and after many."""
    if kind == "nccl":
        torch.cuda.set_device(0)
    backend = open_backend(on_gpu=kind == "nccl", kind=kind)
    counts = []
    for number in range(1, NUM_GROUPS + 1):
        backend.begin()
        group = backend.make(dist.HashStore(), 0, 1, form_s=WAIT_S, operation_s=WAIT_S)
        backend.formed()
        total = torch.full((1000,), 3.0, device=backend.device)
        for asynchronous in (False, True):
            options = dist.AllreduceOptions()
            options.asyncOp = asynchronous
            work = group.allreduce([total], options)
            if work is not None:
                work.wait()
        backend.sync(lambda: False, WAIT_S)
        assert total.sum().item() == 3000.0
        backend.cut()
        assert wait_until(backend.is_quiet)
        del group, work
        gc.collect()
        if number in (NUM_FIRST, NUM_GROUPS):
            used = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] if kind == "nccl" else 0
            counts.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), used >> 20])
    return counts[0], counts[1]


@pytest.mark.parametrize("kind", ["gloo", "staged", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_many_groups_leave_no_more_behind_than_the_first(kind: str) -> None:
    ((first, last),) = run_ranks(1, make_and_end_groups, kind, timeout_s=200.0)
    assert all(after <= before for before, after in zip(first, last, strict=True)), (first, last)
