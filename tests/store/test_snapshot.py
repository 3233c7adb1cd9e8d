"""One capture after another: what may change when, what is in the snapshot, and what a failure leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.store.codec import DTYPES, ROLES, PartKey, ShardIdentity, Snapshot, SnapshotHeader, checksum, verify
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.memory import HostBuffers, PrivateMemory
from moe_ckpt.store.snapshot import Piece, SnapshotEngine, Wanted
from moe_ckpt.store.updates import Gradients
from moe_ckpt.types import ParallelLayout, RunIdentity
from tests.properties import examples
from tests.store.test_copier import WAIT_S, held, held_until_waited_for

IDENTITY = RunIdentity(run_id="run-1", model="0123abcd", layout=ParallelLayout(pp=1, dp=1, ep=1, tp=1))
SHARD = ShardIdentity(global_rank=0, pp_rank=0, tp_rank=0, ep_rank=0, etp_rank=0, dp_rank=0)
HEADER = SnapshotHeader(
    identity=IDENTITY,
    shard=SHARD,
    iteration=12,
    window_start=11,
    slot=1,
    num_slots=3,
    full=("layer 0",),
    compute=("layer 1",),
    adam_steps=(12.0,),
    parts=(),
    payload_bytes=0,
    checksum=0,
)
KIB = 1 << 10


class Engine:
    """An engine with all that it needs."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.copier = HostCopier()
        self.buffers = HostBuffers(PrivateMemory(pinned=False), limit_bytes)
        self.engine = SnapshotEngine(self.copier, self.buffers)

    def capture(self, pieces: Sequence[Piece], changing: Sequence[Piece] = ()) -> None:
        self.engine.capture([Wanted(HEADER, lambda: pieces, changing)])

    def collected(self) -> Snapshot:
        taken = self.engine.collect(wait=True)
        assert taken
        (snapshot,) = taken.snapshots
        return snapshot

    def assert_usable(self) -> None:
        """Take a snapshot and give its memory back: nothing else is in use."""
        tensor = torch.arange(16)
        self.capture([piece(tensor)])
        snapshot = self.collected()
        assert torch.equal(only_part(snapshot), tensor)
        self.buffers.release(snapshot.payload)
        assert self.buffers.in_use_bytes == 0


@pytest.fixture
def parts() -> Iterator[Engine]:
    parts = Engine()
    yield parts
    parts.copier.close()


def piece(tensor: torch.Tensor, name: str = "weight", role: str = "master", start: int = 0) -> Piece:
    key = PartKey(operator="layer 0", tensor=name, role=role)
    return key, tensor, (start, start + tensor.numel())


def only_part(snapshot: Snapshot) -> torch.Tensor:
    (part,) = snapshot.header.parts
    return snapshot.part(part)


def values_of(snapshot: Snapshot) -> dict[PartKey, torch.Tensor]:
    verify(snapshot, identity=IDENTITY, shard=SHARD)
    return {part.key: snapshot.part(part) for part in snapshot.header.parts}


def uncopyable() -> Piece:
    """A tensor that has a size but no values."""
    return piece(torch.empty(8, device="meta"), "meta")


# What is taken


def test_a_snapshot_is_complete_when_it_is_collected(parts: Engine) -> None:
    weight, buffer = torch.randn(3, 5), torch.tensor([1, 2, 3])
    parts.capture([piece(weight, start=100)], [piece(buffer, "count", "buffer")])
    snapshot = parts.collected()
    header = snapshot.header
    assert {part.key.tensor: (part.range_start, part.range_end) for part in header.parts} == {
        "weight": (100, 115),
        "count": (0, 3),
    }
    assert header.payload_bytes == 15 * 4 + 3 * 8
    assert header == replace(HEADER, parts=header.parts, payload_bytes=84, checksum=checksum(snapshot.payload, 84))
    values = values_of(snapshot)
    assert torch.equal(values[piece(weight)[0]], weight)
    assert torch.equal(values[piece(buffer, "count", "buffer")[0]], buffer)
    assert parts.buffers.in_use_bytes == 84


def test_a_buffer_that_is_used_again_holds_the_new_snapshot(parts: Engine) -> None:
    for number in range(20):
        tensor = torch.full((1000 - number,), number)
        parts.capture([piece(tensor)])
        parts.engine.release()
        snapshot = parts.collected()
        verify(snapshot, identity=IDENTITY, shard=SHARD)
        assert torch.equal(only_part(snapshot), tensor)
        parts.buffers.release(snapshot.payload)
        assert parts.buffers.total_bytes == 8000


def test_nothing_to_take_makes_an_empty_snapshot(parts: Engine) -> None:
    parts.capture([])
    snapshot = parts.collected()
    assert snapshot.header.parts == ()
    assert values_of(snapshot) == {}


TENSORS = st.tuples(
    st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3), st.sampled_from(ROLES), st.booleans()
)


