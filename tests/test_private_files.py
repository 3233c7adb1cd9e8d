"""Only the user of a job can open the job's files: modes are 0600 and 0700.

Each writer sets these modes without the help of a umask. The job of
`launcher/test_elastic_ends.py` that has a second job beside it has no umask, either.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.faults.log import append_faults
from moe_ckpt.durable.checkpoint_folder import CheckpointFolder, Manifest, commit
from moe_ckpt.elastic.failures import failure_of, write_failure
from moe_ckpt.elastic.live_workers import write_live
from moe_ckpt.elastic.shared_memory import rank_memory, take_over
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.events import EventLog, write_events
from moe_ckpt.private_files import (
    bind_private,
    make_private,
    open_private,
    write_private,
)
from moe_ckpt.replication.client import daemon_socket
from moe_ckpt.replication.daemon import WorkerServer
from moe_ckpt.replication.final_save import SaveTarget, write_save_target
from moe_ckpt.run_folder import RunFolder
from moe_ckpt.run_lock import take_lock
from moe_ckpt.snapshot.codec import ShardIdentity
from moe_ckpt.types import ParallelLayout, RunIdentity
from tests.modes import no_umask, open_to_others
from tests.replication.blobs import publish
from tests.replication.peers import Ranks, copy, ranks_in


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Return the path of a folder to create, in a process without a umask."""
    with no_umask():
        yield tmp_path / "root"


def write_checkpoint(root: Path) -> None:
    directory = CheckpointFolder(root / "checkpoints").prepare(3)
    identity = RunIdentity(
        run_id="a", model="b", layout=ParallelLayout(pp=1, dp=1, ep=1, tp=1)
    )
    commit(directory, Manifest(iteration=3, identity=identity, files=()))


def write_run_folder(root: Path) -> None:
    make_private(root)
    take_lock(root)
    RunFolder(path=root, run_id="a", clock_origin_unix_s=0.0).write_result({})
    write_live(
        root,
        global_rank=0,
        node=0,
        supervisor_pid=os.getpid(),
        memory=root,
        incarnation=0,
    )
    EventLog(
        root / "events" / "rank0000.jsonl", global_rank=0, clock_origin_unix_s=0.0
    ).close()
    write_events(root / "events" / "rank0001.jsonl", [])
    append_faults(root, [])


def write_memory(root: Path) -> None:
    make_private(root)
    folder = rank_memory(root, 1)
    StatusPage(folder / "page")
    write_failure(folder / "failure", failure_of(ValueError("x"), 3))
    shard = ShardIdentity(
        global_rank=1, pp_rank=0, tp_rank=0, ep_rank=0, etp_rank=0, dp_rank=1
    )
    identity = RunIdentity(
        run_id="a", model="b", layout=ParallelLayout(pp=1, dp=2, ep=1, tp=1)
    )
    target = SaveTarget(path="disk", limit_bytes=None, identity=identity, shard=shard)
    write_save_target(folder, target)
    take_over(root, range(2, 3))


def write_copies(root: Path) -> None:
    with ranks_in(root) as ranks:
        publish(ranks.own(0), "a")
        copy(ranks.replicate(0, ranks.serve(1).address), "a")
        _serve_worker(ranks)


def _serve_worker(ranks: Ranks) -> None:
    replicator = ranks.replicate(1)
    door = WorkerServer(ranks.folder(1), replicator, timeout_s=1.0)
    try:
        assert stat.S_ISSOCK(daemon_socket(ranks.folder(1)).stat().st_mode)
        assert open_to_others(ranks.folder(1)) == []
    finally:
        door.close()


@pytest.mark.parametrize(
    "write", [write_checkpoint, write_run_folder, write_memory, write_copies]
)
def test_no_file_of_a_job_is_open_to_others(
    write: Callable[[Path], None], root: Path
) -> None:
    write(root)
    assert open_to_others(root) == []
    assert sum(path.is_file() for path in root.rglob("*")) > 0


def read_only_by_owner(path: Path) -> str:
    assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o600, os.geteuid())
    return path.read_text()


def plant_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def plant_file(path: Path, victim: Path) -> None:
    path.write_text("of a stranger")
    path.chmod(0o666)


def plant_hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


@pytest.mark.parametrize("plant", [plant_link, plant_file, plant_hard_link])
def test_what_is_planted_in_place_of_a_file_is_replaced(
    root: Path, plant: Callable[[Path, Path], None]
) -> None:
    make_private(root)
    victim, path = root / "victim", root / "file"
    victim.write_text("of the victim")
    plant(path, victim)
    write_private(path, "of the job")
    assert read_only_by_owner(path) == "of the job"
    assert not path.is_symlink()
    assert victim.read_text() == "of the victim"


@pytest.mark.parametrize("plant", [plant_link, plant_file, plant_hard_link, None])
def test_what_is_in_place_of_a_socket_is_replaced(
    root: Path, plant: Callable[[Path, Path], None] | None
) -> None:
    """Without `plant`, an earlier process has left its socket."""
    make_private(root)
    victim, path = root / "victim", root / "socket"
    victim.write_text("of the victim")
    if plant:
        plant(path, victim)
    else:
        bind_private(path).close()
    with bind_private(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert stat.S_ISSOCK(path.lstat().st_mode)
        assert open_to_others(path) == []
    assert victim.read_text() == "of the victim"


@pytest.mark.parametrize(
    "flags",
    [os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_RDONLY],
)
def test_no_link_is_opened(root: Path, flags: int) -> None:
    make_private(root)
    for name, target in (("link", "victim"), ("dangling", "nowhere")):
        (root / "victim").touch()
        (root / name).symlink_to(target)
        with pytest.raises(OSError, match="symbolic links"):
            open_private(root / name, flags)
    assert not (root / "nowhere").exists()


def test_a_folder_that_is_there_keeps_its_mode(root: Path) -> None:
    """A user may have shared a run folder on purpose."""
    root.mkdir(mode=0o750)
    make_private(root / "a" / "b")
    write_private(root / "a" / "file", b"content")
    modes = [
        path.stat().st_mode & 0o777 for path in (root, root / "a", root / "a" / "b")
    ]
    assert modes == [0o750, 0o700, 0o700]
    assert (root / "a" / "file").read_bytes() == b"content"
