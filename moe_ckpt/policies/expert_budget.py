"""The number of experts of each layer that a link can carry in an iteration.

Pure. The module computes budgets and divides budgets among layers. A *link* carries
copies to host memory, or to peers, and has a budget of its own. A link also has its own
popularity of each expert: the tokens since the last copy of the expert over the link.
`expert_selection.most_popular` chooses the experts. MoEtion, sections 4.2 and 4.3,
Algorithm 1.
"""

from __future__ import annotations

import numpy as np

from moe_ckpt.errors import ConfigError
from moe_ckpt.types import IntArray


def budget_bytes(bytes_per_s: float, iteration_s: float) -> int:
    """Return the bytes that a link carries in an iteration.

    25e9 bytes/s for 0.5 s are 12500000000 bytes. MoEtion, section 4.2.
    """
    return int(bytes_per_s * iteration_s)


def affordable_experts(
    budget: int, *, expert_bytes: int, other_bytes: int, setting: str
) -> int:
    """Return the number of experts that fit into a budget.

    Every snapshot also holds state that belongs to no expert. A budget of 100 bytes,
    experts of 30 bytes and 35 other bytes give 2 experts.

    Algorithm 1 as printed (S_total = B / C_expert) has no `other_bytes`. Section 4.2,
    however, makes the budget the limit of the whole checkpoint, which always holds all
    state except experts (section 4.1). Without `other_bytes`, training would stall.

    Args:
        budget: The bytes that the link carries.
        expert_bytes: The bytes of an expert.
        other_bytes: The bytes of all state except experts. Pass 0 if peers keep that
            state in any case (section 5.1).
        setting: The source of the budget, for the error message.

    Raises:
        ConfigError: Not even one expert fits. The message names `setting`.
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
    """Return the number of experts to take of each layer, int64 [layers].

    The numbers sum to `num_total`, or to the number of all experts if that is less.
    Each number is proportional to the token risk of its layer and rounded down; the
    layers with the largest remainders get the rest, and of equal remainders the first
    layers. The token risk of a layer is the sum of the popularity of the layer's
    experts.

    A layer that is due all its experts or more gets exactly all its experts, and the
    other layers share the excess. Layers without risk share equally if no open layer
    has any risk. Of 7 experts, layers with risks of 50, 30 and 20 get 4, 2 and 1.

    Algorithm 1, ComputeS, defines neither the adjustment of the sum nor the treatment
    of a full layer.

    Args:
        popularity: The tokens of each expert since its last copy, int64 [layers,
            experts].
        num_total: The number of experts of all layers together.
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
        # integer products are exact: a layer that is due exactly all its experts must
        # count as full
        full = open_layers[left * weights >= num_experts * weights.sum()]
        if not full.size:
            share[open_layers] += _in_proportion(weights, left)
            break
        share[full] = num_experts
        left -= num_experts * full.size
        open_layers = np.setdiff1d(open_layers, full)
    return share


def _in_proportion(weights: IntArray, num_total: int) -> IntArray:
    """Divide `num_total` in proportion to weights, exactly; int64 [weights].

    Largest remainders get the rest.
    """
    share, remainders = np.divmod(num_total * weights, weights.sum())
    order = np.argsort(-remainders, kind="stable")
    share[order[: num_total - share.sum()]] += 1
    return share
