"""How long copies take, from when each began and ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from moe_ckpt.store.copy_times import CopyTimes, Sent

Copies = Sequence[tuple[float, float]]
CASES: dict[str, tuple[Copies, float, float]] = {
    "one": ([(1, 3)], 2, 2),
    "one after the other, with a pause": ([(1, 3), (6, 7)], 3, 6),
    "overlapping": ([(1, 3), (2, 4), (6, 7)], 4, 6),
    "one within another": ([(1, 9), (2, 4), (5, 10)], 9, 9),
}


@pytest.mark.parametrize(("copies", "seconds", "span_s"), CASES.values(), ids=CASES.keys())
def test_what_it_took_to_send_some(copies: Copies, seconds: float, span_s: float) -> None:
    clock = [0.0]
    times = CopyTimes(lambda: clock[0])
    for number, (since_s, until_s) in enumerate(copies):
        clock[0] = until_s
        times.ended(str(number), 8, since_s=since_s)
    clock[0] = max(until_s for _, until_s in copies) + 0.5
    keys = [str(number) for number in range(len(copies))]
    assert times.of([*keys, "not sent"]) == Sent(size_bytes=8 * len(copies), seconds=seconds, span_s=span_s, ago_s=0.5)


def test_what_was_never_sent_or_is_forgotten_took_nothing() -> None:
    times = CopyTimes(lambda: 5.0)
    assert times.of(["a"]) is None
    assert times.bytes_per_s() == math.inf
    times.ended("a", 8, since_s=3.0)
    assert times.bytes_per_s() == 4.0
    times.forget("a")
    assert times.of(["a"]) is None
    assert times.bytes_per_s() == 4.0, "still how fast they are"


@pytest.mark.parametrize(
    ("copies", "bytes_per_s"),
    [
        pytest.param([(0, 1), (0, 2), (0, 4)], 6.0, id="each waits for the one before it"),
        pytest.param([(0, 4), (1, 4), (2, 4)], 6.0, id="all are there at once"),
        pytest.param([(0, 1), (2, 4), (5, 9)], 4.0, id="one at a time"),
        pytest.param([(0, 1), (2, 6), (3, 8), (9, 10)], 8.0, id="some together"),
    ],
)
def test_copies_that_wait_for_each_other_are_no_slower(copies: Copies, bytes_per_s: float) -> None:
    clock = [0.0]
    times = CopyTimes(lambda: clock[0])
    for number, (since_s, until_s) in enumerate(copies):
        clock[0] = until_s
        times.ended(str(number), 8, since_s=since_s)
    assert times.bytes_per_s() == bytes_per_s
