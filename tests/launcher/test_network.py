"""The address under which other nodes reach this node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_ckpt.elastic.network import (
    interface_addresses,
    ipv6_addresses,
    own_host,
    route_to,
)
from moe_ckpt.elastic.torchrun_variables import Launch
from tests.launcher.errors import error_of

_TABLE = Path("/proc/net/if_inet6")


def launch(*, local_world_size: int) -> Launch:
    return Launch(
        global_rank=0,
        world_size=4,
        local_rank=0,
        local_world_size=local_world_size,
        attempt=0,
    )


def test_a_machine_alone_is_reached_by_the_loopback_and_others_as_told() -> None:
    assert interface_addresses()["lo"] == "127.0.0.1"
    assert own_host(launch(local_world_size=4), None) == "127.0.0.1"
    assert own_host(launch(local_world_size=2), "lo") == "127.0.0.1"


def test_of_several_nodes_the_way_to_the_rendezvous_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert own_host(launch(local_world_size=2), None).startswith("127.")


def test_an_unknown_interface_is_named_with_the_known_ones() -> None:
    message = error_of(own_host, launch(local_world_size=4), "eth77")
    assert re.match(
        r"ckpt.network_interface: got 'eth77', wanted one of .*\blo\b", message
    )


def test_a_rendezvous_without_an_address_is_one_error_that_names_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    message = error_of(own_host, launch(local_world_size=2), None)
    says = (
        r"ckpt.network_interface: got no interface, wanted one of .*\blo\b.*, as no way"
        r" leads to nowhere.invalid \("
    )
    assert re.match(says, message)


@pytest.mark.skipif(
    not ipv6_addresses(_TABLE.read_text() if _TABLE.exists() else ""),
    reason="needs IPv6",
)
def test_the_way_to_a_rendezvous_may_be_ipv6() -> None:
    assert route_to("::1", 29500, "--interface") == "::1"


def test_an_interface_has_its_first_ipv6_address_that_others_can_use() -> None:
    table = """00000000000000000000000000000001 01 80 10 80       lo
fe800000000000000042acfffe110002 05 40 20 80     eth0
fd000000000000000000000000000007 05 40 00 80     eth0
fd000000000000000000000000000008 05 40 00 80     eth0
"""
    assert ipv6_addresses(table) == {"lo": "::1", "eth0": "fd00::7"}
    assert ipv6_addresses("") == {}
