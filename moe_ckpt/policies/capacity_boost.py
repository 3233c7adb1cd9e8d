"""The capacities of experts after a recovery, until their lost tokens are made up.

Pure arithmetic on one layer's counts, int64 [experts]; the router assigns tokens.
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
    """Return the tokens that each expert may process of a batch, int64 [experts]:
    `capacity`, or more if it recovers.

    `demand` are the tokens routed to each expert, `deficit` its lost tokens still to be
    made up (0: it does not recover). A recovering expert gets up to `factor` more if
    demand and deficit allow, out of capacity that other experts leave unused; if that
    is too little, the largest deficits go first, and of equals the lowest expert. So no
    more tokens are processed than at equal capacities, and no other expert loses
    capacity. 100 each, 20 % at most, demands 150, 95, 130 and a deficit of 40 for the
    first make 105, 100, 100: the second leaves 5.
    """
    assert demand.shape == deficit.shape, (demand.shape, deficit.shape)
    # 0.29 * 100 is 28.999... as a float
    most_extra = math.floor(Fraction(str(factor)) * capacity)
    # never beyond the deficit: an expert would be trained with more tokens than without
    # the fault
    wanted = np.minimum(np.clip(demand - capacity, 0, most_extra), deficit)
    unused = int(np.maximum(capacity - demand, 0).sum())
    order = np.argsort(-deficit, kind="stable")
    before = np.cumsum(wanted[order]) - wanted[order]
    extra = np.zeros_like(demand)
    extra[order] = np.clip(unused - before, 0, wanted[order])
    return capacity + extra


def share_of(deficit: IntArray, *, index: int, num_shares: int) -> IntArray:
    """Return one share of a deficit that is distributed token by token, the first
    shares first, int64 as `deficit`.

    All shares together are the deficit, so no share makes up too much: 7 in 3 are 3, 2
    and 2.
    """
    assert 0 <= index < num_shares, (index, num_shares)
    return (deficit + num_shares - 1 - index) // num_shares


def made_up(deficit: IntArray, extra: IntArray) -> IntArray:
    """Return the deficit after `extra` tokens were processed beyond the capacity, never
    below 0.

    40 less 5 are 35, 3 less 5 are 0.
    """
    return np.maximum(deficit - extra, 0)
