"""The number of experts of each layer that a link can carry in an iteration: budgets,
and their division among layers.

Pure. A budget belongs to one link (to host memory, to peers), a popularity to the
experts on that link: their tokens since they were last copied there, so each
destination has its own. `expert_selection.most_popular` chooses the experts. MoEtion,
sections 4.2 and 4.3, Algorithm 1.
"""

from __future__ import annotations

import numpy as np

from moe_ckpt.errors import ConfigError
from moe_ckpt.types import IntArray


def budget_bytes(bytes_per_s: float, iteration_s: float) -> int:
    """Return the bytes that a link carries in an iteration: 25e9 bytes/s for 0.5 s are
    12500000000. Section 4.2.
    """
    return int(bytes_per_s * iteration_s)


def affordable_experts(
    budget: int, *, expert_bytes: int, other_bytes: int, setting: str
) -> int:
    """Return how many experts fit into a budget in bytes, beside the rest that every
    snapshot holds.

    100 bytes, experts of 30 and 35 others make 2. Algorithm 1 as printed (S_total = B /
    C_expert) has no `other_bytes`; but section 4.2 makes the budget the limit of the
    whole checkpoint, which always holds all state but experts (section 4.1), so
    training would stall. Pass 0 if peers keep that state anyway (section 5.1). Raises
    ConfigError naming `setting`, the source of the budget, if not even one fits.
    """
    assert expert_bytes > 0, expert_bytes
    least = other_bytes + expert_bytes
    if budget < least:
        wanted = (
            f"at least {least}: {other_bytes} for what is no expert, {expert_bytes} for"
            " one expert"
        )
        raise ConfigError(
            f"{setting}: got a budget of {budget} bytes an iteration, wanted {wanted}"
        )
    return (budget - other_bytes) // expert_bytes


def allocate(popularity: IntArray, num_total: int) -> IntArray:
    """Return how many experts of each layer to take, int64 [layers]: `num_total` in
    all, or every expert there is.

    In proportion to the token risk, a layer's sum of `popularity` (int64 [layers,
    experts]), rounded down; the largest remainders get the rest, of equals the first
    layers. A layer that is due all its experts or more gets those, and the others share
    the excess; layers without risk share equally what is left. Of 7, risks of 50, 30
    and 20 get 4, 2 and
    1. Algorithm 1, ComputeS, which does not define how to adjust the sum, nor a full
       layer.
    """
    num_layers, num_experts = popularity.shape
    left = min(num_total, popularity.size)
    share = np.zeros(num_layers, np.int64)
    risk = popularity.sum(axis=1)
    open_layers = np.arange(num_layers)
    while left:
        weights = (
            risk[open_layers] if risk[open_layers].any() else np.ones_like(open_layers)
        )
        # products of integers: a layer that is due exactly all its experts has to count
        # as full
        full = open_layers[left * weights >= num_experts * weights.sum()]
        if not full.size:
            share[open_layers] += _in_proportion(weights, left)
            break
        share[full] = num_experts
        left -= num_experts * full.size
        open_layers = np.setdiff1d(open_layers, full)
    return share


def _in_proportion(weights: IntArray, num_total: int) -> IntArray:
    """Return `num_total` divided in proportion to weights by largest remainders,
    exactly: int64 [weights].
    """
    share, remainders = np.divmod(num_total * weights, weights.sum())
    order = np.argsort(-remainders, kind="stable")
    share[order[: num_total - share.sum()]] += 1
    return share
