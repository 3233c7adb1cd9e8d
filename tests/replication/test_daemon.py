"""Keepers as real processes: they outlive trainers, end with their guards, and serve on whatever is deleted."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_ckpt.elastic.supervisor import run_and_exit
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.client import KeeperClient, keeper_socket
from moe_ckpt.replication.daemon import KeeperPlace, run_keeper
from moe_ckpt.replication.fetch import fetch_blobs, list_held
from moe_ckpt.replication.messages import Address, parse_address
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, own_path
from tests.elastic.processes import WAIT_S, Child, Watch
from tests.elastic.workers import wait_until
from tests.ranks import RankFailedError, run_ranks
from tests.replication.blobs import buffers_of, content_of, publish
from tests.replication.peers import TICKET
from tests.replication.proxy import Proxy

MIB = 1 << 20
LARGE = bytes(range(250)) * (5 * MIB // 250)


def place_of(root: Path, rank: int) -> KeeperPlace:
    return KeeperPlace(
        rank_folder=root / f"rank{rank:04d}",
        global_rank=rank,
        ticket=TICKET,
        host="127.0.0.1",
        timeout_s=WAIT_S,
        copy_deadline_s=WAIT_S,
    )


def guard_main(orders: Connection, place: KeeperPlace) -> None:
    """Fork a keeper whenever told to, as a guard does; answer with its pid and address."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # the guard's own handler
    while True:
        orders.recv()
        orders.send(fork_keeper(place))


def fork_keeper(place: KeeperPlace) -> tuple[int, str]:
    reading, writing = os.pipe()
    guard_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        run_and_exit(lambda: keep(place, guard_pid, writing))
    os.close(writing)
    with open(reading) as announced:
        return pid, announced.readline().strip()


def keep(place: KeeperPlace, guard_pid: int, writing: int) -> int:
    def announce(address: Address) -> None:
        os.write(writing, f"{address}\n".encode())

    run_keeper(place, guard_pid=guard_pid, may_send=lambda: not stop_file(place).exists(), announce=announce)


def stop_file(place: KeeperPlace) -> Path:
    """Return the file that tells a keeper, as long as it is there, that training has something to send."""
    return place.rank_folder.parent / f"busy{place.global_rank}"


class Rank:
    """One rank's guard and keeper, and clients as its trainers have."""

    def __init__(self, root: Path, rank: int, stack: ExitStack) -> None:
        self.place = place_of(root, rank)
        self.folder = self.place.rank_folder
        self.folder.mkdir()
        self._stack = stack
        self.guard = Child(stack, guard_main, self.place)
        self.start_keeper()

    def start_keeper(self) -> None:
        self.guard.tell("start a keeper")
        self.keeper_pid, address = self.guard.hear()
        self.keeper = Watch(self._stack, self.keeper_pid)
        self.address = parse_address(address)

    def kill_keeper(self) -> None:
        os.kill(self.keeper_pid, signal.SIGKILL)
        self.keeper.wait_for_end()

    def trainer(self, *peers: Address) -> KeeperClient:
        client = KeeperClient(self.folder, timeout_s=WAIT_S)
        self._stack.callback(client.close)
        if peers:
            client.use_peers(peers)
        return client

    def own(self) -> BlobFolder:
        return BlobFolder(own_path(self.folder))

    def held(self, owner_rank: int) -> BlobFolder:
        return BlobFolder(held_path(self.folder, owner_rank))


@pytest.fixture
def ranks(tmp_path: Path, stack: ExitStack) -> list[Rank]:
    return [Rank(tmp_path, rank, stack) for rank in range(2)]


@pytest.fixture
def third_rank(tmp_path: Path, stack: ExitStack) -> Rank:
    return Rank(tmp_path, 2, stack)


@pytest.fixture
def slow_peer(ranks: list[Rank], stack: ExitStack) -> Proxy:
    """Return what stands between the ranks, and lets nothing pass until a test says so."""
    proxy = Proxy(ranks[1].address)
    stack.callback(proxy.close)
    proxy.may_pass.clear()
    return proxy


