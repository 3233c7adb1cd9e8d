"""Any bytes on a connection are a message or an error, within the memory limit."""

from __future__ import annotations

import itertools
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.replication.connection import Connection
from moe_ckpt.replication.messages import Done, Message, message_to_bytes
from tests.properties import GENERATORS, MANY, PER_EXAMPLE, inputs
from tests.replication.peers import frame
from tests.waits import WAIT_S

LIMIT_BYTES = 4096


def received(content: bytes) -> Message:
    """Return the message that the other end receives from these bytes.

    The connection ends after the bytes.
    """
    sending, receiving = socket.socketpair()
    with sending, receiving:
        sending.sendall(content)
        sending.shutdown(socket.SHUT_WR)
        connection = Connection(receiving)
        connection.allow(WAIT_S)
        return connection.receive(LIMIT_BYTES)


def test_a_message_is_received() -> None:
    assert received(frame(message_to_bytes(Done()))) == Done()


@inputs(MANY)
@given(st.binary(), GENERATORS)
def test_any_bytes_end_the_connection(beginning: bytes, chosen: random.Random) -> None:
    for _ in range(PER_EXAMPLE):
        content = beginning + chosen.randbytes(chosen.randrange(2 * LIMIT_BYTES))
        with pytest.raises(OSError, match=r"got no message|closed by the other side"):
            received(content)


def test_a_message_with_any_changed_byte_ends_the_connection() -> None:
    intact = frame(message_to_bytes(Done()))
    for position, change in itertools.product(range(len(intact)), range(1, 256)):
        content = bytearray(intact)
        content[position] ^= change
        with pytest.raises(OSError, match=r"got no message|got a message with XXH3"):
            received(bytes(content))


@given(st.integers(LIMIT_BYTES + 1, 2**32 - 1))
def test_a_length_beyond_the_limit_is_refused_before_memory_is_allocated(
    length: int,
) -> None:
    with pytest.raises(OSError, match="got no message, or one of more than 4096 bytes"):
        received(frame(b"", length=length))
