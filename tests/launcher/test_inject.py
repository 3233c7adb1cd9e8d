"""The loss of a node, while its supervisor replaces workers and its daemon writes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from launcher.faults.inject import kill_node, nobody_replaced
from launcher.proc import stands_still
from moe_ckpt.elastic.live_workers import LiveWorker, read_written, write_live
from moe_ckpt.linux import is_alive
from tests.harness.gloo.processes import Child
from tests.harness.jobs.walking_job import parked_job
from tests.waits import WAIT_S

ROUNDS = 30
NUM_RANKS = 20


def await_true(look: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, "it does not come"
        os.sched_yield()


def bear(_: Connection, run: Path, memory: Path) -> None:
    """Act as the supervisor of long-lived workers and of a new worker at every moment.

    The long-lived workers make a look at all workers take a while.
    """
    for rank in range(1, NUM_RANKS):
        write_live(
            run,
            global_rank=rank,
            node=0,
            supervisor_pid=os.getpid(),
            memory=memory,
            incarnation=0,
        )
    for incarnation in count(1):
        write_live(
            run,
            global_rank=0,
            node=0,
            supervisor_pid=os.getpid(),
            memory=memory,
            incarnation=incarnation,
        )


def newest_incarnation(run: Path) -> int:
    return max((worker.incarnation for worker in read_written(run)), default=-1)


def test_no_worker_is_born_between_the_look_and_the_strike(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    supervisor = start(bear, tmp_path, tmp_path / "memory")
    await_true(lambda: newest_incarnation(tmp_path) > 0)
    for _ in range(ROUNDS // 3):
        with nobody_replaced(tmp_path, range(NUM_RANKS), wait_s=WAIT_S) as (worker, *_):
            assert stands_still(supervisor.pid)
            assert worker.incarnation == newest_incarnation(tmp_path), (
                "the last that there was"
            )
        await_true(lambda last=worker.incarnation: newest_incarnation(tmp_path) > last)


def test_supervisors_go_on_where_the_strike_fails(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    start(bear, tmp_path, tmp_path / "memory")
    await_true(lambda: newest_incarnation(tmp_path) > 0)
    with (
        pytest.raises(OSError, match="no room"),
        nobody_replaced(tmp_path, [0], wait_s=WAIT_S),
    ):
        raise OSError("no room for a note of it")
    last = newest_incarnation(tmp_path)
    await_true(lambda: newest_incarnation(tmp_path) > last)


def test_supervisors_of_other_ranks_are_left_alone(tmp_path: Path) -> None:
    with (
        parked_job(tmp_path, 2) as (job, _),
        nobody_replaced(job.run, [1], wait_s=WAIT_S) as workers,
    ):
        assert [worker.global_rank for worker in workers] == [1]
        assert [stands_still(job.supervisor_pid(rank)) for rank in (0, 1)] == [
            False,
            True,
        ]


def test_a_dead_workers_memory_is_lost_before_its_successor_starts(
    tmp_path: Path,
) -> None:
    with parked_job(tmp_path, 1) as (job, [pid]):
        with nobody_replaced(job.run, [0], wait_s=WAIT_S) as workers:
            os.kill(pid, signal.SIGKILL)
            await_true(lambda: not is_alive(pid))
            assert kill_node(job.run, workers, wait_s=WAIT_S) == [], (
                "it was dead already"
            )
            assert not (job.memory(0) / "own").exists()
            assert job.deaths(0) == []
        job.wait_for_death(0)
        job.wait_to_park(0)
        assert [path.name for path in (job.memory(0) / "own").iterdir()] == [
            "incarnation1"
        ]


def keep_writing(_: Connection, memory: Path) -> None:
    """Act as a daemon that writes new files, and recreates folders that are gone.

    Each round looks up a folder once and then writes there, as the kernel does within
    one call.
    """
    for number in count():
        for part in ("own", "held/rank0001"):
            folder = memory / part
            # a folder may be deleted just now, even while mkdir looks
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                folder.mkdir(parents=True, exist_ok=True)
                found = os.open(folder, os.O_DIRECTORY)
                try:
                    for each in range(5):
                        os.close(
                            os.open(f"{number:09d}-{each}", os.O_CREAT, dir_fd=found)
                        )
                finally:
                    os.close(found)


def worker_with_memory(run: Path) -> LiveWorker:
    memory = run / "memory"
    memory.mkdir()
    write_live(
        run,
        global_rank=0,
        node=0,
        supervisor_pid=os.getppid(),
        memory=memory,
        incarnation=0,
    )
    (worker,) = read_written(run)
    return worker


@pytest.mark.parametrize("call", ["rmdir", "unlink"])
def test_a_daemon_may_write_and_delete_while_memory_is_lost(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_with_memory(tmp_path)
    memory = Path(worker.memory)
    folder = memory / "held" / "rank0001"
    folder.mkdir(parents=True)
    (folder / "written").touch()
    # as in a daemon's call that looked up the folder before the loss
    found = os.open(folder, os.O_DIRECTORY)
    goes_on, meanwhile = getattr(os, call), []

    def comes_between(path: str, *, dir_fd: int | None = None) -> None:
        """Act as the call that `kill_node` makes.

        Just before the first call, the daemon creates or deletes a file.
        """
        if not meanwhile:
            meanwhile.append(path)
            if call == "rmdir":
                os.close(os.open("late", os.O_CREAT, dir_fd=found))
            else:
                goes_on("written", dir_fd=found)
        goes_on(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, call, comes_between)
    try:
        assert kill_node(tmp_path, [worker], wait_s=WAIT_S) == []
    finally:
        os.close(found)
    assert meanwhile == [{"rmdir": "rank0001", "unlink": "written"}[call]]
    assert list(memory.iterdir()) == []


def test_memory_is_lost_whatever_its_daemon_writes_meanwhile(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    worker = worker_with_memory(tmp_path)
    memory = Path(worker.memory)
    daemon = start(keep_writing, memory)
    parts = [memory / "own", memory / "held" / "rank0001"]
    for _ in range(ROUNDS):
        await_true(lambda: all(part.is_dir() for part in parts))
        for part in parts:
            (part / "marked").touch()
        assert kill_node(tmp_path, [worker], wait_s=WAIT_S) == []
        assert not any((part / "marked").exists() for part in parts)
    daemon.kill()
    assert {path.name for path in memory.iterdir()} <= {"own", "held"}, (
        "nothing is left of it elsewhere"
    )
