"""A worker's snapshots and steps outlive the worker in a folder and on peers.

The tests check the contents of the folder, and the requests to peers and their times.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError, PeersLostError
from moe_ckpt.replication.copy_ledger import CopyLedger, NoCopies
from moe_ckpt.replication.copy_times import SentCopy
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.snapshot.blob_keys import belongs_to, is_record, newest_snapshot
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.folder_contents import read_kept
from moe_ckpt.snapshot.step_log import StepLog, StepRecord
from moe_ckpt.snapshot.windows import HostBuffers, SnapshotMemory
from moe_ckpt.types import ReadyGradients
from tests.replication.blobs import content_of, filled
from tests.snapshot.copiers import Engine, finish, held_until_waited_for
from tests.snapshot.samples import keep_window, piece, starts_of, take_window
from tests.waits import WAIT_S

GRADIENTS = ReadyGradients(overflows=(False, True), total_norm=None, loss_scale=2.0)
FACTS = json.dumps(asdict(GRADIENTS))
STEP_5 = {"step-5"}
NUMBERS = piece(torch.ones(100))


class Peers:
    """A fake of one peer, whose copies complete at once.

    Attributes:
        held: Keys of the blobs that the peer holds.
        fails: Whether copies fail.
        asked: Number of requested copies.
    """

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

    def drop(self, keys: list[str]) -> None:
        self.held -= set(keys)


class Life:
    """Publisher, snapshots and steps of one worker.

    The worker adopts the contents that an earlier worker left in the folder.

    Attributes:
        waits: True for each begin of a wait for peers, and False for each end.
    """

    def __init__(self, path: Path, peers: Peers | NoCopies) -> None:
        self.waits: list[bool] = []
        self.publisher = Publisher(BlobFolder(path), peers, 5.0, self.waits.append)
        self.buffers = HostBuffers(self.publisher.folder)
        self.memory = SnapshotMemory(self.buffers, 1, self.publisher)
        self.steps = StepLog(self.publisher)
        self.adopt()

    def adopt(self) -> None:
        kept = self.publisher.adopt()
        self.memory.adopt(kept.snapshots)
        self.steps.adopt(kept.starts, kept.records)

    def forget(self) -> None:
        """Drop all blobs, as `RankMemory.drop_published` does."""
        self.memory.clear()
        self.steps.clear()
        self.buffers.free_unused()

    def begin(self, *held: set[str], drop_stale: bool = True) -> None:
        """Begin copying to peers, of which each holds the given keys."""
        self.publisher.begin_copying(held, drop_stale=drop_stale)

    def persist(self, start: int) -> None:
        keep_window(self.memory, self.buffers, start, daemon=self.publisher)

    def log(self, iteration: int, *, after_whole_state: bool = False) -> None:
        """Log the start and the record of an iteration.

        Args:
            iteration: The iteration.
            after_whole_state: Whether a snapshot of the whole state precedes the
                iteration, so that the start is also published alone.
        """
        self.steps.log_start(iteration, {"rng": torch.full((4,), iteration)})
        if after_whole_state:
            self.steps.publish_start(iteration)
        self.steps.add(
            StepRecord(
                iteration=iteration, gradients=GRADIENTS, tied_gradient=torch.ones(2)
            )
        )

    def keys(self) -> set[str]:
        return set(self.publisher.folder.keys())


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def live(tmp_path: Path, peers: Peers) -> Callable[[], Life]:
    return lambda: Life(tmp_path / "own", peers)


@pytest.fixture
def life(live: Callable[[], Life]) -> Life:
    return live()


@pytest.fixture
def capturing(life: Life) -> Iterator[Engine]:
    """An engine that takes snapshots for the publisher of `life`."""
    capturing = Engine(daemon=life.publisher, buffers=life.buffers)
    yield capturing
    capturing.copier.close()


def test_a_successor_finds_all_that_a_worker_kept(
    life: Life, live: Callable[[], Life]
) -> None:
    life.persist(4)
    life.log(5)
    take_window(life.memory, life.buffers, 6, 1, daemon=life.publisher)
    found = live()
    assert starts_of(found.memory) == [6, 4], (
        "a complete window that was not kept may be others' newest"
    )
    record = found.steps.record(5)
    assert found.steps.start(5)["rng"].tolist() == [5] * 4
    assert (record.gradients, record.tied_gradient is None) == (GRADIENTS, False)


def test_peers_get_nothing_until_told_to_then_differences(
    life: Life, live: Callable[[], Life], peers: Peers
) -> None:
    life.begin(set())
    life.persist(4)
    life.log(5)
    before = set(peers.held)
    assert before == life.keys()

    found = live()
    found.memory.clear()
    found.steps.drop_up_to(5)
    found.log(7, after_whole_state=True)
    assert peers.held == before, "they may have the last copy of what was dropped here"
    peers.asked = 0
    found.begin(before)
    assert peers.held == {"start-7", "step-7"} == found.keys()
    assert peers.asked == 2


def test_a_snapshot_is_sent_before_training_asks_for_it(
    life: Life, capturing: Engine, peers: Peers
) -> None:
    life.begin(set())
    for number in (1, 2):
        capturing.capture(NUMBERS)
        finish(capturing.copier)
        assert peers.held == life.keys()
        assert len(peers.held) == number
        capturing.engine.collect(wait=False)
    assert life.publisher.copy_bytes_per_s() < math.inf


def test_the_time_to_reach_peers_is_known_of_snapshots_sent_to_some(life: Life) -> None:
    def sent_of(start: int) -> SentCopy | None:
        life.persist(start)
        return life.publisher.sent(life.memory.windows()[0].snapshots)

    life.begin()
    assert sent_of(2) is None, "there is no peer to send it to"
    life.begin(set())
    sent = sent_of(4)
    assert sent is not None
    assert sent.size_bytes == sum(
        each.header.payload_bytes for each in life.memory.windows()[0].snapshots
    )
    life.publisher.stop_copying()
    assert sent_of(6) is None


def test_a_torn_snapshot_is_nowhere_when_it_is_dropped(
    life: Life, capturing: Engine, peers: Peers
) -> None:
    life.begin(set())
    with held_until_waited_for(capturing.copier):
        capturing.capture(NUMBERS)
        capturing.engine.discard_torn()
    assert peers.asked == 1, "it was not copied: the test is void"
    assert peers.held == life.keys() == set()
    assert life.buffers.in_use_bytes == 0


def test_a_rank_that_has_lost_its_own_lets_peers_keep_theirs(
    life: Life, peers: Peers
) -> None:
    peers.held = {"snapshot-4-0-aa", "start-5"}
    life.begin(set(peers.held), drop_stale=False)
    assert peers.held == {"snapshot-4-0-aa", "start-5"}


def test_peers_keep_old_blobs_while_copies_of_new_ones_fail(
    life: Life, peers: Peers
) -> None:
    life.persist(6)
    peers.held, peers.fails = {"snapshot-4-0-aa"}, True
    life.begin(set(peers.held))
    assert peers.held == {"snapshot-4-0-aa"}, "it may be the last of its kind"
    life.publisher.stop_copying()
    peers.fails = False
    life.begin(set(peers.held))
    assert peers.held == life.keys()


class LatePeers(Peers):
    """Peers whose copies complete only when a test calls `answer`.

    Attributes:
        meanwhile: Called during each request.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None
        self._unanswered: list[Future[None]] = []

    def copy(self, keys: list[str]) -> Future[None]:
        self.held |= set(keys)
        self.meanwhile()
        self._unanswered.append(Future())
        return self._unanswered[-1]

    def drop(self, keys: list[str]) -> None:
        self.meanwhile()
        super().drop(keys)

    def answer(self, most: int = 100) -> None:
        """Complete the oldest copies, at most `most` of them."""
        for _ in range(most):
            # a copy that completes may begin the next one
            if self._unanswered:
                self._unanswered.pop(0).set_result(None)


