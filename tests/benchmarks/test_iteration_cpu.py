"""CPU time of an iteration: which threads and iterations count, and the table."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.iteration_cpu import (
    ALL,
    Reading,
    kind_of,
    lines,
    mean_of,
    ms_by_kind,
    read_threads,
)
from benchmarks.thread_names import LOOKER, name_threads

ROOT = Path(__file__).resolve().parents[2]
MAIN, COPIER = "worker, training thread", "worker, host-copier"


def reading(unix_s: float, **ms: int) -> Reading:
    """Return a reading of a worker's threads.

    Args:
        unix_s: Time of the reading, in seconds since the epoch.
        ms: CPU milliseconds of each thread since its start, by name.
    """
    numbers = {
        name: (7, 7 + index) for index, name in enumerate(("main", "copier", "new"))
    }
    kinds = {"main": MAIN, "copier": COPIER, "new": COPIER}
    return Reading(
        unix_s=unix_s,
        cpu_ns={numbers[name]: 1_000_000 * each for name, each in ms.items()},
        kinds={numbers[name]: kinds[name] for name in ms},
    )


def test_iterations_between_two_readings_count_with_fractions() -> None:
    """Commits are at 10, 12, 14 and 18 s.

    From 11 to 16 s there are half an iteration, one iteration and half an iteration.
    """
    before, after = (
        reading(11.0, main=100, copier=10),
        reading(16.0, main=180, copier=30),
    )
    found = ms_by_kind(before, after, [10.0, 12.0, 14.0, 18.0], num_ranks=4)
    assert found == pytest.approx({MAIN: 10.0, COPIER: 2.5, ALL: 12.5})


def test_threads_count_from_their_start_and_not_once_they_have_ended() -> None:
    before, after = reading(10.0, main=100, copier=10), reading(12.0, main=120, new=8)
    found = ms_by_kind(before, after, [9.0, 10.0, 12.0], num_ranks=1)
    assert found == pytest.approx({MAIN: 20.0, COPIER: 8.0, ALL: 28.0})


@pytest.mark.parametrize("commits", [[10.5, 12.0], [9.0, 11.5]])
def test_readings_without_commits_on_both_sides_are_refused(
    commits: list[float],
) -> None:
    with pytest.raises(
        ValueError, match=r"^readings: got 10\.0 and 12\.0, wanted within "
    ):
        ms_by_kind(reading(10.0, main=1), reading(12.0, main=2), commits, num_ranks=1)


@pytest.mark.parametrize(
    ("process", "name", "is_main", "kind"),
    [
        ("worker", "python", True, "worker, training thread"),
        ("daemon", "python", True, "daemon, main thread"),
        ("worker", "host-copier_0", False, "worker, host-copier"),
        ("worker", "pt_gloo_runloop", False, "worker, pt_gloo_runloop"),
    ],
)
def test_a_kind_is_a_process_and_a_name_without_numbers(
    process: str, name: str, is_main: bool, kind: str
) -> None:
    assert kind_of(process, name, is_main=is_main) == kind


def test_threads_are_found_by_the_names_that_python_gives() -> None:
    wait = threading.Event()
    names = ("some-work_3", LOOKER)
    threads = [
        threading.Thread(target=wait.wait, name=name, daemon=True) for name in names
    ]
    for thread in threads:
        thread.start()
    try:
        name_threads()
        found = read_threads({os.getpid(): "worker"})
    finally:
        wait.set()
    assert found.kinds[os.getpid(), os.getpid()] == "worker, training thread"
    assert found.cpu_ns[os.getpid(), os.getpid()] > 0
    assert found.kinds[os.getpid(), threads[0].native_id or 0] == "worker, some-work"
    assert (os.getpid(), threads[1].native_id) not in found.kinds


def test_a_mean_has_students_interval_and_one_round_has_no_end() -> None:
    assert (mean_of([3.0]).mean, mean_of([3.0]).half) == (3.0, math.inf)
    two = mean_of([1.0, 3.0])
    assert (two.mean, two.half) == (2.0, pytest.approx(12.706))


def test_the_table_has_differences_round_by_round_and_no_rows_of_nothing() -> None:
    """A round that is slow for both jobs widens no interval of the difference."""
    found = {
        "supervised": [{ALL: 10.0, MAIN: 9.0, "x": 0.01}, {ALL: 30.0, MAIN: 29.0}],
        "gemini": [
            {ALL: 15.0, MAIN: 9.0, COPIER: 6.0},
            {ALL: 35.0, MAIN: 29.0, COPIER: 6.0},
        ],
    }
    head, _, *rows = lines(found)
    assert head.endswith("| supervised | gemini | gemini less supervised |")
    cells = {
        row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:] for row in rows
    }
    assert list(cells) == [ALL, MAIN, COPIER]
    assert cells[ALL][-1] == "5.00 +-0.00 |"
    assert cells[COPIER] == ["0.00 +-0.00", "6.00 +-0.00", "6.00 +-0.00 |"]


@pytest.mark.full
def test_threads_of_real_jobs_are_told_apart() -> None:
    # processes: only threads of a real job show that names of threads reach /proc
    command = ["benchmarks/iteration_cpu.py", "--rounds", "1", "--iterations", "4"]
    small = ["model=tiny", "train.sequence_length=16", "--warm-s", "2"]
    ended = subprocess.run(
        [sys.executable, *command, *small],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    rows = [row.split(" | ")[0] for row in ended.stdout.splitlines()]
    assert {f"| {MAIN}", "| supervisor, main thread", f"| {COPIER}"} <= set(rows)
    assert any(row.startswith("| daemon, ") for row in rows)
