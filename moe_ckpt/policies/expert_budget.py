"""How many experts of each layer a link can carry in an iteration: budgets, and their division among the layers.

Pure. A budget belongs to one link (to host memory, to peers), the popularity to the experts that go over it: their
tokens since they last went there, so each destination has its own. Which experts are taken is selection.most_popular.
MoEtion, sections 4.2 and 4.3, Algorithm 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_ckpt.errors import ConfigError

IntArray = npt.NDArray[np.int64]


def budget_bytes(bytes_per_s: float, iteration_s: float) -> int:
    """Return the bytes that a link carries in an iteration: 25e9 bytes/s for 0.5 s are 12500000000. Section 4.2."""
    return int(bytes_per_s * iteration_s)


def affordable_experts(budget: int, *, expert_bytes: int, other_bytes: int, setting: str) -> int:
    """Return how many experts a budget in bytes has room for, beside what every snapshot holds of the rest.

    100 bytes, experts of 30 and 35 others make 2. Algorithm 1 as printed (S_total = B / C_expert) has no `other_bytes`;
    but section 4.2 makes the budget the limit of the whole checkpoint, which always holds all that is no expert
    (section 4.1), so that training would stall. Pass 0 where peers keep that anyway (section 5.1).
    Raises ConfigError naming `setting`, from which the budget comes, where there is no room for one.
    """
    assert expert_bytes > 0, expert_bytes
    least = other_bytes + expert_bytes
    if budget < least:
        wanted = f"at least {least}: {other_bytes} for what is no expert, {expert_bytes} for one expert"
        raise ConfigError(f"{setting}: got a budget of {budget} bytes an iteration, wanted {wanted}")
    return (budget - other_bytes) // expert_bytes


def allocate(popularity: IntArray, num_total: int) -> IntArray:
    """Return how many experts of each layer to take, int64 [layers]: `num_total` in all, or every expert there is.

    In proportion to the token risk, a layer's sum of `popularity` (int64 [layers, experts]), rounded down; the largest
    remainders get what is left, of equals the first layers. A layer that is due all its experts or more gets those, and
    the others share the excess; layers without risk share equally what no other takes. Of 7, risks of 50, 30 and 20 get
    4, 2 and 1. Algorithm 1, ComputeS, which leaves open how to adjust the sum, and what a full layer is.
    """
    num_layers, num_experts = popularity.shape
    left = min(num_total, popularity.size)
    share = np.zeros(num_layers, np.int64)
    risk = popularity.sum(axis=1)
    open_layers = np.arange(num_layers)
    while left:
        weights = risk[open_layers] if risk[open_layers].any() else np.ones_like(open_layers)
        full = open_layers[left * weights >= num_experts * weights.sum()]
        if not full.size:
            share[open_layers] += _in_proportion(weights, left)
            break
        share[full] = num_experts
        left -= num_experts * full.size
        open_layers = np.setdiff1d(open_layers, full)
    return share


def _in_proportion(weights: IntArray, num_total: int) -> IntArray:
    """Return `num_total` divided in proportion to weights by largest remainders, exactly: int64 [weights]."""
    share, remainders = np.divmod(num_total * weights, weights.sum())
    order = np.argsort(-remainders, kind="stable")
    share[order[: num_total - share.sum()]] += 1
    return share
