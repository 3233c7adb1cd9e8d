"""Form of a blob's entry in the index of its folder.

Owns: the bytes of an entry, and the detection of damage. Must not: access files, or
look into the header.

    XXH3 of the rest, 8 bytes | a line of JSON: all fields but the header | header
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import xxhash

from moe_ckpt.errors import CheckpointLoadError

_HASH = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexEntry:
    """Index entry of a blob."""

    key: str
    """Key of the blob."""

    buffer: str | None
    """Name of the payload's file; None if the blob has no payload."""

    payload_bytes: int
    """Bytes of the payload."""

    serial: str
    """New with every publication."""

    header: bytes
    """Header of the blob."""

    payload_xxh3: int | None = None
    """XXH3 of the payload; None if the writer gave none."""


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    key: str
    buffer: str | None
    payload_bytes: int
    serial: str
    payload_xxh3: int | None = None


# made at import: two threads that decoded a type for the first time at the same moment
# crashed a daemon inside msgspec 0.22
_FIELDS = msgspec.json.Decoder(_Fields)


def entry_to_bytes(entry: IndexEntry) -> bytes:
    """Return an entry's bytes, which begin with a checksum."""
    fields = {name: getattr(entry, name) for name in _Fields.__struct_fields__}
    content = msgspec.json.encode(fields) + b"\n" + entry.header
    return _HASH.pack(xxhash.xxh3_64_intdigest(content)) + content


def entry_from_bytes(key: str, data: bytes) -> IndexEntry:
    """Return the entry that `entry_to_bytes` wrote for this key.

    Raises:
        CheckpointLoadError: The bytes are anything else.
    """
    wanted, content = data[: _HASH.size], data[_HASH.size :]
    found = _HASH.pack(xxhash.xxh3_64_intdigest(content))
    try:
        if found != wanted:
            raise ValueError(f"got XXH3 {found.hex()}, wanted {wanted.hex()}")
        line, _, header = content.partition(b"\n")
        fields = _FIELDS.decode(line)
        entry = IndexEntry(**msgspec.structs.asdict(fields), header=header)
        if entry.key != key:
            raise ValueError(f"got the entry of {entry.key!r}")
    except (ValueError, RecursionError) as error:
        raise CheckpointLoadError(
            f"blob {key}: an index entry of {len(data)} bytes: {error}"
        ) from error
    return entry
