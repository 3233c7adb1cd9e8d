"""One connection: messages and byte streams, each within the time that is left.

Owns: framing, checksums of all bytes, and the limit on every wait. Must not: interpret
messages, or unpickle.

    a message   length, 4 bytes | complement of the length, 4 bytes
                | XXH3 of the body, 8 bytes | body, in MessagePack
    a stream    bytes of an agreed number; both ends compute the XXH3 of the bytes
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import xxhash

from moe_ckpt.replication.messages import (
    Message,
    Refused,
    message_from_bytes,
    message_to_bytes,
)

CHUNK_BYTES = 1 << 20
MOST_MESSAGE_BYTES = 16 << 20
_HEAD = struct.Struct(">IIQ")
_ALL_BITS = 0xFFFFFFFF

M = TypeVar("M", bound=Message)
Pace = Callable[[int], None]
"""Called before each chunk of a stream, with the chunk's size in bytes.

A pace may wait, allow more time, or raise.
"""


class RefusedError(Exception):
    """The other end refused a request."""

    def __init__(self, reason: str, *, garbled: bool) -> None:
        """Create an error.

        Args:
            reason: Reason of the refusal.
            garbled: Whether the bytes arrived damaged, so that another attempt may
                succeed.
        """
        super().__init__(reason)
        self.garbled = garbled


class Connection:
    """One end of a connection, for one thread.

    Another thread may use a `twin` for the other direction. A failed operation raises
    OSError (TimeoutError after the time that `allow` set), and makes the connection
    unusable.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        if connection.family != socket.AF_UNIX:
            # small requests must not wait in the kernel for more bytes
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket = connection
        self._until_s = time.monotonic()

    def twin(self) -> Connection:
        """Return another end of the same connection, with a time limit of its own.

        Only a connection without TLS can have a twin.
        """
        return Connection(self._socket.dup())

    def secure(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Use TLS from here on.

        A client that the server refuses gets the error only with the first message that
        the client receives.

        Args:
            context: This end's context.
            server_side: Whether this end is the server.

        Raises:
            ssl.SSLError: One end refuses the other end's certificate. The class is an
                OSError.
        """
        encrypted = context.wrap_socket(
            self._socket, server_side=server_side, do_handshake_on_connect=False
        )
        # assigned before the handshake, so that `shut_down` can end the handshake, too
        self._socket = encrypted
        encrypted.settimeout(self._left_s())
        try:
            encrypted.do_handshake()
        except ssl.SSLError:
            self._let_the_reason_arrive()
            raise

    def peer_host(self) -> str:
        """Return the address of the other end, without the port.

        Raises:
            OSError: The connection has ended.
        """
        return self._socket.getpeername()[0]

    def allow(self, timeout_s: float) -> None:
        """Limit the following operations to `timeout_s` seconds from now."""
        self._until_s = time.monotonic() + timeout_s

    def is_readable(self, timeout_s: float | None) -> bool:
        """Wait for bytes, or for the end of the connection.

        Args:
            timeout_s: Longest wait, in seconds. None: no limit.

        Returns:
            Whether there are bytes, or the connection has ended.
        """
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True  # bytes that TLS has decrypted already
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def send(self, *messages: Message) -> None:
        """Send messages in one piece."""
        self._send(memoryview(b"".join(map(_framed, messages))))

    def receive(self, most_bytes: int = MOST_MESSAGE_BYTES) -> Message:
        """Return the next message.

        The connection checks the message's size before it allocates memory for the
        message.

        Args:
            most_bytes: Largest accepted size of the message, in bytes.

        Raises:
            OSError: The message is damaged or too large, or the connection failed.
        """
        length, complement, wanted = _HEAD.unpack(self._receive(_HEAD.size))
        # checked here: the hash of the body is compared only after the connection has
        # allocated `length` bytes and waited for as many
        if length != complement ^ _ALL_BITS or length > most_bytes:
            raise ConnectionError(
                f"got no message, or one of more than {most_bytes} bytes"
            )
        body = self._receive(length)
        found = xxhash.xxh3_64_intdigest(body)
        if found != wanted:
            raise ConnectionError(
                f"got a message with XXH3 {found:016x}, wanted {wanted:016x}"
            )
        try:
            return message_from_bytes(body)
        except ValueError as error:
            raise ConnectionError(str(error)) from error

    def expect(self, kind: type[M], most_bytes: int = MOST_MESSAGE_BYTES) -> M:
        """Return the next message, which must be of one kind.

        Args:
            kind: The kind of the message.
            most_bytes: Largest accepted size of the message, in bytes.

        Raises:
            RefusedError: The message is a refusal.
            OSError: The message is of another kind, or the connection failed.
        """
        message = self.receive(most_bytes)
        if isinstance(message, Refused):
            raise RefusedError(message.reason, garbled=message.garbled)
        if not isinstance(message, kind):
            raise ConnectionError(
                f"got {type(message).__name__}, wanted {kind.__name__}"
            )
        return message

    def ask(self, request: Message, kind: type[M]) -> M:
        """Send a request and return the answer, which must be of one kind.

        Raises:
            RefusedError: The other end refused the request.
            OSError: The answer is of another kind, or the connection failed.
        """
        self.send(request)
        return self.expect(kind)

    def send_stream(
        self, content: memoryview, pace: Pace, known_xxh3: int | None = None
    ) -> int:
        """Send bytes in chunks.

        Args:
            content: The bytes.
            pace: Called before each chunk.
            known_xxh3: The XXH3 of all bytes; None: this method computes the hash.

        Returns:
            The XXH3 of all bytes.
        """
        digest = xxhash.xxh3_64()
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            pace(len(chunk))
            if known_xxh3 is None:
                digest.update(chunk)
            self._send(chunk)
        return digest.intdigest() if known_xxh3 is None else known_xxh3

    def receive_stream(self, target: memoryview, pace: Pace) -> int:
        """Fill memory with bytes in chunks.

        Args:
            target: The memory.
            pace: Called before each chunk.

        Returns:
            The XXH3 of all bytes.
        """
        digest = xxhash.xxh3_64()
        for start in range(0, len(target), CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            pace(len(chunk))
            self._receive_into(chunk)
            digest.update(chunk)
        return digest.intdigest()

    def shut_down(self) -> None:
        """End the connection, from any thread.

        Operations that wait on the connection raise OSError.
        """
        with contextlib.suppress(OSError):
            # not SSLSocket.shutdown: after that call other threads would continue in
            # clear text
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _let_the_reason_arrive(self) -> None:
        """Wait for the other end to close the connection.

        To close over unread bytes would reset the connection and lose the TLS alert.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while socket.socket.recv(self._socket, CHUNK_BYTES):
                self._socket.settimeout(self._left_s())

    def _send(self, content: memoryview) -> None:
        self._socket.settimeout(self._left_s())
        self._socket.sendall(content)

    def _receive(self, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        self._receive_into(memoryview(content))
        return content

    def _receive_into(self, target: memoryview) -> None:
        # the timeout is set anew for each part: a peer that sends byte by byte must not
        # exceed the limit
        while target:
            self._socket.settimeout(self._left_s())
            received_bytes = self._socket.recv_into(target)
            if not received_bytes:
                raise ConnectionResetError("closed by the other side")
            target = target[received_bytes:]

    def _left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no time is left")
        return left_s


def _framed(message: Message) -> bytes:
    """Return a message's head and body.

    Raises:
        OSError: The message is too large for any receiver.
    """
    body = message_to_bytes(message)
    if len(body) > MOST_MESSAGE_BYTES:
        raise OSError(
            f"got a message of {len(body)} bytes to send, wanted at most"
            f" {MOST_MESSAGE_BYTES}"
        )
    head = _HEAD.pack(len(body), len(body) ^ _ALL_BITS, xxhash.xxh3_64_intdigest(body))
    return head + body
