"""The keys of machines decide, once for all machines, which machine is a node.

All rules hold for torch's store and for etcd's.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch.distributed as dist

from moe_ckpt.elastic.etcd_client import EtcdClient
from moe_ckpt.elastic.etcd_store import EtcdStore
from moe_ckpt.elastic.machines import Machine, MachineBoard
from tests.elastic.etcd_server import EtcdServer
from tests.waits import WAIT_S

Connections = tuple[dist.Store, dist.Store]
Both = tuple[MachineBoard, MachineBoard]
_part = itertools.count()


@pytest.fixture(scope="module", params=["torch", "etcd"])
def connections(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Connections]:
    """Return two connections to one store."""
    if request.param == "torch":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield server, dist.TCPStore("127.0.0.1", server.port, is_master=False)
        return
    with ExitStack() as stack:
        etcd = EtcdServer(stack, tmp_path_factory.mktemp("etcd"))
        one, other = (
            stack.enter_context(
                closing(EtcdClient([("127.0.0.1", etcd.port)], "job/lease"))
            )
            for _ in range(2)
        )
        yield EtcdStore(one, "job/", WAIT_S), EtcdStore(other, "job/", WAIT_S)


@pytest.fixture
def both(connections: Connections) -> Both:
    """Return the keys as two machines see them."""
    part = f"part{next(_part)}"
    one, other = (MachineBoard(dist.PrefixStore(part, store)) for store in connections)
    return one, other


def machine(name: str, number: int) -> Machine:
    return Machine(name=name, number=number, host="127.0.0.1", port=1)


def test_one_of_two_spares_becomes_a_node_that_is_lost(both: Both) -> None:
    nodes, start = range(20), threading.Barrier(2)
    for node in nodes:
        assert both[0].become(node, "lost", after="")

    def become_all(board: MachineBoard, name: str) -> list[bool]:
        taken = []
        for node in nodes:
            start.wait(WAIT_S)
            taken.append(board.become(node, name, after="lost"))
        return taken

    with ThreadPoolExecutor(2) as threads:
        ones, others = threads.map(become_all, both, ("one", "other"))
    assert [one ^ other for one, other in zip(ones, others, strict=True)] == [True] * 20
    holders = [both[0].holder(node) for node in nodes]
    assert holders == ["one" if one else "other" for one in ones]


def test_a_lost_machine_that_comes_back_is_no_node(both: Both) -> None:
    one, other = both
    assert (one.holder(0), one.become(0, "first", after="")) == ("", True)
    assert other.become(0, "spare", after="first")
    assert not one.become(0, "first", after="")
    assert not one.become(0, "third", after="first")
    assert (one.holder(0), other.holder(0)) == ("spare", "spare")


def test_a_job_ends_once_and_for_the_first_status(both: Both) -> None:
    one, other = both
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(other.wait_for_end)
        one.end(3)
        one.end(0)
        assert (waiting.result(WAIT_S), one.wait_for_end()) == (3, 3)


def test_the_newest_machine_with_a_number_is_found(both: Both) -> None:
    one, other = both
    assert other.newest(1) is None
    for name in ("before", "after"):
        one.register(machine(name, 1))
    # torch's store does not answer a registration: only an answer shows its arrival
    assert one.newest(1) == other.newest(1) == machine("after", 1)
    assert other.machine("before") == machine("before", 1)
    one.sign("after")
    assert list(one.signs(["before", "after"])) == ["after"]
