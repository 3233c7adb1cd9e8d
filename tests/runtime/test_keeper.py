"""Keepers as real processes: they outlive trainers, end with their guards, and serve on whatever is deleted."""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.runtime.guard import run_and_exit
from moe_ckpt.runtime.keeper import KeeperPlace, run_keeper
from moe_ckpt.store.blobs import BlobFolder, held_path, own_path
from moe_ckpt.store.fetch import fetch_blobs, list_held
from moe_ckpt.store.keeper_client import KeeperClient, keeper_socket
from moe_ckpt.store.messages import Address, parse_address
from tests.ranks import RankFailedError, run_ranks
from tests.store.blobs import buffers_of, content_of, publish
from tests.store.peers import TICKET
from tests.store.proxy import Proxy
from tests.waits import START_S

WAIT_S = 30.0
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


def guard_main(place: KeeperPlace, orders: Connection) -> None:
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
        self.place.rank_folder.mkdir()
        self._stack = stack
        context = multiprocessing.get_context("forkserver")
        self._orders, guards_end = context.Pipe()
        self.guard = context.Process(target=guard_main, args=(self.place, guards_end))
        self.guard.start()
        guards_end.close()
        stack.callback(self._end)
        self.start_keeper()

    def start_keeper(self) -> None:
        self._orders.send("start a keeper")
        assert self._orders.poll(START_S)
        self.keeper_pid, address = self._orders.recv()
        self.address = parse_address(address)

    def kill_keeper(self, number: int = signal.SIGKILL) -> None:
        pidfd = os.pidfd_open(self.keeper_pid)
        os.kill(self.keeper_pid, number)
        wait_for_end(pidfd)

    def trainer(self) -> KeeperClient:
        client = KeeperClient(self.place.rank_folder, timeout_s=WAIT_S)
        self._stack.callback(client.close)
        return client

    def own(self) -> BlobFolder:
        return BlobFolder(own_path(self.place.rank_folder))

    def held(self, owner_rank: int) -> BlobFolder:
        return BlobFolder(held_path(self.place.rank_folder, owner_rank))

    def _end(self) -> None:
        self.guard.kill()
        self.guard.join()
        self.guard.close()
        self._orders.close()