@given(described=st.lists(TENSORS, max_size=6), num_changing=st.integers(0, 6))
@examples(60)
def test_any_tensors_come_out_as_they_went_in(
    described: list[tuple[str, list[int], str, bool]], num_changing: int
) -> None:
    parts = Engine()
    pieces: list[Piece] = []
    for number, (dtype, shape, role, transposed) in enumerate(described):
        tensor = torch.randint(0, 2, shape, dtype=torch.uint8).to(DTYPES[dtype])
        tensor = tensor.mT if transposed and tensor.dim() >= 2 else tensor
        if tensor.dtype.is_floating_point:
            tensor.requires_grad_(True)
        pieces.append(piece(tensor, str(number), role))
    parts.capture(pieces[num_changing:], pieces[:num_changing])
    values = values_of(parts.collected())
    assert values.keys() == {key for key, _, _ in pieces}
    assert all(torch.equal(values[key], tensor) for key, tensor, _ in pieces)
    assert all(values[key].dtype == tensor.dtype for key, tensor, _ in pieces)
    parts.copier.close()


# What may change when


def test_a_capture_goes_on_after_it_was_started(parts: Engine) -> None:
    asked_in: list[int] = []

    def pieces() -> list[Piece]:
        asked_in.append(threading.get_ident())
        return [piece(torch.ones(4))]

    with held(parts.copier):
        parts.engine.capture([Wanted(HEADER, pieces, [])])
        assert asked_in == []
        assert parts.engine.collect(wait=False) is None
        assert parts.buffers.in_use_bytes == 0
    parts.collected()
    assert len(asked_in) == 1
    assert threading.get_ident() not in asked_in


def test_what_is_changing_may_change_as_soon_as_it_is_captured(parts: Engine) -> None:
    count, bias = torch.tensor([1, 2, 3]), torch.ones(4, requires_grad=True)
    with held(parts.copier):
        parts.capture([], [piece(count, "count", "buffer"), piece(bias, "bias", "buffer")])
        count.add_(10)
        bias.data.zero_()
    values = values_of(parts.collected())
    assert {key.tensor: value.tolist() for key, value in values.items()} == {"count": [1, 2, 3], "bias": [1.0] * 4}


def test_release_waits_until_everything_is_copied(parts: Engine) -> None:
    weight = torch.arange(1 << 16)
    with held_until_waited_for(parts.copier) as waited:
        parts.capture([piece(weight)])
        assert not waited.is_set()
        parts.engine.release()
        assert waited.is_set()
        weight.zero_()
    snapshot = parts.collected()
    verify(snapshot, identity=IDENTITY, shard=SHARD)
    assert torch.equal(only_part(snapshot), torch.arange(1 << 16))


