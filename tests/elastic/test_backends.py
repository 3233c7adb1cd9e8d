"""What belongs to a generation's transport: its sockets, and NCCL's way of ending."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.elastic.backend_choice import open_backend
from moe_ckpt.elastic.backends import GlooBackend, NcclBackend
from moe_ckpt.errors import PeersLostError
from tests.elastic.transports import passes
from tests.elastic.workers import wait_until
from tests.ranks import RankFailedError, run_ranks
from tests.waits import WAIT_S

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
    transport.cut([])
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
    transport.cut([])
    monkeypatch.undo()
    assert passes(later[0])


def test_a_listening_socket_is_not_cut() -> None:
    transport = GlooBackend()
    transport.begin()
    with socket.create_server(("127.0.0.1", 0)) as server:
        transport.cut([])
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
    transport.cut([])
    assert not transport.is_quiet()
    right.recv(4)
    assert transport.is_quiet()


# NCCL's transport, on a device that is not there: what it asks of CUDA.


NCCL_SWITCHES = tuple(
    f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR")
)


class FakeEvent:
    """A point in a stream, reached after some looks."""

    looks = 0

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        FakeEvent.looks -= 1
        return FakeEvent.looks <= 0


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> NcclBackend:
    for name in NCCL_SWITCHES:
        monkeypatch.setenv(name, "1")  # as torchrun does; undone when the test ends
    return nccl_without_cuda(monkeypatch)


def nccl_without_cuda(monkeypatch: pytest.MonkeyPatch) -> NcclBackend:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return NcclBackend()


def test_nccl_is_kept_from_ending_survivors(nccl: NcclBackend) -> None:
    assert {name: os.environ[name] for name in NCCL_SWITCHES} == dict.fromkeys(NCCL_SWITCHES, "0")


def test_launched_operations_are_waited_for_unless_all_is_over(nccl: NcclBackend) -> None:
    FakeEvent.looks = 5
    nccl.sync(lambda: False, WAIT_S)
    assert FakeEvent.looks == 0
    FakeEvent.looks = 1 << 60
    nccl.sync(lambda: True, WAIT_S)
    with pytest.raises(PeersLostError, match=r"operations on cuda:0 took more than 0\.01 s"):
        nccl.sync(lambda: False, 0.01)


class StuckGroup:
    """A group whose abort takes its time."""

    def __init__(self) -> None:
        self.aborts = 0
        self.may_end = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.may_end.wait(WAIT_S)


def test_a_device_is_quiet_once_all_aborts_and_all_streams_are_done(
    nccl: NcclBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained, synchronized = threading.Event(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda at: synchronized.append(at) or drained.wait(WAIT_S))
    stuck = [StuckGroup(), StuckGroup()]
    for _ in range(2):
        nccl.begin()
        begun_s = time.monotonic()
        for _ in range(3):
            nccl.cut(stuck)
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


class BootstrappingBackend:
    """A backend of NCCL whose peer never comes: only an abort ends its forming."""

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.blocking = options.config.blocking
        self.waits, self.aborted = threading.Event(), threading.Event()
        made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.waits.set()
        if self.aborted.wait(2.0):
            raise RuntimeError("NCCL communicator was aborted")

    def abort(self) -> None:
        self.aborted.set()

    @staticmethod
    def Options() -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(config=SimpleNamespace(blocking=1))


made: list[BootstrappingBackend] = []


def test_a_cut_aborts_groups_that_are_being_formed(nccl: NcclBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", BootstrappingBackend, raising=False)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800")
    nccl.begin()
    with ThreadPoolExecutor(1) as forming:
        group = forming.submit(nccl.make, dist.HashStore(), 0, 2, form_s=7.5, operation_s=WAIT_S)
        assert wait_until(lambda: bool(made) and made[0].waits.is_set())
        nccl.cut([])
        with pytest.raises(RuntimeError, match="was aborted"):
            group.result(WAIT_S)
    assert (made[0].blocking, os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) == (0, "8")
    with pytest.raises(PeersLostError, match="forming process groups"):
        nccl.make(dist.HashStore(), 0, 2, form_s=7.5, operation_s=WAIT_S)


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
        backend.cut([group])
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