def test_a_copy_that_arrives_after_peers_were_asked_does_not_stay(
    life: Life, peers: Peers
) -> None:
    """The publisher stops copying, but the daemon still sends the newest window.

    All ranks go back to the window before.
    """
    life.begin(set())
    life.persist(6)
    late = life.keys()
    life.publisher.stop_copying()
    held = set(peers.held) - late
    life.memory.clear()
    life.publisher.stop_copying()
    life.begin(held)
    assert late & peers.held == set()


def test_a_wait_for_copies_ends_as_ranks_are_lost(tmp_path: Path) -> None:
    peers = LatePeers()
    life = Life(tmp_path, peers)
    life.begin(set())
    life.log(5)
    with ThreadPoolExecutor() as training:
        copied = training.submit(life.publisher.await_copies_of_step, 5)
        while not life.waits and not copied.done():
            pass
        life.publisher.waits.interrupt()
        with pytest.raises(PeersLostError):
            copied.result(WAIT_S)
    assert life.waits == [True, False]
    life.publisher.waits.interrupt()
    with pytest.raises(PeersLostError):
        life.publisher.await_copies_of_step(5)
    life.publisher.stop_copying()
    life.begin(set())
    peers.answer()
    assert life.publisher.await_copies_of_step(5), (
        "the wait ended, the copy did not fail"
    )


