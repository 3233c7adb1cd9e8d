"""Work of the copying thread: order, failures, end, and the duration of copies."""

from __future__ import annotations

import contextlib
import linecache
import math
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from moe_ckpt.replication.copy_times import CopyTimes, SentCopy
from moe_ckpt.snapshot.copier import HostCopier
from tests.snapshot.copiers import finish, held
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


def test_sources_are_made_as_they_are_copied(copier: HostCopier) -> None:
    target = torch.zeros(2, dtype=torch.int64)
    copies = ((target, target + 1) for _ in range(3))
    copier.run(lambda: copier.copy_now(copies)).result(WAIT_S)
    assert target.tolist() == [3, 3]


def test_work_that_fails_keeps_its_error_and_ends_nothing_else(
    copier: HostCopier,
) -> None:
    error = MemoryError()

    def fail() -> None:
        raise error

    with held(copier):
        failed = [copier.run(fail), copier.then(fail)]
        after = [copier.run(lambda: 1), copier.then(lambda: 2)]
    assert [future.exception(WAIT_S) for future in failed] == [error, error]
    assert [future.result(WAIT_S) for future in after] == [1, 2]


def test_closing_finishes_queued_work(copier: HostCopier) -> None:
    go = threading.Event()
    futures = [
        copier.run(lambda: go.wait(WAIT_S)),
        copier.run(lambda: 1),
        copier.then(lambda: 2),
    ]
    go.set()
    copier.close()
    assert [future.done() and future.result() for future in futures] == [True, 1, 2]
    with pytest.raises(RuntimeError, match="shutdown"):
        copier.run(lambda: 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_follows_the_computations_submitted_before(copier: HostCopier) -> None:
    target = torch.zeros(4096, dtype=torch.float32).pin_memory()
    source = torch.zeros(4096, 4096, device="cuda")
    for _ in range(50):
        source = source @ source + 1.0
    expected = source[0].clone()
    copier.run(lambda: copier.copy_now([(target, source[0])])).result(WAIT_S)
    assert torch.equal(target, expected.cpu())


Copies = Sequence[tuple[float, float]]


def times_of(copies: Copies) -> CopyTimes:
    """Return the times of copies of 8 bytes each, half a second after the last copy."""
    clock = [0.0]
    times = CopyTimes(lambda: clock[0])
    for number, (since_s, until_s) in enumerate(copies):
        clock[0] = until_s
        times.ended(str(number), 8, since_s=since_s)
    clock[0] = max(until_s for _, until_s in copies) + 0.5
    return times


@pytest.mark.parametrize(
    ("copies", "seconds", "span_s"),
    [
        pytest.param([(1, 3)], 2, 2, id="one"),
        pytest.param([(1, 3), (2, 4), (6, 7)], 4, 6, id="overlapping, then a pause"),
        pytest.param([(1, 9), (2, 4), (5, 10)], 9, 9, id="one within another"),
    ],
)
def test_the_time_of_sending_some_blobs(
    copies: Copies, seconds: float, span_s: float
) -> None:
    keys = [str(number) for number in range(len(copies))]
    sent = SentCopy(
        size_bytes=8 * len(copies), seconds=seconds, span_s=span_s, ago_s=0.5
    )
    assert times_of(copies).of([*keys, "not sent"]) == sent


def test_blobs_never_sent_or_forgotten_have_no_time() -> None:
    times = CopyTimes(lambda: 5.0)
    assert (times.of(["a"]), times.bytes_per_s()) == (None, math.inf)
    times.ended("a", 8, since_s=3.0)
    times.drop("a")
    assert (times.of(["a"]), times.bytes_per_s()) == (None, 4.0), (
        "still how fast they are"
    )


@pytest.mark.parametrize(
    ("copies", "bytes_per_s"),
    [
        pytest.param(
            [(0, 1), (0, 2), (0, 4)], 6.0, id="each waits for the one before it"
        ),
        pytest.param([(0, 4), (1, 4), (2, 4)], 6.0, id="all are there at once"),
        pytest.param([(0, 1), (2, 4), (5, 9)], 4.0, id="one at a time"),
        pytest.param([(0, 1), (2, 6), (3, 8), (9, 10)], 8.0, id="some together"),
    ],
)
def test_copies_that_wait_for_each_other_are_no_slower(
    copies: Copies, bytes_per_s: float
) -> None:
    assert times_of(copies).bytes_per_s() == bytes_per_s


def test_a_copy_that_ends_while_the_rate_is_read_waits() -> None:
    """Copies end on the thread that reads answers; the training thread reads rates."""
    times = times_of([(0, 1), (2, 3)])
    ending = threading.Thread(target=lambda: times.ended("another", 8, since_s=9.0))

    class Size(int):
        """A size whose division waits until the other copy has ended.

        The wait also ends once the other copy waits for the lock of the rates.
        """

        def __truediv__(self, seconds: float) -> float:
            if ending.ident is None:
                ending.start()
            while ending.is_alive() and not waits_for_a_lock(ending):
                pass
            return int(self) / seconds

    times.ended("this", Size(8), since_s=3.5)
    assert times.bytes_per_s() == 8.0
    ending.join()
    assert times.of(["another"])


def waits_for_a_lock(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and "with self._lock" in linecache.getline(
        frame.f_code.co_filename, frame.f_lineno
    )


class DeviceClock:
    """A device with computations of 1 s and copies of 0.25 s.

    The host runs ahead of the device.
    """

    def __init__(self) -> None:
        self.now_s = 1.0  # end of the computations that were queued before

    def event(self, *, enable_timing: bool = False) -> DeviceEvent:
        return DeviceEvent(self)


class DeviceEvent:
    """An event on a DeviceClock, which the device reaches as copies are done."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.reached_s = 0.0

    def record(self) -> None:
        self.reached_s = self._clock.now_s
        self._clock.now_s += 0.25

    def wait(self) -> None: ...

    def elapsed_time(self, later: DeviceEvent) -> float:
        return (later.reached_s - self.reached_s) * 1e3


class DeviceStream:
    """A stream on which work is done as soon as the host submits the work."""

    def synchronize(self) -> None: ...


def test_the_wait_for_computations_is_no_time_of_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, used = DeviceClock(), []
    stand_ins = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "set_device": lambda index: used.append(
            (index, threading.current_thread().name)
        ),
        "Stream": DeviceStream,
        "Event": clock.event,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    copier = HostCopier()
    target = torch.zeros(2)
    seconds = copier.run(lambda: copier.copy_now([(target, torch.ones(2))])).result(
        WAIT_S
    )
    copier.close()
    assert (target.tolist(), seconds) == ([1.0, 1.0], 0.25)
    assert used == [(1, "host-copier_0")], "a new thread starts on device 0"
