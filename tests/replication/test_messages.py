"""Every message is read back, and no other content is accepted as a message."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from moe_ckpt.replication import messages
from moe_ckpt.replication.messages import (
    Address,
    Found,
    Keys,
    Message,
    message_from_bytes,
    message_to_bytes,
    parse_address,
)
from tests.properties import (
    GENERATORS,
    MANY,
    PER_EXAMPLE,
    inputs,
    random_number,
    random_text,
)

_SCALARS = st.none() | st.integers(-(2**63), 2**64 - 1) | st.text()
KINDS = list(messages._KINDS.values())
VALUES: dict[str, Callable[[random.Random], Any]] = {
    "bool": lambda chosen: chosen.random() < 0.5,
    "int": lambda chosen: random_number(chosen, 2**64),
    "Count": lambda chosen: random_number(chosen, 2**63),
    "str": random_text,
    "Count | None": lambda chosen: chosen.choice((None, random_number(chosen, 2**63))),
    "bytes | None": lambda chosen: chosen.choice((None, chosen.randbytes(40))),
    "str | None": lambda chosen: chosen.choice((None, random_text(chosen))),
    "tuple[str, ...]": lambda chosen: tuple(
        random_text(chosen) for _ in range(chosen.randrange(4))
    ),
}


def random_message(chosen: random.Random) -> Message:
    kind = chosen.choice(KINDS)
    return kind(
        **{
            name: VALUES[str(hint)](chosen)
            for name, hint in kind.__annotations__.items()
        }
    )


@inputs(MANY)
@given(GENERATORS)
def test_every_message_is_read_back(chosen: random.Random) -> None:
    for _ in range(PER_EXAMPLE):
        message = random_message(chosen)
        assert message_from_bytes(message_to_bytes(message)) == message


@given(st.text())
def test_every_text_is_read_back(text: str) -> None:
    assert message_from_bytes(message_to_bytes(Keys(keys=(text, text)))) == Keys(
        keys=(text, text)
    )


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"Done": []},
        {"Done": {}, "Keys": {}},
        {"Done": {"more": 1}},
        {"Nothing": {}},
        {"Message": {}},
        {"Keys": {}},
        {"Keys": {"keys": "ab"}},
        {"Keys": {"keys": [1]}},
        {"Found": {"header_bytes": -1, "payload_bytes": None}},
        {"Found": {"header_bytes": 2**63, "payload_bytes": None}},
        {"Found": {"header_bytes": True, "payload_bytes": None}},
        {"Found": {"header_bytes": 1.0, "payload_bytes": None}},
        {"Found": {"header_bytes": None, "payload_bytes": None}},
        {"Refused": {"reason": "x", "garbled": 1}},
        {"Refused": {"reason": None, "garbled": True}},
    ],
)
def test_other_content_is_refused_as_a_message(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a message"):
        message_from_bytes(msgpack.encode(content))


@pytest.mark.parametrize(
    "content",
    [
        msgpack.encode({"Done": {}})[:-1],
        msgpack.encode({"Done": {}}) + b"\0",
        b"\x91" * 100_000,
    ],
)
def test_a_part_of_a_message_or_more_than_one_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        message_from_bytes(content)


@given(
    st.binary()
    | st.recursive(_SCALARS, lambda inner: st.lists(inner)).map(msgpack.encode)
)
def test_any_bytes_are_refused_with_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        message_from_bytes(content)


@inputs(MANY)
@given(GENERATORS)
def test_a_changed_message_is_another_one_or_refused(chosen: random.Random) -> None:
    for _ in range(PER_EXAMPLE):
        content = bytearray(message_to_bytes(random_message(chosen)))
        for _ in range(chosen.randrange(1, 4)):
            content[chosen.randrange(len(content))] = chosen.choice(
                (chosen.randrange(256), 0x80, 0x81, 0x90, 0xA1, 0xC0, 0xC4)
            )
        with contextlib.suppress(ValueError):  # the changed bytes are no message
            found = message_from_bytes(bytes(content))
            assert message_from_bytes(message_to_bytes(found)) == found


def test_the_form_of_a_message() -> None:
    assert msgpack.decode(message_to_bytes(Keys(keys=("a", "b")))) == {
        "Keys": {"keys": ["a", "b"]}
    }
    found = Found(header=b"abc", payload_bytes=None)
    assert msgpack.decode(message_to_bytes(found)) == {
        "Found": {"header": b"abc", "header_bytes": 0, "payload_bytes": None}
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "node-7.cluster", "::1"])
def test_an_address_is_read_back(host: str) -> None:
    address = Address(host=host, port=2912)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port"])
def test_other_texts_are_refused_as_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_address(text)
