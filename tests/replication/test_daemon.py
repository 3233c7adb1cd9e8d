"""Daemons outlive workers, end with their supervisors, and survive deleted files.

Daemons, supervisors and some workers are real processes, because the tests kill them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread, get_ident

import pytest

from moe_ckpt.elastic.supervisor import run_and_exit
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.client import DaemonClient, daemon_socket
from moe_ckpt.replication.daemon import DaemonSettings, run_daemon
from moe_ckpt.replication.fetch import fetch_blobs, list_held
from moe_ckpt.replication.messages import Address, parse_address
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, own_path
from tests.harness.gloo.processes import Child, Watch
from tests.harness.gloo.ranks import RankFailedError, run_ranks
from tests.harness.gloo.workers import wait_until
from tests.replication.blobs import buffers_of, content_of, publish
from tests.replication.peers import TICKET
from tests.waits import WAIT_S

MIB = 1 << 20
LARGE = bytes(range(250)) * (5 * MIB // 250)


def settings_of(root: Path, rank: int) -> DaemonSettings:
    """Return the settings of a rank's daemon."""
    return DaemonSettings(
        rank_folder=root / f"rank{rank:04d}",
        global_rank=rank,
        ticket=TICKET,
        host="127.0.0.1",
        timeout_s=WAIT_S,
        copy_deadline_s=WAIT_S,
    )


def supervisor_main(orders: Connection, settings: DaemonSettings) -> None:
    """Fork a daemon for each order, as a supervisor does.

    The answer to an order is the pid and the address of the daemon.
    """
    # stands for the supervisor's own handler
    signal.signal(signal.SIGTERM, lambda *_: None)
    while True:
        orders.recv()
        orders.send(fork_daemon(settings))


def fork_daemon(settings: DaemonSettings) -> tuple[int, str]:
    """Fork a daemon, and return the daemon's pid and announced address."""
    reading, writing = os.pipe()
    supervisor_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        run_and_exit(lambda: keep(settings, supervisor_pid, writing))
    os.close(writing)
    with open(reading) as announced:
        return pid, announced.readline().strip()


def keep(settings: DaemonSettings, supervisor_pid: int, writing: int) -> int:
    """Run a daemon, which writes its address to the file descriptor `writing`."""

    def announce(address: Address) -> None:
        os.write(writing, f"{address}\n".encode())

    run_daemon(
        settings,
        supervisor_pid=supervisor_pid,
        may_send=lambda: not stop_file(settings).exists(),
        announce=announce,
    )


def stop_file(settings: DaemonSettings) -> Path:
    """Return the path of a file that exists while training has bytes to send."""
    return settings.rank_folder.parent / f"busy{settings.global_rank}"


class Rank:
    """Supervisor and daemon of one rank, and clients like those of its workers."""

    def __init__(self, root: Path, rank: int, stack: ExitStack) -> None:
        self.settings = settings_of(root, rank)
        self.folder = self.settings.rank_folder
        self.folder.mkdir()
        self._stack = stack
        self.supervisor = Child(stack, supervisor_main, self.settings)
        self.start_daemon()

    def start_daemon(self) -> None:
        self.supervisor.tell("start a daemon")
        self.daemon_pid, address = self.supervisor.hear()
        self.daemon = Watch(self._stack, self.daemon_pid)
        self.address = parse_address(address)

    def kill_daemon(self) -> None:
        os.kill(self.daemon_pid, signal.SIGKILL)
        self.daemon.wait_for_end()

    def worker(self, *peers: Address) -> DaemonClient:
        client = DaemonClient(self.folder, timeout_s=WAIT_S)
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


class SlowPeer:
    """A rank whose daemon is stopped, and answers nothing until `go_on`."""

    def __init__(self, rank: Rank) -> None:
        self.address = rank.address
        self._daemon_pid = rank.daemon_pid
        os.kill(self._daemon_pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._daemon_pid, signal.SIGCONT)


@pytest.fixture
def slow_peer(ranks: list[Rank]) -> SlowPeer:
    return SlowPeer(ranks[1])


