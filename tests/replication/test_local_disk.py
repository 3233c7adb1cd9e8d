"""Blobs on a local disk are whole or absent, within bounds, and restored unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.replication.local_disk import persist, restore
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.token_bucket import Throttle
from tests.harness.gloo.ranks import RankFailedError, run_ranks
from tests.replication.blobs import buffers_of, content_of, publish
from tests.snapshot.copiers import Asked

FIRST, SECOND = ("start-4", "snapshot-3"), ("start-7", "snapshot-6")


@pytest.fixture
def own(tmp_path: Path) -> BlobFolder:
    """Two windows of one rank, in memory.

    Each window has a small blob without payload, and a blob whose payload of 5000 bytes
    is in a buffer of 6000 bytes.
    """
    own = BlobFolder(tmp_path / "own")
    for number, key in enumerate((*FIRST, *SECOND)):
        payload = publish(
            own,
            key,
            bytes([number]) * 6000 if key.startswith("snapshot") else None,
            key.encode(),
        )
        if payload.numel():
            own.publish(key, key.encode(), payload, 5000)
    return own


@pytest.fixture
def disk(own: BlobFolder, tmp_path: Path) -> BlobFolder:
    """A disk with the first window."""
    persist(own, tmp_path / "disk", FIRST, (), None)
    return BlobFolder(tmp_path / "disk")


def contents(folder: BlobFolder) -> dict[str, tuple[bytes, bytes | None]]:
    # a BlobFolder is no mapping
    return {key: content_of(folder, key) for key in folder.keys()}  # noqa: SIM118


def test_restored_blobs_are_those_persisted(
    own: BlobFolder, disk: BlobFolder, tmp_path: Path
) -> None:
    back = BlobFolder(tmp_path / "back")
    assert restore(disk.path, back) == len("start-4" + "snapshot-3") + 5000
    assert contents(back) == {
        key: value for key, value in contents(own).items() if key in FIRST
    }
    (buffer,) = (disk.path / "buffers").iterdir()
    os.truncate(buffer, 100)
    assert restore(disk.path, BlobFolder(tmp_path / "again")) == len("start-4"), (
        "the damaged one stays behind"
    )


def test_stale_blobs_go_and_all_others_stay(own: BlobFolder, disk: BlobFolder) -> None:
    persist(own, disk.path, SECOND, (), None)
    assert disk.keys() == sorted(FIRST + SECOND)
    persist(own, disk.path, SECOND, FIRST, None)
    assert disk.keys() == sorted(SECOND)
    assert len(buffers_of(disk)) == 1


def test_only_small_blobs_are_written_again(own: BlobFolder, disk: BlobFolder) -> None:
    before = disk.get("snapshot-3").serial
    own.publish("start-4", b"after a rollback", None, 0)
    persist(own, disk.path, FIRST, (), None)
    assert disk.get("snapshot-3").serial == before
    assert disk.get("start-4").header == b"after a rollback"


def test_blobs_on_disk_and_new_ones_have_to_fit_together(
    own: BlobFolder, disk: BlobFolder
) -> None:
    wanted = (
        r"got 5017 bytes in use and 5017 more to hold, wanted at most"
        r" ckpt.disk_budget_bytes=10033"
    )
    with pytest.raises(CheckpointSaveError, match=wanted):
        persist(own, disk.path, SECOND, (), 10_033)
    assert disk.keys() == sorted(FIRST)
    persist(own, disk.path, SECOND, (), 10_034)
    assert disk.keys() == sorted(FIRST + SECOND)


def test_writes_take_a_token_for_every_byte(own: BlobFolder, tmp_path: Path) -> None:
    throttle = Asked()
    persist(own, tmp_path / "disk", FIRST, (), None, throttle)
    assert sum(throttle.asked) == len("start-4" + "snapshot-3") + 5000


def test_a_blob_that_was_withdrawn_is_not_kept_and_the_window_before_stays(
    own: BlobFolder, disk: BlobFolder
) -> None:
    own.withdraw("snapshot-6")
    with pytest.raises(CheckpointLoadError, match="snapshot-6"):
        persist(own, disk.path, SECOND, (), None)
    assert disk.keys() == sorted(FIRST), "what was added until then takes room"


class Meanwhile(Throttle):
    """A cap that lets all bytes pass, and calls a function at one of its waits."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._left = number
        self._act = act

    def wait(self, nbytes: int, sleep: object = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


@pytest.fixture
def successor(tmp_path: Path) -> BlobFolder:
    """The memory of the rank on another node, with another window after a rollback.

    The window needs the same step as the second window of the node before.
    """
    folder = BlobFolder(tmp_path / "successor")
    publish(folder, "start-7", None, b"of the successor")
    publish(folder, "snapshot-6-of-successor", bytes(6000), b"of the successor")
    return folder


WINDOW_OF_SUCCESSOR = ("start-7", "snapshot-6-of-successor")
# before the step, before the snapshot, and while the payload is copied
MOMENTS = pytest.mark.parametrize("moment", [1, 2, 3])


@MOMENTS
def test_the_save_of_a_node_that_was_cut_off_leaves_what_its_successor_writes(
    own: BlobFolder, disk: BlobFolder, successor: BlobFolder, moment: int
) -> None:
    cut_off = Meanwhile(
        moment, lambda: persist(own, disk.path, SECOND, (), None, sweeps=False)
    )
    persist(successor, disk.path, WINDOW_OF_SUCCESSOR, (), None, cut_off)
    there = BlobFolder(disk.path)
    assert set(there.keys()) == {*FIRST, *SECOND, *WINDOW_OF_SUCCESSOR}
    for key in ("snapshot-3", "snapshot-6"):
        assert content_of(there, key) == content_of(own, key)
    snapshot = WINDOW_OF_SUCCESSOR[1]
    assert content_of(there, snapshot) == content_of(successor, snapshot)


@MOMENTS
def test_a_write_that_fails_on_a_node_before_takes_nothing_from_the_successor(
    own: BlobFolder, disk: BlobFolder, successor: BlobFolder, moment: int
) -> None:
    """The daemon of a node that was frozen goes on in the middle of a write."""

    def write_and_withdraw() -> None:
        persist(successor, disk.path, WINDOW_OF_SUCCESSOR, (), None)
        own.withdraw("snapshot-6")

    with pytest.raises(CheckpointSaveError):
        persist(own, disk.path, SECOND, (), None, Meanwhile(moment, write_and_withdraw))
    there = contents(disk)
    assert set(there) == {*FIRST, *WINDOW_OF_SUCCESSOR}
    snapshot = WINDOW_OF_SUCCESSOR[1]
    assert there[snapshot] == content_of(successor, snapshot)


def test_a_damaged_blob_is_written_again_where_nothing_is_swept(
    own: BlobFolder, disk: BlobFolder
) -> None:
    (buffer,) = (disk.path / "buffers").iterdir()
    os.truncate(buffer, 100)
    persist(own, disk.path, FIRST, (), None, sweeps=False)
    assert content_of(disk, "snapshot-3") == content_of(own, "snapshot-3")


def test_a_folder_that_cannot_be_written_says_so(
    own: BlobFolder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointSaveError, match="file"):
        persist(own, tmp_path / "file", FIRST, (), None)


def persist_and_die(own: str, disk: str, keys: Sequence[str], sync: int) -> None:
    """Persist blobs, and die at the `os.fsync` after the first `sync` calls."""
    real, left = os.fsync, [sync]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        real(fd)

    os.fsync = fsync
    persist(BlobFolder(Path(own)), Path(disk), keys, (), None)


def test_a_daemon_that_dies_at_any_moment_leaves_old_blobs_whole(
    own: BlobFolder, disk: BlobFolder
) -> None:
    wanted = contents(own)
    num_deaths, finished = 0, False
    while not finished:
        try:
            run_ranks(
                1, persist_and_die, str(own.path), str(disk.path), SECOND, num_deaths
            )
            finished = True
        except RankFailedError:
            num_deaths += 1
            there = contents(disk)
            assert there == {key: wanted[key] for key in there}
            assert set(FIRST) <= set(there)
    assert num_deaths > 2, "it never died: the test is void"
    assert contents(disk) == wanted
