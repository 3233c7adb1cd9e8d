"""Failure classes: exceptions that a replacement repairs, and errors of the program."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt import run_elastic
from moe_ckpt.config import RunFolderConfig, require_patterns
from moe_ckpt.elastic.failures import (
    WORKER_FAULT,
    Failure,
    failure_of,
    is_fault,
    reserve_failure,
    take_failure,
    write_failure,
)
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.elastic_worker import Worker
from moe_ckpt.errors import ConfigError
from moe_ckpt.job_config import JobConfig
from moe_ckpt.run_folder import RunFolder
from moe_ckpt.run_settings import runtime_config
from moe_ckpt.supervised_rank import SupervisedRank
from tests.harness.gloo.processes import Child
from tests.harness.gloo.workers import caused
from tests.policies.profiles import config as config_of
from tests.replication.peers import TICKET
from tests.small_disk import small_disk


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (
            RuntimeError(
                "NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error"
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"
            ),
            True,
        ),
        (OSError(5, "Input/output error"), True),
        (OSError(116, "Stale file handle"), True),
        (
            caused(
                ValueError("batch 7 cannot be read"),
                OSError(110, "Connection timed out"),
            ),
            True,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (FileNotFoundError(2, "No such file or directory"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("shapes do not match"), False),
        (KeyError("exp_avg"), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_faults_of_the_hardware_are_told_from_errors_of_the_program(
    error: Exception, answer: bool
) -> None:
    assert is_fault(error) is answer


def test_patterns_of_the_user_come_first() -> None:
    error = RuntimeError("CUDA error: unspecified launch failure")
    assert not is_fault(error, end_on=["launch failure"])
    assert not is_fault(error, end_on=["launch failure"], replace_on=["CUDA"])
    assert is_fault(ValueError("lost lease of shard 3"), replace_on=["lease of shard"])
    assert is_fault(ValueError("lost lease"), replace_on=["^ValueError: "])


def test_a_pattern_that_is_none_is_one_error() -> None:
    with pytest.raises(
        ConfigError, match=r"runtime.end_on: got '\(', wanted regular expressions"
    ):
        require_patterns("runtime.end_on", ["fine", "("])


def raised(message: str, *, elsewhere: bool = False) -> Exception:
    try:
        if elsewhere:
            raise RuntimeError(message)
        raise RuntimeError(message)
    except RuntimeError as error:
        return error


def test_a_failure_repeats_at_the_same_location_in_the_same_iteration() -> None:
    first = failure_of(raised("at address 0x1"), 7)
    assert first.error == "RuntimeError: at address 0x1"
    assert first.traceback.endswith("RuntimeError: at address 0x1\n")
    assert failure_of(raised("at address 0x2"), 7).repeats(first), (
        "messages may hold addresses"
    )
    assert not failure_of(raised("at address 0x1"), 8).repeats(first)
    assert not failure_of(raised("at address 0x1", elsewhere=True), 7).repeats(first)
    assert not first.repeats(None)


def test_a_supervisor_takes_a_failure_once(tmp_path: Path) -> None:
    path = tmp_path / "failure"
    failure = Failure(
        error="OSError: x", location="OSError at a.py:3", iteration=4, traceback="T"
    )
    write_failure(path, failure)
    assert take_failure(path) == failure
    assert take_failure(path) is None, "a script may end with the same status"


@pytest.mark.parametrize("earlier", [None, "T", "T" * 100_000])
def test_a_failure_is_written_while_the_memory_is_full(
    earlier: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "failure"
    with small_disk(tmp_path) as memory:
        reserve_failure(path)
        memory.fill_to_the_last_page()
        if earlier is not None:
            write_failure(
                path,
                Failure(error="x", location="a.py:1", iteration=3, traceback=earlier),
            )
            assert take_failure(path) is not None
        failure = Failure(
            error="OSError: x", location="a.py:3", iteration=4, traceback="T"
        )
        write_failure(path, failure)
        assert take_failure(path) == failure
        assert take_failure(path) is None


@pytest.mark.parametrize("character", ["T", "\N{SNOWMAN}", "\udc80"])
def test_of_a_long_traceback_the_newest_frames_stay(
    character: str, tmp_path: Path
) -> None:
    path = tmp_path / "failure"
    text = character * 50_000 + "the last line"
    write_failure(
        path, Failure(error="x", location="a.py:1", iteration=3, traceback=text)
    )
    kept = take_failure(path)
    assert kept is not None
    assert text.endswith(kept.traceback)
    assert len(kept.traceback) > 500


def raise_a_fault(_: Worker) -> int:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def raise_a_stale_handle(_: Worker) -> int:
    raise ConfigError("run.dir: [Errno 116] Stale file handle")


def fail_with_full_memory(_: Connection, memory: Path) -> None:
    """Act as a worker whose device fails and whose failure file cannot be written."""
    (memory / "failure").mkdir()
    work_in(memory, raise_a_fault)


def lose_a_file_system(_: Connection, memory: Path) -> None:
    """Act as a worker in which a hardware fault becomes an error of a setting."""
    work_in(memory, raise_a_stale_handle)


def work_in(memory: Path, work: Callable[[Worker], int]) -> None:
    launch = Launch(
        global_rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0
    )
    facts: Any = {
        "ticket": TICKET,
        "ranks_per_node": 1,
        "replicas": 0,
        "has_daemon": False,
        "host": "127.0.0.1",
    }
    facts |= {"folder": RunFolder(path=memory, run_id="run", clock_origin_unix_s=0.0)}
    folder = RunFolderConfig(dir=None, name="run", configuration="")
    job = JobConfig(
        ckpt=config_of("moevement"), runtime=runtime_config(), folder=folder
    )
    supervised = SupervisedRank(launch=launch, memory=memory, **facts)
    sys.exit(run_elastic.run_one_worker(work, Worker(job, supervised, 0)))


def test_a_fault_that_cannot_be_written_down_is_a_death(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    """A worker that cannot leave a failure ends by a signal.

    The supervisor replaces a worker that was killed. A worker that ends with a
    traceback ends the job.
    """
    assert start(fail_with_full_memory, tmp_path).exit_status() == -signal.SIGKILL


def test_a_fault_behind_an_error_of_ours_replaces_the_worker(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    assert start(lose_a_file_system, tmp_path).exit_status() == WORKER_FAULT
    assert take_failure(tmp_path / "failure") is not None
