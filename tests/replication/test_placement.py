"""Who keeps copies for whom: tables, properties of all small clusters, and MoEtion's Algorithm 2 as it is printed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.replication.placement import (
    LISTED_NODES,
    copy_holders,
    num_nodes,
    placement_lines,
    ring_holders,
)

Holders = Callable[..., tuple[int, ...]]

BOTH = pytest.mark.parametrize("holders_of", [copy_holders, ring_holders])


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "expected"),
    [(8, 2, 4), (8, 8, 1), (9, 2, 5), (1, 8, 1), (3, 1, 3)],
)
def test_nodes(world_size: int, ranks_per_node: int, expected: int) -> None:
    assert num_nodes(world_size, ranks_per_node) == expected


# Whole memories: groups and the ring


@pytest.mark.parametrize(
    ("global_rank", "world_size", "ranks_per_node", "replicas", "groups", "ring"),
    [
        pytest.param(3, 8, 2, 1, (1,), (5,), id="the second of a pair"),
        pytest.param(4, 8, 2, 1, (6,), (6,), id="the first of a pair"),
        pytest.param(7, 12, 2, 2, (9, 11), (9, 11), id="the first of three"),
        pytest.param(9, 12, 2, 2, (11, 7), (11, 1), id="the second of three"),
        pytest.param(1, 5, 1, 1, (0,), (2,), id="a pair before the ring"),
        pytest.param(4, 5, 1, 1, (2,), (0,), id="the end of a ring of three"),
        pytest.param(6, 8, 1, 2, (7, 3), (7, 0), id="the end of a ring of five"),
        pytest.param(3, 8, 2, 2, (5, 7), (5, 7), id="too few nodes for two groups"),
        pytest.param(7, 8, 2, 2, (1, 3), (1, 3), id="around a ring of all"),
        pytest.param(0, 8, 2, 3, (2, 4, 6), (2, 4, 6), id="on all other nodes"),
        pytest.param(3, 8, 2, 0, (), (), id="no copies"),
        pytest.param(5, 8, 8, 0, (), (), id="one node has no other"),
    ],
)
def test_holders(
    global_rank: int,
    world_size: int,
    ranks_per_node: int,
    replicas: int,
    groups: tuple[int, ...],
    ring: tuple[int, ...],
) -> None:
    cluster = {"world_size": world_size, "ranks_per_node": ranks_per_node, "replicas": replicas}
    assert copy_holders(global_rank, **cluster) == groups
    assert ring_holders(global_rank, **cluster) == ring


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
    cluster = {"world_size": world_size, "ranks_per_node": ranks_per_node, "replicas": replicas}
    for place in (lambda: copy_holders(0, **cluster), lambda: ring_holders(0, **cluster)):
        with pytest.raises(AssertionError):
            place()
    with pytest.raises(AssertionError):
        placement_lines(**cluster)


@st.composite
def clusters(draw: st.DrawFn, most_nodes: int = 12, most_ranks: int = 9) -> tuple[int, int, int]:
    """World size, ranks per node and replicas, of up to `most_nodes` nodes of up to `most_ranks` ranks."""
    nodes, ranks_per_node = draw(st.integers(1, most_nodes)), draw(st.integers(1, most_ranks))
    return nodes * ranks_per_node, ranks_per_node, draw(st.integers(0, nodes - 1))


@BOTH
@given(cluster=clusters())
def test_copies_are_on_other_nodes_and_spread_evenly(holders_of: Holders, cluster: tuple[int, int, int]) -> None:
    world_size, ranks_per_node, replicas = cluster
    kept: Counter[int] = Counter()
    for owner in range(world_size):
        holders = holders_of(owner, world_size=world_size, ranks_per_node=ranks_per_node, replicas=replicas)
        nodes = [rank // ranks_per_node for rank in (owner, *holders)]
        assert len(set(nodes)) == 1 + replicas, f"rank {owner}: two of nodes {nodes} are one"
        assert {rank % ranks_per_node for rank in holders} <= {owner % ranks_per_node}
        assert all(0 <= holder < world_size for holder in holders)
        kept.update(holders)
    assert [kept[rank] for rank in range(world_size)] == [replicas] * world_size


@given(cluster=clusters())
def test_all_groups_but_the_last_keep_each_others(cluster: tuple[int, int, int]) -> None:
    """Gemini's mixed strategy, by its words: floor(N / m) - 1 groups of m nodes, and a ring of those that remain."""
    world_size, ranks_per_node, replicas = cluster
    nodes, size = world_size // ranks_per_node, replicas + 1
    full = [range(start, start + size) for start in range(0, nodes // size * size, size)][:-1]
    remaining = nodes - len(full) * size
    assert size <= remaining < 2 * size
    for rank in range(world_size):
        node = rank // ranks_per_node
        holders = copy_holders(rank, world_size=world_size, ranks_per_node=ranks_per_node, replicas=replicas)
        if group := next((group for group in full if node in group), None):
            assert {node, *(holder // ranks_per_node for holder in holders)} == set(group)
        else:
            first = rank - len(full) * size * ranks_per_node
            last = {"world_size": remaining * ranks_per_node, "ranks_per_node": ranks_per_node, "replicas": replicas}
            assert holders == tuple(holder + rank - first for holder in ring_holders(first, **last))


def kept_on(holders_of: Holders, nodes: int, replicas: int) -> list[set[int]]:
    """Return for each node the nodes with its state, its own included; a rank a node."""
    cluster = {"world_size": nodes, "ranks_per_node": 1, "replicas": replicas}
    return [{node, *holders_of(node, **cluster)} for node in range(nodes)]


def num_fatal(kept: Sequence[set[int]], lost: int) -> int:
    """Return how many sets of `lost` nodes take every copy of some state with them."""
    return sum(any(on <= set(gone) for on in kept) for gone in combinations(range(len(kept)), lost))


SMALL = [(nodes, replicas) for nodes in range(1, 10) for replicas in range(nodes)]
DIVISIBLE = [(4, 1), (6, 1), (6, 2), (8, 1), (8, 3), (9, 2)]  # those of several groups, all of them full


@BOTH
def test_any_nodes_up_to_as_many_as_copies_may_be_lost(holders_of: Holders) -> None:
    for nodes, replicas in SMALL:
        kept = kept_on(holders_of, nodes, replicas)
        assert all(num_fatal(kept, lost) == 0 for lost in range(replicas + 1))


def test_fewer_sets_of_one_more_node_are_fatal_to_groups_than_to_the_ring() -> None:
    for nodes, replicas in DIVISIBLE:
        size = replicas + 1
        assert num_fatal(kept_on(copy_holders, nodes, replicas), size) == nodes // size
        assert num_fatal(kept_on(ring_holders, nodes, replicas), size) == nodes


def test_the_mixed_strategy_is_near_the_best_there_is() -> None:
    """Gemini, section 4.1: of the sets of m nodes at most 2m - 3 more are fatal than N / m, the least there can be."""
    for nodes, replicas in SMALL:
        size = replicas + 1
        fatal = num_fatal(kept_on(copy_holders, nodes, replicas), size)
        least = math.ceil(nodes / size)
        assert least <= fatal <= least + max(0, 2 * size - 3)
        assert fatal <= num_fatal(kept_on(ring_holders, nodes, replicas), size)


def test_larger_losses_are_as_likely_to_be_survived_as_gemini_says() -> None:
    """Gemini, section 4.1: k of N nodes lost together leave all states with 1 - N C(N-m, k-m) / (m C(N, k)) or more."""
    for nodes, replicas in DIVISIBLE:
        size, kept = replicas + 1, kept_on(copy_holders, nodes, replicas)
        for lost in range(size, nodes + 1):
            assert num_fatal(kept, lost) <= nodes // size * math.comb(nodes - size, lost - size)


# The table


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "replicas", "expected"),
    [
        pytest.param(
            8,
            2,
            1,
            [
                "node  ranks  copies are kept by ranks",
                "   0    0-1  2-3",
                "   1    2-3  0-1",
                "   2    4-5  6-7",
                "   3    6-7  4-5",
            ],
            id="pairs",
        ),
        pytest.param(
            3,
            1,
            2,
            ["node  ranks  copies are kept by ranks", "   0      0  1, 2", "   1      1  2, 0", "   2      2  0, 1"],
            id="each rank a node",
        ),
        pytest.param(
            280,
            8,
            1,
            [
                "node    ranks  copies are kept by ranks",
                "0-31    0-255  in their place on the other nodes: 2 in a row keep each other's",
                "  32  256-263  264-271",
                "  33  264-271  272-279",
                "  34  272-279  256-263",
            ],
            id="many nodes, the last in a ring",
        ),
        pytest.param(4, 1, 0, ["no node keeps copies of another's memory"], id="no copies"),
    ],
)
def test_the_table_says_who_keeps_what(
    world_size: int, ranks_per_node: int, replicas: int, expected: list[str]
) -> None:
    got = placement_lines(world_size=world_size, ranks_per_node=ranks_per_node, replicas=replicas)
    assert got == expected


@given(nodes=st.integers(2, 3000), ranks_per_node=st.integers(1, 9))
def test_the_table_stays_short(nodes: int, ranks_per_node: int) -> None:
    lines = placement_lines(world_size=nodes * ranks_per_node, ranks_per_node=ranks_per_node, replicas=1)
    assert len(lines) <= 1 + LISTED_NODES
    assert max(map(len, lines)) <= 120


# Data-parallel peers first


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
    assert copy_holders(global_rank, world_size=12, ranks_per_node=2, replicas=replicas, peers=peers) == expected


@given(pp=st.integers(1, 4), cluster=clusters(most_nodes=6, most_ranks=4))
def test_stages_of_whole_nodes_keep_their_copies_among_themselves(pp: int, cluster: tuple[int, int, int]) -> None:
    peers, ranks_per_node, replicas = cluster
    kept: Counter[int] = Counter()
    for owner in range(pp * peers):
        holders = copy_holders(
            owner, world_size=pp * peers, ranks_per_node=ranks_per_node, replicas=replicas, peers=peers
        )
        assert {holder // peers for holder in holders} <= {owner // peers}
        assert len({rank // ranks_per_node for rank in (owner, *holders)}) == 1 + replicas
        kept.update(holders)
    assert [kept[rank] for rank in range(pp * peers)] == [replicas] * pp * peers


def test_the_table_shows_one_stage_for_all() -> None:
    lines = placement_lines(world_size=12, ranks_per_node=2, replicas=1, peers=6)
    assert lines == [
        "node  ranks  copies are kept by ranks",
        "   0    0-1  2-3",
        "   1    2-3  4-5",
        "   2    4-5  0-1",
        "and so on, 3 nodes a stage: copies stay within it",
    ]


# Algorithm 2 as printed


def printed(group_of: Sequence[Sequence[int]], dp: int, replicas: int) -> list[list[int]]:
    """MoEtion's Algorithm 2 to the letter from line 5 on, for any groups: who keeps each worker's copies."""
    kept_by: list[list[int]] = [[] for _ in group_of]
    load = [0] * len(group_of)
    for worker, group in enumerate(group_of):
        assigned = 0
        for peer in group:
            if peer != worker and assigned < min(replicas, dp - 1):
                kept_by[worker].append(peer)
                load[peer] += 1
                assigned += 1
        if assigned < replicas:
            for peer in sorted(set(range(len(group_of))) - set(group)):
                if load[peer] < replicas:
                    kept_by[worker].append(peer)
                    load[peer] += 1
                    assigned += 1
                    if assigned == replicas:
                        break
    return kept_by


def printed_groups(dp: int, pp: int) -> list[list[int]]:
    """Line 4; workers count data-parallel peers first, as Megatron's ranks do."""
    return [[worker % dp + dp * stage for stage in range(pp)] for worker in range(dp * pp)]


def stage_groups(dp: int, pp: int) -> list[list[int]]:
    return [[worker // dp * dp + peer for peer in range(dp)] for worker in range(dp * pp)]


def test_the_printed_group_is_a_pipeline() -> None:
    assert printed_groups(dp=2, pp=3)[1] == [1, 3, 5]
    assert stage_groups(dp=2, pp=3)[1] == [0, 1]


def test_the_printed_algorithm_overloads_the_lowest_peer() -> None:
    assert printed(stage_groups(dp=4, pp=1), 4, 1) == [[1], [0], [0], [0]]
    assert printed(printed_groups(dp=2, pp=4), 2, 1)[::2] == [[2], [0], [0], [0]]


def test_the_printed_algorithm_leaves_the_last_worker_without_a_copy() -> None:
    assert printed(stage_groups(dp=1, pp=3), 1, 1) == [[1], [0], []]
    assert printed(printed_groups(dp=1, pp=3), 1, 1) == [[], [], []]


def test_in_the_smallest_jobs_the_plan_is_the_printed_one() -> None:
    """Where its faults do not show: two peers a group, a rank a node."""
    for pp in range(1, 5):
        holders = [
            list(copy_holders(rank, world_size=2 * pp, ranks_per_node=1, replicas=1, peers=2)) for rank in range(2 * pp)
        ]
        assert holders == printed(stage_groups(dp=2, pp=pp), 2, 1)