def test_a_wait_for_a_disk_ends_as_ranks_are_lost(tmp_path: Path) -> None:
    life = Life(tmp_path, LatePeers())
    written = Future[None]()
    with ThreadPoolExecutor() as training:
        waiting = training.submit(life.publisher.wait_for, written)
        while not life.waits and not waiting.done():
            pass
        life.publisher.waits.interrupt()
        with pytest.raises(PeersLostError):
            waiting.result(WAIT_S)
    written.set_result(None)
    life.publisher.wait_for(written)


def test_peers_keep_old_blobs_until_the_last_new_one_has_arrived(
    tmp_path: Path,
) -> None:
    peers = LatePeers()
    life = Life(tmp_path, peers)
    life.persist(6)
    peers.held = {"snapshot-4-0-aa"}
    life.begin(set(peers.held))
    for _ in range(len(life.publisher.folder.keys()) - 1):
        peers.answer(1)
        assert "snapshot-4-0-aa" in peers.held
    peers.answer(1)
    assert peers.held == set(life.publisher.folder.keys())


@pytest.mark.parametrize(
    "while_peers", ["confirm older copies", "are told what to drop"]
)
def test_peers_are_not_told_to_forget_new_copies(
    tmp_path: Path, while_peers: str
) -> None:
    """The key of an iteration's start is the same in every process.

    An iteration that was cut off runs again, and publishes a start under the same key.
    """
    peers = LatePeers()
    life = Life(tmp_path, peers)
    life.log(4)
    peers.held = {*STEP_5, "start-6"}  # keys that the folder of this life lacks
    life.begin(set(peers.held))
    if while_peers == "confirm older copies":
        peers.meanwhile = peers.answer
        life.log(5)
    else:
        # Answers arrive on another thread. A copy that is requested meanwhile must
        # wait: otherwise peers would drop the blob after they received it.
        training = threading.Thread(target=lambda: life.log(5))

        def go_on_as_far_as_may_be() -> None:
            peers.meanwhile = lambda: None
            training.start()
            while training.is_alive() and not waits_in_ledger(training):
                pass

        peers.meanwhile = go_on_as_far_as_may_be
        peers.answer()
        training.join()
    peers.answer()
    assert life.publisher.await_copies_of_step(5)
    assert peers.held == {"step-4", *STEP_5}


