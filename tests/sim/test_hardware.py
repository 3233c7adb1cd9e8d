"""Constants of a cluster: impossible values are named, and collectives are affine."""

from __future__ import annotations

import math

import pytest

from moe_ckpt.errors import ConfigError
from tests.sim.setups import cluster


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": 0}, "cluster.nodes: got 0, wanted more than 0"),
        (
            {"copy_bytes_per_s": -1.0},
            "cluster.copy_bytes_per_s: got -1.0, wanted more than 0",
        ),
        ({"efficiency": 1.5}, "cluster.efficiency: got 1.5, wanted at most 1"),
        ({"sync_overlap": -0.1}, "cluster.sync_overlap: got -0.1, wanted at least 0"),
        (
            {"disk_bytes_per_s": math.inf},
            "cluster.disk_bytes_per_s: got inf, wanted a finite number",
        ),
        ({"repair_s": math.nan}, "cluster.repair_s: got nan, wanted a finite number"),
        (
            {"copies_share": "node"},
            "cluster.copies_share: got 'node', wanted one of rank, job",
        ),
        (
            {"compute_share": "node"},
            "cluster.compute_share: got 'node', wanted one of rank, job",
        ),
    ],
)
def test_an_impossible_constant_is_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(**changes)
    assert str(caught.value) == says


def test_a_collective_takes_alpha_and_beta_m() -> None:
    machines = cluster(
        network_latency_s=0.5,
        network_bytes_per_s=20.0,
        node_latency_s=0.25,
        node_bytes_per_s=100.0,
    )
    assert machines.peer_bytes_per_s == 10.0  # two GPUs share the node's network
    assert (
        machines.collective_s(80.0, 4, within_node=False)
        == 2 * 0.5 + 3 / 4 * 80.0 / 10.0
    )
    assert (
        machines.collective_s(80.0, 4, within_node=True)
        == 2 * 0.25 + 3 / 4 * 80.0 / 100.0
    )
    assert machines.collective_s(80.0, 1, within_node=False) == 0.0
