"""Live workers: the files of workers are compared with the processes that exist."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launcher.proc import stands_still
from moe_ckpt.elastic.live_workers import (
    is_running,
    read_live,
    read_written,
    remove_live,
    write_live,
)
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.linux import boot_id, is_alive, pid_namespace, start_ticks
from tests.harness.jobs.walking_job import rewrite_live


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in which this process is rank 3."""
    StatusPage(tmp_path / "page")
    write_live(
        tmp_path,
        global_rank=3,
        node=1,
        supervisor_pid=os.getppid(),
        memory=tmp_path,
        incarnation=2,
    )
    return tmp_path


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, but leave a zombie."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_the_calling_process_is_written(run: Path) -> None:
    (worker,) = read_live(run)
    assert asdict(worker) == {
        "global_rank": 3,
        "node": 1,
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": pid_namespace(),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "supervisor_pid": os.getppid(),
        "supervisor_start_ticks": start_ticks(os.getppid()),
        "memory": str(run),
        "incarnation": 2,
    }
    assert [path.name for path in (run / "live").iterdir()] == ["rank0003.json"]


def test_workers_come_by_rank_in_their_newest_incarnation_and_go(run: Path) -> None:
    for rank in (11, 0, 3):
        write_live(
            run, global_rank=rank, node=0, supervisor_pid=1, memory=run, incarnation=5
        )
    assert [(worker.global_rank, worker.incarnation) for worker in read_live(run)] == [
        (0, 5),
        (3, 5),
        (11, 5),
    ]
    for rank in (0, 11, 11):
        remove_live(run, rank)
    assert [worker.global_rank for worker in read_written(run)] == [3]


@pytest.mark.parametrize(
    ("changes", "running"),
    [
        # another process has the worker's pid now; the supervisor lives
        ({"start_ticks": 1}, True),
        # another process has the supervisor's pid, too
        ({"start_ticks": 1, "supervisor_start_ticks": 1}, False),
        ({"boot": "of another machine"}, False),
        # a container's pids belong to other processes here
        ({"pid_namespace": 1}, False),
        ({"memory": "/nonexistent"}, True),
    ],
)
def test_a_stale_file_is_no_live_worker(
    run: Path, changes: dict[str, Any], running: bool
) -> None:
    rewrite_live(run, 3, **changes)
    assert read_live(run) == []
    assert len(read_written(run)) == 1
    assert is_running(read_written(run)) is running


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"boot": "another", "host": "far-away"}, "on far-away"),
        ({"pid_namespace": 1}, "in another container"),
    ],
)
def test_a_worker_that_is_not_here_is_named_by_its_location(
    run: Path, changes: dict[str, Any], where: str
) -> None:
    rewrite_live(run, 3, **changes)
    assert [worker.where for worker in read_written(run)] == [where]


def test_a_zombie_is_dead_and_only_its_supervisor_keeps_the_run_going(
    run: Path, other: subprocess.Popen[bytes]
) -> None:
    started = start_ticks(other.pid)
    rewrite_live(run, 3, pid=other.pid, start_ticks=started)
    assert len(read_live(run)) == 1
    end(other)
    assert read_live(run) == []
    assert is_running(read_written(run))
    rewrite_live(run, 3, supervisor_pid=other.pid, supervisor_start_ticks=started)
    assert not is_running(read_written(run))


def test_a_dead_workers_file_without_its_supervisors_start_is_no_job(run: Path) -> None:
    path = run / "live" / "rank0003.json"
    record = json.loads(path.read_text()) | {"start_ticks": 1}
    del record["supervisor_start_ticks"]
    path.write_text(json.dumps(record))
    assert not is_running(read_written(run))


def test_to_look_for_a_page_makes_none(run: Path) -> None:
    (worker,) = read_live(run)
    (run / "page").unlink()
    with pytest.raises(FileNotFoundError):
        worker.open_page()
    assert not (run / "page").exists()


def test_without_a_folder_no_worker_lives(tmp_path: Path) -> None:
    assert read_written(tmp_path) == []
    assert not is_running([])


def test_a_process_that_is_gone_has_no_start(other: subprocess.Popen[bytes]) -> None:
    assert is_alive(other.pid, started=start_ticks(other.pid))
    assert not is_alive(other.pid, started=start_ticks(other.pid) + 1)
    other.kill()
    other.wait()
    assert not is_alive(other.pid)
    with pytest.raises(ProcessLookupError):
        start_ticks(other.pid)


def test_a_stopped_process_stands_still_and_lives(
    other: subprocess.Popen[bytes],
) -> None:
    assert not stands_still(other.pid)
    other.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
    assert stands_still(other.pid)
    assert is_alive(other.pid)
