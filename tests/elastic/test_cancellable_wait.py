"""Other threads can end a wait, and the first thread to set an outcome decides.

Threads wait in slices, or for helper threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from moe_ckpt.elastic.cancellable_wait import Helper, HostWaits, WaitResult
from moe_ckpt.errors import PeersLostError
from tests.waits import WAIT_S

Settle = Callable[[WaitResult], None]


def succeed(outcome: WaitResult) -> None:
    outcome.set(None)


def fail(outcome: WaitResult) -> None:
    outcome.set(ValueError("its own error"))


abandon: Settle = WaitResult.abandon


def ending(outcome: WaitResult) -> str:
    try:
        return "in time" if outcome.wait(WAIT_S) else "late"
    except (ValueError, PeersLostError) as error:
        return str(error)


ENDINGS: dict[Settle, str] = {
    succeed: "in time",
    fail: "its own error",
    abandon: "abandoned: other ranks were lost",
}


def settle_at(start: threading.Barrier, settle: Settle, outcome: WaitResult) -> None:
    start.wait(WAIT_S)
    settle(outcome)


@pytest.mark.parametrize("first", ENDINGS)
@pytest.mark.parametrize("second", ENDINGS)
def test_the_first_to_settle_an_outcome_counts(first: Settle, second: Settle) -> None:
    outcome = WaitResult()
    assert not outcome.wait(0.01)
    first(outcome)
    second(outcome)
    assert [ending(outcome) for _ in range(2)] == [ENDINGS[first]] * 2, (
        "waiting again is the same"
    )
    assert outcome.abandoned == (first is abandon)


@pytest.mark.parametrize("settle", ENDINGS)
def test_all_waiting_threads_are_woken(settle: Settle) -> None:
    outcome, started = WaitResult(), threading.Barrier(4)

    def wait() -> str:
        started.wait(WAIT_S)
        return ending(outcome)

    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(wait) for _ in range(3)]
        settle_at(started, settle, outcome)
        assert [waiter.result(WAIT_S) for waiter in waiting] == [ENDINGS[settle]] * 3


def test_of_threads_at_once_exactly_one_settles_an_outcome() -> None:
    """In every race, `abandoned` fits the error that a wait raises."""
    with ThreadPoolExecutor(2) as threads:
        for _ in range(300):
            outcome, start = WaitResult(), threading.Barrier(2)
            racers = [
                threads.submit(settle_at, start, settle, outcome)
                for settle in (succeed, abandon)
            ]
            for racer in racers:
                racer.result(WAIT_S)
            assert ending(outcome) == ENDINGS[abandon if outcome.abandoned else succeed]


@pytest.fixture
def helper() -> Iterator[Helper]:
    """Return a helper whose thread ends before the end of the test."""
    helper = Helper()
    yield helper
    helper.close()
    helper.join()


def test_a_helper_does_one_call_after_another_and_outlives_their_errors(
    helper: Helper,
) -> None:
    done: list[int] = []

    def call(number: int) -> None:
        done.append(number)
        if number == 1:
            raise ValueError("its own error")

    outcomes = [WaitResult() for _ in range(3)]
    for number, outcome in enumerate(outcomes):
        helper.start(lambda number=number: call(number), outcome)
    assert [ending(outcome) for outcome in outcomes] == [
        "in time",
        "its own error",
        "in time",
    ]
    assert done == [0, 1, 2]


def test_an_abandoned_call_goes_on_alone_and_its_helper_ends_with_it() -> None:
    helper, outcome, begun, go_on = (
        Helper(),
        WaitResult(),
        threading.Event(),
        threading.Event(),
    )
    ended = threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait(WAIT_S)
        ended.set()

    helper.start(call, outcome)
    assert begun.wait(WAIT_S)
    outcome.abandon()
    assert ending(outcome) == ENDINGS[abandon]
    helper.close()
    assert not ended.is_set()
    go_on.set()
    helper.join()
    assert ended.is_set()


class Tensors:
    """Stand-in for the tensors of an operation."""


def test_a_helper_at_rest_holds_no_tensors(helper: Helper) -> None:
    tensors, done, freed = Tensors(), WaitResult(), threading.Event()
    weakref.finalize(tensors, freed.set)
    helper.start(lambda tensors=tensors: None, done)
    del tensors
    done.wait(WAIT_S)
    assert freed.wait(WAIT_S)


class Slow:
    """An operation that ends after some slices of a wait."""

    def __init__(
        self, num_slices: int, error: str = "", *, ends_with_slice: bool = False
    ) -> None:
        """Begin the operation.

        Args:
            num_slices: The number of slices of a wait after which the operation has
                ended.
            error: The message of the error with which the operation ends; empty: no
                error.
            ends_with_slice: Whether the operation ends just as the last slice times
                out.
        """
        self.has_timed_out = threading.Event()
        self._left = num_slices
        self._error = error
        self._ends_with_slice = ends_with_slice

    def is_completed(self) -> bool:
        return self._left == 0

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._left:
            assert timeout is not None, "a wait that no thread could end"
            self._left -= 1
            self.has_timed_out.set()
            if self._left or self._ends_with_slice:
                raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)


@pytest.mark.parametrize("ends_with_slice", [True, False])
@pytest.mark.parametrize("num_slices", [0, 1, 3])
def test_a_wait_in_slices_ends_as_its_operation_does(
    num_slices: int, ends_with_slice: bool
) -> None:
    waits = HostWaits()
    waits.abandon()  # has no effect on waits that begin later
    waits.wait_in_slices(Slow(num_slices, ends_with_slice=ends_with_slice))
    with pytest.raises(RuntimeError, match="its own error"):
        waits.wait_in_slices(
            Slow(num_slices, "its own error", ends_with_slice=ends_with_slice)
        )


def test_a_wait_in_slices_can_be_abandoned() -> None:
    waits, never = HostWaits(), Slow(1 << 60)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(waits.wait_in_slices, never)
        assert never.has_timed_out.wait(WAIT_S)
        waits.abandon()
        with pytest.raises(PeersLostError, match="abandoned"):
            waiting.result(WAIT_S)
