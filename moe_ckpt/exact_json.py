"""Dataclasses from JSON, exactly: each field of its type, every field, and no other."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A rank or another number from 0, or a size: no memory has more bytes."""


class ExactDecoder(Generic[T]):
    """Reads one type. Made while its module is imported, as every decoder is: before
    there are threads.

    msgspec describes a class when a decoder first needs it, and a second thread that
    decodes it meanwhile crashes the process: it reads the unfinished description (seen
    with msgspec 0.22).
    """

    def __init__(
        self,
        kind: type[T],
        from_plain: Callable[[type, Any], Any] | None = None,
        to_plain: Callable[[Any], Any] | None = None,
    ) -> None:
        """The hooks are msgspec's `dec_hook` and `enc_hook`, for types that it does not
        know.
        """
        self._name = kind.__name__
        self._typed = msgspec.json.Decoder(kind, dec_hook=from_plain)
        self._encoder = msgspec.json.Encoder(enc_hook=to_plain)

    def decode(self, data: bytes) -> T:
        """Return the value that `msgspec.json.encode` wrote. Raises ValueError or
        RecursionError for anything else.
        """
        value = self._typed.decode(data)
        content = msgspec.json.decode(data)
        # msgspec ignores unknown fields of dataclasses, and fills in defaults: a newer
        # format could be misread as this
        if content != msgspec.json.decode(self._encoder.encode(value)):
            raise ValueError(
                f"got {reprlib.repr(content)}, wanted all fields of {self._name} and no"
                " others"
            )
        return value
