"""What outlives a trainer: its snapshots and steps in a folder, and what peers are told of them, and when."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.store.blobs import BlobFolder
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.journal import Journal, NoCopies, holds_records, read_kept
from moe_ckpt.store.memory import HostBuffers, SnapshotMemory
from moe_ckpt.store.snapshot import SnapshotEngine, Wanted
from moe_ckpt.store.steps import StepLog, StepRecord
from moe_ckpt.types import ReadyGradients
from tests.store.test_memory import persist_window, starts_of, take_window
from tests.store.test_snapshot import HEADER, held_until_waited_for, piece

GRADIENTS = ReadyGradients(overflows=(False, True), total_norm=None, loss_scale=2.0)


class Peers:
    """What one peer would hold. A copy is done at once, or fails if it `fails`."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.fails = False
        self.asked = 0

    def copy(self, keys: list[str]) -> Future[None]:
        self.asked += 1
        future: Future[None] = Future()
        if self.fails:
            future.set_exception(CheckpointSaveError("no route"))
        else:
            self.held |= set(keys)
            future.set_result(None)
        return future

    def forget(self, keys: list[str]) -> None:
        self.held -= set(keys)


class Life:
    """One trainer's means, with what an earlier one left in the folder."""

    def __init__(self, path: Path, peers: Peers | NoCopies) -> None:
        self.waits: list[bool] = []
        self.journal = Journal(BlobFolder(path), peers, 5.0, self.waits.append)
        self.buffers = HostBuffers(self.journal.folder)
        self.memory = SnapshotMemory(self.buffers, 1, self.journal)
        self.steps = StepLog(self.journal)
        self.adopt()

    def adopt(self) -> None:
        kept = self.journal.adopt()
        self.memory.adopt(kept.snapshots)
        self.steps.adopt(kept.starts, kept.records)

    def take(self, start: int, num_slots: int = 2) -> None:
        take_window(self.memory, self.buffers, start, num_slots, keeper=self.journal)

    def persist(self, start: int) -> None:
        persist_window(self.memory, self.buffers, start, keeper=self.journal)

    def log(self, iteration: int) -> None:
        self.steps.note_start(iteration, {"rng": torch.full((4,), iteration)})
        self.steps.add(StepRecord(iteration=iteration, gradients=GRADIENTS, tied_gradient=torch.ones(2)))


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def live(tmp_path: Path, peers: Peers) -> Callable[[], Life]:
    return lambda: Life(tmp_path / "own", peers)


def test_what_a_trainer_kept_its_successor_finds(live: Callable[[], Life]) -> None:
    dead = live()
    dead.persist(4)
    dead.log(5)
    dead.take(6, 1)
    found = live()
    assert starts_of(found.memory) == [6, 4], "a complete window that was not confirmed may be others' newest"
    assert found.steps.start(5)["rng"].tolist() == [5] * 4
    assert found.steps.record(5).gradients == GRADIENTS
    assert found.steps.record(5).tied_gradient is not None


def test_peers_hear_nothing_until_told_to_and_then_of_the_differences_only(
    live: Callable[[], Life], peers: Peers
) -> None:
    dead = live()
    dead.journal.begin_copying([set()], forget=True)
    dead.persist(4)
    dead.log(5)
    before = set(peers.held)
    assert before == set(dead.journal.folder.keys())

    found = live()
    found.memory.clear()
    found.steps.drop_up_to(5)
    found.log(7)
    assert peers.held == before, "they may have the last copy of what was dropped here"
    peers.asked = 0
    found.journal.begin_copying([before], forget=True)
    assert peers.held == {"start-7", "record-7"} == set(found.journal.folder.keys())
    assert peers.asked == 2


def test_a_snapshot_is_on_its_way_to_peers_before_training_asks_for_it(live: Callable[[], Life], peers: Peers) -> None:
    life, copier = live(), HostCopier()
    engine = SnapshotEngine(copier, life.buffers, life.journal)
    life.journal.begin_copying([set()], forget=True)
    engine.capture([Wanted(HEADER, lambda: [piece(torch.ones(100))])])
    copier.then(lambda: None).result(5.0)
    assert peers.held == set(life.journal.folder.keys()) != set()
    assert life.journal.copy_bytes_per_s() < math.inf

    engine.collect(wait=False)
    engine.capture([Wanted(HEADER, lambda: [piece(torch.ones(100))])])
    copier.then(lambda: None).result(5.0)
    assert len(peers.held) == 2
    copier.close()


