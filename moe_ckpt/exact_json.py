"""Dataclasses from JSON, exactly: each field of its type, every field, and no other."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def decode_exactly(
    data: bytes,
    kind: type[T],
    from_plain: Callable[[type, Any], Any] | None = None,
    to_plain: Callable[[Any], Any] | None = None,
) -> T:
    """Return the value that `msgspec.json.encode` wrote. Raises ValueError, or RecursionError, for anything else.

    The hooks are msgspec's `dec_hook` and `enc_hook`, for types that it does not know.
    """
    value = msgspec.json.decode(data, type=kind, dec_hook=from_plain)
    content = msgspec.json.decode(data)
    # msgspec ignores unknown fields of dataclasses, and fills in defaults: a newer format could be misread as this one
    if content != msgspec.json.decode(msgspec.json.encode(value, enc_hook=to_plain)):
        raise ValueError(f"got {reprlib.repr(content)}, wanted all fields of {kind.__name__} and no others")
    return value
