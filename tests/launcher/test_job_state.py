"""Recoveries in progress, and missing copies, by the last events of each rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.job_state import read_job_state
from moe_ckpt.elastic.process_failure import ranks_in_words
from moe_ckpt.events import (
    CopiesRestored,
    Event,
    GenerationEnded,
    ServersChanged,
    StateResumed,
    WindowReplicated,
    WorkerStarted,
)
from tests.report_runs import committed, rejoined, write_events

BEGUN, ANEW = (
    WorkerStarted(pid=number, host="here", incarnation=number, device="cpu")
    for number in (0, 1)
)
BACK = rejoined(5)
COPIED = CopiesRestored(num_peers=1)
SENT = WindowReplicated(
    window_start=5, size_bytes=8, num_peers=1, seconds=0.1, span_s=0.1, ago_s=0.0
)


def left(ago_s: float = 0.0) -> GenerationEnded:
    return GenerationEnded(generation=1, reason="", left_unix_s=time.time() - ago_s)


def write(run: Path, ranks: Sequence[Sequence[Event]]) -> None:
    for rank, events in enumerate(ranks):
        write_events(run, rank, [(float(at), event) for at, event in enumerate(events)])


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([[BEGUN, committed(1)], [BEGUN]], None),
        # no rank has noticed a loss yet
        ([[BEGUN, committed(1)], [BEGUN, ANEW]], None),
        ([[BEGUN, left()], [BEGUN, committed(1)]], ([0], [], [1])),
        ([[BEGUN, left(), BACK, left()], [BEGUN, left(), BACK]], ([0], [], [1])),
        ([[BEGUN, left()], [BEGUN, ANEW]], ([0], [1], [])),
        ([[BEGUN, left(), BACK], [BEGUN, ANEW, BACK]], None),
        # a rank that has never written
        ([[BEGUN, left()]], ([0], [], [1])),
    ],
)
def test_ranks_of_a_recovery_are_told_apart(
    ranks: Sequence[Sequence[Event]],
    found: tuple[list[int], list[int], list[int]] | None,
    tmp_path: Path,
) -> None:
    write(tmp_path, ranks)
    recovery = read_job_state(tmp_path, 2).recovery
    assert found == (recovery and (recovery.left, recovery.started, recovery.missing))


def test_a_recovery_takes_since_the_first_rank_left(tmp_path: Path) -> None:
    write(tmp_path, [[left(30.0)], [left(50.0)]])
    recovery = read_job_state(tmp_path, 2).recovery
    assert recovery is not None
    assert 50.0 <= recovery.seconds < 80.0


@pytest.mark.parametrize(
    ("ranks", "without"),
    [
        # a policy without copies
        ([[BEGUN, committed(1)], [BEGUN]], None),
        ([[BEGUN, SENT, committed(1)], [BEGUN, committed(1)]], [1]),
        ([[BEGUN, SENT], [BEGUN, SENT, committed(1)]], []),
        ([[BEGUN, SENT, left()], [BEGUN, SENT]], [0]),
        ([[BEGUN, SENT, left(), BACK], [ANEW, BACK, COPIED]], [0]),
        ([[BEGUN, SENT, left(), BACK, COPIED], [ANEW, BACK, SENT]], []),
        ([[BEGUN, SENT], [BEGUN, SENT, ServersChanged(addresses="")]], [1]),
        (
            [
                [BEGUN, SENT],
                [
                    BEGUN,
                    SENT,
                    StateResumed(iteration=1, source="", seconds=0.1, passed_over=[]),
                ],
            ],
            [1],
        ),
    ],
)
def test_copies_count_from_the_last_loss_on(
    ranks: Sequence[Sequence[Event]], without: list[int] | None, tmp_path: Path
) -> None:
    write(tmp_path, ranks)
    assert read_job_state(tmp_path, 2).without_copies == without


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1, 2, 3], "ranks 0 to 3"),
        ([0, 1, 4, 6, 7], "ranks 0 to 1, 4, 6 to 7"),
    ],
)
def test_ranks_are_named_briefly(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words
