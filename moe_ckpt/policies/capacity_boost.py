"""Expert capacities after a recovery, raised until lost tokens are made up.

Pure arithmetic on the counts of one layer, int64 [experts]. The router assigns tokens.
MoEtion, section 6.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from moe_ckpt.types import IntArray


def boosted_capacity(
    demand: IntArray, deficit: IntArray, *, capacity: int, factor: float = 0.10
) -> IntArray:
    """Return the tokens that each expert may process of a batch, int64 [experts].

    A recovering expert may process up to `factor` more tokens than `capacity`, if
    demand and deficit allow. The extra capacity comes from capacity that other experts
    leave unused. If the unused capacity is too small, the experts with the largest
    deficits go first; of experts with equal deficits, the lowest goes first. Hence no
    more tokens are processed than at equal capacities, and no other expert loses
    capacity.

    With a capacity of 100, a factor of 0.2, demands of 150, 95 and 130 and a deficit of
    40 of the first expert, the capacities are 105, 100 and 100: the second expert
    leaves 5 unused.

    Args:
        demand: The tokens routed to each expert.
        deficit: The lost tokens of each expert that are still to be made up. 0: the
            expert does not recover.
        capacity: The tokens that each expert may process without a recovery.
        factor: The largest extra capacity, as a share of `capacity`.
    """
    assert demand.shape == deficit.shape, (demand.shape, deficit.shape)
    # a fraction: the float product 0.29 * 100 is 28.999..., whose floor is 28
    most_extra = math.floor(Fraction(str(factor)) * capacity)
    # at most the deficit: beyond it, an expert would be trained with more tokens than
    # without the fault
    wanted = np.minimum(np.clip(demand - capacity, 0, most_extra), deficit)
    unused = int(np.maximum(capacity - demand, 0).sum())
    order = np.argsort(-deficit, kind="stable")
    before = np.cumsum(wanted[order]) - wanted[order]
    extra = np.zeros_like(demand)
    extra[order] = np.clip(unused - before, 0, wanted[order])
    return capacity + extra


def share_of(deficit: IntArray, *, index: int, num_shares: int) -> IntArray:
    """Return one share of a deficit, int64 of the same shape.

    The deficit is distributed token by token, and the first shares come first. All
    shares together are the deficit, so that no token is made up twice: a deficit of 7
    in 3 shares is 3, 2 and 2.

    Args:
        deficit: The tokens still to be made up.
        index: The number of the share, from 0.
        num_shares: The number of shares.
    """
    assert 0 <= index < num_shares, (index, num_shares)
    return (deficit + num_shares - 1 - index) // num_shares


def made_up(deficit: IntArray, extra: IntArray) -> IntArray:
    """Return the deficit after `extra` tokens were processed beyond the capacity.

    The result is never below 0: 40 less 5 is 35, and 3 less 5 is 0.
    """
    return np.maximum(deficit - extra, 0)
