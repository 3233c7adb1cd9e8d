"""A cut ends the sockets of its generation alone, and groups leave nothing behind."""

from __future__ import annotations

import gc
import os
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.config import STAGED
from moe_ckpt.elastic.backend_choice import open_backend
from moe_ckpt.elastic.generation_sockets import GenerationSockets, LoopSockets
from moe_ckpt.elastic.staged import register_staged
from tests.harness.gloo.backends import passes
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.gloo.workers import open_groups, own_rank, wait_until
from tests.waits import WAIT_S

# Sockets of a generation.


@pytest.fixture
def pair(stack: ExitStack) -> Callable[[], tuple[socket.socket, ...]]:
    """Return a function that opens a pair of connected sockets."""
    return lambda: tuple(map(stack.enter_context, socket.socketpair()))


@pytest.mark.parametrize(
    ("begins", "is_formed", "left"),
    [
        pytest.param(True, True, [True, False, True], id="formed"),
        pytest.param(True, False, [True, False, False], id="being formed"),
        pytest.param(
            False, False, [True, True, True], id="not begun on this rank, which is new"
        ),
    ],
)
def test_only_sockets_of_the_generation_are_cut(
    pair, begins: bool, is_formed: bool, left: list[bool]
) -> None:
    sockets = GenerationSockets()
    before = pair()
    if begins:
        sockets.begin()
    during = pair()
    if is_formed:
        sockets.formed()
    after = pair()
    sockets.shut_down()
    assert [passes(ends) for ends in (before, during, after)] == left


def test_a_socket_that_gets_the_number_of_another_is_not_cut(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads close and open sockets during a cut."""
    sockets = GenerationSockets()
    sockets.begin()
    during = pair()
    sockets.formed()
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
    sockets.shut_down()
    monkeypatch.undo()
    assert passes(later[0])


def test_a_listening_socket_is_not_cut(start: Callable[[], Loop]) -> None:
    """A loop of gloo continues to listen after a cut.

    `GenerationSockets`, for the bootstrap of a communicator, also shuts down sockets
    that listen.
    """
    sockets = LoopSockets()
    server = sockets.add(start).server
    sockets.shut_down()
    socket.create_connection(server.getsockname(), WAIT_S).close()
    server.accept()[0].close()


# Sockets that an event loop of gloo watches.


@dataclass
class Loop:
    """An epoll instance that watches a listening socket.

    A loop of gloo watches its listening socket from the start, too.
    """

    poll: select.epoll
    server: socket.socket
    stack: ExitStack

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a new connection. The loop watches the first end."""
        there = self.stack.enter_context(
            socket.create_connection(self.server.getsockname(), WAIT_S)
        )
        here = self.stack.enter_context(self.server.accept()[0])
        self.poll.register(here)
        return here, there


@pytest.fixture
def start(stack: ExitStack) -> Callable[[], Loop]:
    """Return a function that starts a loop."""

    def begin() -> Loop:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        poll = stack.enter_context(select.epoll())
        poll.register(server)
        return Loop(poll, server, stack)

    return begin


def test_connections_that_a_loop_has_opened_later_are_cut_and_no_others(
    pair, start: Callable[[], Loop]
) -> None:
    before, sockets = start(), LoopSockets()
    loop = sockets.add(start)
    after = start()
    first, second = loop.connect(), loop.connect()
    others = before.connect(), after.connect(), pair()
    sockets.shut_down()
    assert [passes(ends) for ends in (first, second, *others)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    third = loop.connect()  # the listening socket is not shut down
    assert passes(third)


def test_another_loop_with_the_number_of_one_that_has_ended_is_left_alone(
    stack: ExitStack, start: Callable[[], Loop]
) -> None:
    sockets = LoopSockets()
    loop = sockets.add(start)
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    number = loop.poll.fileno()
    loop.poll.close()
    other = Loop(stack.enter_context(select.epoll()), server, stack)
    assert other.poll.fileno() == number
    other.poll.register(server)
    ends = other.connect()
    sockets.shut_down()
    assert passes(ends)


def test_a_generation_is_quiet_once_all_bytes_are_read(
    pair, start: Callable[[], Loop]
) -> None:
    sockets = LoopSockets()
    loop = sockets.add(start)
    here, there = loop.connect()
    others = pair()
    others[0].send(b"not the generation's")
    assert not sockets.have_unread_bytes()
    there.send(b"late")
    assert wait_until(sockets.have_unread_bytes)
    here.recv(4)
    assert not sockets.have_unread_bytes()


NUM_GROUPS, NUM_FIRST = 50, 10


def make_and_end_groups(kind: str) -> tuple[list[int], list[int]]:
    """Make and end many groups of one rank, and measure the resources in use.

    Returns:
        Open files, threads, and MiB in use on the device (0 without a GPU): after the
        first NUM_FIRST groups, and after all groups.
    """
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
        backend.cut(WAIT_S)
        assert wait_until(backend.is_quiet)
        del group, work
        gc.collect()
        if number in (NUM_FIRST, NUM_GROUPS):
            used = (
                torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
                if kind == "nccl"
                else 0
            )
            counts.append(
                [
                    len(os.listdir("/proc/self/fd")),
                    len(os.listdir("/proc/self/task")),
                    used >> 20,
                ]
            )
    return counts[0], counts[1]


@pytest.mark.parametrize(
    "kind", ["gloo", "staged", pytest.param("nccl", marks=pytest.mark.gpu)]
)
def test_many_groups_leave_no_more_behind_than_the_first(kind: str) -> None:
    ((first, last),) = run_ranks(1, make_and_end_groups, kind)
    assert all(after <= before for before, after in zip(first, last, strict=True)), (
        first,
        last,
    )


# Groups of this project's classes, which torch creates.


def open_handles() -> tuple[str | None, list[float]]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    open_groups(own_rank(), 1)
    return sum_alone()


def open_staged() -> tuple[str | None, list[float]]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    register_staged()
    dist.init_process_group(STAGED, store=rank_store(), rank=0, world_size=1)
    return sum_alone()


def sum_alone() -> tuple[str | None, list[float]]:
    value = torch.ones(1)
    dist.all_reduce(value)
    return os.environ["TORCH_FR_BUFFER_SIZE"], value.tolist()


@pytest.mark.parametrize("open_world", [open_handles, open_staged])
def test_a_flight_recorder_that_the_environment_asks_for_stays_off(
    open_world: Callable[[], tuple[str | None, list[float]]],
) -> None:
    """torch 2.15 would attach the recorder to each group, under a name of its backend.

    Groups of this project have no backend with a name. The test needs a process of its
    own: torch has one world, and one list of backends, in each process.
    """
    assert run_ranks(1, open_world) == [("0", [1.0])]