def test_copies_reach_all_peers_and_come_back(
    ranks: list[Rank], third_rank: Rank
) -> None:
    """Copies arrive even while training has bytes to send: the stop file exists."""
    stop_file(ranks[0].settings).touch()
    peers = [ranks[1], third_rank]
    worker, own = ranks[0].worker(*(peer.address for peer in peers)), ranks[0].own()
    publish(own, "a", LARGE)
    publish(own, "b", b"b")
    for future in (worker.copy(["a"]), worker.copy(["b"])):
        future.result(WAIT_S)
    shutil.rmtree(ranks[0].folder)
    for peer in peers:
        assert list_held(peer.address, TICKET, 0, timeout_s=WAIT_S) == ["a", "b"]
        again = BlobFolder(own_path(ranks[0].folder))
        assert fetch_blobs(peer.address, TICKET, 0, again, timeout_s=WAIT_S) == len(
            LARGE
        ) + 1 + 2 * len(b"header")
        assert content_of(again, "a") == (b"header", LARGE)
        only = BlobFolder(ranks[0].folder / f"only {peer.address.port}")
        fetch_blobs(
            peer.address, TICKET, 0, only, is_needed="b".__eq__, timeout_s=WAIT_S
        )
        assert only.keys() == ["b"]


def test_a_copy_that_fails_says_why(ranks: list[Rank], third_rank: Rank) -> None:
    worker, own = ranks[0].worker(), ranks[0].own()
    publish(own, "a")
    with pytest.raises(CheckpointSaveError, match="got no peers yet"):
        worker.copy(["a"]).result(WAIT_S)
    worker.use_peers([ranks[1].address, third_rank.address])
    with pytest.raises(
        CheckpointSaveError,
        match=r"copy of b, .*No such file.*; copy of b, .*No such file",
    ):
        worker.copy(["b"]).result(WAIT_S)
    third_rank.kill_daemon()
    with pytest.raises(
        CheckpointSaveError,
        match=f"^copy of a, {third_rank.address}: .*after 5 attempts$",
    ):
        worker.copy(["a"]).result(WAIT_S)
    assert ranks[1].held(0).keys() == ["a"]


def test_the_worker_goes_on_while_a_peer_is_slow(
    ranks: list[Rank], slow_peer: SlowPeer
) -> None:
    worker = ranks[0].worker(slow_peer.address)
    publish(ranks[0].own(), "a")
    copied = [worker.copy(["a"]) for _ in range(200)]
    worker.drop(["a"])
    assert not any(future.done() for future in copied)
    assert not copied[0].cancel()
    slow_peer.go_on()
    for future in copied:
        future.result(WAIT_S)


