"""Which window has which role on its way to disk, through successes, failures and restarts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import CheckpointFailed, EventLog, WindowPersisted, read_events
from moe_ckpt.runtime.shelf import NOTHING
from moe_ckpt.runtime.to_disk import DiskWindows, Role
from moe_ckpt.store.blobs import BlobFolder
from moe_ckpt.store.journal import Journal, NoCopies

WAIT_S = 10.0


class Disk:
    """Windows on their way to a disk that is as fast as the test says."""

    def __init__(self, folder: Path, newest: int = NOTHING, *, strict: bool = False, copy_s: float = WAIT_S) -> None:
        self.path = folder / "events.jsonl"
        self.events = EventLog(self.path, global_rank=0, clock_origin_unix_s=0.0)
        journal = Journal(BlobFolder(folder / "own", pinned=False), NoCopies(), copy_s, lambda _: None)
        self.windows = DiskWindows(newest, journal, self.events, strict=strict)

    @property
    def roles(self) -> tuple[int, int, int]:
        snapshot, persist, recovery = (self.windows.start_of(role) for role in Role)
        return snapshot, persist, recovery

    def set_out(self, window_start: int) -> Future[None]:
        done: Future[None] = Future()
        self.windows.begin(window_start, to_disk=True)
        self.windows.set_out(done)
        return done

    def told(self) -> list[object]:
        self.events.close()
        return [logged.event for logged in read_events(self.path)]


def test_a_window_is_taken_then_written_then_there(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.roles == (NOTHING, NOTHING, NOTHING)
    disk.windows.begin(4, to_disk=True)
    assert disk.roles == (4, NOTHING, NOTHING)
    done: Future[None] = Future()
    disk.windows.set_out(done)
    assert disk.roles == (NOTHING, 4, NOTHING)
    assert disk.windows.is_under_way
    assert disk.windows.is_writing
    done.set_result(None)
    assert disk.windows.is_under_way, "nobody has noted it yet"
    assert not disk.windows.is_writing
    disk.windows.finish()
    assert disk.roles == (NOTHING, NOTHING, 4)
    assert not disk.windows.is_under_way
    (persisted,) = disk.told()
    assert isinstance(persisted, WindowPersisted)
    assert persisted.window_start == 4


def test_three_windows_have_the_three_roles(tmp_path: Path) -> None:
    disk = Disk(tmp_path, newest=2)
    disk.set_out(4)
    disk.windows.begin(6, to_disk=True)
    assert disk.roles == (6, 4, 2)


def test_a_window_that_is_not_for_the_disk_has_none_and_takes_none(tmp_path: Path) -> None:
    disk = Disk(tmp_path, newest=2)
    disk.windows.begin(4, to_disk=True)
    disk.windows.begin(5, to_disk=False)
    assert disk.roles == (NOTHING, NOTHING, 2)


def lost(done: Future[None]) -> None:
    done.set_exception(CheckpointSaveError("disk full"))


def hung(_: Future[None]) -> None:
    pass


@pytest.mark.parametrize(("fate", "reason"), [(lost, "disk full"), (hung, "not on disk after 0.01 s")])
@pytest.mark.parametrize("strict", [True, False])
def test_a_window_that_is_lost_leaves_the_one_before_it(
    fate: Callable[[Future[None]], None], reason: str, strict: bool, tmp_path: Path
) -> None:
    disk = Disk(tmp_path, newest=2, strict=strict, copy_s=0.01 if fate is hung else WAIT_S)
    fate(disk.set_out(4))
    if strict:
        with pytest.raises(CheckpointSaveError, match=reason):
            disk.windows.finish()
    else:
        disk.windows.finish()
    assert disk.roles == (NOTHING, NOTHING, 2)
    disk.set_out(6).set_result(None)
    disk.windows.finish()
    assert disk.roles == (NOTHING, NOTHING, 6)
    assert disk.told()[0] == CheckpointFailed(iteration=4, reason=reason)


def test_nothing_is_under_way_and_nothing_is_waited_for(tmp_path: Path) -> None:
    disk = Disk(tmp_path, newest=2)
    disk.windows.finish()
    assert disk.roles == (NOTHING, NOTHING, 2)
    assert disk.told() == []
