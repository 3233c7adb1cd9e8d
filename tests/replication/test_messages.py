"""Messages: every one is read back, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.replication import messages
from moe_ckpt.replication.messages import (
    Address,
    Found,
    Keys,
    Message,
    message_from_json,
    message_to_json,
    parse_address,
)
from tests.properties import GENERATORS, MANY, PER_EXAMPLE, inputs, random_number, random_text

KINDS = list(messages._KINDS.values())
VALUES: dict[str, Callable[[random.Random], Any]] = {
    "bool": lambda chosen: chosen.random() < 0.5,
    "int": lambda chosen: random_number(chosen, 2**64),
    "Count": lambda chosen: random_number(chosen, 2**63),
    "str": random_text,
    "Count | None": lambda chosen: chosen.choice((None, random_number(chosen, 2**63))),
    "bytes | None": lambda chosen: chosen.choice((None, chosen.randbytes(40))),
    "str | None": lambda chosen: chosen.choice((None, random_text(chosen))),
    "tuple[str, ...]": lambda chosen: tuple(random_text(chosen) for _ in range(chosen.randrange(4))),
}


def random_message(chosen: random.Random) -> Message:
    kind = chosen.choice(KINDS)
    return kind(**{name: VALUES[str(hint)](chosen) for name, hint in kind.__annotations__.items()})


@inputs(MANY)
@given(GENERATORS)
def test_every_message_is_read_back(chosen: random.Random) -> None:
    for _ in range(PER_EXAMPLE):
        message = random_message(chosen)
        assert message_from_json(message_to_json(message)) == message


@given(st.text())
def test_every_text_is_read_back(text: str) -> None:
    assert message_from_json(message_to_json(Keys(keys=(text, text)))) == Keys(keys=(text, text))


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b'{"Done":{}',
        b'{"Done":[]}',
        b'{"Done":{},"Keys":{}}',
        b'{"Done":{"more":1}}',
        b'{"Nothing":{}}',
        b'{"Message":{}}',
        b'{"Keys":{}}',
        b'{"Keys":{"keys":"ab"}}',
        b'{"Keys":{"keys":[1]}}',
        b'{"Found":{"header_bytes":-1,"payload_bytes":null}}',
        b'{"Found":{"header_bytes":9223372036854775808,"payload_bytes":null}}',
        b'{"Found":{"header_bytes":true,"payload_bytes":null}}',
        b'{"Found":{"header_bytes":1.0,"payload_bytes":null}}',
        b'{"Found":{"header_bytes":null,"payload_bytes":null}}',
        b'{"Refused":{"reason":"x","garbled":1}}',
        b'{"Refused":{"reason":null,"garbled":true}}',
        b"[" * 100_000,
    ],
)
def test_other_content_is_refused_as_a_message(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        message_from_json(content)


@given(st.binary() | st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)).map(json.dumps))
def test_any_bytes_are_refused_with_a_value_error(content: bytes | str) -> None:
    with pytest.raises(ValueError, match="not a message"):
        message_from_json(content.encode() if isinstance(content, str) else content)


@inputs(MANY)
@given(GENERATORS)
def test_a_changed_message_is_another_one_or_refused(chosen: random.Random) -> None:
    for _ in range(PER_EXAMPLE):
        content = bytearray(message_to_json(random_message(chosen)))
        for _ in range(chosen.randrange(1, 4)):
            content[chosen.randrange(len(content))] = chosen.choice((chosen.randrange(256), *b'"[]{},:0'))
        with contextlib.suppress(ValueError):  # it is no message any more
            found = message_from_json(bytes(content))
            assert message_from_json(message_to_json(found)) == found


def test_the_form_of_a_message() -> None:
    assert message_to_json(Keys(keys=("a", "b"))) == b'{"Keys":{"keys":["a","b"]}}'
    found = Found(header=b"abc", payload_bytes=None)
    assert message_to_json(found) == b'{"Found":{"header":"YWJj","header_bytes":0,"payload_bytes":null}}'


@pytest.mark.parametrize("host", ["127.0.0.1", "node-7.cluster", "::1"])
def test_an_address_is_read_back(host: str) -> None:
    address = Address(host=host, port=2912)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port"])
def test_other_texts_are_refused_as_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_address(text)
