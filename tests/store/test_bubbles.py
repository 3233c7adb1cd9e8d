"""A thread that copies waits for bubbles and uses them; a hurry ends all waiting; what a bubble took is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from moe_ckpt.store.bubbles import PipelineBubbles
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.memory import HostBuffers, PrivateMemory
from moe_ckpt.store.snapshot import Copied, SnapshotEngine, Wanted
from tests.store.test_copier import WAIT_S
from tests.store.test_snapshot import HEADER, only_part, piece


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as thread:
        yield thread


class Waiting(PipelineBubbles):
    """Bubbles that tell when somebody has begun to wait for one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self) -> bool:
        self.is_waited_for.set()
        return super().wait()


def test_a_bubble_is_open_within_its_context() -> None:
    bubbles = PipelineBubbles()
    assert not bubbles.is_open
    with bubbles.open():
        assert bubbles.is_open
        assert bubbles.wait()
    assert not bubbles.is_open


def test_one_who_waits_goes_on_in_the_next_bubble(other: ThreadPoolExecutor) -> None:
    bubbles = Waiting()
    with bubbles.open():
        pass
    waited: Future[bool] = other.submit(bubbles.wait)
    assert bubbles.is_waited_for.wait(WAIT_S)
    with bubbles.open():
        assert waited.result(WAIT_S)


def test_a_hurry_ends_waiting_until_it_is_over(other: ThreadPoolExecutor) -> None:
    bubbles = Waiting()
    waited = other.submit(bubbles.wait)
    assert bubbles.is_waited_for.wait(WAIT_S)
    bubbles.hurry()
    assert not waited.result(WAIT_S)
    assert not bubbles.wait()
    bubbles.unhurry()
    with bubbles.open():
        assert bubbles.wait()


def test_seconds_are_those_since_it_was_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 3.5, 10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr("moe_ckpt.store.bubbles.time.monotonic", lambda: next(moments))
    bubbles = PipelineBubbles()
    for _ in range(2):
        with bubbles.open():
            pass
    assert bubbles.take_seconds() == 2.75
    with pytest.raises(KeyError), bubbles.open():
        raise KeyError  # the neighbour is gone
    assert not bubbles.is_open
    assert bubbles.take_seconds() == 1.0
    assert bubbles.take_seconds() == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_a_bubble_lasts_until_what_is_waited_for_is_there() -> None:
    bubbles, busy = PipelineBubbles(), torch.ones(1 << 24, device="cuda")
    with bubbles.open():
        for _ in range(100):
            busy.sqrt_()
    assert bubbles.take_seconds() > 0, "the device was still at it"
    assert not bubbles.is_open


class Engine:
    """An engine that copies three tensors of 80 bytes, and the bubbles it waits for."""

    def __init__(self) -> None:
        self.bubbles = Waiting()
        self.copier = HostCopier()
        buffers = HostBuffers(PrivateMemory(pinned=False))
        self.engine = SnapshotEngine(self.copier, buffers, bubbles=self.bubbles)
        self.tensors = [torch.full((20,), float(number)) for number in range(3)]

    def capture(self, bubble_bytes: float) -> None:
        wanted = [Wanted(HEADER, lambda tensor=tensor: [piece(tensor)]) for tensor in self.tensors]
        self.engine.capture(wanted, bubble_bytes=bubble_bytes)

    def collected(self) -> tuple[list[list[float]], Copied]:
        taken = self.engine.collect(wait=True)
        assert taken
        return [only_part(snapshot).unique().tolist() for snapshot in taken.snapshots], taken.copied


@pytest.fixture
def parts() -> Iterator[Engine]:
    parts = Engine()
    yield parts
    parts.bubbles.hurry()
    parts.copier.close()


def test_what_has_room_waits_for_a_bubble_and_the_rest_does_not(parts: Engine) -> None:
    parts.capture(bubble_bytes=100)
    assert parts.bubbles.is_waited_for.wait(WAIT_S)  # all others are copied
    for tensor in parts.tensors:
        tensor += 10
    with parts.bubbles.open():
        parts.copier.then(lambda: None).result(WAIT_S)
    values, copied = parts.collected()
    assert values == [[10.0], [1.0], [2.0]]
    assert copied.bubble_bytes == 80


def test_all_is_copied_in_one_bubble_if_it_fits(parts: Engine) -> None:
    with parts.bubbles.open():
        parts.capture(bubble_bytes=1e9)
        parts.copier.then(lambda: None).result(WAIT_S)
    assert parts.collected()[1].bubble_bytes == 240


@pytest.mark.parametrize("end", ["release", "discard_torn"])
def test_where_no_bubble_comes_nobody_waits_longer_than_until_the_state_may_change(parts: Engine, end: str) -> None:
    parts.capture(bubble_bytes=1e9)
    assert parts.bubbles.is_waited_for.wait(WAIT_S)
    getattr(parts.engine, end)()
    if end == "discard_torn":
        assert parts.engine.collect(wait=True) is None
    else:
        values, copied = parts.collected()
        assert values == [[0.0], [1.0], [2.0]]
        assert copied.bubble_bytes == 0
    parts.bubbles.is_waited_for.clear()
    parts.capture(bubble_bytes=1e9)
    assert parts.bubbles.is_waited_for.wait(WAIT_S)
    for tensor in parts.tensors:
        tensor += 10
    with parts.bubbles.open():
        parts.copier.then(lambda: None).result(WAIT_S)
    assert parts.collected()[1].bubble_bytes == 240, "the hurry was that of the one before"


def test_without_room_in_bubbles_nothing_waits(parts: Engine) -> None:
    parts.capture(bubble_bytes=0)
    parts.copier.then(lambda: None).result(WAIT_S)
    assert parts.collected()[1].bubble_bytes == 0
    assert not parts.bubbles.is_waited_for.is_set()
