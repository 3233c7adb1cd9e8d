"""The experts that a partial snapshot takes, and their number per layer.

Pure: all ranks choose the same experts from the same turn or the same summed counts. A
`Selection` holds, for each MoE layer by its index among the MoE layers, the ascending
numbers of the chosen experts. The experts of a layer lie in blocks of equal size on the
EP ranks. The module must not know the contents or the destination of a snapshot. MoC,
sections 3.2, 4.3 and 5.3; `most_popular` also implements MoEtion, Algorithm 1, lines
10-13.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_ckpt.types import IntArray

Selection = tuple[tuple[int, ...], ...]


def sequential_experts(
    turn: int, *, num_layers: int, num_experts: int, ep: int, k: int
) -> Selection:
    """Return the experts of a snapshot whose experts take turns over all EP ranks.

    Each turn takes the next k experts of each layer. The order of a layer alternates
    between the EP ranks, and each layer begins where the previous layer ends. For 4
    layers of 3 experts on 3 ranks and k = 1, turn 0 takes experts 0, 1, 2, 0 and turn 1
    takes experts 1, 2, 0, 1.

    Every ceil(num_experts / k) consecutive turns take every expert, and take each
    exactly once if k divides num_experts. Within a turn, the numbers of experts of two
    EP ranks differ by at most one. MoC, section 3.2 and Figure 4.

    Args:
        turn: The number of the snapshot, from 0.
        num_layers: The number of MoE layers.
        num_experts: The number of experts of a layer.
        ep: The number of EP ranks.
        k: The number of experts of each layer that a snapshot takes.
    """
    assert 1 <= k <= num_experts, (k, num_experts)
    order = _interleaved(num_experts, ep)
    # the layer shifts the start: otherwise a turn would take experts of the same EP
    # rank in all layers
    starts = [(turn + layer) * k for layer in range(num_layers)]
    return tuple(
        tuple(sorted(order[(start + step) % num_experts] for step in range(k)))
        for start in starts
    )


def most_popular(tokens: IntArray, num_taken: Sequence[int]) -> Selection:
    """Return the experts with the most tokens of each layer.

    Of experts with equal tokens, the lowest come first: of 5, 9 and 5 tokens, the first
    two are experts 0 and 1. MoEtion, Algorithm 1, lines 10-13. MoC, section 3.2, takes
    equally many experts of each layer, with the most unsaved tokens.

    Args:
        tokens: The tokens of each expert, int64 [layers, experts].
        num_taken: The number of experts to take of each layer.
    """
    # stable: otherwise ranks could choose different experts of equal counts
    descending = np.argsort(-tokens, axis=1, kind="stable")
    return tuple(
        tuple(sorted(row[:num].tolist()))
        for row, num in zip(descending, num_taken, strict=True)
    )


def within_links(
    tokens: IntArray,
    num_taken: Sequence[int],
    expert_bytes: IntArray,
    left_bytes: IntArray,
) -> Selection:
    """Return the most popular experts that the links of all ranks have room for.

    An expert that exceeds the room of a rank's link is skipped, and the next expert
    takes its place. Experts with the most tokens go first, over all layers. If two
    ranks have room for one expert each, one expert of each rank is taken, even if the
    two most popular experts are on the first rank. At least one expert is taken if
    there is a candidate. MoEtion, section 4.2: a budget is the budget of a link.

    Args:
        tokens: The tokens of each expert, int64 [layers, experts]. An expert with
            negative tokens is no candidate.
        num_taken: The largest number of experts to take of each layer.
        expert_bytes: The bytes of each expert on each rank, int64 [ranks, layers,
            experts].
        left_bytes: The bytes that the link of each rank carries beside all state except
            experts, int64 [ranks].
    """
    left, taken = left_bytes.copy(), [set[int]() for _ in num_taken]
    candidates = [
        divmod(int(index), tokens.shape[1])
        for index in np.argsort(-tokens, axis=None, kind="stable")
    ]
    candidates = [
        (layer, expert)
        for layer, expert in candidates
        if tokens[layer, expert] >= 0 and num_taken[layer]
    ]
    for layer, expert in candidates:
        needed = expert_bytes[:, layer, expert]
        # a rank that has no bytes of the expert sets no limit, even if the core alone
        # exceeds the link of that rank
        if len(taken[layer]) < num_taken[layer] and np.all(
            (needed <= left) | (needed == 0)
        ):
            left -= needed
            taken[layer].add(expert)
    # at least one expert: otherwise all experts would grow older while a link is slow
    if candidates and not any(taken):
        taken[candidates[0][0]].add(candidates[0][1])
    return tuple(tuple(sorted(experts)) for experts in taken)


def sent_by_gradient(before: Selection, now: Selection) -> Selection:
    """Return the experts of which peers need only gradients.

    Peers need only gradients of an expert that the previous snapshot also sent to them.
    Requires a snapshot in every iteration. MoEtion, Algorithm 3.

    Args:
        before: The experts that the previous snapshot sent to peers.
        now: The experts that this snapshot sends to peers.
    """
    return tuple(
        tuple(sorted({*old} & {*new})) for old, new in zip(before, now, strict=True)
    )


def most_unsaved_of(
    selection: Selection, unsaved: IntArray, k: int, *, ep: int
) -> Selection:
    """Return the k experts of each layer of a selection that storage needs most.

    A layer with fewer than k selected experts keeps all of them. Experts with equal
    `unsaved` are ordered by the number of experts already chosen on their EP rank,
    fewest first, then by their own number, lowest first.

    With sequential selection, let s be the number of experts of a layer that a snapshot
    takes. If s divides num_experts, one of every ceil(s / k) snapshots of an expert
    persists that expert: only the s - 1 experts that always share the expert's
    snapshots can go first, each once, k at a time. In general up to 2 (s - 1) experts
    can go first, which gives one of every 1 + floor(2 (s - 1) / k) snapshots. Both
    bounds hold only if every snapshot is persisted: a rhythm that persists every other
    snapshot may never persist some experts. MoC, section 5.1.

    Args:
        selection: The experts that the snapshot takes.
        unsaved: The updates of each expert that storage lacks, int64 [layers, experts].
            Counted in tokens where experts are selected by load. Counted in turns since
            the expert was persisted with sequential selection; all counts start before
            the first turn.
        k: The number of experts of each layer to persist.
        ep: The number of EP ranks.
    """
    on_rank = np.zeros(ep, np.int64)
    rank_of = np.arange(unsaved.shape[1]) // (unsaved.shape[1] // ep)
    chosen = []
    for experts, lacking in zip(selection, unsaved, strict=True):
        left = np.array(experts, np.int64)
        taken: list[int] = []
        while left.size and len(taken) < k:
            neediest = np.lexsort((left, on_rank[rank_of[left]], -lacking[left]))[0]
            taken.append(int(left[neediest]))
            on_rank[rank_of[left[neediest]]] += 1
            left = np.delete(left, neediest)
        chosen.append(tuple(sorted(taken)))
    return tuple(chosen)


# How many


def bottleneck_by_k(
    other_bytes: IntArray, expert_bytes: IntArray, *, ep: int, sequential: bool
) -> IntArray:
    """Return, for each k, the most bytes that a rank copies for one snapshot.

    With sequential selection the function takes the maximum over all turns, otherwise
    the maximum over all possible selections. Example: 2 ranks, 2 layers of 4 experts of
    10 bytes, half of each layer on each rank, and 5 other bytes. The results are 15,
    25, 35, 45 with sequential selection and 25, 45, 45, 45 without.

    Args:
        other_bytes: The bytes that each rank copies in every snapshot, int64 [ranks].
        expert_bytes: The bytes of each expert on each rank, int64 [ranks, layers,
            experts].
        ep: The number of EP ranks.
        sequential: Whether experts take turns.

    Returns:
        The bytes for k = 1, 2, ... up to all experts of a layer, int64 [experts].
    """
    num_experts = expert_bytes.shape[2]
    if sequential:
        sums = [
            _sequential_bytes(expert_bytes, ep, k) for k in range(1, num_experts + 1)
        ]
    else:
        largest_first = -np.sort(-expert_bytes, axis=2)
        sums = list(np.moveaxis(np.cumsum(largest_first.sum(axis=1), axis=1), 1, 0))
    return np.array([(other_bytes + by_rank).max() for by_rank in sums], np.int64)


def fitting_k(
    bottleneck_bytes: IntArray, *, copy_bytes_per_s: float, overlap_s: float
) -> int:
    """Return the largest k whose snapshot fits into the next forward and backward.

    The result is at least 1. Where not even one expert per layer fits, training stalls
    for the rest of the copy (MoC, equation 10). Bottlenecks of 15, 25, 35 and 45 bytes,
    10 bytes/s and 3 s give 2. MoC, section 5.3: K_snapshot.

    Args:
        bottleneck_bytes: The bytes of the slowest rank for k = 1, 2, ..., int64
            [experts].
        copy_bytes_per_s: The rate of copies of a rank.
        overlap_s: Seconds of the next forward and backward.
    """
    fitting = np.flatnonzero(bottleneck_bytes <= copy_bytes_per_s * overlap_s)
    return int(fitting[-1]) + 1 if fitting.size else 1


def limit_per_k(limit: float, *, first_k: int, num_experts: int) -> float:
    """Return the PLT that each k may cost, so that all k together stay near `limit`.

    The values of k are `first_k`, its double and so on, up to the last value below
    `num_experts`; with all experts nothing is lost. All values share the limit equally:
    0.0375 for k = 1, 2, 4, 8 of 16 experts gives 0.009375 each.

    The paper has a limit for every k and one limit for all k, 0.0375, but does not
    relate the two limits. The whole limit for each k would allow a sum of
    log2(num_experts) times the limit.
    """
    assert 1 <= first_k <= num_experts, (first_k, num_experts)
    num_shares = max(1, ((num_experts - 1) // first_k).bit_length())
    return limit / num_shares


def next_k(k: int, *, num_experts: int, plt_since: float, limit: float) -> int:
    """Return the k after a recovery: doubled if the current k has cost too much.

    k is at most `num_experts`. With a limit of 0.01, k = 1 stays 1 at a `plt_since` of
    0.009 and becomes 2 at 0.011. MoC, section 5.3: Dynamic-K.

    Args:
        k: The current number of experts of each layer that a snapshot takes.
        num_experts: The number of experts of a layer.
        plt_since: The PLT of all faults since the last change of k, which is the part
            due to the current k. With the PLT of the whole run, a PLT above the limit
            would double k at every later fault, even if the faults of the current k
            lost nothing.
        limit: The PLT that the current k may cost.
    """
    return min(2 * k, num_experts) if plt_since > limit else k


def _interleaved(num_experts: int, ep: int) -> list[int]:
    """Return the experts of a layer, ordered by index in a block, then by EP rank."""
    assert num_experts % ep == 0, (num_experts, ep)
    num_local = num_experts // ep
    return [
        rank * num_local + index for index in range(num_local) for rank in range(ep)
    ]


def _sequential_bytes(expert_bytes: IntArray, ep: int, k: int) -> IntArray:
    """Return the most expert bytes that each rank copies in any turn, int64 [ranks]."""
    num_ranks, num_layers, num_experts = expert_bytes.shape
    order = _interleaved(num_experts, ep)
    around = np.concatenate(
        [expert_bytes[:, :, order], expert_bytes[:, :, order[: k - 1]]], axis=2
    )
    runs = np.cumsum(
        np.concatenate(
            [np.zeros((num_ranks, num_layers, 1), np.int64), around], axis=2
        ),
        axis=2,
    )
    # [ranks, layers, first position in the order]
    from_start = runs[:, :, k:] - runs[:, :, :-k]
    turns, layers = np.arange(num_experts)[:, None], np.arange(num_layers)
    of_turns = from_start[:, layers, (turns + layers) * k % num_experts].sum(axis=2)
    return of_turns.max(axis=1)
