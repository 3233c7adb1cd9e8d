"""Only time in which a process could have run counts toward its silence.

A starved process does not count as dead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from moe_ckpt.elastic.starvation import (
    Readings,
    Silence,
    ThreadReading,
    read_threads,
    starved_s,
)
from tests.waits import WAIT_S

LIMIT_S = 1.0
MAIN, HEART = 1, 2


def reading(
    ran_s: float, waited_s: float, *, is_runnable: bool = False
) -> ThreadReading:
    return ThreadReading(ran_s=ran_s, waited_s=waited_s, is_runnable=is_runnable)


class Process:
    """A process with two threads; `looks` counts the readings of the threads."""

    def __init__(self) -> None:
        self.main = reading(5.0, 1.0)
        self.looks = 0

    def read(self) -> Readings:
        self.looks += 1
        return {MAIN: self.main, HEART: reading(0.1, 0.0)}


def silent_for(process: Process, waited_s: float, until_s: float) -> float:
    """Return after how many seconds of silence a process counts as dead.

    Args:
        process: The process, silent since second 100.
        waited_s: Seconds in which the process waits for a CPU, in each second.
        until_s: Seconds after which the search ends.

    Returns:
        Seconds; infinity if the process does not count as dead by then.
    """
    silence, step_s = Silence(LIMIT_S, process.read), 0.05
    now_s = 100.0
    while now_s < 100.0 + until_s:
        now_s += step_s
        process.main = reading(
            process.main.ran_s + 0.001, process.main.waited_s + waited_s * step_s
        )
        if silence.exceeds_limit(100.0, now_s):
            return now_s - 100.0
    return float("inf")


def test_a_process_that_could_have_run_is_dead_after_the_limit() -> None:
    assert silent_for(Process(), 0.0, 10.0) == pytest.approx(LIMIT_S, abs=0.051)


def test_time_in_the_run_queue_does_not_count() -> None:
    """At a wait of 0.75, a quarter of each second after the first look counts."""
    assert silent_for(Process(), 0.75, 10.0) == pytest.approx(
        0.25 + 0.75 / 0.25, abs=0.3
    )
    assert silent_for(Process(), 1.0, 60.0) == float("inf")


def test_a_wait_that_goes_on_is_seen_before_the_kernel_has_added_it() -> None:
    before = {MAIN: reading(5.0, 1.0, is_runnable=True)}
    assert starved_s(before, {MAIN: reading(5.0, 1.0, is_runnable=True)}, 0.5) == 0.5
    assert starved_s(before, {MAIN: reading(5.4, 1.0, is_runnable=True)}, 0.5) == 0.0, (
        "it has run"
    )
    assert starved_s(before, {MAIN: reading(5.0, 1.0)}, 0.5) == 0.0, (
        "it sleeps, or is stopped"
    )


def test_the_longest_wait_of_any_thread_counts() -> None:
    before = {MAIN: reading(5.0, 1.0), HEART: reading(0.1, 0.0)}
    after = {MAIN: reading(5.1, 1.3), HEART: reading(0.1, 0.1), 3: reading(0.0, 9.0)}
    assert starved_s(before, after, 0.5) == pytest.approx(0.3), (
        "a thread that is new has no wait yet"
    )


def test_a_wait_before_the_silence_is_no_excuse() -> None:
    process = Process()
    silence = Silence(LIMIT_S, process.read)
    assert not silence.exceeds_limit(100.0, 100.3)
    # the kernel adds a wait of a minute, of which 0.35 seconds lie in the silence
    process.main = reading(5.0, 61.0)
    assert not silence.exceeds_limit(100.0, 100.35)
    assert not any(
        silence.exceeds_limit(100.0, now_s)
        for now_s in (100.55, 100.75, 100.95, 101.15, 101.3)
    )
    assert silence.exceeds_limit(100.0, 101.4)


def test_a_sign_of_life_ends_the_account() -> None:
    process = Process()
    silence = Silence(LIMIT_S, process.read)
    for now_s in (100.3, 100.6, 100.9):
        process.main = reading(5.0, process.main.waited_s + 0.3)
        assert not silence.exceeds_limit(100.0, now_s)
    assert not any(
        silence.exceeds_limit(101.0, now_s)
        for now_s in (101.1, 101.3, 101.5, 101.7, 101.9)
    )
    assert silence.exceeds_limit(101.0, 102.1), "what was starved before is over"


def test_time_in_which_nothing_was_looked_at_does_not_count() -> None:
    """A supervisor can be starved with its worker, and run again before its worker."""
    silence = Silence(LIMIT_S, Process().read)
    assert not silence.exceeds_limit(100.0, 100.1)
    assert not silence.exceeds_limit(100.0, 106.0), "the worker had no chance yet"
    assert not any(
        silence.exceeds_limit(100.0, now_s) for now_s in (106.2, 106.4, 106.6, 106.8)
    )
    assert silence.exceeds_limit(100.0, 107.0), "it had one"


def test_time_before_the_first_look_does_not_count() -> None:
    """A supervisor can be stopped with its worker before it has looked at all."""
    silence = Silence(LIMIT_S, Process().read)
    assert not silence.exceeds_limit(100.0, 106.0)
    assert not any(
        silence.exceeds_limit(100.0, now_s)
        for now_s in (106.2, 106.4, 106.6, 106.8, 106.9)
    )
    assert silence.exceeds_limit(100.0, 107.1)


def test_a_process_that_gives_signs_of_life_is_not_looked_at() -> None:
    process = Process()
    silence = Silence(LIMIT_S, process.read)
    for beat in range(100):
        assert not silence.exceeds_limit(100.0 + beat, 100.2 + beat)
    assert process.looks == 0


def test_readings_of_a_real_process_add_up() -> None:
    before = read_threads(os.getpid())[os.getpid()]
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    after = read_threads(os.getpid())[os.getpid()]
    assert after.is_runnable
    assert after.ran_s - before.ran_s >= 0.03, "the kernel adds up at ticks"
    assert read_threads(2**22 + 1) == {}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
            )
            stack.callback(loop.kill)
        yield


@pytest.mark.full  # loads the machine for half a minute
@pytest.mark.parametrize(
    ("is_stopped", "is_dead"),
    [(False, False), (True, True)],
    ids=["starved", "stopped"],
)
def test_under_eight_busy_loops_only_a_stopped_process_is_dead(
    is_stopped: bool, is_dead: bool
) -> None:
    """The process has the lowest priority, to wait for seconds, and never rests."""
    with (
        busy_loops(8),
        subprocess.Popen(
            ["nice", "-n19", sys.executable, "-c", "while True: pass"]
        ) as starved,
    ):
        time.sleep(0.5)
        if is_stopped:
            os.kill(starved.pid, signal.SIGSTOP)
        silence, since_s = (
            Silence(LIMIT_S, lambda: read_threads(starved.pid)),
            time.monotonic(),
        )
        until_s, found = since_s + (WAIT_S if is_stopped else 2.5), False
        while time.monotonic() < until_s and not found:
            found = silence.exceeds_limit(since_s, time.monotonic())
            time.sleep(0.05)
        starved.kill()
    assert found is is_dead
