"""The unevenness of tokens over experts, by seed.

A popularity has a given skewness (MoEvement, Appendix D).
"""

from __future__ import annotations

import numpy as np

from moe_ckpt.sim.job import Array


def skewed_popularity(num_experts: int, skewness: float, *, seed: int) -> Array:
    """Return each expert's share of a layer's tokens, float64 [experts], sum 1.

    The shares are drawn from a symmetric Dirichlet distribution whose alpha solves E[S]
    = 1 / (alpha E + 1): a skewness of 0.25 and 64 experts give 0.0469.

    Args:
        num_experts: The number of experts of a layer.
        skewness: The expected normalized Herfindahl-Hirschman index. 0: even. Near 1:
            one expert gets all tokens.
        seed: The seed of the draw.
    """
    assert 0 <= skewness < 1, skewness
    if num_experts == 0 or skewness == 0:
        return np.full(num_experts, 1 / max(1, num_experts))
    alpha = (1 / skewness - 1) / num_experts
    # gamma(a) is gamma(a + 1) u^(1 / a) in distribution
    logs = np.log(np.random.default_rng(seed).gamma(alpha + 1, size=num_experts))
    # logarithms, because a gamma of a tiny alpha underflows
    logs += np.log(np.random.default_rng(seed + 1).random(num_experts)) / alpha
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()