def wait_for_end(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(1000 * WAIT_S), "a process lives on"
    os.close(pidfd)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def ranks(tmp_path: Path, stack: ExitStack) -> list[Rank]:
    return [Rank(tmp_path, rank, stack) for rank in range(2)]


@pytest.fixture
def third_rank(tmp_path: Path, stack: ExitStack) -> Rank:
    return Rank(tmp_path, 2, stack)


def test_a_trainers_copies_reach_all_peers_and_come_back(ranks: list[Rank], third_rank: Rank) -> None:
    trainer, own = ranks[0].trainer(), ranks[0].own()
    publish(own, "a", LARGE)
    publish(own, "b", b"b")
    peers = [ranks[1], third_rank]
    trainer.use_peers([peer.address for peer in peers])
    for future in (trainer.copy(["a"]), trainer.copy(["b"])):
        future.result(WAIT_S)
    shutil.rmtree(ranks[0].place.rank_folder)
    for peer in peers:
        assert list_held(peer.address, TICKET, 0, timeout_s=WAIT_S) == ["a", "b"]
        again = BlobFolder(own_path(ranks[0].place.rank_folder))
        assert fetch_blobs(peer.address, TICKET, 0, again, timeout_s=WAIT_S) == len(LARGE) + 1 + 2 * len(b"header")
        assert content_of(again, "a") == (b"header", LARGE)


def test_what_is_forgotten_is_dropped_after_what_was_copied_before(ranks: list[Rank]) -> None:
    trainer, own = ranks[0].trainer(), ranks[0].own()
    trainer.use_peers([ranks[1].address])
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


def test_the_trainer_goes_on_while_a_peer_is_slow(ranks: list[Rank], stack: ExitStack) -> None:
    proxy = Proxy(ranks[1].address)
    stack.callback(proxy.close)
    proxy.may_pass.clear()
    trainer, own = ranks[0].trainer(), ranks[0].own()
    trainer.use_peers([proxy.address])
    publish(own, "a")
    copied = [trainer.copy(["a"]) for _ in range(200)]
    trainer.forget(["a"])
    assert not any(future.done() for future in copied)
    assert not copied[0].cancel()
    proxy.may_pass.set()
    for future in copied:
        future.result(WAIT_S)


def test_a_copy_goes_on_however_busy_training_is(ranks: list[Rank]) -> None:
    stop_file(ranks[0].place).touch()
    trainer = ranks[0].trainer()
    trainer.use_peers([ranks[1].address])
    publish(ranks[0].own(), "a", LARGE)
    trainer.copy(["a"]).result(WAIT_S)
    assert content_of(ranks[1].held(0), "a") == (b"header", LARGE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_keeper_ends_with_its_guard(ranks: list[Rank], number: signal.Signals) -> None:
    """SIGTERM goes to the keeper itself: the guard's handler, which it was forked with, must not be called."""
    keeper = os.pidfd_open(ranks[0].keeper_pid)
    if number == signal.SIGKILL:
        ranks[0].guard.kill()
    else:
        os.kill(ranks[0].keeper_pid, number)
    wait_for_end(keeper)
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


def test_a_trainers_death_is_no_ones_elses_and_its_successor_goes_on(ranks: list[Rank]) -> None:
    folder, peer = ranks[0].place.rank_folder, ranks[1]
    for _ in range(3):
        with pytest.raises(RankFailedError, match="rank 0 died"):
            run_ranks(1, copy_and_die, str(folder), str(peer.address))
    own = ranks[0].own()
    assert list(own.adopt()) == ["a"]
    trainer = ranks[0].trainer()
    trainer.use_peers([peer.address])
    publish(own, "b", b"b")
    trainer.copy(["a", "b"]).result(WAIT_S)
    assert content_of(peer.held(0), "a") == (b"header", LARGE)
    assert content_of(peer.held(0), "b") == (b"header", b"b")
    assert len(buffers_of(peer.held(0))) == 2


def test_a_lost_node_starts_from_nothing_with_the_same_keeper(ranks: list[Rank]) -> None:
    lost, peer = ranks[0], ranks[1]
    before = lost.trainer()
    before.use_peers([peer.address])
    publish(lost.own(), "a", LARGE)
    before.copy(["a"]).result(WAIT_S)
    lost_folder = lost.place.rank_folder.rename(lost.place.rank_folder.with_name("lost"))
    shutil.rmtree(lost_folder)

    trainer, own = lost.trainer(), lost.own()
    trainer.use_peers([peer.address])
    fetch_blobs(peer.address, TICKET, 0, own, timeout_s=WAIT_S)
    publish(own, "b", b"b")
    trainer.copy(["a", "b"]).result(WAIT_S)
    assert peer.held(0).keys() == ["a", "b"]
    other = peer.trainer()
    publish(peer.own(), "c", b"c")
    other.use_peers([lost.address])
    other.copy(["c"]).result(WAIT_S)
    assert lost.held(1).keys() == ["c"]


def test_a_dead_keeper_fails_its_copies_and_its_successor_has_the_peers(ranks: list[Rank], stack: ExitStack) -> None:
    proxy = Proxy(ranks[1].address)
    stack.callback(proxy.close)
    proxy.may_pass.clear()
    trainer = ranks[0].trainer()
    trainer.use_peers([proxy.address])
    publish(ranks[0].own(), "a")
    pending = [trainer.copy(["a"]) for _ in range(3)]
    ranks[0].kill_keeper()
    for future in pending:
        with pytest.raises(CheckpointSaveError, match="the keeper is gone"):
            future.result(WAIT_S)
    with pytest.raises(CheckpointSaveError, match=r"keeper\.sock: got no keeper: .*refused"):
        trainer.copy(["a"]).result(WAIT_S)
    trainer.forget(["a"])
    proxy.may_pass.set()
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
    keeper_socket(ranks[0].place.rank_folder).unlink()
    trainer = ranks[0].trainer()
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(trainer.use_peers, [ranks[1].address])
        ranks[0].start_keeper()
        told.result(WAIT_S)
    publish(ranks[0].own(), "a")
    trainer.copy(["a"]).result(WAIT_S)


def test_what_a_closed_client_had_asked_for_is_still_done(ranks: list[Rank]) -> None:
    trainer = ranks[0].trainer()
    trainer.use_peers([ranks[1].address])
    publish(ranks[0].own(), "a", LARGE)
    copied = trainer.copy(["a"])
    trainer.close()
    assert copied.done()
    deadline_s = time.monotonic() + WAIT_S
    while not list_held(ranks[1].address, TICKET, 0, timeout_s=WAIT_S) and time.monotonic() < deadline_s:
        pass
    assert ranks[1].held(0).keys() == ["a"]
