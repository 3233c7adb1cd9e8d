"""The acts of real processes are a path of the model, whenever a worker is killed.

The model is that of the protocol (protocol.py). Only processes can show this property:
the kernel and the network give writes and messages their order.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest

from launcher.proc import stands_still
from moe_ckpt.elastic.live_workers import LiveWorker
from moe_ckpt.elastic.status_page import ANY_ITERATION
from moe_ckpt.replication import copy_server
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.types import Phase
from tests.harness.gloo.workers import wait_until
from tests.harness.jobs.elastic_job import ElasticJob
from tests.recovery.checker import is_over
from tests.recovery.protocol import Protocol
from tests.recovery.traces import follow, read_trace, record, turn, wrap

NUM_RANKS, NUM_ITERATIONS = 3, 8
JOB = (
    f"parallel.pp={NUM_RANKS}",
    "parallel.ranks_per_node=1",
    "model.num_layers=3",
    "train.global_batch_size=6",
    f"train.iterations={NUM_ITERATIONS}",
    "ckpt.window=1",
    # longer than a test keeps a worker stopped, under any load
    "runtime.heartbeat_s=200",
)
KILLS = (
    (1, Phase.FORWARD, 2),
    (0, Phase.STEP, 3),
    (2, Phase.SNAPSHOT, 4),
    (1, Phase.BETWEEN, 5),
    (0, Phase.STEP, 6),
    (2, Phase.RECOVERY, ANY_ITERATION),  # in the recovery from the kill before
    (1, Phase.JOIN, ANY_ITERATION),  # and in the recovery from that kill
    (0, Phase.BACKWARD, 8),
    (2, Phase.DONE, ANY_ITERATION),
)
"""Kills by rank, phase and iteration.

Each kill strikes a process that lives, but that does not get to the point of the kill
while the victim of the kill before is stopped.
"""


def test_a_job_whose_workers_are_killed_is_a_path_of_the_model(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with ElasticJob(
        NUM_RANKS, tmp_path, *JOB, setup=functools.partial(record, trace)
    ) as job:
        stop(job, *KILLS[0])
        for number, (rank, *_) in enumerate(KILLS, 1):
            worker = job.wait_for(
                functools.partial(stopped_worker, job, rank),
                f"rank {rank} to stand still",
            )
            if number < len(KILLS):
                stop(job, *KILLS[number])
            with turn(trace) as say:
                os.kill(worker.pid, SIGKILL)
                job.wait_for(
                    functools.partial(has_ended, worker),
                    f"the end of rank {rank}'s worker",
                )
                say(f"rank {rank}'s worker dies")
        job.wait()
    sentences = read_trace(trace)
    print(*sentences, sep="\n")
    assert is_over(
        follow(
            Protocol(iterations=NUM_ITERATIONS, faults=len(KILLS), kinds=("kill",)),
            sentences,
        )
    )


def record_without_confirmation(trace: Path) -> None:
    """Record ranks that keep windows although these have not reached peers.

    The first window is an exception, because the model begins with that window.
    """
    record(trace)
    wrap(
        Publisher,
        "await_copies",
        lambda call, own, snapshots: not is_first(snapshots) or call(own, snapshots),
    )
    wrap(
        Publisher,
        "awaits_copies",
        lambda call, own, snapshots: is_first(snapshots) and call(own, snapshots),
    )
    wrap(copy_server, "receive_blob", functools.partial(receive_late, trace))


def is_first(snapshots: Sequence[Snapshot]) -> bool:
    return snapshots[0].header.window_start == 0


def receive_late(
    trace: Path,
    receive: Callable[..., int],
    link: Any,
    found: Any,
    folder: Any,
    key: str,
    *rest: Any,
) -> int:
    """Receive window 2 only once all ranks have kept window 2."""
    is_late = key.startswith("snapshot-2-")
    assert not is_late or wait_until(
        lambda: trace.read_text().count("keeps window 2 only") == NUM_RANKS
    )
    return receive(link, found, folder, key, *rest)


def test_a_job_that_breaks_a_rule_is_no_path(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    setup = functools.partial(record_without_confirmation, trace)
    with ElasticJob(
        NUM_RANKS, tmp_path, *JOB, "train.iterations=3", setup=setup
    ) as job:
        job.wait()
    with pytest.raises(AssertionError, match=r"> rank \d keeps window 2 only"):
        follow(Protocol(iterations=3, faults=0), read_trace(trace))


def stop(job: ElasticJob, rank: int, phase: Phase, iteration: int) -> None:
    job.page(rank).order(SIGSTOP, phase, iteration=iteration)


def stopped_worker(job: ElasticJob, rank: int) -> LiveWorker | None:
    worker = job.worker(rank)
    return worker if stands_still(worker.pid) else None


def has_ended(worker: LiveWorker) -> bool | None:
    return not worker.is_alive or None


VOTES = tuple(f"rank {rank} votes for iteration 1" for rank in range(NUM_RANKS))
STEPS = tuple(f"rank {rank} steps to 1" for rank in range(NUM_RANKS))
WINDOWS = tuple(f"rank {rank} takes window 1" for rank in range(NUM_RANKS))
COPIES = tuple(f"rank {rank}'s window 1 reaches its peer" for rank in range(NUM_RANKS))
KEPT = tuple(f"rank {rank} keeps window 1 only" for rank in range(NUM_RANKS))
TWO_ITERATIONS = (
    *VOTES,
    *STEPS,
    *WINDOWS,
    *COPIES,
    *KEPT,
    "rank 0's peer drops window 0",
)


def test_a_path_without_faults_is_followed() -> None:
    follow(Protocol(faults=0), TWO_ITERATIONS)


@pytest.mark.parametrize(
    ("broken", "first_wrong"),
    [
        ((*VOTES[:2], STEPS[0]), STEPS[0]),
        ((*VOTES, *STEPS, COPIES[1]), COPIES[1]),
        ((*VOTES, *STEPS, *WINDOWS, *COPIES[:2], KEPT[0]), KEPT[0]),
        (
            (*TWO_ITERATIONS[:15], "rank 0's peer drops window 1"),
            "rank 0's peer drops window 1",
        ),
        (("rank 1's worker dies", *VOTES), VOTES[1]),
        (
            ("rank 1 ends generation 1: decides that it ends",),
            "rank 1 ends generation 1: decides that it ends",
        ),
        (("rank 0 arrives in generation 2",), "rank 0 arrives in generation 2"),
    ],
    ids=[
        "a vote",
        "a snapshot",
        "a copy",
        "a needed window",
        "a dead rank",
        "an end without reason",
        "no generation",
    ],
)
def test_what_the_model_forbids_is_no_path(
    broken: tuple[str, ...], first_wrong: str
) -> None:
    with pytest.raises(AssertionError, match=f"> {first_wrong}"):
        follow(Protocol(faults=1, kinds=("kill",)), broken)
