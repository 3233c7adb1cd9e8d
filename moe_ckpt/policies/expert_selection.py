"""The experts that a partial snapshot takes, and how many of each layer.

Pure: all ranks choose the same from the same turn or the same summed counts. A
`Selection` holds the ascending numbers of the chosen experts, for each MoE layer by its
place among the MoE layers. The experts of a layer lie in blocks of equal size on the EP
ranks. Must not: know the contents of a snapshot, or its destination. MoC, sections 3.2,
4.3 and 5.3; `most_popular` is MoEtion, Algorithm 1, lines 10-13, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_ckpt.types import IntArray

Selection = tuple[tuple[int, ...], ...]


def sequential_experts(
    turn: int, *, num_layers: int, num_experts: int, ep: int, k: int
) -> Selection:
    """Return what the `turn`-th snapshot (from 0) takes: the next k experts of each
    layer, interleaved over EP ranks.

    The order of a layer goes round the EP ranks, and a layer begins where the one
    before ends. 4 layers of 3 experts on 3 ranks, k = 1: turn 0 takes experts 0, 1, 2,
    0, turn 1 takes 1, 2, 0, 1. Every ceil(num_experts / k) turns in a row take every
    expert, exactly once where k divides num_experts. In a turn no EP rank has more than
    one expert more than another. MoC, section 3.2 and Figure 4.
    """
    assert 1 <= k <= num_experts, (k, num_experts)
    order = _interleaved(num_experts, ep)
    # by layer, too: else a turn would take experts of the same EP rank in all layers
    starts = [(turn + layer) * k for layer in range(num_layers)]
    return tuple(
        tuple(sorted(order[(start + step) % num_experts] for step in range(k)))
        for start in starts
    )


def most_popular(tokens: IntArray, num_taken: Sequence[int]) -> Selection:
    """Return for each layer i the `num_taken[i]` experts with the most tokens (int64
    [layers, experts]).

    Of equals it takes the lowest: of 5, 9, 5 tokens, two are experts 0 and 1. MoEtion,
    Algorithm 1, lines 10-13. MoC, section 3.2: as many of each layer, with the most
    unsaved tokens.
    """
    # else ranks may differ in which of equals they take
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
    """Return `most_popular` of these, without those that a rank's link has no room for;
    others take their place.

    `expert_bytes` are int64 [ranks, layers, experts], `left_bytes` what the link of
    each rank carries beside all that is no expert, int64 [ranks]; negative tokens are
    no candidates. The most tokens of all layers go first. Two ranks with room for one
    expert each take one each, though the two most popular are on the first. At least
    one is taken. MoEtion, section 4.2: a budget is that of a link.
    """
    left, taken = left_bytes.copy(), [set[int]() for _ in num_taken]
    candidates = [
        divmod(int(place), tokens.shape[1])
        for place in np.argsort(-tokens, axis=None, kind="stable")
    ]
    candidates = [
        (layer, expert)
        for layer, expert in candidates
        if tokens[layer, expert] >= 0 and num_taken[layer]
    ]
    for layer, expert in candidates:
        needed = expert_bytes[:, layer, expert]
        # a rank without a piece of the expert is no limit, also if its core alone
        # exceeds its link
        if len(taken[layer]) < num_taken[layer] and np.all(
            (needed <= left) | (needed == 0)
        ):
            left -= needed
            taken[layer].add(expert)
    # else all experts would grow older for as long as a link is slow
    if candidates and not any(taken):
        taken[candidates[0][0]].add(candidates[0][1])
    return tuple(tuple(sorted(experts)) for experts in taken)


def sent_by_gradient(before: Selection, now: Selection) -> Selection:
    """Return the experts of which peers need gradients only: they received the same
    expert with the snapshot before.

    Requires a snapshot of every iteration. MoEtion, Algorithm 3.
    """
    return tuple(
        tuple(sorted({*old} & {*new})) for old, new in zip(before, now, strict=True)
    )


def most_unsaved_of(
    selection: Selection, unsaved: IntArray, k: int, *, ep: int
) -> Selection:
    """Return the k experts of each layer of a selection (all, if it has fewer) that
    storage needs most.

    `unsaved` (int64 [layers, experts]) are updates that storage lacks: tokens where
    experts were selected by load; with sequential selection turns since the expert was
    persisted, counted from before the first turn for all. Of equals it takes an expert
    of the EP rank with the fewest so far, then the lowest.

    With turns, where a snapshot takes s experts and s divides num_experts, an expert is
    persisted in one of ceil(s / k) snapshots of it: only the s - 1 that always come
    with it can go before it, each once, k at a time. In general up to 2 (s - 1) can:
    one of 1 + floor(2 (s - 1) / k). That holds if every snapshot is persisted: a rhythm
    that leaves out every other one may leave out the same experts for good. MoC,
    section 5.1.
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
    """Return for each k from 1 to all experts the most bytes that a rank ever copies
    for one snapshot, int64 [experts].

    A rank copies `other_bytes` (int64 [ranks]) in every snapshot and `expert_bytes`
    (int64 [ranks, layers, experts]) of the experts taken. The most of any turn, if
    selection is sequential; else of any selection there can be. 10 bytes of 2 layers' 4
    experts on each of 2 ranks, half of each layer local, and 5 others: 15, 25, 35, 45
    or 25, 45, 45, 45.
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
    """Return the largest k whose snapshot is copied within the next forward and
    backward, at least 1.

    `bottleneck_bytes` are those of k = 1, 2, ... (int64 [experts]): 15, 25, 35, 45
    bytes, 10 bytes/s and 3 s make 2. Where not even 1 fits, training stalls for the
    rest of the copy (MoC, equation 10). MoC, section 5.3: K_snapshot.
    """
    fitting = np.flatnonzero(bottleneck_bytes <= copy_bytes_per_s * overlap_s)
    return int(fitting[-1]) + 1 if fitting.size else 1


def limit_per_k(limit: float, *, first_k: int, num_experts: int) -> float:
    """Return the PLT that each k may be at the cost of, so that all together stay about
    within `limit`.

    `first_k`, its double and so on, up to the last below `num_experts` (which loses
    nothing), share it equally: 0.0375 for k = 1, 2, 4, 8 of 16 are 0.009375 each. The
    paper has a limit of every k and one of them all, 0.0375, but not how they are
    related; a whole limit for each would allow the sum to be log2(num_experts) times as
    much.
    """
    assert 1 <= first_k <= num_experts, (first_k, num_experts)
    num_shares = max(1, ((num_experts - 1) // first_k).bit_length())
    return limit / num_shares


def next_k(k: int, *, num_experts: int, plt_since: float, limit: float) -> int:
    """Return the k after a recovery: doubled, up to all experts, if the current k has
    cost more than its limit.

    `plt_since` is the PLT of all faults since k was last changed: the part attributable
    to this k. (With that of the whole run, a PLT above the limit would double k at
    every later fault, even if its own faults cost nothing.) 1 stays 1 at 0.009 of 0.01
    and becomes 2 at 0.011. MoC, section 5.3: Dynamic-K.
    """
    return min(2 * k, num_experts) if plt_since > limit else k


def _interleaved(num_experts: int, ep: int) -> list[int]:
    """Return the experts of a layer in the order of their places in the EP ranks'
    blocks, and there of the ranks.
    """
    assert num_experts % ep == 0, (num_experts, ep)
    num_local = num_experts // ep
    return [
        rank * num_local + place for place in range(num_local) for rank in range(ep)
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
    # [ranks, layers, first place in the order]
    from_start = runs[:, :, k:] - runs[:, :, :-k]
    turns, layers = np.arange(num_experts)[:, None], np.arange(num_layers)
    of_turns = from_start[:, layers, (turns + layers) * k % num_experts].sum(axis=2)
    return of_turns.max(axis=1)
