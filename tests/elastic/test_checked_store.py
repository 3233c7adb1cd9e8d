"""A lost store is one clear error, requests count as waits, silent connections end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import pytest
import torch.distributed as dist

from launcher.proc import stands_still
from moe_ckpt.elastic.checked_store import CheckedStore, end_silent_connections
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.elastic.supervisor import start_beside
from moe_ckpt.errors import StoreLostError
from moe_ckpt.linux import thread_states
from tests.harness.gloo.processes import Child
from tests.harness.gloo.workers import NotingStore, wait_until

REQUESTS: dict[str, Callable[[dist.Store], object]] = {
    "set": lambda store: store.set("there", "1"),
    "get": lambda store: store.get("there"),
    "add": lambda store: store.add("number", 1),
    "compare_set": lambda store: store.compare_set("another", "", "1"),
    "check": lambda store: store.check(["there"]),
    "delete_key": lambda store: store.delete_key("absent"),
    "wait": lambda store: store.wait(["there"], timedelta(seconds=1)),
    "wait long": lambda store: store.wait(["there"]),
}


@pytest.fixture
def page(tmp_path: Path) -> StatusPage:
    return StatusPage(tmp_path / "page")


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=list(REQUESTS))
def test_each_request_is_answered_as_by_the_client(
    request_of: Callable[[dist.Store], object],
) -> None:
    answers = []
    for wrap in (CheckedStore, lambda client: client):
        client = dist.HashStore()
        client.set("there", "1")
        answers.append(request_of(wrap(client)))
    assert answers[0] == answers[1]


def host_a_store(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()


def ask_a_silent_store(connection: Connection, port: int) -> None:
    """Act as a supervisor that gets SIGTERM while its store does not answer."""
    store = CheckedStore(
        dist.TCPStore("127.0.0.1", port, is_master=False), heeds_signals=True
    )
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    connection.send(store.add("number", 1))
    connection.recv()
    connection.send("asks")
    store.add("number", 1)


def test_a_supervisor_is_told_to_stop_while_its_store_is_silent(
    start: Callable[..., Child],
) -> None:
    host = start(host_a_store)
    supervisor = start(ask_a_silent_store, host.hear())
    assert supervisor.hear() == 1
    os.kill(host.pid, signal.SIGSTOP)
    assert wait_until(lambda: stands_still(host.pid))
    supervisor.tell("ask")
    assert supervisor.hear() == "asks"
    assert wait_until(lambda: set(thread_states(supervisor.pid)) == {"S"}), (
        "it waits for the answer"
    )
    os.kill(supervisor.pid, signal.SIGTERM)
    assert supervisor.exit_status() == 7


def stop_as_a_request_begins(connection: Connection) -> None:
    """Act as a supervisor that gets SIGTERM as a request's thread is about to start.

    The handler saves in another process.
    """
    start = Thread.start

    def start_late(thread: Thread) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        start(thread)

    def save_and_exit(*_: object) -> None:
        os.waitpid(start_beside(lambda: 0), 0)
        os._exit(7)

    Thread.start = start_late  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, save_and_exit)
    store = CheckedStore(dist.HashStore(), heeds_signals=True)
    connection.send("asks")
    store.add("number", 1)


def test_a_supervisor_is_told_to_stop_as_a_request_begins(
    start: Callable[..., Child],
) -> None:
    supervisor = start(stop_as_a_request_begins)
    assert supervisor.hear() == "asks"
    assert supervisor.exit_status() == 7


def test_a_request_counts_as_a_wait_while_it_lasts(page: StatusPage) -> None:
    client = NotingStore(page)
    store = CheckedStore(client, page.waits)
    store.add("number", 1)
    assert (client.seen, page.waiting) == ([("add", True)], False)
    page.wait_for_copies(True)
    store.add("number", 1)
    assert client.seen == [("add", True)] * 2
    assert (page.waiting, page.communicates) == (True, False), (
        "the wait around it goes on"
    )


def test_a_failed_request_ends_its_wait(page: StatusPage) -> None:
    store = CheckedStore(dist.HashStore(), page.waits)
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(seconds=0.01))
    assert not page.waiting


@pytest.mark.parametrize("name", ["get", "add", "compare_set", "check", "wait long"])
def test_a_store_that_is_gone_is_one_clear_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = CheckedStore(dist.TCPStore("127.0.0.1", server.port, is_master=False))
    client.set("there", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    where = f"the store of the job at 127.0.0.1:{server.port} does not answer"
    del server
    with pytest.raises(
        StoreLostError,
        match=rf"{where} \([^\n]*\): its node has failed, or the network to it is cut$",
    ):
        REQUESTS[name](client)


def test_only_connections_to_that_port_end_when_they_are_silent(
    stack: ExitStack,
) -> None:
    servers = [
        stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)
    ]
    ours, another = (
        stack.enter_context(socket.create_connection(each.getsockname()))
        for each in servers
    )
    end_silent_connections(servers[0].getsockname()[1], 7.5)
    limits = [
        each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        for each in (ours, another)
    ]
    probed = [
        each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for each in (ours, another)
    ]
    assert (limits, probed) == ([7500, 0], [1, 0])
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 7.5, (
        "an idle connection is probed in time"
    )
    assert ours.getpeername() == servers[0].getsockname(), "it is still open"


def test_no_descriptor_is_left_over_from_the_search(stack: ExitStack) -> None:
    """The search duplicates descriptors, and must close the duplicates.

    A duplicate of a pipe's end would keep the pipe's reader waiting, and each search
    would double the number of duplicates.
    """
    reading, writing = os.pipe()
    stack.callback(os.close, reading)
    end_silent_connections(1, 7.5)
    os.close(writing)
    assert os.read(reading, 1) == b""
