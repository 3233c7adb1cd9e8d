"""A waiting worker warms up, waits, and becomes a worker; or it has died meanwhile.

The processes are real forks, as only their pipes and pids are the subject.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from moe_ckpt.elastic.supervisor import start_beside
from moe_ckpt.elastic.waiting_worker import WaitingWorker
from moe_ckpt.linux import is_alive
from tests.harness.gloo.workers import wait_until


def start(folder: Path) -> WaitingWorker:
    """Start a process that writes its warming up, and later its order, to files."""

    def become(order: str) -> int:
        (folder / "order").write_text(order)
        return 7

    def warm_up() -> bool:
        (folder / "warm").touch()
        return True

    return WaitingWorker(warm_up, become, start_beside)


def test_it_warms_up_and_ends_as_the_worker_that_it_becomes(tmp_path: Path) -> None:
    """The order arrives although another process has inherited the pipe."""
    waiting = start(tmp_path)
    if (sibling := os.fork()) == 0:
        threading.Event().wait()
    wait_until((tmp_path / "warm").exists)
    assert not waiting.has_begun
    pid = waiting.begin("rank 3")
    assert waiting.has_begun
    assert pid is not None
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (tmp_path / "order").read_text() == "rank 3\n"
    os.kill(sibling, signal.SIGKILL)
    os.waitpid(sibling, 0)


@pytest.mark.parametrize("warm_up_fails", [False, True])
def test_one_that_has_died_becomes_nothing(
    warm_up_fails: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def warm_up() -> bool:
        (tmp_path / "written").write_text(str(os.getpid()))
        (tmp_path / "written").rename(tmp_path / "pid")
        if warm_up_fails:
            raise RuntimeError("CUDA error: out of memory")
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    waiting = WaitingWorker(warm_up, lambda _: 0, start_beside)
    wait_until(lambda: (tmp_path / "pid").exists())
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))
    assert waiting.begin("rank 3") is None
    os.waitpid(pid, 0)
    assert ("out of memory" in capfd.readouterr().err) is warm_up_fails


def test_one_that_is_not_needed_ends(tmp_path: Path) -> None:
    waiting = start(tmp_path)
    waiting.end()
    assert not is_alive(waiting.pid)
    assert not (tmp_path / "order").exists()


def test_one_that_declines_ends_without_an_order() -> None:
    waiting = WaitingWorker(lambda: False, lambda _: 0, start_beside)
    assert os.waitpid(waiting.pid, 0)[1] == 0
