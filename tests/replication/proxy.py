"""A proxy between two processes that fails as networks do.

The proxy passes bytes over real sockets, and can delay bytes, flip a bit, or cut off a
connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from dataclasses import dataclass

from moe_ckpt.replication.messages import Address
from tests.waits import WAIT_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Damage to one byte that one end of a connection sends."""

    offset: int
    """Offset of the byte in all bytes that the end sends, from 0."""

    from_client: bool = True
    """Whether the client sends the byte. Otherwise the server sends the byte."""

    cut: bool = False
    """Whether the connection ends before the byte, in place of a flipped bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyAddress(Address):
    """Address of a proxy, printed as the address of the server behind the proxy.

    The proofs of both ends contain the printed address, so both ends accept the proxy
    as a part of the network.
    """

    proxy: Proxy
    """The proxy."""

    def __str__(self) -> str:
        return str(self.proxy.target)


class Proxy:
    """Passes bytes between clients and a server.

    Attributes:
        target: Address of the server. A test may set another address.
        damages: Damages to the next connections, one for each connection.
        num_connections: Number of accepted connections.
        passed: All bytes so far, in both directions.
        may_pass: While the event is not set, bytes from clients wait in the proxy.
        port: Port of the proxy.
        address: Address of the proxy.
    """

    def __init__(self, target: Address, *damages: Damage) -> None:
        self.target = target
        self.damages = deque(damages)
        self.num_connections = 0
        self.passed = bytearray()
        self.may_pass = threading.Event()
        self.may_pass.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.address = ProxyAddress(host="127.0.0.1", port=self.port, proxy=self)
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept_all)]
        self._threads[0].start()

    def cut_all(self) -> None:
        """Cut off all connections."""
        for connection in self._sockets:
            _shut_down(connection)

    def close(self) -> None:
        _shut_down(self._listening)
        self._threads[0].join(WAIT_S)
        self.may_pass.set()
        self.cut_all()
        for thread in self._threads:
            thread.join(WAIT_S)
        for connection in [self._listening, *self._sockets]:
            connection.close()

    def _accept_all(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(client)
                self.num_connections += 1
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(
                (self.target.host, self.target.port), WAIT_S
            )
        except OSError:
            _shut_down(client)
            return
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.append(server)
        damage = self.damages.popleft() if self.damages else None
        for source, sink, is_client in (
            (client, server, True),
            (server, client, False),
        ):
            own = damage if damage and damage.from_client is is_client else None
            thread = threading.Thread(
                target=self._pump, args=(source, sink, own, is_client)
            )
            self._threads.append(thread)
            thread.start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        damage: Damage | None,
        is_client: bool,
    ) -> None:
        passed_bytes = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.passed += data
                if is_client:
                    assert self.may_pass.wait(WAIT_S)
                if damage and passed_bytes <= damage.offset < passed_bytes + len(data):
                    index = damage.offset - passed_bytes
                    data = (
                        data[:index]
                        if damage.cut
                        else data[:index] + bytes([data[index] ^ 4]) + data[index + 1 :]
                    )
                    sink.sendall(data)
                    if damage.cut:
                        break
                else:
                    sink.sendall(data)
                passed_bytes += len(data)
        _shut_down(source)
        _shut_down(sink)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