def test_what_it_took_to_reach_peers_is_known_of_what_was_sent_to_some(live: Callable[[], Life]) -> None:
    life = live()
    life.journal.begin_copying([], forget=True)
    life.persist(2)
    assert life.journal.sent(life.memory.windows()[0].snapshots) is None, "nobody to send it to"
    life.journal.begin_copying([set()], forget=True)
    life.persist(4)
    window = life.memory.windows()[0]
    sent = life.journal.sent(window.snapshots)
    assert sent is not None
    assert sent.size_bytes == sum(snapshot.header.payload_bytes for snapshot in window.snapshots)
    life.journal.stop_copying()
    life.persist(6)
    assert life.journal.sent(life.memory.windows()[0].snapshots) is None


def test_a_torn_snapshot_is_nowhere_when_it_is_dropped(live: Callable[[], Life], peers: Peers) -> None:
    life, copier = live(), HostCopier()
    engine = SnapshotEngine(copier, life.buffers, life.journal)
    life.journal.begin_copying([set()], forget=True)
    with held_until_waited_for(copier):
        engine.capture([Wanted(HEADER, lambda: [piece(torch.ones(100))])])
        engine.discard_torn()
    assert peers.asked == 1, "it was not copied: the test is void"
    assert peers.held == set(life.journal.folder.keys()) == set()
    assert life.buffers.in_use_bytes == 0
    copier.close()


def test_a_snapshot_that_cannot_be_kept_says_so_and_leaves_nothing(live: Callable[[], Life]) -> None:
    life, copier = live(), HostCopier()
    engine = SnapshotEngine(copier, life.buffers, life.journal)
    life.journal.folder.path.mkdir(parents=True, exist_ok=True)
    (life.journal.folder.path / "index").write_text("in the way")
    engine.capture([Wanted(HEADER, lambda: [piece(torch.ones(100))])])
    with pytest.raises(CheckpointSaveError, match="index"):
        engine.collect(wait=True)
    assert engine.collect(wait=True) is None
    assert life.buffers.in_use_bytes == 0
    copier.close()


def test_who_has_lost_its_own_lets_peers_keep_theirs(live: Callable[[], Life], peers: Peers) -> None:
    peers.held = {"snapshot-4-0-aa", "start-5"}
    live().journal.begin_copying([set(peers.held)], forget=False)
    assert peers.held == {"snapshot-4-0-aa", "start-5"}


def test_peers_keep_what_they_have_until_they_have_what_takes_its_place(live: Callable[[], Life], peers: Peers) -> None:
    life = live()
    life.persist(6)
    peers.held, peers.fails = {"snapshot-4-0-aa"}, True
    life.journal.begin_copying([set(peers.held)], forget=True)
    assert peers.held == {"snapshot-4-0-aa"}, "it may be the last of its kind"
    life.journal.stop_copying()
    peers.fails = False
    life.journal.begin_copying([set(peers.held)], forget=True)
    assert peers.held == set(life.journal.folder.keys())