def test_copies_reach_all_peers_and_come_back(ranks: list[Rank], third_rank: Rank) -> None:
    """However busy training is: the file says that it is."""
    stop_file(ranks[0].place).touch()
    peers = [ranks[1], third_rank]
    trainer, own = ranks[0].trainer(*(peer.address for peer in peers)), ranks[0].own()
    publish(own, "a", LARGE)
    publish(own, "b", b"b")
    for future in (trainer.copy(["a"]), trainer.copy(["b"])):
        future.result(WAIT_S)
    shutil.rmtree(ranks[0].folder)
    for peer in peers:
        assert list_held(peer.address, TICKET, 0, timeout_s=WAIT_S) == ["a", "b"]
        again = BlobFolder(own_path(ranks[0].folder))
        assert fetch_blobs(peer.address, TICKET, 0, again, timeout_s=WAIT_S) == len(LARGE) + 1 + 2 * len(b"header")
        assert content_of(again, "a") == (b"header", LARGE)


def test_a_forgotten_blob_is_dropped_after_earlier_copies(ranks: list[Rank]) -> None:
    trainer, own = ranks[0].trainer(ranks[1].address), ranks[0].own()
    for key in ("a", "b", "c"):
        publish(own, key)
    copied = trainer.copy(["a", "b"])
    trainer.forget(["a"])
    trainer.copy(["c"]).result(WAIT_S)
    copied.result(WAIT_S)
    assert ranks[1].held(0).keys() == ["b", "c"]


def test_a_copy_that_fails_says_why(ranks: list[Rank], third_rank: Rank) -> None:
    trainer, own = ranks[0].trainer(), ranks[0].own()
    publish(own, "a")
    with pytest.raises(CheckpointSaveError, match="got no peers yet"):
        trainer.copy(["a"]).result(WAIT_S)
    trainer.use_peers([ranks[1].address, third_rank.address])
    with pytest.raises(CheckpointSaveError, match=r"copy of b, .*No such file.*; copy of b, .*No such file"):
        trainer.copy(["b"]).result(WAIT_S)
    third_rank.kill_keeper()
    with pytest.raises(CheckpointSaveError, match=f"^copy of a, {third_rank.address}: .*after 5 attempts$"):
        trainer.copy(["a"]).result(WAIT_S)
    assert ranks[1].held(0).keys() == ["a"]


