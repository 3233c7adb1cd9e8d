"""The form of a blob's entry in the index of its folder.

Owns: the bytes of an entry, and the detection of damage. Must not: access files, or look into the header.

    XXH3 of all that follows, 8 bytes | a line of JSON: key, buffer, payload_bytes, serial | header
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from moe_ckpt.errors import CheckpointLoadError

_HASH = struct.Struct(">Q")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexEntry:
    """The blob under a key: `buffer` names the file of the payload, `serial` is new with every publication."""

    key: str
    buffer: str | None
    payload_bytes: int
    serial: str
    header: bytes


def entry_to_bytes(entry: IndexEntry) -> bytes:
    """Return an entry's bytes, with their checksum."""
    fields = {"buffer": entry.buffer, "payload_bytes": entry.payload_bytes, "serial": entry.serial}
    content = json.dumps({"key": entry.key, **fields}).encode() + b"\n" + entry.header
    return _HASH.pack(xxhash.xxh3_64_intdigest(content)) + content


def entry_from_bytes(key: str, data: bytes) -> IndexEntry:
    """Return the entry that `entry_to_bytes` wrote for this key.

    Raises CheckpointLoadError if the bytes are anything else.
    """
    try:
        return _read(key, data)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointLoadError(f"blob {key}: an index entry of {len(data)} bytes: {error}") from error


def _read(key: str, data: bytes) -> IndexEntry:
    wanted, content = data[: _HASH.size], data[_HASH.size :]
    found = _HASH.pack(xxhash.xxh3_64_intdigest(content))
    if found != wanted:
        raise ValueError(f"got XXH3 {found.hex()}, wanted {wanted.hex()}")
    line, _, header = content.partition(b"\n")
    fields = json.loads(line)
    if fields["key"] != key:
        raise ValueError(f"got the entry of {fields['key']!r}")
    return IndexEntry(
        key=key,
        buffer=None if fields["buffer"] is None else _typed(str, fields["buffer"]),
        payload_bytes=_typed(int, fields["payload_bytes"]),
        serial=_typed(str, fields["serial"]),
        header=header,
    )


def _typed(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise TypeError(f"got {value!r}, wanted {kind.__name__}")
    return value
