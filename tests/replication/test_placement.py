"""The placement of copies on ranks: tables, and properties of all small clusters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.replication.placement import (
    LISTED_NODES,
    copy_holders,
    num_nodes,
    placement_lines,
)

Holders = Callable[..., tuple[int, ...]]
Cluster = tuple[int, int, int]
"""World size, ranks per node and replicas."""


def arguments(cluster: Cluster) -> dict[str, int]:
    """Return a cluster as keyword arguments."""
    return dict(zip(("world_size", "ranks_per_node", "replicas"), cluster, strict=True))


def ring_holders(
    global_rank: int, *, world_size: int, ranks_per_node: int, replicas: int
) -> tuple[int, ...]:
    """Return the holders in Gemini's ring strategy (section 4.1).

    All nodes form one ring, and the next nodes in the ring hold the copies.
    """
    return tuple(
        (global_rank + hop * ranks_per_node) % world_size
        for hop in range(1, replicas + 1)
    )


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "nodes"),
    [(8, 2, 4), (8, 8, 1), (9, 2, 5), (1, 8, 1)],
)
def test_nodes(world_size: int, ranks_per_node: int, nodes: int) -> None:
    assert num_nodes(world_size, ranks_per_node) == nodes


@pytest.mark.parametrize(
    ("global_rank", "cluster", "holders"),
    [
        pytest.param(3, (8, 2, 1), (1,), id="the second of a pair"),
        pytest.param(4, (8, 2, 1), (6,), id="the first of a pair"),
        pytest.param(7, (12, 2, 2), (9, 11), id="the first of three"),
        pytest.param(9, (12, 2, 2), (11, 7), id="the second of three"),
        pytest.param(1, (5, 1, 1), (0,), id="a pair before the ring"),
        pytest.param(4, (5, 1, 1), (2,), id="the end of a ring of three"),
        pytest.param(6, (8, 1, 2), (7, 3), id="the end of a ring of five"),
        pytest.param(3, (8, 2, 2), (5, 7), id="too few nodes for two groups"),
        pytest.param(7, (8, 2, 2), (1, 3), id="around a ring of all"),
        pytest.param(0, (8, 2, 3), (2, 4, 6), id="on all other nodes"),
        pytest.param(3, (8, 2, 0), (), id="no copies"),
        pytest.param(5, (8, 8, 0), (), id="one node has no other"),
    ],
)
def test_holders(global_rank: int, cluster: Cluster, holders: tuple[int, ...]) -> None:
    assert copy_holders(global_rank, **arguments(cluster)) == holders


@pytest.mark.parametrize(
    "cluster",
    [(8, 2, 4), (8, 8, 1), (8, 2, -1), (9, 2, 1)],
    ids=[
        "as many copies as nodes",
        "one node",
        "fewer than none",
        "a node that is smaller",
    ],
)
@pytest.mark.parametrize("compute", [partial(copy_holders, 0), placement_lines])
def test_what_cannot_be_placed_is_our_own_bug(
    compute: Callable[..., object], cluster: Cluster
) -> None:
    with pytest.raises(AssertionError):
        compute(**arguments(cluster))


@st.composite
def clusters(draw: st.DrawFn, most_nodes: int = 12, most_ranks: int = 9) -> Cluster:
    nodes, ranks_per_node = (
        draw(st.integers(1, most_nodes)),
        draw(st.integers(1, most_ranks)),
    )
    return nodes * ranks_per_node, ranks_per_node, draw(st.integers(0, nodes - 1))


@given(cluster=clusters())
def test_copies_are_on_other_nodes_and_spread_evenly(cluster: Cluster) -> None:
    world_size, ranks_per_node, replicas = cluster
    kept: Counter[int] = Counter()
    for owner in range(world_size):
        holders = copy_holders(owner, **arguments(cluster))
        nodes = [rank // ranks_per_node for rank in (owner, *holders)]
        assert len(set(nodes)) == 1 + replicas, (
            f"rank {owner}: two of nodes {nodes} are one"
        )
        assert {rank % ranks_per_node for rank in holders} <= {owner % ranks_per_node}
        assert all(0 <= holder < world_size for holder in holders)
        kept.update(holders)
    assert [kept[rank] for rank in range(world_size)] == [replicas] * world_size


@given(cluster=clusters())
def test_all_groups_but_the_last_keep_each_others(cluster: Cluster) -> None:
    """The groups are those of the text about Gemini's mixed strategy.

    There are floor(N / m) - 1 groups of m nodes, and a ring of the remaining nodes.
    """
    world_size, ranks_per_node, replicas = cluster
    nodes, size = world_size // ranks_per_node, replicas + 1
    full = [
        range(start, start + size) for start in range(0, nodes // size * size, size)
    ][:-1]
    remaining = nodes - len(full) * size
    assert size <= remaining < 2 * size
    for rank in range(world_size):
        node = rank // ranks_per_node
        holders = copy_holders(rank, **arguments(cluster))
        if group := next((group for group in full if node in group), None):
            assert {node, *(holder // ranks_per_node for holder in holders)} == set(
                group
            )
        else:
            first = rank - len(full) * size * ranks_per_node
            last = arguments((remaining * ranks_per_node, ranks_per_node, replicas))
            assert holders == tuple(
                holder + rank - first for holder in ring_holders(first, **last)
            )


def kept_on(holders_of: Holders, nodes: int, replicas: int) -> list[set[int]]:
    """Return for each node the nodes that have the node's state, itself included.

    Each node has one rank.
    """
    return [
        {node, *holders_of(node, **arguments((nodes, 1, replicas)))}
        for node in range(nodes)
    ]


def num_fatal(kept: Sequence[set[int]], lost: int) -> int:
    """Return the number of sets of `lost` nodes that have all copies of some state."""
    return sum(
        any(on <= set(gone) for on in kept)
        for gone in combinations(range(len(kept)), lost)
    )


def test_the_mixed_strategy_is_near_the_best_there_is() -> None:
    """Gemini, section 4.1, bounds the number of fatal sets of m nodes.

    The least possible number is N / m, rounded up. The mixed strategy has at most
    2m - 3 more.
    """
    for nodes, replicas in [
        pair for pair in product(range(1, 10), range(9)) if pair[1] < pair[0]
    ]:
        size, kept = replicas + 1, kept_on(copy_holders, nodes, replicas)
        least, fatal = math.ceil(nodes / size), num_fatal(kept, size)
        assert least <= fatal <= least + max(0, 2 * size - 3)
        assert fatal <= num_fatal(kept_on(ring_holders, nodes, replicas), size)
        assert num_fatal(kept, replicas) == 0, (
            "any nodes up to as many as copies may be lost"
        )


PAIRS = ["   0    0-1  2-3", "   1    2-3  0-1", "   2    4-5  6-7", "   3    6-7  4-5"]
SINGLE = ["   0      0  1, 2", "   1      1  2, 0", "   2      2  0, 1"]
MANY = [
    "0-31    0-255  in their place on the other nodes: 2 in a row keep each other's",
    "  32  256-263  264-271",
    "  33  264-271  272-279",
    "  34  272-279  256-263",
]
HEAD = "node  ranks  copies are kept by ranks"


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        pytest.param((8, 2, 1), [HEAD, *PAIRS], id="pairs"),
        pytest.param((3, 1, 2), [HEAD, *SINGLE], id="each rank a node"),
        pytest.param(
            (280, 8, 1),
            ["node    ranks  copies are kept by ranks", *MANY],
            id="the last in a ring",
        ),
        pytest.param(
            (4, 1, 0), ["no node keeps copies of another's memory"], id="no copies"
        ),
    ],
)
def test_the_table_names_the_holders(cluster: Cluster, expected: list[str]) -> None:
    assert placement_lines(**arguments(cluster)) == expected


@given(nodes=st.integers(2, 3000), ranks_per_node=st.integers(1, 9))
def test_the_table_stays_short(nodes: int, ranks_per_node: int) -> None:
    lines = placement_lines(**arguments((nodes * ranks_per_node, ranks_per_node, 1)))
    assert len(lines) <= 1 + LISTED_NODES
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("global_rank", "replicas", "peers", "expected"),
    [
        pytest.param(4, 1, 6, (0,), id="a ring of the three nodes of a stage"),
        pytest.param(10, 1, 6, (6,), id="and of the next stage"),
        pytest.param(7, 2, 6, (9, 11), id="on all other nodes of the stage"),
        pytest.param(4, 3, 6, (6, 8, 10), id="a stage has too few nodes"),
        pytest.param(4, 1, 3, (6,), id="stages that share a node"),
        pytest.param(4, 1, 2, (6,), id="a stage is a node"),
        pytest.param(4, 1, None, (6,), id="nobody's peers are known"),
        pytest.param(4, 0, 6, (), id="no copies"),
    ],
)
def test_copies_stay_among_peers_where_these_are_on_enough_nodes(
    global_rank: int, replicas: int, peers: int | None, expected: tuple[int, ...]
) -> None:
    assert (
        copy_holders(
            global_rank, world_size=12, ranks_per_node=2, replicas=replicas, peers=peers
        )
        == expected
    )


@given(pp=st.integers(1, 4), cluster=clusters(most_nodes=6, most_ranks=4))
def test_stages_of_whole_nodes_keep_their_copies_among_themselves(
    pp: int, cluster: Cluster
) -> None:
    peers, ranks_per_node, replicas = cluster
    kept: Counter[int] = Counter()
    for owner in range(pp * peers):
        holders = copy_holders(
            owner, **arguments((pp * peers, ranks_per_node, replicas)), peers=peers
        )
        assert {holder // peers for holder in holders} <= {owner // peers}
        assert (
            len({rank // ranks_per_node for rank in (owner, *holders)}) == 1 + replicas
        )
        kept.update(holders)
    assert [kept[rank] for rank in range(pp * peers)] == [replicas] * pp * peers


def test_the_table_shows_one_stage_for_all() -> None:
    lines = placement_lines(**arguments((12, 2, 1)), peers=6)
    stage = ["   0    0-1  2-3", "   1    2-3  4-5", "   2    4-5  0-1"]
    assert lines == [HEAD, *stage, "and so on, 3 nodes a stage: copies stay within it"]
