"""Snapshots as header and payload: layout of parts, JSON, damage and strangers.

Damaged snapshots, and snapshots of another run or shard, are refused.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot.codec import (
    DTYPES,
    ROLES,
    Part,
    ShardIdentity,
    Snapshot,
    SnapshotHeader,
    checksum,
    header_from_json,
    header_to_json,
    layout_parts,
    part_view,
    verify,
)
from moe_ckpt.types import ParallelLayout, RunIdentity
from tests.snapshot.samples import HEADER, IDENTITY, SHARD, Piece, damaged, piece


def one_of_each_dtype() -> list[Piece]:
    """Return a tensor of each precision, with values that only this precision holds.

    The tensors with the smallest elements come first.
    """
    values = torch.tensor([0.0, 1.0, 3.0])
    dtypes = sorted(DTYPES.values(), key=lambda dtype: dtype.itemsize)
    return [
        piece((values + (1 / 3 * dtype.is_floating_point)).to(dtype), f"weight {dtype}")
        for dtype in dtypes
    ]


def snapshot_of(*pieces: Piece, spare_bytes: int = 0) -> Snapshot:
    """Build a snapshot as a capture does, in a buffer of old bytes.

    The buffer is longer than needed by `spare_bytes`.
    """
    parts, payload_bytes = layout_parts(pieces)
    payload = torch.full((payload_bytes + spare_bytes,), 0xAB, dtype=torch.uint8)
    tensors = {key: tensor for key, tensor, _ in pieces}
    for part in parts:
        part_view(payload, part).copy_(tensors[part.key])
    return Snapshot(
        header=header_of(parts, payload_bytes, checksum(payload, payload_bytes)),
        payload=payload,
    )


def header_of(
    parts: tuple[Part, ...] = (), payload_bytes: int = 0, checksum: int = 0
) -> SnapshotHeader:
    return replace(HEADER, parts=parts, payload_bytes=payload_bytes, checksum=checksum)


def forged(header: SnapshotHeader, way: Sequence[str | int], value: object) -> bytes:
    """Return a header's JSON with one changed field and a fitting checksum.

    Args:
        header: The header.
        way: The names and indices that lead to the field.
        value: The new value of the field.
    """
    fields = inner = json.loads(header_to_json(header).partition(b"\n")[2])
    for step in way[:-1]:
        inner = inner[step]
    inner[way[-1]] = value
    return sealed(json.dumps(fields).encode())


def sealed(body: bytes, **head: object) -> bytes:
    return (
        json.dumps({"format": 1, "crc32": zlib.crc32(body), **head}).encode()
        + b"\n"
        + body
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(list(DTYPES.values())), shapes), max_size=12))
def test_every_layout_is_aligned_without_padding_and_readable(
    drawn: list[tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in drawn]
    parts, payload_bytes = layout_parts(
        [piece(tensor, str(index)) for index, tensor in enumerate(tensors)]
    )
    assert (
        payload_bytes
        == sum(tensor.nbytes for tensor in tensors)
        == sum(part.nbytes for part in parts)
    )
    assert all(part.offset_bytes % part.dtype.itemsize == 0 for part in parts)
    header = header_of(parts, payload_bytes)
    # reading refuses overlaps
    assert header_from_json(header_to_json(header)) == header
    views = [
        part_view(torch.zeros(payload_bytes, dtype=torch.uint8), part) for part in parts
    ]
    assert [(view.dtype, tuple(view.shape)) for view in views] == [
        (part.dtype, part.shape) for part in parts
    ]


def test_the_precisions_of_training_have_names() -> None:
    floats = {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
    integers = {
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
    assert set(DTYPES.values()) == floats | integers
    assert all(str(dtype) == f"torch.{name}" for name, dtype in DTYPES.items())


def test_tensors_keep_their_bits_in_every_precision() -> None:
    strange = piece(torch.tensor([math.nan, -0.0, math.inf, 1e-45]), "strange")
    snapshot = snapshot_of(*one_of_each_dtype(), strange, spare_bytes=100)
    originals = {key: tensor for key, tensor, _ in [*one_of_each_dtype(), strange]}
    assert {part.dtype for part in snapshot.header.parts} == set(DTYPES.values())
    for part in snapshot.header.parts:
        stored = snapshot.part(part)
        assert stored.dtype == originals[part.key].dtype
        assert bits(stored) == bits(originals[part.key])
        assert (
            stored.untyped_storage().data_ptr()
            == snapshot.payload.untyped_storage().data_ptr()
        )


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(torch.zeros(1)), piece(torch.zeros(2))],
        [piece(torch.zeros(1), role="hessian")],
        [(piece(torch.zeros(3))[0], torch.zeros(3), (0, 4))],
    ],
    ids=["same key twice", "unknown role", "range of another size"],
)
def test_a_layout_that_makes_no_sense_is_our_bug(pieces: list[Piece]) -> None:
    with pytest.raises(AssertionError):
        layout_parts(pieces)


def test_the_checksum_is_xxh3_of_the_bytes_that_count() -> None:
    payload = torch.tensor(
        list(b"123456789 and what was here before"), dtype=torch.uint8
    )
    # hash of no bytes, as the authors of XXH3 publish the value
    assert checksum(payload, 0) == 0x2D06800538D394C2
    assert (
        checksum(payload, 9)
        == checksum(payload[:9].clone(), 9)
        != checksum(payload, 10)
    )
    with pytest.raises(AssertionError):
        checksum(payload, payload.numel() + 1)


def test_an_own_snapshot_is_accepted_and_a_flipped_bit_refused() -> None:
    snapshot = snapshot_of(*one_of_each_dtype(), spare_bytes=9)
    verify(snapshot, identity=IDENTITY, shard=SHARD)
    assert snapshot.header.payload_bytes > 50
    name = r"^rank 3's snapshot of iteration 12 \(slot 1 of 3, window from 11\): "
    for position in range(snapshot.header.payload_bytes):
        snapshot.payload[position] ^= 1 << position % 8
        with pytest.raises(
            CheckpointLoadError,
            match=name + "got checksum of the payload [0-9a-f]{16}, wanted",
        ):
            verify(snapshot, identity=IDENTITY, shard=SHARD)
        snapshot.payload[position] ^= 1 << position % 8
    snapshot.payload[snapshot.header.payload_bytes :] = 0  # old bytes of the buffer
    verify(snapshot, identity=IDENTITY, shard=SHARD)
    verify(snapshot_of(), identity=IDENTITY, shard=SHARD)


OTHER_LAYOUT, OTHER_SHARD = (
    ParallelLayout(pp=1, dp=8, ep=2, tp=1),
    replace(SHARD, etp_rank=1),
)


@pytest.mark.parametrize(
    ("identity", "shard", "reason"),
    [
        (replace(IDENTITY, run_id="run-2"), SHARD, "got run id run-1, wanted run-2"),
        (
            replace(IDENTITY, model="ffff"),
            SHARD,
            "got model fingerprint 0123abcd, wanted ffff",
        ),
        (
            replace(IDENTITY, layout=OTHER_LAYOUT),
            SHARD,
            f"got layout {IDENTITY.layout}, wanted {OTHER_LAYOUT}",
        ),
        (IDENTITY, OTHER_SHARD, f"got shard {SHARD}, wanted {OTHER_SHARD}"),
    ],
    ids=["run", "model", "layout", "shard"],
)
def test_a_foreign_snapshot_is_refused_by_name(
    identity: RunIdentity, shard: ShardIdentity, reason: str
) -> None:
    with pytest.raises(CheckpointLoadError) as caught:
        verify(snapshot_of(*one_of_each_dtype()), identity=identity, shard=shard)
    assert (
        str(caught.value)
        == f"rank 3's snapshot of iteration 12 (slot 1 of 3, window from 11): {reason}"
    )


def test_a_payload_that_is_cut_short_is_refused() -> None:
    snapshot = snapshot_of(piece(torch.ones(4)))
    short = Snapshot(header=snapshot.header, payload=snapshot.payload[:15])
    with pytest.raises(
        CheckpointLoadError,
        match=r"window from 11\): got a payload of 15 bytes, wanted 16",
    ):
        verify(short, identity=IDENTITY, shard=SHARD)


counts = st.integers(0, 2**63 - 1)
LAYOUT_FIELDS = ("pp", "dp", "ep", "tp")


@given(
    text=st.text(),
    numbers=st.lists(counts, min_size=10, max_size=10),
    adam_steps=st.lists(
        st.floats(allow_nan=False, allow_infinity=False), max_size=3
    ).map(tuple),
    total=st.integers(0, 2**64 - 1),
)
def test_json_gives_back_the_same_header(
    text: str, numbers: list[int], adam_steps: tuple[float, ...], total: int
) -> None:
    layout = ParallelLayout(**dict(zip(LAYOUT_FIELDS, numbers[:4], strict=True)))
    shard = ShardIdentity(**dict(zip(asdict(SHARD), numbers[4:], strict=True)))
    parts, payload_bytes = layout_parts(
        [piece(torch.empty(2), text, role, start=7) for role in ROLES]
    )
    header = replace(
        header_of(parts, payload_bytes, total),
        identity=RunIdentity(run_id=text, model=f"{text}?", layout=layout),
        shard=shard,
        full=(text, ""),
        compute=("", text),
        adam_steps=adam_steps,
    )
    data = header_to_json(header)
    assert header_from_json(data) == header
    assert header_to_json(header_from_json(data)) == data
    whole_numbers = replace(header, adam_steps=(3, 2**53))
    assert header_from_json(header_to_json(whole_numbers)) == whole_numbers


def test_a_header_is_two_lines_of_json_with_plain_names() -> None:
    parts, payload_bytes = layout_parts(
        [piece(torch.ones(2, 3), "w", "exp_avg", start=6)]
    )
    head, body = map(
        json.loads, header_to_json(header_of(parts, payload_bytes, 7)).split(b"\n")
    )
    assert (head["format"], body["identity"]) == (1, asdict(IDENTITY))
    ranks = {
        "global_rank": 3,
        "pp_rank": 0,
        "tp_rank": 0,
        "ep_rank": 1,
        "etp_rank": 0,
        "dp_rank": 3,
    }
    assert body["shard"] == asdict(SHARD) == ranks
    key = {"operator": "layer 0 expert 1", "tensor": "w", "role": "exp_avg"}
    extent = {"range_start": 6, "range_end": 12, "offset_bytes": 0}
    assert body["parts"] == [
        {"key": key, "dtype": "float32", "shape": [2, 3], **extent}
    ]


def test_a_header_that_is_damaged_cut_short_or_continued_is_refused() -> None:
    data = header_to_json(snapshot_of(*one_of_each_dtype()).header)
    for wrong in damaged(data):
        with pytest.raises(CheckpointLoadError):
            header_from_json(wrong)
    with pytest.raises(CheckpointLoadError, match="got fields with CRC-32"):
        header_from_json(data + b" ")


def try_to_read(data: bytes) -> SnapshotHeader | None:
    """Return the header; None after CheckpointLoadError.

    Any other error reaches the caller.
    """
    try:
        return header_from_json(data)
    except CheckpointLoadError:
        return None


@given(st.binary())
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    assert try_to_read(data) is None
    assert try_to_read(sealed(data)) is None


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([*DTYPES, *ROLES]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def ways(draw: st.DrawFn) -> list[str | int]:
    content: Any = json.loads(
        header_to_json(snapshot_of(*one_of_each_dtype()).header).partition(b"\n")[2]
    )
    way: list[str | int] = []
    while (
        isinstance(content, dict | list)
        and content
        and (not way or draw(st.booleans()))
    ):
        step: Any = draw(
            st.sampled_from(
                sorted(content) if isinstance(content, dict) else range(len(content))
            )
        )
        way.append(step)
        content = content[step]
    return way


@given(ways(), json_values)
def test_any_other_value_in_a_sealed_header_is_read_or_refused(
    way: list[str | int], value: object
) -> None:
    read = try_to_read(forged(snapshot_of(*one_of_each_dtype()).header, way, value))
    assert read is None or header_from_json(header_to_json(read)) == read


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("format", 2, "got format 2, wanted 1"),
        ("format", True, r"Expected `int`, got `bool` - at `\$.format`"),
        (
            "more",
            1,
            "got {'adam_steps': .*}, wanted all fields of SnapshotHeader and no others",
        ),
        (
            "unit",
            {"name": "core"},
            r"Object missing required field `epoch` - at `\$.unit`",
        ),
        ("iteration", -1, r"Expected `int` >= 0 - at `\$.iteration`"),
        (
            "iteration",
            2**63,
            r"Expected `int` <= 9223372036854775807 - at `\$.iteration`",
        ),
        ("iteration", 12.0, r"Expected `int`, got `float` - at `\$.iteration`"),
        ("iteration", 13, r"got iteration 13, wanted window_start 11 \+ 1"),
        ("num_slots", 1, "got slot 1, wanted one below num_slots 1"),
        ("full", "expert", r"Expected `array`, got `str` - at `\$.full`"),
        ("compute", [1], r"Expected `str`, got `int` - at `\$.compute\[0\]`"),
        ("adam_steps", ["1"], r"Expected `float`, got `str` - at `\$.adam_steps\[0\]`"),
        ("adam_steps", [math.nan], "JSON is malformed"),
        ("adam_steps", [math.inf], "JSON is malformed"),
        ("identity", None, r"Expected `object`, got `null` - at `\$.identity`"),
        (
            "identity layout",
            {"pp": 1},
            r"Object missing required field `dp` - at `\$.identity.layout`",
        ),
        ("identity layout cp", 1, "wanted all fields of SnapshotHeader and no others"),
        (
            "payload_bytes",
            23,
            "got parts up to byte 24, wanted at most payload_bytes 23",
        ),
        (
            "parts 0 dtype",
            "complex64",
            r"got 'complex64', wanted one of float64.* - at `\$.parts\[0\].dtype`",
        ),
        (
            "parts 0 dtype",
            ["float32"],
            r"got \['float32'\], wanted one of float64.* - at `\$.parts\[0\].dtype`",
        ),
        (
            "parts 0 key role",
            "hessian",
            "hessian of a .*: got role 'hessian', wanted one of compute",
        ),
        (
            "parts 0 key role",
            ["master"],
            r"Expected `str`, got `array` - at `\$.parts\[0\].key.role`",
        ),
        (
            "parts 0 offset_bytes",
            -4,
            r"Expected `int` >= 0 - at `\$.parts\[0\].offset_bytes`",
        ),
        (
            "parts 0 offset_bytes",
            24,
            "got parts up to byte 36, wanted at most payload_bytes 24",
        ),
        (
            "parts 1 offset_bytes",
            13,
            "master of b .*: got offset 13, wanted a multiple of its element size",
        ),
        (
            "parts 1 offset_bytes",
            8,
            "master of b .*: got offset 8, but the part before ends at 12",
        ),
        (
            "parts 0 range_end",
            4,
            (
                r"master of a .*: got shape \(3,\), wanted as many elements as the"
                r" range 0 to 4"
            ),
        ),
        ("parts 0 range_start", 5, "wanted as many elements as the range 5 to 3"),
        (
            "parts 0 shape",
            [-1, -3],
            r"Expected `int` >= 0 - at `\$.parts\[0\].shape\[0\]`",
        ),
        ("parts 1 key tensor", "a", "got two parts with the same key"),
    ],
)
def test_a_sealed_header_that_makes_no_sense_is_refused(
    path: str, value: object, reason: str
) -> None:
    header = snapshot_of(piece(torch.ones(3), "a"), piece(torch.ones(3), "b")).header
    way = [int(step) if step.isdigit() else step for step in path.split()]
    data = (
        sealed(b"{}", format=value) if path == "format" else forged(header, way, value)
    )
    with pytest.raises(CheckpointLoadError, match=reason):
        header_from_json(data)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        b"1e999",
    ],
    ids=[
        "empty",
        "null",
        "list",
        "not text",
        "deep list",
        "deep dict",
        "long number",
        "infinite number",
    ],
)
def test_sealed_bytes_that_are_no_header_are_refused(body: bytes) -> None:
    with pytest.raises(CheckpointLoadError):
        header_from_json(sealed(body))
    with pytest.raises(CheckpointLoadError):
        header_from_json(body + b"\n")