def waits_in_ledger(thread: threading.Thread) -> bool:
    """Return whether a thread is inside `CopyLedger.add`, which takes the lock."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is CopyLedger.add.__code__


def test_a_blob_that_one_of_two_peers_lacks_is_copied(
    life: Life, live: Callable[[], Life], peers: Peers
) -> None:
    life.log(5, after_whole_state=True)
    life = live()
    life.begin({"start-5", *STEP_5}, {"start-5"})
    assert peers.held == STEP_5
    assert life.publisher.await_copies_of_step(5)


def test_a_start_noted_again_before_copying_is_copied_again(
    life: Life, live: Callable[[], Life], peers: Peers
) -> None:
    """Peers may hold a start from before a rollback under the same key."""
    life.log(5)
    life = live()
    life.steps.log_start(5, {"rng": torch.zeros(4)})
    life.begin({"start-5", *STEP_5})
    assert peers.held == {"start-5"}
    life.publisher.stop_copying()
    peers.held = set()
    life.begin({"start-5", *STEP_5})
    assert peers.held == set(), "once is enough"


def test_copies_that_fail_are_waited_for_once(life: Life, peers: Peers) -> None:
    life.begin(set())
    peers.fails = True
    for iteration in (5, 6):
        life.log(iteration)
        assert not life.publisher.await_copies_of_step(iteration)
        assert life.waits == [True, False], (
            "an iteration is not to wait for what has failed already"
        )
    peers.fails = False
    life.publisher.stop_copying()
    life.begin(set())
    assert life.publisher.await_copies_of_step(6)


def test_a_window_counts_as_copied_with_its_steps_only(
    life: Life, peers: Peers
) -> None:
    """A record whose copy failed is not sent again.

    No replay gets past the iteration of a missing record.
    """
    life.begin(set())
    life.log(5)
    life.persist(4)
    snapshots = life.memory.windows()[0].snapshots
    assert life.publisher.await_copies(snapshots)
    lacking = peers.held - STEP_5
    assert [
        life.publisher.num_copies(snapshots, [held]) for held in (peers.held, lacking)
    ] == [1, 0]
    peers.fails = True
    life.steps.add(life.steps.record(5))
    assert not life.publisher.awaits_copies(snapshots)
    assert not life.publisher.await_copies(snapshots)


def fetch_of(
    folder: BlobFolder, *, fail_after: int | None = None
) -> Callable[[BlobFolder], int]:
    """Return a fetch of another folder's blobs.

    Args:
        folder: The other folder.
        fail_after: Number of blobs after which the fetch fails. None: no failure.
    """

    def fetch(into: BlobFolder) -> int:
        for number, key in enumerate(folder.keys()):
            if number == fail_after:
                raise CheckpointLoadError("the peer is gone")
            header, content = content_of(folder, key)
            into.deposit(
                key,
                header,
                None if content is None else filled(into, content),
                len(content or b""),
            )
        return len(folder.keys())

    return fetch


def buffers_of(path: Path) -> list[Path]:
    return list((path / "buffers").iterdir())


@pytest.fixture
def copy(tmp_path: Path) -> BlobFolder:
    """A peer's copy of a window, with the steps of the window."""
    life = Life(tmp_path / "copy", NoCopies())
    life.persist(4)
    life.log(5, after_whole_state=True)
    return BlobFolder(tmp_path / "copy")


def test_fetched_blobs_take_the_place_of_all_others(
    life: Life, live: Callable[[], Life], copy: BlobFolder
) -> None:
    life.log(1)
    assert life.publisher.replace(fetch_of(copy), life.forget) == len(copy.keys())
    life.adopt()
    assert starts_of(life.memory) == starts_of(live().memory) == [4]
    assert not life.steps.has_start(1)


@pytest.mark.parametrize("arrived", range(4))
def test_a_fetch_that_failed_leaves_what_there_was(
    life: Life, copy: BlobFolder, arrived: int, tmp_path: Path
) -> None:
    """A copy of the folder during the fetch stands for the folder after kill -9."""
    life.persist(2)
    life.log(3)
    before, half = life.keys(), tmp_path / "half"
    num_buffers = len(buffers_of(life.publisher.folder.path))

    def die(into: BlobFolder) -> int:
        try:
            return fetch_of(copy, fail_after=arrived)(into)
        finally:
            shutil.copytree(into.path, half)

    with pytest.raises(CheckpointLoadError, match="the peer is gone"):
        life.publisher.replace(die, life.forget)
    assert life.keys() == before
    successor = Life(half, NoCopies())
    assert successor.keys() == before
    assert starts_of(successor.memory) == starts_of(life.memory) == [2]
    for path in (half, life.publisher.folder.path):
        assert len(buffers_of(path)) == num_buffers, "nothing of the fetch is left"


def test_a_death_after_all_has_arrived_leaves_what_arrived(
    life: Life, copy: BlobFolder, tmp_path: Path
) -> None:
    """Old and new blobs have the same keys, as a damaged window and its copy have."""
    for key in copy.keys():  # noqa: SIM118 - not a mapping
        header, content = content_of(copy, key)
        payload = None if content is None else filled(life.publisher.folder, content)
        life.publisher.folder.deposit(key, header, payload, len(content or b""))
    life.adopt()
    folder = life.publisher.folder
    moments = [tmp_path / "before", tmp_path / "between", tmp_path / "after"]

    def forget() -> None:
        shutil.copytree(folder.path, moments[0])
        life.forget()
        shutil.copytree(folder.path, moments[1])
        shutil.copytree(folder.path, moments[2])
        # the moment directly before the new index is in place
        shutil.rmtree(moments[2] / "index")

    life.publisher.replace(fetch_of(copy), forget)
    assert life.keys() == set(copy.keys())
    for moment in moments:
        successor = Life(moment, NoCopies())
        assert successor.keys() == set(copy.keys())
        assert starts_of(successor.memory) == [4]
        assert len(buffers_of(moment)) == len(buffers_of(copy.path))