def test_the_trainer_goes_on_while_a_peer_is_slow(ranks: list[Rank], slow_peer: Proxy) -> None:
    trainer = ranks[0].trainer(slow_peer.address)
    publish(ranks[0].own(), "a")
    copied = [trainer.copy(["a"]) for _ in range(200)]
    trainer.forget(["a"])
    assert not any(future.done() for future in copied)
    assert not copied[0].cancel()
    slow_peer.may_pass.set()
    for future in copied:
        future.result(WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_keeper_ends_with_its_guard(ranks: list[Rank], number: signal.Signals) -> None:
    """SIGTERM goes to the keeper itself: the guard's handler, which it was forked with, must not be called."""
    if number == signal.SIGKILL:
        ranks[0].guard.kill()
    else:
        os.kill(ranks[0].keeper_pid, number)
    ranks[0].keeper.wait_for_end()
    assert list_held(ranks[1].address, TICKET, 0, timeout_s=WAIT_S) == []


def orphan_keeper(root: str) -> int:
    """Fork a keeper whose guard is not its parent any more; return its exit status."""
    pid = os.fork()
    if pid == 0:
        run_and_exit(lambda: keep(place_of(Path(root), 0), os.getpid(), 1))
    _, status = os.waitpid(pid, 0)
    return -os.WTERMSIG(status)


def test_a_keeper_whose_guard_died_before_it_began_ends_at_once(tmp_path: Path) -> None:
    assert run_ranks(1, orphan_keeper, str(tmp_path)) == [-signal.SIGKILL]
    assert list(tmp_path.iterdir()) == []


def copy_and_die(rank_folder: str, peer: str) -> None:
    """Be a trainer that is killed as soon as it has asked for copies."""
    publish(BlobFolder(own_path(Path(rank_folder))), "a", LARGE)
    client = KeeperClient(Path(rank_folder), timeout_s=WAIT_S)
    client.use_peers([parse_address(peer)])
    for _ in range(20):
        client.copy(["a"])
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainers_death_ends_no_keeper_and_its_successor_goes_on(ranks: list[Rank]) -> None:
    peer = ranks[1]
    for _ in range(2):
        with pytest.raises(RankFailedError, match="rank 0 died"):
            run_ranks(1, copy_and_die, str(ranks[0].folder), str(peer.address))
    own = ranks[0].own()
    assert list(own.adopt()) == ["a"]
    publish(own, "b", b"b")
    ranks[0].trainer(peer.address).copy(["a", "b"]).result(WAIT_S)
    assert [content_of(peer.held(0), key) for key in "ab"] == [(b"header", LARGE), (b"header", b"b")]
    assert len(buffers_of(peer.held(0))) == 2


def test_a_lost_node_starts_from_nothing_with_the_same_keeper(ranks: list[Rank]) -> None:
    lost, peer = ranks
    before = lost.trainer(peer.address)
    publish(lost.own(), "a", LARGE)
    before.copy(["a"]).result(WAIT_S)
    shutil.rmtree(lost.folder.rename(lost.folder.with_name("lost")))

    trainer, own = lost.trainer(peer.address), lost.own()
    fetch_blobs(peer.address, TICKET, 0, own, timeout_s=WAIT_S)
    publish(own, "b", b"b")
    trainer.copy(["a", "b"]).result(WAIT_S)
    assert peer.held(0).keys() == ["a", "b"]
    publish(peer.own(), "c", b"c")
    peer.trainer(lost.address).copy(["c"]).result(WAIT_S)
    assert lost.held(1).keys() == ["c"]


def test_a_dead_keeper_fails_its_copies_and_its_successor_has_the_peers(ranks: list[Rank], slow_peer: Proxy) -> None:
    trainer = ranks[0].trainer(slow_peer.address)
    publish(ranks[0].own(), "a")
    pending = [trainer.copy(["a"]) for _ in range(3)]
    ranks[0].kill_keeper()
    for future in pending:
        with pytest.raises(CheckpointSaveError, match="the keeper is gone"):
            future.result(WAIT_S)
    with pytest.raises(CheckpointSaveError, match=r"keeper\.sock: got no keeper: .*refused"):
        trainer.copy(["a"]).result(WAIT_S)
    trainer.forget(["a"])
    slow_peer.may_pass.set()
    ranks[0].start_keeper()
    trainer.copy(["a"]).result(WAIT_S)
    assert ranks[1].held(0).keys() == ["a"]


def test_where_there_is_no_keeper_the_trainer_is_told(tmp_path: Path) -> None:
    client = KeeperClient(tmp_path, timeout_s=0.05)
    for use in (lambda: client.use_peers([]), lambda: client.copy(["a"]).result(0)):
        with pytest.raises(CheckpointSaveError, match=r"keeper\.sock: got no keeper: .*No such file"):
            use()
    client.close()
    with pytest.raises(CheckpointSaveError, match="was closed"):
        client.copy(["a"]).result(0)


def test_a_trainer_waits_for_a_keeper_that_is_being_replaced(ranks: list[Rank]) -> None:
    ranks[0].kill_keeper()
    keeper_socket(ranks[0].folder).unlink()
    trainer = ranks[0].trainer()
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(trainer.use_peers, [ranks[1].address])
        ranks[0].start_keeper()
        told.result(WAIT_S)
    publish(ranks[0].own(), "a")
    trainer.copy(["a"]).result(WAIT_S)


def test_a_closed_clients_copies_are_still_made(ranks: list[Rank]) -> None:
    trainer = ranks[0].trainer(ranks[1].address)
    publish(ranks[0].own(), "a", LARGE)
    copied = trainer.copy(["a"])
    trainer.close()
    assert copied.done()
    assert wait_until(lambda: list_held(ranks[1].address, TICKET, 0, timeout_s=WAIT_S) == ["a"])
    assert ranks[1].held(0).keys() == ["a"]
