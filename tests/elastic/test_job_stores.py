"""The two stores of a job, torch's and etcd's, follow the rules of generations.

One table of operations holds for both stores.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch.distributed as dist

from moe_ckpt.config import parse_endpoints
from moe_ckpt.elastic import etcd_client, etcd_store
from moe_ckpt.elastic.etcd_client import EtcdClient, read
from moe_ckpt.elastic.etcd_store import EtcdStore
from moe_ckpt.replication.messages import Address
from moe_ckpt.run_settings import runtime_config
from tests.elastic.etcd_server import EtcdServer
from tests.harness.gloo.workers import wait_until
from tests.launcher.errors import error_of
from tests.replication.proxy import Damage, Proxy
from tests.waits import WAIT_S

Connect = Callable[[str], dist.Store]
_part = itertools.count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with ExitStack() as stack:
        yield EtcdServer(stack, tmp_path_factory.mktemp("etcd"))


def client_of(etcd: EtcdServer, *before: tuple[str, int]) -> EtcdClient:
    return EtcdClient([*before, ("127.0.0.1", etcd.port)], "job/lease")


@pytest.fixture(scope="module", params=["torch", "etcd"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Return a function that opens a part of one store over a separate connection."""
    if request.param == "torch":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def open_torch(part: str) -> dist.Store:
            return dist.PrefixStore(
                part, dist.TCPStore("127.0.0.1", server.port, is_master=False)
            )

        yield open_torch
        return
    etcd: EtcdServer = request.getfixturevalue("etcd")
    with ExitStack() as stack:

        def open_etcd(part: str) -> dist.Store:
            client = stack.enter_context(closing(client_of(etcd)))
            return EtcdStore(client, f"job/{part}/", WAIT_S)

        yield open_etcd


@pytest.fixture
def part() -> str:
    """Return the name of a part of the store that no other test uses."""
    return f"part{next(_part)}"


