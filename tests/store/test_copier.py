"""Work for the copying thread: its order, its failures, its end, and how long copies take."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.copy_times import CopyTimes, Sent
from tests.store.copiers import finish, held
from tests.waits import WAIT_S


@pytest.fixture
def copier() -> Iterator[HostCopier]:
    copier = HostCopier()
    yield copier
    copier.close()


def test_work_is_done_in_order_in_a_thread_of_its_own(copier: HostCopier) -> None:
    done: list[tuple[int, int]] = []
    with held(copier):
        for number in range(20):
            submit = copier.run if number % 3 else copier.then
            submit(lambda number=number: done.append((number, threading.get_ident())))
        assert done == []
    finish(copier)
    assert [number for number, _ in done] == list(range(20))
    assert len({thread for _, thread in done} - {threading.get_ident()}) == 1
    assert copier.run(lambda: 5).result(WAIT_S) == 5
    assert copier.then(lambda: 6).result(WAIT_S) == 6


def test_every_copy_is_complete_when_copying_returns(copier: HostCopier) -> None:
    sources = [torch.arange(1000), torch.randn(7).to(torch.bfloat16), torch.tensor([True, False]), torch.empty(0)]
    targets = [torch.zeros_like(source) for source in sources]

    def copy() -> tuple[float, list[torch.Tensor]]:
        seconds = copier.copy_now(zip(targets, sources, strict=True))
        return seconds, [target.clone() for target in targets]

    seconds, copied = copier.run(copy).result(WAIT_S)
    assert seconds >= 0
    assert all(torch.equal(target, source) for target, source in zip(copied, sources, strict=True))


def test_sources_are_made_as_they_are_copied(copier: HostCopier) -> None:
    target = torch.zeros(2, dtype=torch.int64)
    copies = ((target, target + 1) for _ in range(3))
    copier.run(lambda: copier.copy_now(copies)).result(WAIT_S)
    assert target.tolist() == [3, 3]


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError(), KeyError("x")], ids=repr)
def test_work_that_fails_keeps_its_error_and_ends_nothing_else(copier: HostCopier, error: Exception) -> None:
    def fail() -> None:
        raise error

    with held(copier):
        failed = [copier.run(fail), copier.then(fail)]
        after = [copier.run(lambda: 1), copier.then(lambda: 2)]
    assert [future.exception(WAIT_S) for future in failed] == [error, error]
    assert [future.result(WAIT_S) for future in after] == [1, 2]


def test_closing_finishes_what_is_queued(copier: HostCopier) -> None:
    go = threading.Event()
    futures = [copier.run(lambda: go.wait(WAIT_S)), copier.run(lambda: 1), copier.then(lambda: 2)]
    go.set()
    copier.close()
    assert [future.done() and future.result() for future in futures] == [True, 1, 2]
    with pytest.raises(RuntimeError, match="shutdown"):
        copier.run(lambda: 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_sees_what_was_computed_before_it_was_submitted(copier: HostCopier) -> None:
    target = torch.zeros(4096, dtype=torch.float32).pin_memory()
    source = torch.zeros(4096, 4096, device="cuda")
    for _ in range(50):
        source = source @ source + 1.0
    expected = source[0].clone()
    copier.run(lambda: copier.copy_now([(target, source[0])])).result(WAIT_S)
    assert torch.equal(target, expected.cpu())


Copies = Sequence[tuple[float, float]]


def times_of(copies: Copies) -> tuple[CopyTimes, list[float]]:
    """Return the times of copies of 8 bytes each, and their clock."""
    clock = [0.0]
    times = CopyTimes(lambda: clock[0])
    for number, (since_s, until_s) in enumerate(copies):
        clock[0] = until_s
        times.ended(str(number), 8, since_s=since_s)
    return times, clock


@pytest.mark.parametrize(
    ("copies", "seconds", "span_s"),
    [
        pytest.param([(1, 3)], 2, 2, id="one"),
        pytest.param([(1, 3), (6, 7)], 3, 6, id="one after the other, with a pause"),
        pytest.param([(1, 3), (2, 4), (6, 7)], 4, 6, id="overlapping"),
        pytest.param([(1, 9), (2, 4), (5, 10)], 9, 9, id="one within another"),
    ],
)
def test_what_it_took_to_send_some(copies: Copies, seconds: float, span_s: float) -> None:
    times, clock = times_of(copies)
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
    assert times_of(copies)[0].bytes_per_s() == bytes_per_s
