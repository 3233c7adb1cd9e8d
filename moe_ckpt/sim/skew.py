"""The unevenness of tokens over experts: a popularity of a given skewness (MoEvement,
Appendix D). By seed.
"""

from __future__ import annotations

import numpy as np

from moe_ckpt.sim.job import Array


def skewed_popularity(num_experts: int, skewness: float, *, seed: int) -> Array:
    """Return each expert's share of a layer's tokens, float64 [experts], sum 1.

    `skewness` is the normalized Herfindahl-Hirschman index that is expected: 0 is even,
    near 1 one expert gets all. From a symmetric Dirichlet distribution whose alpha
    solves E[S] = 1 / (alpha E + 1): 0.25 of 64 experts make 0.0469.
    """
    assert 0 <= skewness < 1, skewness
    if num_experts == 0 or skewness == 0:
        return np.full(num_experts, 1 / max(1, num_experts))
    alpha = (1 / skewness - 1) / num_experts
    # gamma(a) is gamma(a + 1) u^(1 / a) in distribution
    logs = np.log(np.random.default_rng(seed).gamma(alpha + 1, size=num_experts))
    # a gamma of a tiny alpha underflows
    logs += np.log(np.random.default_rng(seed + 1).random(num_experts)) / alpha
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()
