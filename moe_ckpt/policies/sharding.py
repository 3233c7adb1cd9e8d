"""The division of state that data-parallel ranks hold alike: each rank's bytes, and those of the slowest rank.

Pure arithmetic over sizes. DP rank r holds the experts of EP rank r mod ep, in EP group r // ep. State of one rank
alone (optimizer state under ZeRO) is not divided: pass its bytes as part of a rank's load. All ranks compute the same.
MoC, sections 3.1.1 and 4: equations (5), (6) and (8), Figure 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """DP rank `dp_rank` saves the bytes from `start` to before `stop` of a part of the model.

    `part` is a position among the non-expert modules, or layer * num_experts + expert.
    """

    part: int
    start: int
    stop: int
    dp_rank: int


def rank_bytes(shares: Iterable[Share], dp: int) -> IntArray:
    """Return the bytes that each rank saves, int64 [dp]."""
    saved = np.zeros(dp, np.int64)
    for share in shares:
        saved[share.dp_rank] += share.stop - share.start
    return saved


def bottleneck_bytes(*loads: IntArray) -> int:
    """Return the most bytes that a rank saves of several loads, each int64 [dp]: of 3, 0 and 1, 2 it is 4."""
    return int(np.sum(loads, axis=0).max())


# Experts


def first_group_experts(expert_bytes: IntArray, selection: Sequence[Sequence[int]], *, ep: int) -> list[Share]:
    """Let EP group 0 save the selected experts of each layer (`expert_bytes` int64 [layers, experts]). Figure 7(a)."""
    return equal_experts(expert_bytes, selection, dp=ep, ep=ep)


def equal_experts(expert_bytes: IntArray, selection: Sequence[Sequence[int]], *, dp: int, ep: int) -> list[Share]:
    """Let the dp / ep ranks that hold an EP rank's experts save whole selected experts in turns.

    An expert of a layer is the smallest unit here, and what equation (9) counts. 2 layers of 2 experts, all selected,
    dp = 4 and ep = 2: ranks 0 and 1 save layer 0, ranks 2 and 3 layer 1. MoC, section 4.1 and Figure 7(b).
    """
    num_experts = expert_bytes.shape[1]
    num_before = [0] * ep
    shares = []
    for layer, expert in _selected(selection):
        ep_rank = expert // (num_experts // ep)
        group = num_before[ep_rank] % (dp // ep)
        num_before[ep_rank] += 1
        part, size = layer * num_experts + expert, int(expert_bytes[layer, expert])
        shares.append(Share(part=part, start=0, stop=size, dp_rank=group * ep + ep_rank))
    return shares


def cut_experts(expert_bytes: IntArray, selection: Sequence[Sequence[int]], *, dp: int, ep: int) -> list[Share]:
    """Let each of the dp / ep ranks that hold a selected expert save an equal part of it, within a byte.

    The finer alternative to `equal_experts`, as ZeRO cuts optimizer state: 10 bytes on ranks 0 and 2 are 5 and 5.
    """
    num_experts, num_groups = expert_bytes.shape[1], dp // ep
    shares = []
    for layer, expert in _selected(selection):
        ep_rank, part = expert // (num_experts // ep), layer * num_experts + expert
        cuts = [int(expert_bytes[layer, expert]) * group // num_groups for group in range(num_groups + 1)]
        shares += [
            Share(part=part, start=cuts[group], stop=cuts[group + 1], dp_rank=group * ep + ep_rank)
            for group in range(num_groups)
        ]
    return shares


# All that is no expert


def first_rank_modules(module_bytes: IntArray) -> list[Share]:
    """Let DP rank 0 save all modules (int64 [modules]). MoC, Figure 7(a)."""
    return _whole_modules(module_bytes, np.zeros(len(module_bytes), np.int64))


def equal_modules(module_bytes: IntArray, *, dp: int) -> list[Share]:
    """Let every rank save whole modules that lie together and have about as many bytes as those of any other.

    A module goes to the rank in whose share of all bytes its middle lies: of 10, 10, 20 bytes and 2 ranks, the first
    two to rank 0. MoC, section 4.2 and Figure 7(b); layers are the smallest unit there, too.
    """
    middles = 2 * np.cumsum(module_bytes) - module_bytes  # twice, to stay exact
    ranks = np.minimum(middles * dp // max(1, 2 * int(module_bytes.sum())), dp - 1)
    return _whole_modules(module_bytes, ranks)


def adaptive_modules(module_bytes: IntArray, loads: IntArray) -> list[Share]:
    """Let ranks save whole modules so that those with few bytes to save already (`loads`, int64 [dp]) get more.

    The largest module first, each to the rank with the least so far, of equals the lowest: 9, 5 and 4 bytes on loads of
    8 and 0 go to ranks 1, 0 and 1, which then save 13 each. Where that bottleneck is above the one of `equal_modules`,
    those are returned: a greedy choice alone promises no more than the mean and one module. Sequential selection makes
    the loads go round the ranks, so it is worth calling every turn. MoC, section 4.3.
    """
    greedy = _greedy(module_bytes, loads)
    equal = equal_modules(module_bytes, dp=len(loads))
    return min(greedy, equal, key=lambda shares: bottleneck_bytes(loads, rank_bytes(shares, len(loads))))


# The rank that saves most


def shared_out(
    expert_bytes: IntArray, module_bytes: IntArray, selection: Sequence[Sequence[int]], *, dp: int, ep: int
) -> dict[str, int]:
    """Return the bytes of the rank that saves most, by the division of the selected experts and all modules.

    "first": EP group 0 saves the experts, rank 0 the modules; "equal": both equally; "adaptive": modules by the bytes
    that experts leave to each rank. `expert_bytes` is int64 [layers, experts], `module_bytes` int64 [modules]. MoC,
    section 4, Figure 7.
    """
    first = rank_bytes(first_group_experts(expert_bytes, selection, ep=ep), dp)
    equal = rank_bytes(equal_experts(expert_bytes, selection, dp=dp, ep=ep), dp)
    modules = {
        "first": (first, first_rank_modules(module_bytes)),
        "equal": (equal, equal_modules(module_bytes, dp=dp)),
        "adaptive": (equal, adaptive_modules(module_bytes, equal)),
    }
    return {name: bottleneck_bytes(loads, rank_bytes(shares, dp)) for name, (loads, shares) in modules.items()}


# Sizes by the formulas


def full_checkpoint_bytes(*, other_params: int, expert_params: int, weight_bytes: int, optimizer_bytes: int) -> int:
    """Return the size of a whole checkpoint from parameters and bytes per parameter. MoC, equation (5)."""
    return (other_params + expert_params) * (weight_bytes + optimizer_bytes)


def partial_checkpoint_bytes(
    *, other_params: int, expert_params: int, weight_bytes: int, optimizer_bytes: int, k: int, num_experts: int
) -> int:
    """Return the size of a checkpoint with k of each layer's experts, which are equal in size. MoC, equation (6)."""
    saved_params = other_params + expert_params * k // num_experts
    return saved_params * (weight_bytes + optimizer_bytes)


