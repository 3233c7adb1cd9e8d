"""Work for the copying thread: its order, its failures, and its end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch

from moe_ckpt.store.copier import HostCopier

WAIT_S = 60.0


@pytest.fixture
def copier() -> Iterator[HostCopier]:
    copier = HostCopier()
    yield copier
    copier.close()


@contextmanager
def held(copier: HostCopier) -> Iterator[None]:
    """Keep the thread of a copier from everything that is submitted inside, until the end."""
    go = threading.Event()
    holding = copier.run(lambda: go.wait(WAIT_S))
    try:
        yield
    finally:
        go.set()
    assert holding.result()


@contextmanager
def held_until_waited_for(copier: HostCopier) -> Iterator[threading.Event]:
    """Keep the thread of a copier busy until this thread waits for a future; the event tells that it has."""
    go, left, waiting_thread = threading.Event(), threading.Event(), threading.get_ident()

    def watch() -> None:
        while not left.is_set():
            if _waits_for_a_future(waiting_thread):
                go.set()
                return

    holding = copier.run(lambda: go.wait(WAIT_S) or left.is_set())
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield go
    finally:
        left.set()
        watcher.join()
        go.set()
    assert holding.result()


def _waits_for_a_future(thread_id: int) -> bool:
    frame = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_code is not Future.result.__code__:
        frame = frame.f_back
    return frame is not None


def test_what_is_submitted_first_is_done_first(copier: HostCopier) -> None:
    done: list[int] = []
    with held(copier):
        for number in range(20):
            submit = copier.run if number % 3 else copier.then
            submit(lambda number=number: done.append(number))
        assert done == []
    copier.then(lambda: None).result(WAIT_S)
    assert done == list(range(20))


def test_work_is_done_one_after_another_in_a_thread_of_its_own(copier: HostCopier) -> None:
    threads = {work(threading.get_ident).result(WAIT_S) for work in (copier.run, copier.then) for _ in range(5)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_work_gives_its_result(copier: HostCopier) -> None:
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
    assert [future.done() for future in futures] == [True, True, True]
    assert [future.result() for future in futures] == [True, 1, 2]
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
