"""A real network between two processes that does what networks do: hold bytes back,
flip one, break off.
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
    """What happens to the byte at `offset` of what one side sends on a connection;
    `cut` instead of flipped.
    """

    offset: int
    from_client: bool = True
    cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyAddress(Address):
    """Where a proxy listens, under the name of the server behind it: as if the network
    were the proxy.
    """

    proxy: Proxy

    def __str__(self) -> str:
        return str(self.proxy.target)


class Proxy:
    """Passes bytes on to `target`, which may be changed, and back; the next connections
    suffer `damages` in turn.
    """

    def __init__(self, target: Address, *damages: Damage) -> None:
        self.target = target
        self.damages = deque(damages)
        self.num_connections = 0
        self.passed = bytearray()  # all bytes so far, in both directions
        self.may_pass = threading.Event()  # what clients send waits while it is not set
        self.may_pass.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.address = ProxyAddress(host="127.0.0.1", port=self.port, proxy=self)
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept_all)]
        self._threads[0].start()

    def cut_all(self) -> None:
        """Break off all connections that there are."""
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
                    place = damage.offset - passed_bytes
                    data = (
                        data[:place]
                        if damage.cut
                        else data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
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