def ideal_rank_bytes(
    *, other_params: int, expert_params: int, weight_bytes: int, optimizer_bytes: int, dp: int
) -> float:
    """Return each rank's bytes if all save alike: an even part of equation (5), the aim of equal sharding."""
    full = full_checkpoint_bytes(
        other_params=other_params,
        expert_params=expert_params,
        weight_bytes=weight_bytes,
        optimizer_bytes=optimizer_bytes,
    )
    return full / dp


def paper_rank_bytes(
    *, other_params: int, expert_params: int, weight_bytes: int, optimizer_bytes: int, dp: int, ep: int
) -> float:
    """Return equation (8) to the letter. It is `ideal_rank_bytes` with one EP group, and dp / ep times most of it else.

    The gains that section 6.2.1 reports for two groups (28 %) follow from the former; by the letter they were losses.
    """
    optimizer = (other_params + expert_params) * optimizer_bytes / ep
    return optimizer + other_params * weight_bytes / dp + expert_params * weight_bytes / ep


def _selected(selection: Sequence[Sequence[int]]) -> Iterable[tuple[int, int]]:
    return ((layer, expert) for layer, experts in enumerate(selection) for expert in experts)


def _whole_modules(module_bytes: IntArray, ranks: IntArray) -> list[Share]:
    pairs = zip(module_bytes.tolist(), ranks.tolist(), strict=True)
    return [Share(part=part, start=0, stop=size, dp_rank=rank) for part, (size, rank) in enumerate(pairs)]


def _greedy(module_bytes: IntArray, loads: IntArray) -> list[Share]:
    so_far = loads.copy()
    ranks = np.zeros(len(module_bytes), np.int64)
    for part in np.argsort(-module_bytes, kind="stable"):
        ranks[part] = np.argmin(so_far)
        so_far[ranks[part]] += module_bytes[part]
    return _whole_modules(module_bytes, ranks)
