"""A node's processes are not started beside the agent's end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from moe_ckpt.elastic.node_process import Main, node_process, start_node_process

NAME = "watcher"


@contextlib.contextmanager
def endless() -> Iterator[Main]:
    def main(_agent: int) -> NoReturn:
        signal.pause()
        os._exit(1)

    yield main


def ended_pid() -> int:
    """Return the pid of a process that has ended and was waited for."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize("folder_is_left", [False, True])
def test_none_is_started_after_the_end_of_the_agent(
    folder_is_left: bool, tmp_path: Path
) -> None:
    root = tmp_path if folder_is_left else tmp_path / "deleted"
    start_node_process(root, NAME, ended_pid(), endless)
    assert node_process(root, NAME) is None


def test_a_missing_folder_is_an_error_while_the_agent_lives(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start_node_process(tmp_path / "missing", NAME, os.getpid(), endless)
