"""Who keeps copies for whom: tables, and properties of every small cluster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.placement import copy_holders, num_nodes


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "expected"),
    [(8, 2, 4), (8, 8, 1), (9, 2, 5), (1, 8, 1), (3, 1, 3)],
)
def test_nodes(world_size: int, ranks_per_node: int, expected: int) -> None:
    assert num_nodes(world_size, ranks_per_node) == expected


@pytest.mark.parametrize(
    ("global_rank", "world_size", "ranks_per_node", "replicas", "expected"),
    [
        pytest.param(3, 8, 2, 2, (5, 7), id="the same place on the next nodes"),
        pytest.param(7, 8, 2, 2, (1, 3), id="around the ring"),
        pytest.param(3, 8, 2, 0, (), id="no copies"),
        pytest.param(0, 8, 2, 3, (2, 4, 6), id="on all other nodes"),
        pytest.param(1, 4, 1, 1, (2,), id="each rank a node"),
        pytest.param(5, 8, 8, 0, (), id="one node has no other"),
    ],
)
def test_holders(
    global_rank: int, world_size: int, ranks_per_node: int, replicas: int, expected: tuple[int, ...]
) -> None:
    got = copy_holders(global_rank, world_size=world_size, ranks_per_node=ranks_per_node, replicas=replicas)
    assert got == expected


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "replicas"),
    [
        pytest.param(8, 2, 4, id="as many copies as nodes"),
        pytest.param(8, 8, 1, id="one node"),
        pytest.param(8, 2, -1, id="fewer than none"),
        pytest.param(9, 2, 1, id="a node that is smaller"),
    ],
)
def test_what_cannot_be_placed_is_our_own_bug(world_size: int, ranks_per_node: int, replicas: int) -> None:
    with pytest.raises(AssertionError):
        copy_holders(0, world_size=world_size, ranks_per_node=ranks_per_node, replicas=replicas)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[int, int, int]:
    """World size, ranks per node and replicas, of up to 12 nodes of up to 9 ranks."""
    nodes, ranks_per_node = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    return nodes * ranks_per_node, ranks_per_node, draw(st.integers(0, nodes - 1))


@given(cluster=clusters())
def test_copies_are_on_other_nodes_and_spread_evenly(cluster: tuple[int, int, int]) -> None:
    world_size, ranks_per_node, replicas = cluster
    kept: Counter[int] = Counter()
    for owner in range(world_size):
        holders = copy_holders(owner, world_size=world_size, ranks_per_node=ranks_per_node, replicas=replicas)
        nodes = [rank // ranks_per_node for rank in (owner, *holders)]
        assert len(set(nodes)) == 1 + replicas, f"rank {owner}: two of nodes {nodes} are one"
        assert all(0 <= holder < world_size for holder in holders)
        kept.update(holders)
    assert [kept[rank] for rank in range(world_size)] == [replicas] * world_size
