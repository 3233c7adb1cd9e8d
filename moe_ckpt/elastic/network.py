"""The address at which other nodes reach this node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

from moe_ckpt.config import require
from moe_ckpt.elastic.torchrun import Launch

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_LONGEST_NAME = 15


def own_host(launch: Launch, interface: str | None) -> str:
    """Return this node's address on an interface.

    None: the interface that leads to the rendezvous, or the loopback without other nodes. Raises ConfigError for an
    interface that has no IPv4 address, naming those that do.
    """
    if interface is not None:
        return address_on(interface, "ckpt.network_interface")
    if launch.local_world_size == launch.world_size:
        return "127.0.0.1"
    return route_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def address_on(interface: str, setting: str) -> str:
    """Return this node's address on an interface. Raises ConfigError with the setting and the present interfaces."""
    addresses = interface_addresses()
    require(interface in addresses, setting, interface, "one of " + ", ".join(sorted(addresses)))
    return addresses[interface]


def route_to(host: str, port: int) -> str:
    """Return this node's address on the interface that leads to another host."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((host, port))  # sends nothing: picks the route
        return str(probe.getsockname()[0])


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface of this machine that has one."""
    found: dict[str, str] = {}
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_LONGEST_NAME])
            with contextlib.suppress(OSError):  # it has none
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return found
