"""Snapshots in host memory: held windows, reuse of buffers, and bounded memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.codec import ROLES, Snapshot
from moe_ckpt.snapshot.windows import (
    BYTES_OF_ROLE,
    HostBuffers,
    HostMemory,
    PrivateMemory,
    SnapshotMemory,
)
from moe_ckpt.types import Version
from tests.replication.blobs import KIB
from tests.snapshot.samples import (
    Piece,
    keep_window,
    piece,
    pool,
    snapshot_of,
    starts_of,
    take_window,
)
from tests.waits import WAIT_S


def in_flight(memory: SnapshotMemory) -> tuple[Snapshot, ...]:
    window = memory.in_flight()
    return window.snapshots if window else ()


def num_held(memory: SnapshotMemory) -> int:
    return len(in_flight(memory)) + sum(
        len(window.snapshots) for window in memory.windows()
    )


@pytest.mark.parametrize(
    ("free", "nbytes", "taken"),
    [
        ([100_000, 110_000, 120_000], 105_000, 110_000),
        ([120_000, 110_000, 100_000], 105_000, 110_000),
        ([100_000], 100_000, 100_000),
        ([99_999], 100_000, 100_000),
        ([129_096], 100_000, 129_096),  # 1.25 x 100,000 + 4,096
        ([129_097], 100_000, 100_000),
        ([4096], 0, 4096),
        ([4097], 0, 0),
    ],
)
def test_the_smallest_buffer_that_fits_and_is_not_far_too_large(
    free: list[int], nbytes: int, taken: int
) -> None:
    buffers = pool()
    for buffer in [buffers.acquire(size) for size in free]:
        buffers.release(buffer)
    assert buffers.acquire(nbytes).numel() == taken


def test_free_buffers_beyond_the_peak_go_back_longest_free_first() -> None:
    buffers = pool()
    for buffer in [buffers.acquire(size * KIB) for size in (400, 300, 100)]:
        buffers.release(buffer)
    # 850 KiB would exceed 800 KiB: the buffer of 400 KiB goes back
    buffers.release(buffers.acquire(50 * KIB))
    assert buffers.total_bytes == 450 * KIB
    buffers.release(buffers.acquire(350 * KIB))  # 450 + 350 KiB fit in 800 KiB
    assert buffers.total_bytes == 800 * KIB


def test_the_budget_is_kept_and_named_once_free_buffers_have_made_room() -> None:
    buffers = pool(limit_bytes=1000 * KIB)
    buffers.release(buffers.acquire(900 * KIB))
    held = buffers.acquire(600 * KIB)
    assert buffers.total_bytes == 600 * KIB
    with pytest.raises(CheckpointSaveError) as caught:
        buffers.acquire(401 * KIB)
    assert str(caught.value) == (
        "host memory for snapshots: got 614400 bytes in use and 410624 more to hold, "
        "wanted at most ckpt.memory_budget_bytes=1024000"
    )
    assert buffers.acquire(400 * KIB).numel() == 400 * KIB
    buffers.release(held)
    assert buffers.total_bytes == 1000 * KIB


def test_memory_that_is_released_twice_or_is_not_ours_is_a_bug() -> None:
    buffers = pool()
    buffer = buffers.acquire(10)
    with pytest.raises(AssertionError):
        buffers.release(buffer[:5])
    buffers.release(buffer)
    with pytest.raises(AssertionError):
        buffers.release(buffer)


@pytest.fixture(params=["private", "folder"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> HostMemory:
    return (
        BlobFolder(tmp_path)
        if request.param == "folder"
        else PrivateMemory(pinned=False)
    )


def test_memory_is_bytes_of_its_own(memory: HostMemory) -> None:
    tensors = [memory.allocate(nbytes) for nbytes in (1000, 1, 0, 1000)]
    for number, tensor in enumerate(tensors):
        assert (tensor.dtype, tensor.dim(), tensor.is_contiguous()) == (
            torch.uint8,
            1,
            True,
        )
        tensor.fill_(number)
    memory.free(tensors.pop(0))
    assert [tensor.tolist() for tensor in tensors] == [[1], [], [3] * 1000]
    with pytest.raises(CheckpointSaveError, match=f"{2**62} bytes"):
        memory.allocate(2**62)
    assert memory.allocate(1000).numel() == 1000


def test_an_adopted_buffer_is_one_in_use() -> None:
    memory = PrivateMemory(pinned=False)
    buffers = HostBuffers(memory, limit_bytes=1000)
    adopted = memory.allocate(1200)  # more than the limit, but already allocated
    buffers.adopt(adopted)
    with pytest.raises(AssertionError):
        buffers.adopt(adopted)
    with pytest.raises(CheckpointSaveError, match="got 1200 bytes in use and 1 more"):
        buffers.acquire(1)
    buffers.release(adopted)
    assert (buffers.in_use_bytes, buffers.total_bytes) == (0, 1200)
    assert buffers.acquire(1000).numel() == 1000
    assert buffers.total_bytes == 1000, (
        "the adopted buffer was kept beyond what was needed"
    )


def test_pinned_memory_is_ordinary_memory_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not PrivateMemory(pinned=True).allocate(10).is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_pinned() -> None:
    assert PrivateMemory(pinned=True).allocate(10).is_pinned()
    assert not PrivateMemory(pinned=False).allocate(10).is_pinned()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 200_000)), max_size=60),
    st.integers(200_000, 1_000_000),
)
def test_any_use_stays_in_the_budget_and_near_the_need(
    steps: list[tuple[bool, int]], limit_bytes: int
) -> None:
    buffers, held = pool(limit_bytes), []
    peak_bytes = 0
    for is_acquire, number in steps:
        if held and not is_acquire:
            buffers.release(held.pop(number % len(held)))
            continue
        try:
            held.append(buffers.acquire(number))
        except CheckpointSaveError:
            assert sum(buffer.numel() for buffer in held) + number > limit_bytes
        assert len({id(buffer) for buffer in held}) == len(held)
        peak_bytes = max(peak_bytes, buffers.in_use_bytes)
        assert buffers.in_use_bytes == sum(buffer.numel() for buffer in held)
        assert buffers.in_use_bytes <= buffers.total_bytes <= peak_bytes <= limit_bytes


def test_threads_never_share_a_buffer() -> None:
    buffers = pool()
    for buffer in [buffers.acquire(2000 + size) for size in range(100)]:
        buffers.release(buffer)
    barrier, usual_s = threading.Barrier(4), sys.getswitchinterval()

    def use(number: int) -> list[int]:
        found = []
        for _ in range(100):
            barrier.wait(WAIT_S)
            buffer = buffers.acquire(2000)
            buffer[0] = number
            barrier.wait(WAIT_S)
            found.append(int(buffer[0]))
            barrier.wait(WAIT_S)
            buffers.release(buffer)
        return found

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(use, range(4))) == [
                [number] * 100 for number in range(4)
            ]
    finally:
        sys.setswitchinterval(usual_s)
    assert buffers.in_use_bytes == 0


def add_window(
    memory: SnapshotMemory,
    buffers: HostBuffers,
    start: int,
    slots: Sequence[Sequence[Piece]],
) -> None:
    """Take a window of these slots without keeping the window."""
    memory.begin(Version(epoch=0, iteration=start), len(slots))
    for slot, pieces in enumerate(slots):
        memory.add(snapshot_of(buffers, (start, slot, len(slots)), pieces))


@pytest.mark.parametrize("keep_windows", [1, 2])
def test_windows_of_the_same_sizes_use_the_memory_of_the_first(
    keep_windows: int,
) -> None:
    buffers = pool()
    memory, sizes = (
        SnapshotMemory(buffers, keep_windows),
        [660_000, 620_000, 580_000, 540_000],
    )
    used: set[int] = set()
    for window in range(12):
        slots = [[piece(torch.empty(size, dtype=torch.uint8))] for size in sizes]
        add_window(memory, buffers, 1 + 4 * window, slots)
        memory.keep_in_flight()
        now = {id(snapshot.payload) for snapshot in memory.windows()[0].snapshots}
        assert window <= keep_windows or now <= used, "a buffer was allocated"
        used |= now
        assert buffers.total_bytes == min(window + 1, keep_windows + 1) * sum(sizes)


def carry_out(
    script: str, keep_windows: int, *, keeps_oldest: bool = False
) -> SnapshotMemory:
    """Execute a script of orders.

    After each order, the buffers in use are those of the held snapshots.
    """
    buffers = pool()
    memory = SnapshotMemory(buffers, keep_windows, keeps_oldest=keeps_oldest)
    for order in script.split(", "):
        name, *numbers = order.split()
        starts = [int(number) for number in numbers]
        if name == "keep":
            keep_window(memory, buffers, *starts)
        elif name == "take":
            take_window(memory, buffers, *starts)
        elif name == "begin":
            memory.begin(Version(epoch=0, iteration=starts[0]), 2)
        elif name == "add":
            memory.add(snapshot_of(buffers, (starts[0], 0, 2)))
        elif name == "keep_only":
            memory.keep_only(starts)
        else:
            getattr(memory, name)(*starts)
        assert buffers.in_use_bytes == 1000 * num_held(memory)
    return memory


@pytest.mark.parametrize(
    ("keep_windows", "script", "starts", "in_flight"),
    [
        # the next window drops a window that was never completed
        (1, "keep 1, begin 3, add 3, begin 4", [1], (4, 0)),
        (1, "keep 1, keep 3, take 5, abandon, abandon", [3], None),
        (3, "keep 1, keep 3, keep 5, take 7, drop 3", [5, 1], (7, 2)),
        (3, "keep 1, keep 3, keep 5, take 7, drop 7, drop 1", [5, 3], None),
        # kept windows stay until the window in flight is kept
        (2, "keep 1, keep 3, keep 5, take 3", [5, 3], (3, 2)),
        # taken again after a rollback
        (2, "keep 1, keep 3, keep 5, take 3, keep_in_flight", [3], None),
        (1, "keep 4, take 6, keep_complete", [6, 4], None),
        (
            1,
            "keep 4, take 6, keep_complete, begin 8, add 8, keep_complete",
            [6, 4],
            None,
        ),
        # only the first of the wanted windows
        (1, "keep 4, take 6, keep_complete, keep_only 6 4", [6], None),
        # only windows that other ranks have, too
        (2, "keep 4, keep 6, keep_only 4 2", [4], None),
        (2, "keep 4, take 4, keep_complete", [4], None),  # the same window again
    ],
)
def test_after_a_script(
    keep_windows: int, script: str, starts: list[int], in_flight: tuple[int, int] | None
) -> None:
    memory = carry_out(script, keep_windows)
    window = memory.in_flight()
    assert (window and (window.start, len(window.snapshots))) == in_flight
    assert (starts_of(memory), memory.oldest_needed_iteration()) == (starts, starts[-1])
    assert all(window.complete for window in memory.windows())


@pytest.mark.parametrize(
    ("keep_windows", "script", "starts", "in_flight"),
    [
        (1, "keep 1, keep 3, keep 5", [5, 1], None),
        (2, "keep 1, keep 3, keep 5, keep 7", [7, 5, 1], None),
        (1, "keep 1, keep 3, keep 5, keep_only 5 1", [5, 1], None),
        (1, "keep 1, keep 3, keep 5, take 7, drop_superseded", [5], (7, 2)),
        (2, "keep 1, keep 3, keep 5, keep 7, drop_superseded", [7, 5], None),
        (1, "keep 1, keep 3, drop_superseded, keep 5, keep 7", [7, 3], None),
        # a window from before a rollback is no oldest window
        (1, "keep 4, keep 6, take 4, keep_in_flight", [4], None),
    ],
)
def test_the_oldest_window_stays_until_it_is_superseded(
    keep_windows: int, script: str, starts: list[int], in_flight: tuple[int, int] | None
) -> None:
    memory = carry_out(script, keep_windows, keeps_oldest=True)
    window = memory.in_flight()
    assert (window and (window.start, len(window.snapshots))) == in_flight
    assert starts_of(memory) == starts


def test_a_snapshot_of_the_same_slot_is_replaced() -> None:
    buffers = pool()
    memory = SnapshotMemory(buffers, 1)
    memory.begin(Version(epoch=0, iteration=1), 2)
    old, new = snapshot_of(buffers, (1, 0, 2)), snapshot_of(buffers, (1, 0, 2))
    for snapshot in (old, new):
        memory.add(snapshot)
    assert (in_flight(memory), buffers.in_use_bytes) == ((new,), 1000)
    assert buffers.acquire(1000) is old.payload
    memory.add(Snapshot(header=replace(new.header, checksum=1), payload=new.payload))
    assert buffers.in_use_bytes == 2000, "the same buffer under another header"


ELSEWHERE = [((3, 0, 2), {}), ((1, 0, 3), {}), ((1, 2, 2), {}), ((1, -1, 2), {})]
MISNUMBERED = [((1, 1, 2), {"iteration": 1}), ((1, 1, 2), {"window_start": 0})]


@pytest.mark.parametrize(("slot_of_window", "wrong"), [*ELSEWHERE, *MISNUMBERED])
def test_a_snapshot_that_does_not_belong_is_a_bug(
    slot_of_window: tuple[int, int, int], wrong: dict[str, int]
) -> None:
    memory, snapshot = SnapshotMemory(pool(), 1), snapshot_of(pool(), slot_of_window)
    memory.begin(Version(epoch=0, iteration=1), 2)
    with pytest.raises(AssertionError):
        memory.add(
            Snapshot(header=replace(snapshot.header, **wrong), payload=snapshot.payload)
        )
    assert num_held(memory) == 0


@pytest.mark.parametrize(
    "script",
    [
        "add 1",
        "keep_in_flight",
        "begin 1, add 1, keep_in_flight",
        "begin 1, add 1, drop 2",
    ],
)
def test_calls_out_of_order_are_bugs(script: str) -> None:
    with pytest.raises(AssertionError):
        carry_out(script, 1)


def test_bytes_are_counted_by_role_over_all_windows() -> None:
    buffers = pool()
    memory = SnapshotMemory(buffers, 1)
    assert set(BYTES_OF_ROLE) == set(ROLES)
    assert memory.bytes_by_role() == {
        "full_bytes": 0,
        "compute_bytes": 0,
        "buffer_bytes": 0,
    }
    sizes = {
        "master": 100,
        "exp_avg": 10,
        "exp_avg_sq": 1,
        "compute": 1000,
        "buffer": 10_000,
    }
    pieces = [piece(torch.empty(size), role=role) for role, size in sizes.items()]
    add_window(memory, buffers, 1, [pieces])
    memory.keep_in_flight()
    add_window(memory, buffers, 2, [pieces])
    assert memory.bytes_by_role() == {
        "full_bytes": 2 * 444,
        "compute_bytes": 2 * 4000,
        "buffer_bytes": 2 * 40_000,
    }
