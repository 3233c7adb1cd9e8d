"""Form of one rank's sparse snapshot in host memory: a header and one tensor of bytes.

Owns: the offset of each tensor in the payload, the header's JSON, checksums, and the
check that a snapshot belongs to this run and shard. Must not: allocate, access a device
or a peer, keep snapshots, or unpickle. MoEvement, section 3.2.

    payload | 8-byte elements | 4-byte | 2-byte | 1-byte | left over from earlier use |
            0                                            payload_bytes
"""

from __future__ import annotations

import math
import reprlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.exact_json import Count, ExactDecoder
from moe_ckpt.types import RunIdentity, Version

FORMAT_VERSION = 1
COMPUTE, MASTER, EXP_AVG, EXP_AVG_SQ, BUFFER, GRADIENT = (
    "compute",
    "master",
    "exp_avg",
    "exp_avg_sq",
    "buffer",
    "gradient",
)
MOMENTS = (EXP_AVG, EXP_AVG_SQ)
_SCALE = ".scale"
ROLES = (
    COMPUTE,
    MASTER,
    *MOMENTS,
    BUFFER,
    GRADIENT,
    *(f"{role}{_SCALE}" for role in (COMPUTE, MASTER, *MOMENTS)),
)

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "bool": torch.bool,
}
"""Dtypes by their names in headers. Tensors are stored in the dtype of training. The
scales of a tensor are a separate part.
"""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def scale_of(role: str) -> str:
    """Return the role of the scales (float32) that multiply a part's values.

    A master weight or a moment has one scale, [1]. A compute weight has one scale, or
    one for each block.
    """
    return f"{role}{_SCALE}"