def test_a_daemon_ends_with_its_supervisor_and_not_before(ranks: list[Rank]) -> None:
    """A scheduler sends SIGTERM to all processes of a job.

    Only the supervisor decides how the job reacts.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(ranks[0].daemon_pid, number)
    assert list_held(ranks[0].address, TICKET, 1, timeout_s=WAIT_S) == []
    ranks[0].supervisor.kill()
    ranks[0].daemon.wait_for_end()
    assert list_held(ranks[1].address, TICKET, 0, timeout_s=WAIT_S) == []


def orphan_daemon(root: str) -> int:
    """Fork a daemon whose supervisor is not its parent, and return the exit status."""
    pid = os.fork()
    if pid == 0:
        run_and_exit(lambda: keep(settings_of(Path(root), 0), os.getpid(), 1))
    _, status = os.waitpid(pid, 0)
    return -os.WTERMSIG(status)


def test_a_daemon_whose_supervisor_died_before_it_began_ends_at_once(
    tmp_path: Path,
) -> None:
    assert run_ranks(1, orphan_daemon, str(tmp_path)) == [-signal.SIGKILL]
    assert list(tmp_path.iterdir()) == []


def copy_and_die(rank_folder: str, peer: str) -> None:
    """Run a worker that is killed directly after its requests for copies."""
    publish(BlobFolder(own_path(Path(rank_folder))), "a", LARGE)
    client = DaemonClient(Path(rank_folder), timeout_s=WAIT_S)
    client.use_peers([parse_address(peer)])
    for _ in range(20):
        client.copy(["a"])
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_workers_death_ends_no_daemon_and_its_successor_goes_on(
    ranks: list[Rank],
) -> None:
    peer = ranks[1]
    for _ in range(2):
        with pytest.raises(RankFailedError, match="rank 0 died"):
            run_ranks(1, copy_and_die, str(ranks[0].folder), str(peer.address))
    own = ranks[0].own()
    assert list(own.adopt()) == ["a"]
    publish(own, "b", b"b")
    ranks[0].worker(peer.address).copy(["a", "b"]).result(WAIT_S)
    assert [content_of(peer.held(0), key) for key in "ab"] == [
        (b"header", LARGE),
        (b"header", b"b"),
    ]
    assert len(buffers_of(peer.held(0))) <= 3, (
        "the second worker's `a` cut off a copy of the first's"
    )


def test_a_lost_node_starts_from_nothing_with_the_same_daemon(
    ranks: list[Rank],
) -> None:
    lost, peer = ranks
    before = lost.worker(peer.address)
    publish(lost.own(), "a", LARGE)
    before.copy(["a"]).result(WAIT_S)
    shutil.rmtree(lost.folder.rename(lost.folder.with_name("lost")))

    worker, own = lost.worker(peer.address), lost.own()
    fetch_blobs(peer.address, TICKET, 0, own, timeout_s=WAIT_S)
    publish(own, "b", b"b")
    worker.copy(["a", "b"]).result(WAIT_S)
    assert peer.held(0).keys() == ["a", "b"]
    publish(peer.own(), "c", b"c")
    peer.worker(lost.address).copy(["c"]).result(WAIT_S)
    assert lost.held(1).keys() == ["c"]


def test_a_dead_daemon_fails_its_copies_and_its_successor_has_the_peers(
    ranks: list[Rank], slow_peer: SlowPeer
) -> None:
    worker = ranks[0].worker(slow_peer.address)
    publish(ranks[0].own(), "a")
    pending = [worker.copy(["a"]) for _ in range(3)]
    ranks[0].kill_daemon()
    for future in pending:
        with pytest.raises(CheckpointSaveError, match="the daemon is gone"):
            future.result(WAIT_S)
    with pytest.raises(
        CheckpointSaveError, match=r"daemon\.sock: got no daemon: .*refused"
    ):
        worker.copy(["a"]).result(WAIT_S)
    worker.drop(["a"])
    slow_peer.go_on()
    ranks[0].start_daemon()
    worker.copy(["a"]).result(WAIT_S)
    assert ranks[1].held(0).keys() == ["a"]


def test_a_request_does_not_wait_until_earlier_ones_have_failed(
    ranks: list[Rank], slow_peer: SlowPeer
) -> None:
    """The caller may hold a lock that the callbacks of failing requests need.

    A rank's publisher is such a caller.
    """
    worker, caller = ranks[0].worker(slow_peer.address), get_ident()
    publish(ranks[0].own(), "a")
    fails, asked = Event(), Event()
    has_waited: Future[bool] = Future()

    def hold_until_asked(_: object) -> None:
        fails.set()
        while not (asked.is_set() or joins_a_thread(caller)):
            pass
        has_waited.set_result(not asked.is_set())

    worker.copy(["a"]).add_done_callback(hold_until_asked)
    ranks[0].kill_daemon()
    assert fails.wait(WAIT_S)
    again = worker.copy(["a"])
    asked.set()
    assert not has_waited.result(WAIT_S)
    assert again.exception(WAIT_S)


def joins_a_thread(ident: int) -> bool:
    """Return whether a thread waits for the end of another thread."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code is not Thread.join.__code__:
        frame = frame.f_back
    return frame is not None


def test_where_there_is_no_daemon_the_worker_is_told(tmp_path: Path) -> None:
    client = DaemonClient(tmp_path, timeout_s=0.05)
    for use in (lambda: client.use_peers([]), lambda: client.copy(["a"]).result(0)):
        with pytest.raises(
            CheckpointSaveError, match=r"daemon\.sock: got no daemon: .*No such file"
        ):
            use()
    client.close()
    with pytest.raises(CheckpointSaveError, match="was closed"):
        client.copy(["a"]).result(0)


def test_a_worker_waits_for_a_daemon_that_is_being_replaced(ranks: list[Rank]) -> None:
    ranks[0].kill_daemon()
    daemon_socket(ranks[0].folder).unlink()
    worker = ranks[0].worker()
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(worker.use_peers, [ranks[1].address])
        ranks[0].start_daemon()
        told.result(WAIT_S)
    publish(ranks[0].own(), "a")
    worker.copy(["a"]).result(WAIT_S)


def test_a_closed_clients_copies_are_still_made(ranks: list[Rank]) -> None:
    worker = ranks[0].worker(ranks[1].address)
    publish(ranks[0].own(), "a", LARGE)
    copied = worker.copy(["a"])
    worker.close()
    assert copied.done()
    assert wait_until(
        lambda: list_held(ranks[1].address, TICKET, 0, timeout_s=WAIT_S) == ["a"]
    )
    assert ranks[1].held(0).keys() == ["a"]
