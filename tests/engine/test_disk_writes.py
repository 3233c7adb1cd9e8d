"""Roles of windows on their way to disk, through successes and failures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from moe_ckpt.engine.disk_writes import DiskWindows, Role
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import CheckpointFailed, EventLog, WindowPersisted, read_events
from moe_ckpt.replication.copy_ledger import NoCopies
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.snapshot.blobs import BlobFolder
from tests.waits import WAIT_S


class Disk:
    """Windows on their way to a disk whose writes end when the test says so."""

    def __init__(
        self, folder: Path, *, strict: bool = False, copy_s: float = WAIT_S
    ) -> None:
        self.path = folder / "events.jsonl"
        self.events = EventLog(self.path, global_rank=0, clock_origin_unix_s=0.0)
        publisher = Publisher(
            BlobFolder(folder / "own", pinned=False), NoCopies(), copy_s, lambda _: None
        )
        self.windows = DiskWindows(publisher, self.events, strict=strict)

    @property
    def roles(self) -> tuple[int | None, int | None, int | None]:
        snapshot, persist, recovery = (self.windows.start_of(role) for role in Role)
        return snapshot, persist, recovery

    def set_out(self, window_start: int) -> Future[None]:
        self.windows.begin(window_start, to_disk=True)
        done: Future[None] = Future()
        self.windows.set_out(done)
        return done

    @property
    def is_busy(self) -> tuple[bool, bool]:
        return self.windows.is_under_way, self.windows.is_writing

    def told(self) -> list[object]:
        self.events.close()
        return [logged.event for logged in read_events(self.path)]


def test_windows_are_taken_then_written_then_there(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.windows.finish()
    assert (disk.roles, disk.is_busy) == ((None, None, None), (False, False))
    disk.windows.begin(4, to_disk=True)
    assert disk.roles == (4, None, None)
    done: Future[None] = Future()
    disk.windows.set_out(done)
    assert (disk.roles, disk.is_busy) == ((None, 4, None), (True, True))
    done.set_result(None)
    assert disk.is_busy == (True, False), "it is there, and not noted yet"
    disk.windows.finish()
    assert (disk.roles, disk.is_busy) == ((None, None, 4), (False, False))
    disk.set_out(6)
    disk.windows.begin(8, to_disk=True)
    assert disk.roles == (8, 6, 4)
    disk.windows.begin(9, to_disk=False)
    assert disk.roles == (None, 6, 4), (
        "a window that has not set out gives way to one that is not for the disk"
    )
    (persisted,) = disk.told()
    assert isinstance(persisted, WindowPersisted)
    assert persisted.window_start == 4


def lost(done: Future[None]) -> None:
    done.set_exception(CheckpointSaveError("disk full"))


def hung(_: Future[None]) -> None:
    pass


@pytest.mark.parametrize(
    ("fate", "reason"), [(lost, "disk full"), (hung, "not on disk after 0.01 s")]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_window_that_is_lost_leaves_the_one_before_it(
    fate: Callable[[Future[None]], None], reason: str, strict: bool, tmp_path: Path
) -> None:
    disk = Disk(tmp_path, strict=strict, copy_s=0.01 if fate is hung else WAIT_S)
    disk.set_out(2).set_result(None)
    disk.windows.finish()
    fate(disk.set_out(4))
    if strict:
        with pytest.raises(CheckpointSaveError, match=reason):
            disk.windows.finish()
    else:
        disk.windows.finish()
    assert disk.roles == (None, None, 2)
    disk.set_out(6).set_result(None)
    disk.windows.finish()
    assert disk.roles == (None, None, 6)
    assert disk.told()[1] == CheckpointFailed(iteration=4, reason=reason)
