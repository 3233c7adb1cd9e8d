"""The ranks that hold each rank's copies. Pure.

A node is `ranks_per_node` consecutive ranks, which fail together. `copy_holders` places
the memory of every rank in groups of nodes, the last of them a ring (Gemini, SOSP '23,
section 4.1). If the data-parallel peers are given, groups stay among peers (MoEtion,
section 5.1, Algorithm 2). All ranks compute the same placement. Must not: depend
on which ranks are alive.
"""

from __future__ import annotations

LISTED_NODES = 16
"""Most nodes that `placement_lines` lists one by one.

For more nodes, one line describes all groups but the last.
"""


def num_nodes(world_size: int, ranks_per_node: int) -> int:
    """Return the number of failure domains; the last domain may be smaller."""
    return -(-world_size // ranks_per_node)


def copy_holders(
    global_rank: int,
    *,
    world_size: int,
    ranks_per_node: int,
    replicas: int,
    peers: int | None = None,
) -> tuple[int, ...]:
    """Return the ranks that hold this rank's copies.

    The holders are the ranks with this rank's local index on `replicas` other nodes of
    this rank's group. Every rank holds the copies of `replicas` other ranks. Any
    `replicas` nodes may be lost, and most sets of one node more. The placement is the
    mixed strategy of Gemini, section 4.1. Gemini's m counts the owner's own copy: m =
    replicas + 1.

    - 8 ranks, 2 a node, 1 replica: nodes 0 and 1 hold each other's copies, and so do
      nodes 2 and 3. Rank 1 holds the copies of rank 3.
    - 5 nodes, 1 replica: nodes 0 and 1 hold each other's copies. Node 3 holds the
      copies of node 2, node 4 those of node 3, and node 2 those of node 4.
    - 6 nodes, 3 a stage (`peers`), 1 replica: nodes 0 to 2 form a ring, and so do nodes
      3 to 5.

    Groups among peers are those of MoEtion, section 5.1, Algorithm 2, as the paper's
    text describes the algorithm (docs/design.md, "Copies to peers").

    Args:
        global_rank: The rank.
        world_size: Number of ranks, a multiple of `ranks_per_node`.
        ranks_per_node: Number of ranks on each node.
        replicas: Number of copies beside the owner's memory, less than the number of
            nodes.
        peers: Number of consecutive ranks that train one stage as data-parallel peers.
            Groups stay among the peers if the peers fill whole nodes, and more than
            `replicas` nodes. None: groups of all nodes.

    Returns:
        The holders, nearest in the ring first.
    """
    first, near = _near(global_rank, world_size, ranks_per_node, replicas, peers)
    nodes = _equal_nodes(near, ranks_per_node, replicas)
    group = _group((global_rank - first) // ranks_per_node, nodes, replicas)
    holders = _next_in_ring(global_rank - first, group, ranks_per_node, replicas)
    return tuple(first + holder for holder in holders)


def placement_lines(
    *, world_size: int, ranks_per_node: int, replicas: int, peers: int | None = None
) -> list[str]:
    """Return a readable table of `copy_holders`, with a line for each node.

    The first rank of a range is held by the first rank of each range in the last
    column. For more than LISTED_NODES nodes, all groups but the last, which may be a
    ring, share a line. If groups stay among data-parallel peers, the first stage stands
    for all stages.
    """
    _, near = _near(0, world_size, ranks_per_node, replicas, peers)
    nodes = _equal_nodes(near, ranks_per_node, replicas)
    if replicas == 0:
        return ["no node keeps copies of another's memory"]
    num_summed = (
        _group(nodes[-1], nodes, replicas).start if len(nodes) > LISTED_NODES else 0
    )
    rows = [("node", "ranks", "copies are kept by ranks")]
    if num_summed:
        others = (
            f"in their place on the other nodes: {replicas + 1} in a row keep each"
            " other's"
        )
        rows.append(
            (_span(0, num_summed), _span(0, num_summed * ranks_per_node), others)
        )
    for node in nodes[num_summed:]:
        first = node * ranks_per_node
        holders = copy_holders(
            first, world_size=near, ranks_per_node=ranks_per_node, replicas=replicas
        )
        spans = [_span(rank, ranks_per_node) for rank in (first, *holders)]
        rows.append((str(node), spans[0], ", ".join(spans[1:])))
    node_width, ranks_width = (
        max(len(row[column]) for row in rows) for column in (0, 1)
    )
    lines = [
        f"{node:>{node_width}}  {ranks:>{ranks_width}}  {kept_by}"
        for node, ranks, kept_by in rows
    ]
    return (
        lines
        if near == world_size
        else [*lines, f"and so on, {len(nodes)} nodes a stage: copies stay within it"]
    )


def _near(
    global_rank: int,
    world_size: int,
    ranks_per_node: int,
    replicas: int,
    peers: int | None,
) -> tuple[int, int]:
    """Return the first rank and the number of ranks among which copies stay."""
    # groups consist of whole nodes: a node with ranks of two stages would be in two
    # rings
    if (
        peers is None
        or peers % ranks_per_node
        or num_nodes(peers, ranks_per_node) <= replicas
    ):
        return 0, world_size
    return global_rank // peers * peers, peers


def _equal_nodes(world_size: int, ranks_per_node: int, replicas: int) -> range:
    assert 0 <= replicas < num_nodes(world_size, ranks_per_node), (
        replicas,
        world_size,
        ranks_per_node,
    )
    assert world_size % ranks_per_node == 0, (world_size, ranks_per_node)
    return range(world_size // ranks_per_node)


def _group(node: int, nodes: range, replicas: int) -> range:
    """Return the group of a node: replicas + 1 consecutive nodes that share copies.

    The last group takes the remaining nodes, too, and has up to 2 * replicas + 1 nodes.
    A ring fits all sizes: in a full group a ring reaches all other nodes.
    """
    size = replicas + 1
    last = len(nodes) // size - 1
    index = min(node // size, last)
    return (
        nodes[index * size :]
        if index == last
        else nodes[index * size : (index + 1) * size]
    )


def _next_in_ring(
    global_rank: int, ring: range, ranks_per_node: int, replicas: int
) -> tuple[int, ...]:
    node, local_index = divmod(global_rank, ranks_per_node)
    position = ring.index(node)
    return tuple(
        ring[(position + hop) % len(ring)] * ranks_per_node + local_index
        for hop in range(1, replicas + 1)
    )


def _span(first: int, length: int) -> str:
    return str(first) if length == 1 else f"{first}-{first + length - 1}"
