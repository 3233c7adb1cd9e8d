"""Which ranks keep copies for which. Pure. A node is `ranks_per_node` consecutive ranks, which fail together."""

from __future__ import annotations


def num_nodes(world_size: int, ranks_per_node: int) -> int:
    """Return the number of failure domains; the last may be smaller."""
    return -(-world_size // ranks_per_node)


def copy_holders(global_rank: int, *, world_size: int, ranks_per_node: int, replicas: int) -> tuple[int, ...]:
    """Return the ranks that keep this rank's copies: the rank in its place on each of the next `replicas` nodes.

    8 ranks, 2 a node, 2 replicas: rank 3 is kept by ranks 5 and 7, rank 7 by 1 and 3. Needs replicas < nodes and nodes
    of equal size. Gemini, section 4.1: a ring of nodes, so that every node keeps as much as it gives away.
    """
    assert 0 <= replicas < num_nodes(world_size, ranks_per_node), (replicas, world_size, ranks_per_node)
    assert world_size % ranks_per_node == 0, (world_size, ranks_per_node)
    return tuple((global_rank + hop * ranks_per_node) % world_size for hop in range(1, replicas + 1))