ROWS: dict[str, tuple[list[tuple[Any, ...]], list[Any]]] = {
    "set, get": ([("set", "a", "one"), ("get", "a")], [None, b"one"]),
    "set twice": (
        [("set", "a", "one"), ("set", "a", "two"), ("get", "a")],
        [None, None, b"two"],
    ),
    "any bytes": (
        [("set", "a", bytes(range(256))), ("get", "a")],
        [None, bytes(range(256))],
    ),
    "an empty value": (
        [("set", "a", ""), ("check", ["a"]), ("get", "a")],
        [None, True, b""],
    ),
    "any key": (
        [("set", "a/\u00e4 b", "1"), ("check", ["a/\u00e4 b", "a"])],
        [None, False],
    ),
    "check": (
        [("check", ["a"]), ("set", "a", "1"), ("check", ["a"]), ("check", ["a", "b"])],
        [False, None, True, False],
    ),
    "delete": (
        [("delete_key", "a"), ("set", "a", "1"), ("delete_key", "a"), ("check", ["a"])],
        [False, None, True, False],
    ),
    "add": (
        [("add", "a", 1), ("add", "a", 2), ("add", "a", -4), ("add", "a", 0)],
        [1, 3, -1, -1],
    ),
    "add nothing": ([("add", "a", 0), ("add", "a", 1)], [0, 1]),
    "add, get": (
        [("add", "a", 12), ("get", "a"), ("set", "a", "40"), ("add", "a", 2)],
        [12, b"12", None, 42],
    ),
    "swap from nothing": ([("compare_set", "a", "", "1"), ("get", "a")], [b"1", b"1"]),
    "swap from something": (
        [("set", "a", "1"), ("compare_set", "a", "1", "2"), ("get", "a")],
        [None, b"2", b"2"],
    ),
    "no swap: another value": (
        [("set", "a", "1"), ("compare_set", "a", "0", "2"), ("get", "a")],
        [None, b"1", b"1"],
    ),
    "no swap: it exists": (
        [("set", "a", "1"), ("compare_set", "a", "", "2"), ("get", "a")],
        [None, b"1", b"1"],
    ),
    "no swap: it does not exist": (
        [("compare_set", "a", "1", "2"), ("check", ["a"])],
        [b"1", False],
    ),
    "many keys": (
        [("set", "k7", "1"), ("check", [f"k{n}" for n in range(300)])],
        [None, False],
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_operations(row: str, connect: Connect, part: str) -> None:
    store = connect(part)
    operations, wanted = ROWS[row]
    assert [
        getattr(store, name)(*arguments) for name, *arguments in operations
    ] == wanted


def test_parts_have_keys_of_their_own(connect: Connect, part: str) -> None:
    one, other = connect(part), connect(f"{part}0")
    one.set("a", "1")
    assert (one.check(["a"]), other.check(["a"])) == (True, False)


@pytest.mark.parametrize("keys", [["a"], ["there", "a"]])
def test_a_wait_for_a_key_that_does_not_come_ends(
    keys: list[str], connect: Connect, part: str
) -> None:
    store = connect(part)
    store.set("there", "1")
    since_s = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        store.wait(keys, timedelta(seconds=0.2))
    assert 0.2 <= time.monotonic() - since_s < WAIT_S / 2


@pytest.mark.parametrize("way", ["get", "wait"])
def test_a_wait_ends_with_another_connections_write(
    way: str, connect: Connect, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other connection writes `b`, then `a`, while the first connection waits."""
    # the write must wake the wait
    monkeypatch.setattr(etcd_store, "_LOOK_AGAIN_S", 2 * WAIT_S)
    one, other = connect(part), connect(part)
    writing = threading.Thread(
        target=lambda: [other.set(key, key) for key in ("b", "a")]
    )
    timer = threading.Timer(0.1, writing.start)
    timer.start()
    seen = (
        one.get("a")
        if way == "get"
        else one.wait(["a", "b"], timedelta(seconds=WAIT_S))
    )
    timer.join()
    writing.join()
    assert (seen, one.check(["a", "b"])) == (b"a" if way == "get" else None, True)


def test_each_sum_is_seen_by_one_connection_only(connect: Connect, part: str) -> None:
    """The last rank to arrive begins a generation.

    With two last ranks there would be two generations, and with none there would be no
    generation.
    """
    stores = [connect(part) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        sums = threads.map(lambda store: [store.add("n", 1) for _ in range(5)], stores)
    assert sorted(itertools.chain(*sums)) == list(range(1, 21))


def test_one_connection_wins_a_swap(connect: Connect, part: str) -> None:
    stores = [connect(part) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        seen = set(
            threads.map(lambda store, n: store.compare_set("a", "", n), stores, "1234")
        )
    assert seen == {stores[0].get("a")}


# On etcd only: lost members of a cluster, and requests that are sent again.


@pytest.fixture
def cut(etcd: EtcdServer, part: str, stack: ExitStack) -> tuple[EtcdStore, Proxy]:
    """Return a store, and the proxy before etcd, whose connections the test may cut."""
    proxy = Proxy(Address(host="127.0.0.1", port=etcd.port))
    stack.callback(proxy.close)
    client = EtcdClient([("127.0.0.1", proxy.address.port)], "job/lease")
    stack.callback(client.close)
    return EtcdStore(client, f"job/{part}/", WAIT_S), proxy


REPEATED = {
    "add": (("add", "a", 1), 2, b"2"),
    "set": (("set", "a", "7"), None, b"7"),
    "swap": (("compare_set", "a", "1", "5"), b"5", b"5"),
    "swap from nothing": (("compare_set", "b", "", "5"), b"5", b"1"),
    "check": (("check", ["a"]), True, b"1"),
}


@pytest.mark.parametrize("row", REPEATED)
def test_a_request_whose_answer_was_lost_counts_once(
    row: str, cut: tuple[EtcdStore, Proxy]
) -> None:
    store, proxy = cut
    assert (store.add("a", 1), store.check(["a"])) == (1, True)
    (name, *arguments), wanted, left = REPEATED[row]
    proxy.damages.append(Damage(offset=0, from_client=False, cut=True))
    proxy.cut_all()
    assert getattr(store, name)(*arguments) == wanted
    assert (store.get("a"), len(proxy.damages), proxy.num_connections) == (left, 0, 3)


def test_a_lost_answer_counts_once_though_others_added_meanwhile(
    etcd: EtcdServer, cut, part: str, monkeypatch
) -> None:
    """The second key of an addition proves that etcd has carried the addition out.

    The number alone proves nothing, as other additions have changed the number.
    """
    store, proxy = cut
    with closing(client_of(etcd)) as client:
        other = EtcdStore(client, f"job/{part}/", WAIT_S)
        assert (store.add("a", 1), other.add("a", 1)) == (1, 2)
        store.check(["a"])
        monkeypatch.setattr(etcd_client, "_AGAIN_S", 0.3)
        proxy.damages.append(Damage(offset=0, from_client=False, cut=True))
        proxy.cut_all()
        sums: list[int] = []
        adding = threading.Thread(target=lambda: sums.append(store.add("b", 1)))
        adding.start()
        other.wait(["b"], timedelta(seconds=WAIT_S))
        assert other.add("b", 1) == 2
        adding.join()
    assert (sums, store.add("b", 0)) == ([1], 2)


def test_a_change_between_the_look_and_the_watch_is_seen(
    etcd: EtcdServer, part: str
) -> None:
    with closing(client_of(etcd)) as client:
        store = EtcdStore(client, f"job/{part}/", WAIT_S)
        revision = client.transact([], [read(f"job/{part}/a")]).revision
        store.set("a", "1")
        since_s = time.monotonic()
        client.watch(f"job/{part}/a", revision + 1, WAIT_S)
        assert time.monotonic() - since_s < WAIT_S / 2


def test_a_member_that_is_gone_is_passed_over(etcd: EtcdServer, part: str) -> None:
    with closing(client_of(etcd, ("127.0.0.1", 1))) as client:
        store = EtcdStore(client, f"job/{part}/", WAIT_S)
        assert store.add("a", 1) == 1
        with pytest.raises(dist.DistStoreError):
            store.wait(["b"], timedelta(seconds=0.1))


def test_a_wait_outlives_a_restart_of_etcd(tmp_path, stack: ExitStack) -> None:
    etcd = EtcdServer(stack, tmp_path)
    with closing(client_of(etcd)) as waiting, closing(client_of(etcd)) as writing:
        one, other = (
            EtcdStore(waiting, "job/", WAIT_S),
            EtcdStore(writing, "job/", WAIT_S),
        )
        other.set("before", "1")
        seen: list[bytes] = []
        thread = threading.Thread(target=lambda: seen.append(one.get("after")))
        thread.start()
        etcd.kill()
        etcd.start_again()
        other.set("after", "2")
        thread.join(WAIT_S)
        assert (seen, one.check(["before"])) == ([b"2"], True)


def test_a_cluster_that_never_answers_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd_client, "_PATIENCE_S", 0.3)
    client = EtcdClient([("127.0.0.1", 1)], "job/lease")
    with pytest.raises(
        dist.DistNetworkError,
        match=r"etcd at 127.0.0.1:1: got no answer in 0.3 seconds \(Conn",
    ):
        EtcdStore(client, "job/", WAIT_S).check(["a"])


def revoke(etcd: EtcdServer, lease: str) -> None:
    request = Request(
        f"http://{etcd.endpoint}/v3/lease/revoke", json.dumps({"ID": lease}).encode()
    )
    with urlopen(request, timeout=WAIT_S) as answer:
        assert answer.status == 200


def test_all_keys_end_with_the_jobs_lease(etcd: EtcdServer, part: str) -> None:
    """Two clients, as of two processes, find one lease."""
    with ExitStack() as stack:
        to_etcd = [("127.0.0.1", etcd.port)]
        clients = [
            stack.enter_context(closing(EtcdClient(to_etcd, f"{part}/lease")))
            for _ in range(2)
        ]
        one, other = (EtcdStore(client, f"{part}/", WAIT_S) for client in clients)
        one.set("a", "1")
        other.add("b", 1)
        other.compare_set("c", "", "1")
        assert one.check(["a", "b", "c"])
        [lease] = clients[1].transact([], [read(f"{part}/lease")]).entries
        assert lease is not None
        revoke(etcd, lease.value.decode())
        assert not any(other.check([key]) for key in ("a", "b", "c", "lease"))
        with pytest.raises(dist.DistNetworkError, match="lease not found"):
            one.set("a", "1")


@pytest.mark.full
def test_keys_last_as_long_as_a_process_asks(
    etcd: EtcdServer, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_client, "_LEASE_S", 2)
    monkeypatch.setattr(etcd_client, "_RENEW_S", 0.1)
    with closing(EtcdClient([("127.0.0.1", etcd.port)], f"{part}/lease")) as client:
        store = EtcdStore(client, f"{part}/", WAIT_S)
        store.set("a", "1")
        for _ in range(8):
            with pytest.raises(dist.DistStoreError):
                store.wait(["b"], timedelta(seconds=0.5))
        assert store.check(["a"])
        monkeypatch.setattr(etcd_client, "_RENEW_S", 1000.0)
        assert wait_until(lambda: not store.check(["a"])), (
            "a lease that is not renewed does not end"
        )


@pytest.mark.parametrize(
    "members",
    ["host", "host:", "host:0", "host:70000", "a:1,,b:2", ":1", "http://host:1"],
)
def test_members_that_cannot_be_are_refused(members: str) -> None:
    assert error_of(runtime_config, etcd=members).startswith(
        f"runtime.etcd: got {members!r}, wanted HOST:PORT of one"
    )


def test_members_are_hosts_with_ports() -> None:
    assert parse_endpoints("runtime.etcd", "node-1:2379, 10.0.0.2:65535") == [
        ("node-1", 2379),
        ("10.0.0.2", 65535),
    ]