def test_a_snapshot_is_not_there_before_its_checksum_and_the_state_may_change_meanwhile(
    parts: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def checksum_when_told(payload: torch.Tensor, nbytes: int) -> int:
        assert go.wait(WAIT_S)
        return checksum(payload, nbytes)

    monkeypatch.setattr("moe_ckpt.store.snapshot.checksum", checksum_when_told)
    weight = torch.ones(100)
    parts.capture([piece(weight)])
    parts.engine.release()
    weight.zero_()
    assert parts.engine.collect(wait=False) is None
    parts.engine.discard_torn()
    go.set()
    snapshot = parts.collected()
    verify(snapshot, identity=IDENTITY, shard=SHARD)
    assert torch.equal(only_part(snapshot), torch.ones(100))


def test_a_finished_snapshot_is_collected_without_waiting(parts: Engine) -> None:
    parts.capture([piece(torch.ones(100))])
    parts.copier.then(lambda: None).result(WAIT_S)
    taken = parts.engine.collect(wait=False)
    assert taken
    verify(taken.snapshots[0], identity=IDENTITY, shard=SHARD)
    assert taken.copied.seconds >= 0
    assert taken.copied.bubble_bytes == 0


class FullKeeper:
    """Keeps all snapshots but the `refused`-th."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.kept: list[Snapshot] = []
        self.dropped: list[Snapshot] = []

    def add_snapshot(self, snapshot: Snapshot, gradients: Gradients | None = None) -> None:
        if len(self.kept) == self.refused:
            raise CheckpointSaveError("no room")
        self.kept.append(snapshot)

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        self.dropped.append(snapshot)


@pytest.mark.parametrize("refused", range(4))
def test_of_several_snapshots_all_are_kept_or_none(refused: int) -> None:
    copier, buffers, keeper = HostCopier(), HostBuffers(PrivateMemory(pinned=False)), FullKeeper(refused)
    engine = SnapshotEngine(copier, buffers, keeper)
    tensors = [torch.full((5,), float(number)) for number in range(3)]
    engine.capture([Wanted(HEADER, lambda tensor=tensor: [piece(tensor)]) for tensor in tensors])
    if refused == 3:
        taken = engine.collect(wait=True)
        assert taken
        assert [only_part(each).tolist() for each in taken.snapshots] == [tensor.tolist() for tensor in tensors]
        assert [id(each) for each in taken.snapshots] == [id(snapshot) for snapshot in keeper.kept]
    else:
        with pytest.raises(CheckpointSaveError, match="no room"):
            engine.collect(wait=True)
        assert keeper.dropped == keeper.kept
        assert buffers.in_use_bytes == 0
    copier.close()


def test_collecting_waits_where_it_is_told_to(parts: Engine) -> None:
    with held_until_waited_for(parts.copier) as waited:
        parts.capture([piece(torch.ones(100))])
        verify(parts.collected(), identity=IDENTITY, shard=SHARD)
        assert waited.is_set()


def test_a_snapshot_is_collected_once(parts: Engine) -> None:
    parts.engine.release()
    assert parts.engine.collect(wait=True) is None
    parts.capture([piece(torch.ones(1))])
    parts.collected()
    assert parts.engine.collect(wait=True) is None
    assert parts.engine.collect(wait=False) is None
    parts.engine.release()


def test_a_capture_before_the_last_is_collected_is_our_own_bug(parts: Engine) -> None:
    parts.capture([piece(torch.ones(1))])
    with pytest.raises(AssertionError):
        parts.capture([piece(torch.ones(1))])
    assert only_part(parts.collected()).tolist() == [1.0]


# A state that is lost while it is taken


def test_a_torn_capture_is_dropped_with_its_memory(parts: Engine) -> None:
    weight = torch.ones(1000)
    with held_until_waited_for(parts.copier):
        parts.capture([piece(weight)], [piece(torch.ones(3), "count", "buffer")])
        weight.zero_()
        parts.engine.discard_torn()
        assert parts.buffers.in_use_bytes == 0
    assert parts.buffers.total_bytes == 4012, "nothing was copied: the test is void"
    assert parts.engine.collect(wait=True) is None
    parts.engine.release()
    parts.assert_usable()


def test_a_capture_that_is_copied_is_not_torn(parts: Engine) -> None:
    weight = torch.ones(100)
    parts.capture([piece(weight)])
    parts.engine.release()
    weight.zero_()
    parts.engine.discard_torn()
    assert torch.equal(only_part(parts.collected()), torch.ones(100))


def test_there_need_be_nothing_to_discard(parts: Engine) -> None:
    parts.engine.discard_torn()
    parts.assert_usable()
    parts.engine.discard_torn()
    parts.assert_usable()


# Failures


def raising(error: Exception) -> Callable[[], Sequence[Piece]]:
    def pieces() -> Sequence[Piece]:
        raise error

    return pieces


FAILURES = {
    "a tensor without values": lambda: [piece(torch.ones(100)), uncopyable()],
    "a precision that has no name": lambda: [piece(torch.zeros(1, dtype=torch.complex64))],
    "too little memory": lambda: [piece(torch.zeros(2 * KIB))],
    "a device that fails": raising(RuntimeError("broken")),
    "a machine out of memory": raising(MemoryError("no memory")),
}
ENDS: dict[str, Callable[[Engine], object]] = {
    "release": lambda parts: parts.engine.release(),
    "collect": lambda parts: parts.engine.collect(wait=True),
    "collect once done": lambda parts: (
        parts.copier.then(lambda: None).result(WAIT_S),
        parts.engine.collect(wait=False),
    ),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("pieces", FAILURES.values(), ids=FAILURES)
def test_a_capture_that_fails_says_so_and_leaves_nothing(
    pieces: Callable[[], Sequence[Piece]], end: Callable[[Engine], object]
) -> None:
    parts = Engine(limit_bytes=KIB)
    before = Wanted(HEADER, lambda: [piece(torch.ones(3))])
    parts.engine.capture([before, Wanted(HEADER, pieces, [piece(torch.ones(2), "count", "buffer")])])
    with pytest.raises(CheckpointSaveError, match=r"^the snapshot could not be copied: .+") as caught:
        end(parts)
    assert caught.value.__cause__ is not None
    assert parts.buffers.in_use_bytes == 0
    parts.engine.release()
    parts.engine.discard_torn()
    assert parts.engine.collect(wait=True) is None
    parts.assert_usable()
    parts.copier.close()


def test_a_pool_over_its_limit_names_the_setting() -> None:
    parts = Engine(limit_bytes=KIB)
    held_bytes = parts.buffers.acquire(1000)
    parts.capture([piece(torch.zeros(10))])
    with pytest.raises(CheckpointSaveError, match=r"1000 bytes in use and 40 more .* ckpt\.memory_budget_bytes=1024$"):
        parts.engine.release()
    parts.buffers.release(held_bytes)
    parts.assert_usable()
    parts.copier.close()


def test_work_of_others_goes_on_after_a_failure(parts: Engine) -> None:
    parts.capture([uncopyable()])
    other: Future[int] = parts.copier.run(lambda: 5)
    assert other.result(WAIT_S) == 5
    with pytest.raises(CheckpointSaveError):
        parts.engine.release()


def test_discarding_a_capture_that_fails_raises_nothing(parts: Engine) -> None:
    with held_until_waited_for(parts.copier):
        parts.capture([uncopyable()])
        parts.engine.discard_torn()
    parts.assert_usable()
