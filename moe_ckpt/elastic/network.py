"""The address at which other nodes reach this node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ckpt.config import require
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.errors import ConfigError

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_LONGEST_NAME = 15
_IPV6 = Path("/proc/net/if_inet6")
_LINK_LOCAL = 0x20


def own_host(launch: Launch, interface: str | None) -> str:
    """Return this node's address on an interface.

    Args:
        launch: This process's position in the job.
        interface: The interface. None: the interface that leads to the rendezvous, or
            the loopback if the job has no other nodes.

    Raises:
        ConfigError: The interface has no address (the message names interfaces that
            have one), or no route leads to the rendezvous.
    """
    setting = "ckpt.network_interface"
    if interface is not None:
        return address_on(interface, setting)
    if launch.local_world_size == launch.world_size:
        return "127.0.0.1"
    return route_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), setting)


def address_on(interface: str, setting: str) -> str:
    """Return this node's address on an interface.

    Args:
        interface: The interface.
        setting: The setting that names the interface, for an error.

    Raises:
        ConfigError: The interface has no address. The message has the setting, and the
            interfaces that have an address.
    """
    addresses = interface_addresses()
    require(interface in addresses, setting, interface, _one_of(addresses))
    return addresses[interface]


def route_to(host: str, port: int, setting: str) -> str:
    """Return this node's address on the interface that leads to another host.

    Args:
        host: The name or address of the other host.
        port: Any port of the other host.
        setting: The setting that names an interface, for an error.

    Returns:
        An IPv4 or IPv6 address.

    Raises:
        ConfigError: The name has no address, or no route leads to the address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        return _first_route(found)
    except OSError as error:
        wanted = (
            f"{_one_of(interface_addresses())}, as no way leads to {host} ({error})"
        )
        raise ConfigError(f"{setting}: got no interface, wanted {wanted}") from error


def interface_addresses() -> dict[str, str]:
    """Return one address of each interface of this machine that has an address.

    Returns:
        The addresses by interface: IPv4 if the interface has an IPv4 address, else
        IPv6.
    """
    found: dict[str, str] = {}
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_LONGEST_NAME])
            with contextlib.suppress(OSError):  # no IPv4 address
                found[name] = socket.inet_ntoa(
                    fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                )
    # the ioctl above returns IPv4 addresses only
    return ipv6_addresses(_IPV6.read_text() if _IPV6.exists() else "") | found


def ipv6_addresses(table: str) -> dict[str, str]:
    """Return the first IPv6 address of each interface in the kernel's table.

    Link-local addresses are left out, as they mean nothing without their interface.

    Args:
        table: Lines of address, index, prefix, scope, flags and name, such as
            `00000000000000000000000000000001 01 80 10 80       lo`.
    """
    found: dict[str, str] = {}
    for digits, _, _, scope, _, name in map(str.split, table.splitlines()):
        if int(scope, 16) != _LINK_LOCAL:
            found.setdefault(
                name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            )
    return found


def _first_route(found: Sequence[tuple[Any, ...]]) -> str:
    """Return this node's address for the first address that has a route.

    Raises:
        OSError: No address has a route.
    """
    errors: list[OSError] = []
    for family, kind, _, _, address in found:
        try:
            with contextlib.closing(socket.socket(family, kind)) as probe:
                probe.connect(address)  # sends nothing: only picks the route
                return str(probe.getsockname()[0])
        except OSError as error:
            errors.append(error)
    raise errors[0]


def _one_of(addresses: Mapping[str, str]) -> str:
    return "one of " + ", ".join(sorted(addresses))