def scaled_role(role: str) -> str:
    """Return the role that a scale belongs to; return any other role unchanged."""
    return role.removesuffix(_SCALE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIdentity:
    """Shard of the job that a snapshot holds: the position of the snapshot's rank."""

    global_rank: Count
    """Rank in the job."""

    pp_rank: Count
    """Pipeline-parallel rank."""

    tp_rank: Count
    """Tensor-parallel rank."""

    ep_rank: Count
    """Expert-parallel rank."""

    etp_rank: Count
    """Expert-tensor-parallel rank."""

    dp_rank: Count
    """Data-parallel rank."""

    def __str__(self) -> str:
        axes = (
            f"pp {self.pp_rank}, tp {self.tp_rank}, ep {self.ep_rank}, etp"
            f" {self.etp_rank}, dp {self.dp_rank}"
        )
        return f"rank {self.global_rank} ({axes})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartKey:
    """Key of a part."""

    operator: str
    """Name of the operator."""

    tensor: str
    """Name of the parameter or buffer, unique in the rank. With virtual stages the name
    includes the model chunk.
    """

    role: str
    """Role of the values, one of ROLES."""

    def __str__(self) -> str:
        return f"{self.role} of {self.tensor} ({self.operator})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One tensor of a snapshot, and the tensor's offset in the payload."""

    key: PartKey
    """Key of the tensor, unique in the snapshot."""

    dtype: torch.dtype
    """Dtype of the stored tensor."""

    shape: tuple[Count, ...]
    """Shape of the stored tensor."""

    range_start: Count
    """First element of this rank's piece in the flattened whole tensor."""

    range_end: Count
    """End of the piece in the flattened whole tensor, exclusive."""

    offset_bytes: Count
    """Offset of the tensor in the payload, in bytes."""

    @property
    def numel(self) -> int:
        return self.range_end - self.range_start

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTag:
    """Unit of a snapshot in a partial checkpoint."""

    name: str
    """Name of the unit."""

    epoch: Count
    """Epoch of the run."""

    on_peers: bool
    """Whether peers keep the unit too, beside own memory."""

    on_disk: bool
    """Whether disks keep the unit too, beside own memory."""

    seen_tokens: Count
    """Tokens that the unit's expert had been trained with."""

    complete_with: tuple[str, ...] = ()
    """Names of all units that make a checkpoint of this rank. Set for the core only."""

    taken_with: tuple[Count, Count, Count] = (0, 0, 0)
    """Numbers of this rank's units in the same snapshot, the core included: in own
    memory, on peers, and on disk. Set for the core only.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotHeader:
    """All of a snapshot but its bytes: the state after `iteration`, as slot `slot`."""

    identity: RunIdentity
    """Run that the snapshot belongs to."""

    shard: ShardIdentity
    """Rank that took the snapshot."""

    iteration: Count
    """Iteration after which the snapshot was taken: `window_start` + `slot`."""

    window_start: Count
    """Iteration of the window's slot 0."""

    slot: Count
    """Slot of the snapshot, from 0."""

    num_slots: Count
    """Number of slots of the window."""

    full: tuple[str, ...]
    """Names of the operators whose master weights, moments, or both are stored."""

    compute: tuple[str, ...]
    """Names of the operators of which only compute weights are stored."""

    adam_steps: tuple[float, ...]
    """Step count of each inner optimizer."""

    parts: tuple[Part, ...]
    """Tensors in the payload."""

    payload_bytes: Count
    """Bytes at the beginning of the payload that belong to the snapshot."""

    # not a Count: a hash may use all 64 bits, a size may not
    checksum: int
    """XXH3 of the first `payload_bytes` bytes of the payload."""

    branch: Count = 0
    """Branch of the run in which `iteration` was trained (`engine.step_state`)."""

    unit: UnitTag | None = None
    """Set in partial checkpoints, whose windows have one slot and several snapshots."""

    @property
    def version(self) -> Version:
        """Version that the snapshot belongs to, with all others of its window."""
        return Version(
            epoch=self.unit.epoch if self.unit else 0, iteration=self.window_start
        )

    @property
    def name(self) -> str:
        """Name of the snapshot in its version: the name of the unit, or of the slot."""
        return self.unit.name if self.unit else _slot_name(self.slot)

    @property
    def complete_with(self) -> tuple[str, ...]:
        """Names of all snapshots that make a version.

        Among units only the core has these names.
        """
        return (
            self.unit.complete_with
            if self.unit
            else tuple(map(_slot_name, range(self.num_slots)))
        )

    def __str__(self) -> str:
        if self.unit:
            return (
                f"rank {self.shard.global_rank}'s snapshot of {self.unit.name} at"
                f" iteration {self.version}"
            )
        slot = f"slot {self.slot} of {self.num_slots}, window from {self.window_start}"
        return (
            f"rank {self.shard.global_rank}'s snapshot of iteration {self.iteration}"
            f" ({slot})"
        )


def _slot_name(slot: int) -> str:
    return f"slot {slot}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """A header and its payload. Both are immutable."""

    header: SnapshotHeader
    """Header that describes the payload."""

    payload: torch.Tensor
    """uint8, [at least payload_bytes], contiguous, in host memory."""

    def part(self, part: Part) -> torch.Tensor:
        """Return a part of the payload as a view of the part's dtype and shape."""
        return part_view(self.payload, part)

    def tensors(self) -> dict[PartKey, torch.Tensor]:
        """Return all parts as views of the payload, by key."""
        return {part.key: self.part(part) for part in self.header.parts}


def part_view(payload: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the bytes of `part` as a tensor of the part's dtype and shape.

    The tensor shares memory with the payload.
    """
    stored = payload[part.offset_bytes : part.offset_bytes + part.nbytes]
    return stored.view(part.dtype).view(part.shape)


def layout_parts(
    items: Sequence[tuple[PartKey, torch.Tensor, tuple[int, int]]],
) -> tuple[tuple[Part, ...], int]:
    """Lay out tensors one after another in a payload.

    Larger elements come first, so that each part is aligned to its elements without
    padding: 1 x bool, 2 x bf16, 1 x fp32 are at bytes 8, 4 and 0.

    Args:
        items: Key, tensor, and range in the flattened whole tensor, for each part.

    Returns:
        The parts in the order of the payload, and the total bytes.

    Raises:
        CheckpointSaveError: A tensor has a dtype that DTYPES does not name.
    """
    assert len({key for key, _, _ in items}) == len(items), (
        "two parts have the same key"
    )
    parts: list[Part] = []
    offset_bytes = 0
    for key, tensor, (start, end) in sorted(
        items, key=lambda item: -item[1].dtype.itemsize
    ):
        assert key.role in ROLES, f"{key}: wanted a role of {ROLES}"
        assert tensor.numel() == end - start, (
            f"{key}: {tensor.numel()} elements for the range {start} to {end}"
        )
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointSaveError(
                f"{key}: got {tensor.dtype}, wanted one of {', '.join(DTYPES)}"
            )
        extent = {"range_start": start, "range_end": end, "offset_bytes": offset_bytes}
        parts.append(
            Part(key=key, dtype=tensor.dtype, shape=tuple(tensor.shape), **extent)
        )
        offset_bytes += parts[-1].nbytes
    return tuple(parts), offset_bytes


def checksum(payload: torch.Tensor, nbytes: int) -> int:
    """Return the XXH3 hash (64 bits) of the first `nbytes` bytes of a payload.

    The hash neither copies the bytes nor holds the GIL.
    """
    assert nbytes <= payload.numel(), (
        f"{nbytes} bytes of a payload of {payload.numel()}"
    )
    # XXH3 reads 24 GiB/s, zlib's CRC-32 reads 4: a checksum must not cost as much as
    # the copy that the checksum guards
    return xxhash.xxh3_64_intdigest(payload[:nbytes].numpy().data)


def verify(snapshot: Snapshot, *, identity: RunIdentity, shard: ShardIdentity) -> None:
    """Check that a snapshot belongs to this run and this shard, and is intact.

    Raises:
        CheckpointLoadError: Run, model, layout, shard, size or checksum differs. The
            error names the snapshot and the difference.
    """
    # identity before the hash: the hash reads the whole payload, and the payload of a
    # foreign snapshot may be intact
    require_own(snapshot, identity=identity, shard=shard)
    header = snapshot.header
    found = checksum(snapshot.payload, header.payload_bytes)
    _expect(
        header, "checksum of the payload", f"{found:016x}", f"{header.checksum:016x}"
    )


def require_own(
    snapshot: Snapshot, *, identity: RunIdentity, shard: ShardIdentity
) -> None:
    """Check that a snapshot belongs to this run and shard, without reading the payload.

    Raises:
        CheckpointLoadError: Run, model, layout, shard or size differs. The error names
            the snapshot and the difference.
    """
    header = snapshot.header
    _expect(header, "run id", header.identity.run_id, identity.run_id)
    _expect(header, "model fingerprint", header.identity.model, identity.model)
    _expect(header, "layout", header.identity.layout, identity.layout)
    _expect(header, "shard", header.shard, shard)
    held_bytes = snapshot.payload.numel()
    if held_bytes < header.payload_bytes:
        raise CheckpointLoadError(
            f"{header}: got a payload of {held_bytes} bytes, wanted"
            f" {header.payload_bytes}"
        )


def header_to_json(header: SnapshotHeader) -> bytes:
    """Return a header as two lines of JSON.

    The first line holds the version of the format and the CRC-32 of the second line.
    The second line holds the fields. With two lines a reader can check the bytes of the
    second line before parsing them.
    """
    body = msgspec.json.encode(header, enc_hook=_DTYPE_NAMES.__getitem__)
    return (
        msgspec.json.encode(_Head(format=FORMAT_VERSION, crc32=zlib.crc32(body)))
        + b"\n"
        + body
    )


def header_from_json(data: bytes) -> SnapshotHeader:
    """Return the header that `header_to_json` wrote.

    Raises:
        CheckpointLoadError: The bytes are anything else, or describe parts that do not
            fit into one payload.
    """
    try:
        head, _, body = data.partition(b"\n")
        _check_head(_HEADS.decode(head), zlib.crc32(body))
        header = _HEADERS.decode(body)
        _check_window(header)
        _check_parts(header)
    except (ValueError, RecursionError) as error:
        raise CheckpointLoadError(
            f"a snapshot's header of {len(data)} bytes: {error}"
        ) from error
    return header


def _expect(header: SnapshotHeader, what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise CheckpointLoadError(f"{header}: got {what} {got}, wanted {wanted}")


class _Head(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Count
    crc32: Count


def _check_head(head: _Head, crc32: int) -> None:
    if head.format != FORMAT_VERSION:
        raise ValueError(f"got format {head.format}, wanted {FORMAT_VERSION}")
    if head.crc32 != crc32:
        raise ValueError(f"got fields with CRC-32 {crc32:08x}, wanted {head.crc32:08x}")


def _check_window(header: SnapshotHeader) -> None:
    if header.slot >= header.num_slots:
        raise ValueError(
            f"got slot {header.slot}, wanted one below num_slots {header.num_slots}"
        )
    if header.iteration != header.window_start + header.slot:
        raise ValueError(
            f"got iteration {header.iteration}, wanted window_start"
            f" {header.window_start} + {header.slot}"
        )


def _check_parts(header: SnapshotHeader) -> None:
    end_bytes = 0
    # sorted by size too: a part without elements lies at the offset of its successor
    for part in sorted(header.parts, key=lambda part: (part.offset_bytes, part.nbytes)):
        if part.key.role not in ROLES:
            raise ValueError(
                f"{part.key}: got role {part.key.role!r}, wanted one of"
                f" {', '.join(ROLES)}"
            )
        if math.prod(part.shape) != part.range_end - part.range_start:
            wanted = f"{part.range_start} to {part.range_end}"
            raise ValueError(
                f"{part.key}: got shape {part.shape}, wanted as many elements as the"
                f" range {wanted}"
            )
        # checked here: torch refuses unaligned views, but only after the load has begun
        if part.offset_bytes % part.dtype.itemsize:
            raise ValueError(
                f"{part.key}: got offset {part.offset_bytes}, wanted a multiple of its"
                " element size"
            )
        if part.offset_bytes < end_bytes:
            raise ValueError(
                f"{part.key}: got offset {part.offset_bytes}, but the part before ends"
                f" at {end_bytes}"
            )
        end_bytes = part.offset_bytes + part.nbytes
    if end_bytes > header.payload_bytes:
        raise ValueError(
            f"got parts up to byte {end_bytes}, wanted at most payload_bytes"
            f" {header.payload_bytes}"
        )
    if len({part.key for part in header.parts}) != len(header.parts):
        raise ValueError("got two parts with the same key")


def _dtype_from(_: type, name: object) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"got {reprlib.repr(name)}, wanted one of {', '.join(DTYPES)}")
    return DTYPES[name]


# made at import: two threads that decoded a type for the first time at the same moment
# crashed a daemon inside msgspec 0.22
_HEADS = msgspec.json.Decoder(_Head)
_HEADERS = ExactDecoder(SnapshotHeader, _dtype_from, _DTYPE_NAMES.__getitem__)
