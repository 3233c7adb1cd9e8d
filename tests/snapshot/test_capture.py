"""Successive captures: when tensors may change, contents of snapshots, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.snapshot.adam_update import Gradients
from moe_ckpt.snapshot.capture import SnapshotEngine, SnapshotRequest
from moe_ckpt.snapshot.codec import DTYPES, ROLES, PartKey, Snapshot, checksum
from tests.replication.blobs import KIB
from tests.snapshot.copiers import Engine, held, held_until_waited_for
from tests.snapshot.samples import HEADER, Piece, only_part, piece
from tests.waits import WAIT_S


@pytest.fixture
def parts() -> Iterator[Engine]:
    parts = Engine()
    yield parts
    parts.copier.close()


def assert_nothing_to_collect(parts: Engine) -> None:
    parts.engine.release()
    parts.engine.discard_torn()  # no error without a capture
    assert parts.engine.collect(wait=True) is None


def assert_usable(parts: Engine) -> None:
    """Check that no buffer is in use, and that the next snapshot can be taken."""
    assert parts.buffers.in_use_bytes == 0
    parts.capture(piece(torch.arange(16)))
    snapshot = parts.collected()
    assert torch.equal(only_part(snapshot), torch.arange(16))
    parts.buffers.release(snapshot.payload)
    assert parts.buffers.in_use_bytes == 0


def values_of(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    return {part.key.tensor: snapshot.part(part) for part in snapshot.header.parts}


def count(*values: int) -> Piece:
    return piece(torch.tensor(values), "count", "buffer")


UNCOPYABLE = piece(torch.empty(8, device="meta"), "meta")  # has a size but no values


def test_a_snapshot_is_complete_when_it_is_collected(parts: Engine) -> None:
    weight = torch.randn(3, 5)
    parts.capture(piece(weight, start=100), changing=[count(1, 2, 3)])
    snapshot = parts.collected()
    header = snapshot.header
    ranges = {
        part.key.tensor: (part.range_start, part.range_end) for part in header.parts
    }
    assert ranges == {"weight": (100, 115), "count": (0, 3)}
    assert header == replace(
        HEADER,
        parts=header.parts,
        payload_bytes=84,
        checksum=checksum(snapshot.payload, 84),
    )
    values = values_of(snapshot)
    assert torch.equal(values["weight"], weight)
    assert values["count"].tolist() == [1, 2, 3]
    assert parts.buffers.in_use_bytes == 84 == 15 * 4 + 3 * 8
    assert parts.engine.collect(wait=True) is None, "it is collected once"
    parts.engine.release()


TENSORS = st.tuples(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(ROLES),
    st.booleans(),
)


@given(described=st.lists(TENSORS, max_size=6), num_changing=st.integers(0, 6))
def test_tensors_come_out_as_they_went_in(
    described: list[tuple[str, list[int], str, bool]], num_changing: int
) -> None:
    parts = Engine()
    tensors: dict[PartKey, torch.Tensor] = {}
    for number, (dtype, shape, role, transposed) in enumerate(described):
        tensor = torch.randint(0, 2, shape, dtype=torch.uint8).to(DTYPES[dtype])
        tensor = tensor.mT if transposed and tensor.dim() >= 2 else tensor
        if tensor.dtype.is_floating_point:
            tensor.requires_grad_(True)
        tensors[PartKey(operator="layer 0", tensor=str(number), role=role)] = tensor
    pieces = [(key, tensor, (0, tensor.numel())) for key, tensor in tensors.items()]
    parts.capture(*pieces[num_changing:], changing=pieces[:num_changing])
    snapshot = parts.collected()
    values = {part.key: snapshot.part(part) for part in snapshot.header.parts}
    assert values.keys() == tensors.keys()
    assert all(
        torch.equal(values[key], each) and values[key].dtype == each.dtype
        for key, each in tensors.items()
    )
    parts.copier.close()


def test_a_capture_goes_on_after_it_was_started(parts: Engine) -> None:
    asked_in: list[int] = []

    def pieces() -> list[Piece]:
        asked_in.append(threading.get_ident())
        return [piece(torch.ones(4))]

    with held(parts.copier):
        parts.engine.capture([SnapshotRequest(HEADER, pieces, [])])
        assert asked_in == []
        assert parts.engine.collect(wait=False) is None
        assert parts.buffers.in_use_bytes == 0
    parts.collected()
    assert len(asked_in) == 1
    assert threading.get_ident() not in asked_in


def test_changing_tensors_may_change_as_soon_as_they_are_captured(
    parts: Engine,
) -> None:
    number, bias = torch.tensor([1, 2, 3]), torch.ones(4, requires_grad=True)
    with held(parts.copier):
        parts.capture(
            changing=[piece(number, "count", "buffer"), piece(bias, "bias", "buffer")]
        )
        number.add_(10)
        bias.data.zero_()
    values = {
        name: value.tolist() for name, value in values_of(parts.collected()).items()
    }
    assert values == {"count": [1, 2, 3], "bias": [1.0] * 4}


def test_release_waits_until_everything_is_copied(parts: Engine) -> None:
    weight = torch.arange(1 << 16)
    with held_until_waited_for(parts.copier) as waited:
        parts.capture(piece(weight))
        assert not waited.is_set()
        parts.engine.release()
        assert waited.is_set()
        weight.zero_()
    assert torch.equal(only_part(parts.collected()), torch.arange(1 << 16))


def test_a_snapshot_is_not_there_before_its_checksum(
    parts: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def checksum_when_told(payload: torch.Tensor, nbytes: int) -> int:
        assert go.wait(WAIT_S)
        return checksum(payload, nbytes)

    monkeypatch.setattr("moe_ckpt.snapshot.capture.checksum", checksum_when_told)
    weight = torch.ones(100)
    parts.capture(piece(weight))
    parts.engine.release()
    weight.zero_()  # the state may change before the checksum
    assert parts.engine.collect(wait=False) is None
    parts.engine.discard_torn()  # a capture with a finished copy is not torn
    go.set()
    assert torch.equal(only_part(parts.collected()), torch.ones(100))


class FullDaemon:
    """Refuses all further snapshots once `refused` snapshots are kept."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.kept: list[Snapshot] = []
        self.dropped: list[Snapshot] = []

    def add_snapshot(
        self, snapshot: Snapshot, gradients: Gradients | None = None
    ) -> None:
        if len(self.kept) == self.refused:
            raise CheckpointSaveError("no room")
        self.kept.append(snapshot)

    def drop_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        self.dropped += snapshots


