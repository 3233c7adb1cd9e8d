"""The address that others reach a node under."""

from __future__ import annotations

import pytest

from launcher.launch import Launch
from launcher.network import interface_addresses, own_host
from moe_ckpt.errors import ConfigError
from tests.elastic import ElasticJob


def launch(*, local_world_size: int) -> Launch:
    return Launch(global_rank=0, world_size=4, local_rank=0, local_world_size=local_world_size, attempt=0)


def test_a_machine_alone_is_reached_by_the_loopback() -> None:
    assert own_host(launch(local_world_size=4), None) == "127.0.0.1"


def test_an_interface_has_its_address() -> None:
    assert interface_addresses()["lo"] == "127.0.0.1"
    assert own_host(launch(local_world_size=2), "lo") == "127.0.0.1"


def test_of_several_nodes_the_way_to_the_rendezvous_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert own_host(launch(local_world_size=2), None).startswith("127.")


def test_an_interface_that_is_not_there_is_named_with_those_that_are(tmp_path) -> None:
    wanted = r"ckpt.network_interface: got 'eth77', wanted one of .*\blo\b"
    with pytest.raises(ConfigError, match=wanted):
        own_host(launch(local_world_size=4), "eth77")
    with ElasticJob(2, tmp_path, "ckpt.network_interface=eth77") as job:
        assert job.wait_for_failure().count("error: ckpt.network_interface: got 'eth77'") == 1
