"""A mirror port: the network interface on which a switch repeats training traffic.

Owns: the raw socket. Must not: look into frames. On one machine the loopback interface
is the mirror port of all ranks. On loopback each frame leaves and arrives, and only the
arrival is read.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from typing import Protocol

from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError

_ALL_PROTOCOLS = 3
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 64 << 20
_SOL_PACKET, _ADD_MEMBERSHIP, _PROMISCUOUS, _IGNORE_OUTGOING = 263, 1, 1, 23
_ARPHRD_LOOPBACK = 772
# beyond 64 KiB: if segmentation is offloaded, a packet exceeds the length in its header
# (see `frames`)
_LARGEST_FRAME_BYTES = 1 << 17
# bounded: the caller handles the frames under a lock that requests for sums need too
_MOST_FRAMES = 256


class FrameSource(Protocol):
    """Source of frames, in the order of arrival."""

    def read(self, timeout_s: float) -> list[bytes]:
        """Return the frames that have arrived, in order.

        Args:
            timeout_s: Seconds to wait for the first frame.

        Returns:
            The frames; none if no frame has arrived in time.
        """
        ...

    def close(self) -> None:
        """Release the source. `read` must not be called afterwards."""
        ...


class MirrorPort:
    """Reads all frames of a network interface."""

    def __init__(self, interface: str) -> None:
        """Open the interface.

        Args:
            interface: Name of the network interface.

        Raises:
            ConfigError: The process lacks the privilege CAP_NET_RAW, or the interface
                does not exist or cannot be read.
        """
        self._socket = _open(interface)

    def read(self, timeout_s: float) -> list[bytes]:
        frames: list[bytes] = []
        try:
            self._socket.settimeout(timeout_s)
            frames.append(self._socket.recv(_LARGEST_FRAME_BYTES))
            self._socket.setblocking(False)
            while len(frames) < _MOST_FRAMES:
                frames.append(self._socket.recv(_LARGEST_FRAME_BYTES))
        except OSError as error:
            is_quiet = (
                isinstance(error, TimeoutError | BlockingIOError)
                or error.errno == errno.ENETDOWN
            )
            if not is_quiet:  # an interface that is down may come up again
                raise
        return frames

    def close(self) -> None:
        self._socket.close()


def _open(interface: str) -> socket.socket:
    # of this process's network namespace
    there = sorted(name for _, name in socket.if_nameindex())
    require(
        interface in there,
        "ckpt.mirror_interface",
        interface,
        f"one of {', '.join(there)}",
    )
    try:
        port = socket.socket(
            socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)
        )
    except PermissionError as error:
        wanted = "CAP_NET_RAW, which reading a mirror port needs, or ckpt.capture=tap"
        raise ConfigError(
            f"ckpt.capture=mirror: got a process without the privilege, wanted {wanted}"
        ) from error
    try:
        port.bind((interface, 0))
        # loopback: otherwise a second copy of a frame fills in for the copy that
        # `ckpt.capture_loss` drops
        if port.getsockname()[3] == _ARPHRD_LOOPBACK:
            port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        # mirrored frames are addressed to other hosts
        request = struct.pack(
            "iHH8s", socket.if_nametoindex(interface), _PROMISCUOUS, 0, b""
        )
        port.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, request)
        # the larger buffer needs CAP_NET_ADMIN; without that privilege frames are lost
        # earlier
        with contextlib.suppress(PermissionError):
            port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    except OSError as error:
        port.close()
        down = (
            "an interface that is up"
            if error.errno == errno.ENETDOWN
            else "one that can be read"
        )
        raise ConfigError(
            f"ckpt.mirror_interface: got {interface}: {error.strerror}, wanted {down}"
        ) from error
    return port
