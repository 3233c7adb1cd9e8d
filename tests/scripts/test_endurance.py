"""The summary of an endurance run names each promise that was broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripts.endurance import KINDS, Endured, Moment, broken_promises
from tests.harness.jobs.chaos import MIB, Sample, Used
from tests.harness.jobs.references import Outcome

END = Outcome(digest_per_rank=["a", "b"], eval_loss=1.0, losses={1: 2.0})
OTHER_END = Outcome(digest_per_rank=["a", "c"], eval_loss=1.0, losses={1: 2.0})


def used(**changes: int) -> Used:
    """Return the resources of a process, with some changes."""
    return Used(
        **{
            "files": 40,
            "threads": 9,
            "sockets": 10,
            "private_bytes": 100 * MIB,
            **changes,
        }
    )


def sample(
    zombies: int = 0, memory_files: int = 90, memory_bytes: int = MIB, **changes: int
) -> Sample:
    """Return a sample in which the daemon's resources have some changes."""
    by_kind = {kind: used(**changes) if kind == "daemon" else used() for kind in KINDS}
    return Sample(
        by_kind=by_kind,
        zombies=zombies,
        memory_files=memory_files,
        memory_bytes=memory_bytes,
    )


def endured(sample_at: Callable[[int], Sample], **changes: Any) -> Endured:
    """Return a run of 12 faults with a sample for each moment."""
    moments = [
        Moment(faults=number, seconds=2.0 * number, sample=sample_at(number))
        for number in range(12)
    ]
    facts: dict[str, Any] = {
        "faults": 12,
        "counts": {"signal": 12},
        "seconds": 24.0,
        "outcome": END,
    }
    return Endured(moments=moments, **{**facts, **changes})


def test_a_run_that_uses_now_more_and_now_less_breaks_no_promise() -> None:
    run = endured(
        lambda number: sample(files=40 + number % 3, memory_files=80 + number % 5)
    )
    assert broken_promises(run, END, 12) == []


@pytest.mark.parametrize(
    ("sample_at", "says"),
    [
        (
            lambda number: sample(files=40 + number),
            "files of a daemon grew from at most 43 to at least 49",
        ),
        (
            lambda number: sample(threads=9 + number),
            "threads of a daemon grew from at most 12 to at least 18",
        ),
        (
            lambda number: sample(sockets=10 + number),
            "sockets of a daemon grew from at most 13 to at least 19",
        ),
        (
            lambda number: sample(private_bytes=4 * MIB * number),
            "private_bytes of a daemon grew from",
        ),
        (
            lambda number: sample(zombies=number),
            "zombies grew from at most 3 to at least 9",
        ),
        (
            lambda number: sample(memory_files=number),
            "memory_files grew from at most 3 to at least 9",
        ),
        (
            lambda number: sample(memory_bytes=number * MIB),
            f"memory_bytes grew from at most {3 * MIB} to at least {9 * MIB}",
        ),
    ],
    ids=[
        "files",
        "threads",
        "sockets",
        "memory",
        "zombies",
        "files in shared memory",
        "shared memory",
    ],
)
def test_a_leak_is_named(sample_at: Callable[[int], Sample], says: str) -> None:
    [broken] = broken_promises(endured(sample_at), END, 12)
    assert broken.startswith(says)


def test_another_end_and_too_few_faults_are_named() -> None:
    assert broken_promises(endured(lambda _: sample(), outcome=OTHER_END), END, 13) == [
        "the end differs from that of the run without faults",
        "got 12 faults, wanted 13: the job has too few iterations",
    ]