@pytest.mark.parametrize("refused", range(4))
def test_of_several_snapshots_all_are_kept_or_none(refused: int) -> None:
    daemon = FullDaemon(refused)
    parts = Engine(daemon=daemon)
    tensors = [torch.full((5,), float(number)) for number in range(3)]
    parts.engine.capture(
        [
            SnapshotRequest(HEADER, lambda tensor=tensor: [piece(tensor)])
            for tensor in tensors
        ]
    )
    if refused == 3:
        taken = parts.engine.collect(wait=True)
        assert taken
        assert [only_part(each).tolist() for each in taken.snapshots] == [
            tensor.tolist() for tensor in tensors
        ]
        assert [id(each) for each in taken.snapshots] == [
            id(snapshot) for snapshot in daemon.kept
        ]
    else:
        with pytest.raises(CheckpointSaveError, match="no room"):
            parts.engine.collect(wait=True)
        assert daemon.dropped == daemon.kept
        assert parts.buffers.in_use_bytes == 0
    parts.copier.close()


def test_a_capture_before_the_last_is_collected_is_our_own_bug(parts: Engine) -> None:
    parts.capture(piece(torch.ones(1)))
    with pytest.raises(AssertionError):
        parts.capture(piece(torch.ones(1)))
    assert only_part(parts.collected()).tolist() == [1.0]


def test_a_torn_capture_is_dropped_with_its_memory(parts: Engine) -> None:
    weight = torch.ones(1000)
    with held_until_waited_for(parts.copier):
        parts.capture(piece(weight), changing=[count(1, 2, 3)])
        weight.zero_()
        parts.engine.discard_torn()
        assert parts.buffers.in_use_bytes == 0
    assert parts.buffers.total_bytes == 4024, "nothing was copied: the test is void"
    assert_nothing_to_collect(parts)
    assert_usable(parts)


def test_discarding_a_capture_that_fails_raises_nothing(parts: Engine) -> None:
    with held_until_waited_for(parts.copier):
        parts.capture(UNCOPYABLE)
        parts.engine.discard_torn()
    assert_usable(parts)


def raising(error: Exception) -> Callable[[], Sequence[Piece]]:
    def pieces() -> Sequence[Piece]:
        raise error

    return pieces


FAILURES = {
    "a tensor without values": lambda: [piece(torch.ones(100)), UNCOPYABLE],
    "a precision that has no name": lambda: [
        piece(torch.zeros(1, dtype=torch.complex64))
    ],
    "too little memory": lambda: [piece(torch.zeros(2 * KIB))],
    "a device that fails": raising(RuntimeError("broken")),
    "a machine out of memory": raising(MemoryError("no memory")),
}

ENDS: dict[str, Callable[[SnapshotEngine], object]] = {
    "release": lambda engine: engine.release(),
    "collect": lambda engine: engine.collect(wait=True),
    "collect once done": lambda engine: engine.collect(wait=False),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", FAILURES)
def test_a_capture_that_fails_says_so_and_leaves_nothing(name: str, end: str) -> None:
    parts = Engine(limit_bytes=KIB)
    before = SnapshotRequest(HEADER, lambda: [piece(torch.ones(3))])
    parts.engine.capture(
        [before, SnapshotRequest(HEADER, FAILURES[name], [count(1, 2)])]
    )
    assert parts.copier.run(lambda: 5).result(WAIT_S) == 5, "the work of others goes on"
    with pytest.raises(
        CheckpointSaveError, match=r"^the snapshot could not be copied: .+"
    ) as caught:
        ENDS[end](parts.engine)
    assert caught.value.__cause__ is not None
    assert parts.buffers.in_use_bytes == 0
    assert_nothing_to_collect(parts)
    assert_usable(parts)
    parts.copier.close()