def test_memory_that_is_taken_after_a_fetch_is_no_fetched_blob(
    life: Life, copy: BlobFolder
) -> None:
    folder, keys = life.publisher.folder, copy.keys()
    life.persist(2)
    life.publisher.replace(fetch_of(copy), life.forget)
    before = [content_of(folder, key) for key in keys]
    for _ in range(3):
        folder.allocate(400).fill_(1)
    assert [content_of(folder, key) for key in keys] == before


@pytest.mark.parametrize(
    "key", ["snapshot-1", "snapshot-a-0-bb", "local-", "snapshot-1-0-aa-2"]
)
def test_a_snapshots_key_without_its_numbers_is_one_clear_error(key: str) -> None:
    for read in (
        lambda: newest_snapshot(["snapshot-4-1-aa", key]),
        lambda: belongs_to(key, 4),
    ):
        with pytest.raises(
            CheckpointLoadError, match=f"got '{key}', wanted snapshot-START-SLOT-ID, "
        ):
            read()


def test_which_keys_belong_to_a_window() -> None:
    keys = ["snapshot-4-1-aa", "snapshot-5-0-bb", "start-4", "start-5", "step-5"]
    assert [key for key in keys if belongs_to(key, 4)] == [
        "snapshot-4-1-aa",
        "start-5",
        "step-5",
    ]
    assert newest_snapshot(keys) == 5
    assert newest_snapshot(["start-5"]) is None
    with pytest.raises(
        CheckpointLoadError, match="got 'other', wanted snapshot-START-SLOT-ID, "
    ):
        belongs_to("other", 4)


DAMAGED = ["{}", "[]", "[", '{"overflows": 3}', '{"overflows": [], "loss_scale": 1.0}']


def test_damaged_steps_are_left_out(
    copy: BlobFolder, caplog: pytest.LogCaptureFixture
) -> None:
    facts = [None, {"other": "1"}, *({"gradients": text} for text in DAMAGED)]
    heads = [save({}, metadata=each) for each in facts]
    blobs = {f"step-{number}": head for number, head in enumerate(heads, start=6)}
    blobs |= {
        "start-six": heads[0],
        "step-six": heads[0],
        "start-7": b"",
        "step-99": (2).to_bytes(8, "little") + b"[]",
    }
    for key, head in blobs.items():
        copy.publish(key, head, None, 0)
    kept = read_kept(copy)
    assert (list(kept.starts), list(kept.records)) == ([5], [5])
    assert {
        record.args[0] for record in caplog.records if isinstance(record.args, tuple)
    } == set(blobs)


def test_only_a_record_proves_progress(copy: BlobFolder) -> None:
    assert any(map(is_record, copy.keys()))
    assert not any(map(is_record, ["snapshot-0-0-aa", "start-1"]))


def test_a_copy_that_is_being_changed_is_read_as_far_as_it_is_whole(
    copy: BlobFolder,
) -> None:
    (copy.path / "index" / "start-5.blob").write_bytes(b"garbage")
    (copy.path / "index" / "step-6.blob").write_bytes(b"garbage")
    kept = read_kept(copy)
    assert [snapshot.header.slot for snapshot in kept.snapshots] == [0, 1]
    assert (list(kept.starts), list(kept.records)) == ([5], [5]), (
        "a step has its start, too"
    )


def test_a_start_that_was_published_alone_is_as_new_as_that_of_the_step(
    life: Life,
) -> None:
    life.log(5, after_whole_state=True)
    life.steps.log_start(5, {"rng": torch.zeros(4)})
    assert read_kept(life.publisher.folder).starts[5]["rng"].tolist() == [0] * 4


def test_steps_of_older_versions_become_those_of_today(
    life: Life, live: Callable[[], Life]
) -> None:
    """In older versions each start and each record was a blob of its own."""
    life.log(5, after_whole_state=True)
    life.log(6, after_whole_state=True)
    for iteration in (5, 6):
        head = save({"tied_gradient": torch.ones(2)}, metadata={"gradients": FACTS})
        life.publisher.folder.publish(f"record-{iteration}", head, None, 0)
        life.publisher.folder.withdraw(f"step-{iteration}")
    found = live()
    assert found.steps.reaches(5) == 6
    assert found.steps.record(6).gradients == GRADIENTS
    assert found.keys() == {"start-5", "start-6", "step-5", "step-6"}
    found.steps.drop_up_to(6)
    assert found.keys() == set()
