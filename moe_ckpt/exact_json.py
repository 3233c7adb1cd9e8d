"""Exact dataclasses from JSON: every field of its type, and no other field."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A rank or another number from 0, or a size: no memory has more bytes."""


class ExactDecoder(Generic[T]):
    """Decodes one type. Create each decoder while its module is imported.

    Modules are imported before there are threads. msgspec builds the description of a
    class when a decoder first needs it. A second thread that decodes the class
    meanwhile reads the unfinished description and crashes the process (seen with
    msgspec 0.22).
    """

    def __init__(
        self,
        kind: type[T],
        from_plain: Callable[[type, Any], Any] | None = None,
        to_plain: Callable[[Any], Any] | None = None,
    ) -> None:
        """Create a decoder.

        Args:
            kind: The type.
            from_plain: msgspec's `dec_hook`, for types that msgspec does not support.
            to_plain: msgspec's `enc_hook`, for such types.
        """
        self._name = kind.__name__
        self._typed = msgspec.json.Decoder(kind, dec_hook=from_plain)
        self._encoder = msgspec.json.Encoder(enc_hook=to_plain)

    def decode(self, data: bytes) -> T:
        """Return the value that `msgspec.json.encode` wrote.

        Raises:
            ValueError: The data is something else.
            RecursionError: The data is nested too deeply.
        """
        value = self._typed.decode(data)
        content = msgspec.json.decode(data)
        # msgspec ignores unknown fields of dataclasses and fills in defaults: a newer
        # format could be misread as this one
        if content != msgspec.json.decode(self._encoder.encode(value)):
            raise ValueError(
                f"got {reprlib.repr(content)}, wanted all fields of {self._name} and no"
                " others"
            )
        return value