class LatePeers(Peers):
    """Whose answers wait until `answer`; `meanwhile` is done whenever they are asked for something."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None
        self._unanswered: list[Future[None]] = []

    def copy(self, keys: list[str]) -> Future[None]:
        self.held |= set(keys)
        self.meanwhile()
        self._unanswered.append(Future())
        return self._unanswered[-1]

    def forget(self, keys: list[str]) -> None:
        self.meanwhile()
        super().forget(keys)

    def answer(self) -> None:
        answers, self._unanswered = self._unanswered, []
        for answer in answers:
            answer.set_result(None)


def _about_to_forget_a_start(path: Path, peers: LatePeers) -> Life:
    """Return the life of a trainer whose peers hold what iteration 5 starts from, which it does not; others do, too."""
    life = Life(path, peers)
    life.log(4)
    peers.held = {"start-5", "record-5", "start-6"}
    life.journal.begin_copying([set(peers.held)], forget=True)
    return life


def test_peers_keep_what_they_get_while_older_copies_are_confirmed(tmp_path: Path) -> None:
    """What an iteration starts from has one name, whoever kept it, and an iteration that was cut off comes again."""
    peers = LatePeers()
    life = _about_to_forget_a_start(tmp_path, peers)
    peers.meanwhile = peers.answer
    life.log(5)
    peers.answer()
    assert life.journal.has_copies_of_step(5)
    assert peers.held == {"start-4", "record-4", "start-5", "record-5"}


def test_peers_keep_what_they_get_while_they_are_told_what_to_forget(tmp_path: Path) -> None:
    """Answers come in another thread: who asks for a copy then has to wait, or peers would forget it after that."""
    peers = LatePeers()
    life = _about_to_forget_a_start(tmp_path, peers)
    training = threading.Thread(target=lambda: life.log(5))

    def go_on_as_far_as_may_be() -> None:
        peers.meanwhile = lambda: None
        training.start()
        training.join(0.2)  # it waits for what is being done here

    peers.meanwhile = go_on_as_far_as_may_be
    peers.answer()
    training.join()
    peers.answer()
    assert peers.held == {"start-4", "record-4", "start-5", "record-5"}


def test_what_one_of_two_peers_lacks_is_copied(live: Callable[[], Life], peers: Peers) -> None:
    live().log(5)
    life = live()
    life.journal.begin_copying([{"start-5", "record-5"}, {"start-5"}], forget=True)
    assert peers.held == {"record-5"}
    assert life.journal.has_copies_of_step(5)


def test_what_was_noted_again_before_copying_is_copied_again(live: Callable[[], Life], peers: Peers) -> None:
    """Under its name peers may hold what the iteration started from before all went elsewhere."""
    live().log(5)
    life = live()
    life.steps.note_start(5, {"rng": torch.zeros(4)})
    life.journal.begin_copying([{"start-5", "record-5"}], forget=True)
    assert peers.held == {"start-5"}
    life.journal.stop_copying()
    peers.held = set()
    life.journal.begin_copying([{"start-5", "record-5"}], forget=True)
    assert peers.held == set(), "once is enough"


def test_copies_that_fail_are_waited_for_once(live: Callable[[], Life], peers: Peers) -> None:
    life = live()
    life.journal.begin_copying([set()], forget=True)
    peers.fails = True
    life.log(5)
    assert not life.journal.has_copies_of_step(5)
    assert life.waits == [True, False]
    life.log(6)
    assert not life.journal.has_copies_of_step(6)
    assert life.waits == [True, False], "an iteration is not to wait for what has failed already"
    peers.fails = False
    life.journal.stop_copying()
    life.journal.begin_copying([set()], forget=True)
    assert life.journal.has_copies_of_step(6)


def _fetch_of(folder: BlobFolder, *, fail_after: int | None = None) -> Callable[[BlobFolder], int]:
    """Return a fetch of what another folder holds, which fails after some blobs."""

    def fetch(into: BlobFolder) -> int:
        for number, key in enumerate(folder.keys()):
            if number == fail_after:
                raise CheckpointLoadError("the peer is gone")
            blob = folder.get(key)
            payload = None
            if blob.payload is not None:
                payload = into.allocate(blob.payload_bytes)
                payload.copy_(blob.payload[: blob.payload_bytes])
            into.deposit(key, blob.header, payload, blob.payload_bytes)
        return len(folder.keys())

    return fetch


@pytest.fixture
def copy(tmp_path: Path) -> BlobFolder:
    """A peer's copy of a window and its steps."""
    life = Life(tmp_path / "copy", NoCopies())
    life.persist(4)
    life.log(5)
    return BlobFolder(tmp_path / "copy")


def test_what_was_fetched_takes_the_place_of_all_that_was_there(live: Callable[[], Life], copy: BlobFolder) -> None:
    life = live()
    life.log(1)
    assert life.journal.replace(_fetch_of(copy)) == len(copy.keys())
    life.steps = StepLog(life.journal)
    life.adopt()
    assert starts_of(life.memory) == [4]
    assert not life.steps.has_start(1)
    assert starts_of(live().memory) == [4]


@pytest.mark.parametrize("arrived", range(4))
def test_nothing_is_made_of_a_fetch_that_failed(live: Callable[[], Life], copy: BlobFolder, arrived: int) -> None:
    life = live()
    with pytest.raises(CheckpointLoadError, match="the peer is gone"):
        life.journal.replace(_fetch_of(copy, fail_after=arrived))
    assert life.journal.folder.keys() == []


@pytest.mark.parametrize("arrived", range(4))
def test_nothing_is_made_of_a_fetch_that_died_with_its_trainer(
    live: Callable[[], Life], copy: BlobFolder, arrived: int, tmp_path: Path
) -> None:
    """As the folder is while a fetch goes on, copied away, so is it after kill -9."""
    half = tmp_path / "half"

    def die(into: BlobFolder) -> int:
        try:
            return _fetch_of(copy, fail_after=arrived)(into)
        except CheckpointLoadError:
            shutil.copytree(into.path, half)
            raise

    with pytest.raises(CheckpointLoadError):
        live().journal.replace(die)
    successor = Life(half, NoCopies())
    assert successor.journal.folder.keys() == []
    assert (starts_of(successor.memory), successor.steps.size_bytes) == ([], 0)


def test_a_record_is_what_proves_progress(copy: BlobFolder) -> None:
    assert holds_records(copy.keys())
    assert not holds_records(["snapshot-0-0-aa", "start-1"])


def test_a_copy_that_is_being_changed_is_read_as_far_as_it_is_whole(copy: BlobFolder) -> None:
    (copy.path / "index" / "start-5.blob").write_bytes(b"garbage")
    kept = read_kept(copy)
    assert [snapshot.header.slot for snapshot in kept.snapshots] == [0, 1]
    assert kept.starts == {}
    assert list(kept.records) == [5]
