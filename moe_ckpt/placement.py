"""Which ranks keep copies for which. Pure. A node is `ranks_per_node` consecutive ranks, which fail together.

`copy_holders` places the whole memory of every rank: groups of nodes, the last one a ring (Gemini, SOSP '23, section
4.1). `plan_shard_copies` places single shards, and only those that data parallelism does not keep on enough nodes
already (MoEtion, section 5.1, Algorithm 2). All ranks compute the same. Must not: know who is alive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LISTED_NODES = 16
"""Of more nodes than this, `placement_lines` gives all groups but the last one line together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCopy:
    """`to_rank` keeps a copy of shard number `shard` for `from_rank`, which trains with it and sends it."""

    shard: int
    from_rank: int
    to_rank: int


def num_nodes(world_size: int, ranks_per_node: int) -> int:
    """Return the number of failure domains; the last may be smaller."""
    return -(-world_size // ranks_per_node)


def copy_holders(global_rank: int, *, world_size: int, ranks_per_node: int, replicas: int) -> tuple[int, ...]:
    """Return the ranks that keep this rank's copies: the rank in its place on each of `replicas` nodes of its group.

    8 ranks, 2 a node, 1 replica: nodes 0 and 1 keep each other's copies, and so do 2 and 3; rank 3 is kept by rank 1.
    5 nodes, 1 replica: nodes 0 and 1 keep each other's, 2 is kept by 3, 3 by 4, 4 by 2. Needs replicas < nodes and
    nodes of equal size. Gemini, section 4.1, mixed strategy, whose m counts the owner's own copy: m = replicas + 1.
    Every rank keeps `replicas` others' copies; any `replicas` nodes may be lost, and most sets of one more.
    """
    nodes = _equal_nodes(world_size, ranks_per_node, replicas)
    group = _group(global_rank // ranks_per_node, nodes, replicas)
    return _next_in_ring(global_rank, group, ranks_per_node, replicas)


def ring_holders(global_rank: int, *, world_size: int, ranks_per_node: int, replicas: int) -> tuple[int, ...]:
    """Return the ranks in this rank's place on each of the next `replicas` nodes, with all nodes in one ring.

    8 ranks, 2 a node, 2 replicas: rank 3 is kept by ranks 5 and 7, rank 7 by 1 and 3. Needs what `copy_holders` needs.
    Gemini, section 4.1, ring strategy: of the sets of replicas + 1 nodes, all that are adjacent take a state with them.
    """
    nodes = _equal_nodes(world_size, ranks_per_node, replicas)
    return _next_in_ring(global_rank, nodes, ranks_per_node, replicas)


def placement_lines(*, world_size: int, ranks_per_node: int, replicas: int) -> list[str]:
    """Return a table of `copy_holders` for people: a line a node, the first rank of a range kept by the first of each.

    Of more than LISTED_NODES nodes, all groups but the last, which may be a ring, share a line.
    """
    nodes = _equal_nodes(world_size, ranks_per_node, replicas)
    if replicas == 0:
        return ["no node keeps copies of another's memory"]
    num_summed = _group(nodes[-1], nodes, replicas).start if len(nodes) > LISTED_NODES else 0
    rows = [("node", "ranks", "copies are kept by ranks")]
    if num_summed:
        others = f"in their place on the other nodes: {replicas + 1} in a row keep each other's"
        rows.append((_span(0, num_summed), _span(0, num_summed * ranks_per_node), others))
    for node in nodes[num_summed:]:
        first = node * ranks_per_node
        holders = copy_holders(first, world_size=world_size, ranks_per_node=ranks_per_node, replicas=replicas)
        spans = [_span(rank, ranks_per_node) for rank in (first, *holders)]
        rows.append((str(node), spans[0], ", ".join(spans[1:])))
    node_width, ranks_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{node:>{node_width}}  {ranks:>{ranks_width}}  {kept_by}" for node, ranks, kept_by in rows]


def plan_shard_copies(
    trained_by: Sequence[Collection[int]], *, group_of: Sequence[int], node_of: Sequence[int], replicas: int
) -> list[ShardCopy]:
    """Return the copies after which every shard is on `replicas` + 1 nodes, counting those that train with it.

    `trained_by`: of each shard, the ranks whose own state has it: one where the optimizer is sharded, the peers of a
    data-parallel group where it is replicated. `group_of`, `node_of`: of each rank, its data-parallel group and its
    failure domain. A copy goes to a node without the shard, there to the rank with the fewest copies, of these to a
    data-parallel peer, of these to the next in number. Where nodes are equal and each rank brings one shard, what a
    rank keeps is within one of even. Shards count as equally large: place different kinds by a call each. 1,024
    shards on as many ranks take 0.3 s a replica.

    Ranks 0, 1 on node 0 and 2, 3 on node 1, 1 replica: a shard of each, all peers: 0 and 2 keep each other's, 1 and 3
    too. One shard that all four train with: no copy.

    MoEtion, section 5.1, Algorithm 2, as its text means it. As printed, the algorithm
    - calls a pipeline a data-parallel group: line 4 takes the PP workers of equal i % DP, the text up to DP - 1 peers;
    - knows no nodes, and does not count the replicas that training has, which the text says need no copy;
    - fills groups from the lowest worker on, without a bound: in a group of 4 with r = 1 that worker keeps 3 copies;
    - outside a group stops at r copies a keeper, whoever is left: of 3 groups of one with r = 1, the last has no copy.
    """
    assert 0 <= replicas < len(set(node_of)), (replicas, node_of)
    assert len(group_of) == len(node_of), (group_of, node_of)
    assert all(trained_by), trained_by
    nodes = [{node_of[rank] for rank in ranks} for ranks in trained_by]
    num_kept, num_sent = [0] * len(node_of), [0] * len(node_of)
    copies: list[ShardCopy] = []
    for wanted in range(2, replicas + 2):  # by rounds: else the first shards fill groups whose own then go elsewhere
        for shard, trainers in enumerate(trained_by):
            if len(nodes[shard]) >= wanted:
                continue
            from_rank = min(trainers, key=lambda rank: (num_sent[rank], rank))
            free = [rank for rank, node in enumerate(node_of) if node not in nodes[shard]]
            to_rank = _choose_keeper(free, owner=min(trainers), group_of=group_of, num_kept=num_kept)
            num_sent[from_rank] += 1
            num_kept[to_rank] += 1
            nodes[shard].add(node_of[to_rank])
            copies.append(ShardCopy(shard=shard, from_rank=from_rank, to_rank=to_rank))
    return copies


def _equal_nodes(world_size: int, ranks_per_node: int, replicas: int) -> range:
    assert 0 <= replicas < num_nodes(world_size, ranks_per_node), (replicas, world_size, ranks_per_node)
    assert world_size % ranks_per_node == 0, (world_size, ranks_per_node)
    return range(world_size // ranks_per_node)


def _group(node: int, nodes: range, replicas: int) -> range:
    """Return the nodes that `node` shares copies with: replicas + 1 in a row, and what is left over in the last group.

    The last group has up to 2 * replicas + 1 nodes. A ring suits all: it reaches all others of a group that is full.
    """
    size = replicas + 1
    last = len(nodes) // size - 1
    index = min(node // size, last)
    return nodes[index * size :] if index == last else nodes[index * size : (index + 1) * size]


def _next_in_ring(global_rank: int, ring: range, ranks_per_node: int, replicas: int) -> tuple[int, ...]:
    node, place = divmod(global_rank, ranks_per_node)
    position = ring.index(node)
    return tuple(ring[(position + hop) % len(ring)] * ranks_per_node + place for hop in range(1, replicas + 1))


def _choose_keeper(free: Sequence[int], *, owner: int, group_of: Sequence[int], num_kept: Sequence[int]) -> int:
    """Return which of the ranks in `free` keeps a copy for `owner`. Load goes before nearness."""

    def cost(rank: int) -> tuple[int, bool, int]:
        return num_kept[rank], group_of[rank] != group_of[owner], (rank - owner) % len(group_of)

    return min(free, key=cost)


def _span(first: int, length: int) -> str:
    return str(first) if length == 1 else f"{first}-{first + length - 1}"
