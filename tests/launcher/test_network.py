"""The address that others reach a node under."""

from __future__ import annotations

import re

import pytest

from moe_ckpt.elastic.network import interface_addresses, own_host
from moe_ckpt.elastic.torchrun import Launch
from tests.launcher.errors import error_of


def launch(*, local_world_size: int) -> Launch:
    return Launch(global_rank=0, world_size=4, local_rank=0, local_world_size=local_world_size, attempt=0)


def test_a_machine_alone_is_reached_by_the_loopback_and_others_as_told() -> None:
    assert interface_addresses()["lo"] == "127.0.0.1"
    assert own_host(launch(local_world_size=4), None) == "127.0.0.1"
    assert own_host(launch(local_world_size=2), "lo") == "127.0.0.1"


def test_of_several_nodes_the_way_to_the_rendezvous_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert own_host(launch(local_world_size=2), None).startswith("127.")


def test_an_unknown_interface_is_named_with_the_known_ones() -> None:
    message = error_of(own_host, launch(local_world_size=4), "eth77")
    assert re.match(r"ckpt.network_interface: got 'eth77', wanted one of .*\blo\b", message)
