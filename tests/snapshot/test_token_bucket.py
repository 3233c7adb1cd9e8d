"""Caps limit the bytes of each period, and waits under a cap end.

No wait is longer than on a link with the rate of the cap.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.token_bucket import BURST_S, Throttle, TokenBucket
from tests.snapshot.copiers import Asked
from tests.waits import WAIT_S

RATE = 1000.0


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def move(self, seconds: float) -> bool:
        self.now_s += seconds
        return False


def traffic(clock: Clock, throttle: Throttle, seed: int) -> Iterator[tuple[float, int]]:
    """Yield the time and the number of bytes of each chunk that passes.

    One thread copies the chunks, with pauses, and with sleeps that last too long.
    """
    chance = random.Random(seed)
    for _ in range(300):
        nbytes = chance.choice([1, 7, 40, 90])
        late_s = chance.choice([0.0, 0.0, 0.01, 0.2])
        throttle.wait(
            nbytes, lambda seconds, late_s=late_s: clock.move(seconds + late_s)
        )
        yield clock.now_s, nbytes
        clock.now_s += chance.choice([0.0, 0.0, 0.0, 0.003, 1.5])


@pytest.mark.parametrize("seed", range(10))
def test_no_period_carries_more_than_the_cap(seed: int) -> None:
    clock = Clock()
    passed = list(traffic(clock, Throttle(RATE, clock), seed))
    sums = [0]
    for _, nbytes in passed:
        sums.append(sums[-1] + nbytes)
    assert all(
        sums[last + 1] <= RATE * (at_s - 100.0) + 1e-6
        for last, (at_s, _) in enumerate(passed)
    )
    for first, (since_s, nbytes) in enumerate(passed):
        for last in range(first, len(passed)):
            most = RATE * (passed[last][0] - since_s + BURST_S) + nbytes
            assert sums[last + 1] - sums[first] <= most + 1e-6


def test_a_copy_waits_as_long_as_on_a_link_of_that_rate() -> None:
    clock = Clock()
    throttle = Throttle(RATE, clock)
    clock.now_s += 60.0  # a pause earns a burst, and no more
    for _ in range(100):
        throttle.wait(50, clock.move)
    assert clock.now_s == pytest.approx(160.0 + 5.0 - BURST_S)


def test_threads_share_the_tokens_in_their_order() -> None:
    clock = Clock()
    bucket = TokenBucket(RATE, clock)
    assert [bucket.take(nbytes) for nbytes in (500, 250, 1000)] == pytest.approx(
        [0.5, 0.75, 1.75]
    )
    bucket.give_back(1000)
    assert bucket.take(250) == pytest.approx(1.0)


def refuse(_: float) -> bool:
    raise ConnectionAbortedError


def test_tokens_of_an_interrupted_wait_come_back() -> None:
    clock = Clock()
    throttle = Throttle(RATE, clock)
    with pytest.raises(ConnectionAbortedError):
        throttle.wait(10**9, refuse)
    throttle.wait(10**9, lambda _: True)
    throttle.wait(500, clock.move)
    assert clock.now_s == pytest.approx(100.5)


def test_lifting_a_cap_ends_waits_until_it_counts_again() -> None:
    throttle, waiting, done = Throttle(1e-3), threading.Event(), threading.Event()

    def copy() -> None:
        waiting.set()
        throttle.wait(10**6)
        throttle.wait(10**6)
        done.set()

    thread = threading.Thread(target=copy)
    thread.start()
    assert waiting.wait(WAIT_S)
    assert not done.is_set()
    throttle.lift()
    thread.join(WAIT_S)
    assert done.is_set()
    throttle.apply()
    slept: list[float] = []
    throttle.wait(1000, lambda seconds: bool(slept.append(seconds)))
    assert slept == [pytest.approx(1e6, rel=1e-3)], (
        "bytes that were let through left no debt"
    )


def test_a_capped_copier_copies_the_same_and_ends_at_once() -> None:
    copier = HostCopier(Throttle(1.0))
    sources = [
        torch.arange(700_000, dtype=torch.float32),
        torch.arange(5, dtype=torch.uint8),
        torch.zeros(0),
    ]
    targets = [torch.zeros_like(source) for source in sources]
    copied = copier.run(lambda: copier.copy_now(zip(targets, sources, strict=True)))
    assert not copied.done()
    copier.close()
    assert copied.result(WAIT_S) >= 0
    assert all(
        torch.equal(target, source)
        for target, source in zip(targets, sources, strict=True)
    )


def test_a_capped_copy_takes_a_token_for_every_byte() -> None:
    throttle = Asked()
    copier = HostCopier(throttle)
    source = torch.ones(700_000)
    copier.run(lambda: copier.copy_now([(torch.zeros_like(source), source)])).result(
        WAIT_S
    )
    copier.close()
    assert sum(throttle.asked) == source.nbytes
    assert max(throttle.asked) <= 1 << 20
