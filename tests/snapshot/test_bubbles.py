"""A copying thread waits for bubbles and uses them; a hurry ends all waits.

The length of bubbles is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import CopiedBytes, SnapshotRequest
from tests.snapshot.copiers import Engine, finish
from tests.snapshot.samples import HEADER, only_part, piece
from tests.waits import WAIT_S


class Waiting(PipelineBubbles):
    """Bubbles with an event that is set once a thread begins to wait for a bubble."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self) -> bool:
        self.is_waited_for.set()
        return super().wait()


def test_a_thread_waits_for_the_next_bubble_or_a_hurry() -> None:
    bubbles = Waiting()
    with bubbles.open():
        assert bubbles.is_open
    assert not bubbles.is_open
    with ThreadPoolExecutor(max_workers=1) as other:
        waited = other.submit(bubbles.wait)
        assert bubbles.is_waited_for.wait(WAIT_S)
        with bubbles.open():
            assert waited.result(WAIT_S)
        bubbles.is_waited_for.clear()
        waited = other.submit(bubbles.wait)
        assert bubbles.is_waited_for.wait(WAIT_S)
        bubbles.hurry()
        assert not waited.result(WAIT_S)
    assert not bubbles.wait()
    bubbles.unhurry()
    with bubbles.open():
        assert bubbles.wait()


def test_seconds_count_from_the_last_question(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 3.5, 10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr(
        "moe_ckpt.snapshot.bubbles.time.monotonic", lambda: next(moments)
    )
    bubbles = PipelineBubbles()
    for _ in range(2):
        with bubbles.open():
            pass
    assert bubbles.take_seconds() == 2.75
    with pytest.raises(KeyError), bubbles.open():
        raise KeyError  # as if the neighbour were lost
    assert not bubbles.is_open
    assert bubbles.take_seconds() == 1.0
    assert bubbles.take_seconds() == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_a_bubble_lasts_until_the_device_is_idle() -> None:
    bubbles, busy = PipelineBubbles(), torch.ones(1 << 24, device="cuda")
    with bubbles.open():
        for _ in range(100):
            busy.sqrt_()
    assert bubbles.take_seconds() > 0, "the device was still at it"
    assert not bubbles.is_open


class Bubbling(Engine):
    """An engine that copies three tensors of 80 bytes, with the engine's bubbles."""

    def __init__(self) -> None:
        self.bubbles = Waiting()
        super().__init__(bubbles=self.bubbles)
        self.tensors = [torch.full((20,), float(number)) for number in range(3)]

    def take(self, bubble_bytes: float) -> None:
        wanted = [
            SnapshotRequest(HEADER, lambda tensor=tensor: [piece(tensor)])
            for tensor in self.tensors
        ]
        self.engine.capture(wanted, bubble_bytes=bubble_bytes)

    def change_in_a_bubble(self) -> None:
        """Change the state, and then open a bubble until all copies are done.

        The change follows all copies that do not wait for a bubble.
        """
        assert self.bubbles.is_waited_for.wait(WAIT_S)
        for tensor in self.tensors:
            tensor += 10
        with self.bubbles.open():
            finish(self.copier)

    def taken(self) -> tuple[list[list[float]], CopiedBytes]:
        taken = self.engine.collect(wait=True)
        assert taken
        return [
            only_part(snapshot).unique().tolist() for snapshot in taken.snapshots
        ], taken.copied


@pytest.fixture
def parts() -> Iterator[Bubbling]:
    parts = Bubbling()
    yield parts
    parts.bubbles.hurry()
    parts.copier.close()


def test_copies_that_fit_wait_for_a_bubble_and_others_do_not(parts: Bubbling) -> None:
    parts.take(bubble_bytes=100)
    parts.change_in_a_bubble()
    values, copied = parts.taken()
    assert values == [[10.0], [1.0], [2.0]]
    assert copied.bubble_bytes == 80


@pytest.mark.parametrize(("room_bytes", "used_bytes"), [(1e9, 240), (0, 0)])
def test_all_is_copied_in_one_bubble_if_it_has_room(
    parts: Bubbling, room_bytes: float, used_bytes: int
) -> None:
    with parts.bubbles.open():
        parts.take(room_bytes)
        finish(parts.copier)
    assert parts.taken()[1].bubble_bytes == used_bytes
    assert parts.bubbles.is_waited_for.is_set() == (used_bytes > 0)


@pytest.mark.parametrize("end", ["release", "discard_torn"])
def test_a_capture_waits_for_bubbles_until_the_state_may_change(
    parts: Bubbling, end: str
) -> None:
    parts.take(bubble_bytes=1e9)
    assert parts.bubbles.is_waited_for.wait(WAIT_S)
    getattr(parts.engine, end)()
    if end == "discard_torn":
        assert parts.engine.collect(wait=True) is None
    else:
        values, copied = parts.taken()
        assert values == [[0.0], [1.0], [2.0]]
        assert copied.bubble_bytes == 0
    parts.bubbles.is_waited_for.clear()
    parts.take(bubble_bytes=1e9)
    parts.change_in_a_bubble()
    assert parts.taken()[1].bubble_bytes == 240, "the hurry was that of the one before"
