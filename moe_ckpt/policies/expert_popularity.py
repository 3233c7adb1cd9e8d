"""The popularity of each expert, and the change that triggers a new operator order.

Pure arithmetic on counts that routers report. The caller collects the counts and sums
them over ranks. MoEvement, section 3.5 and Appendix B.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_ckpt.config import POPULARITIES
from moe_ckpt.types import IntArray

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.float64] | IntArray


def accumulate(
    kind: str, so_far: Array, hard: Counts, soft: Counts, *, decay: float
) -> Array:
    """Return the popularity of each expert after one more iteration, float64.

    Kind `hard` adds the routed tokens, and kind `soft` adds the gating probabilities.
    Kind `decayed` returns decay * so_far + (1 - decay) * hard: 10, then 20 with a decay
    of 0.9 give 11. The result is linear in all three arrays, so ranks may accumulate
    their own counts and sum the results later. MoEvement, section 3.5 and Appendix B.

    Args:
        kind: One of `POPULARITIES`.
        so_far: The popularity before the iteration, one value per expert, of any shape.
        hard: The tokens routed to each expert in the iteration.
        soft: The sum of each expert's gating probabilities in the iteration.
        decay: The weight of `so_far` for kind `decayed`; other kinds ignore the value.
    """
    assert kind in POPULARITIES, kind
    if kind == "decayed":
        return decay * so_far + (1.0 - decay) * hard
    return so_far + (soft if kind == "soft" else hard)


def carried_over(kind: str, popularity: Array) -> Array:
    """Return the popularity with which a new window starts counting, float64.

    Kind `decayed` carries a copy of the average so far; other kinds start from zeros.
    """
    assert kind in POPULARITIES, kind
    return popularity.copy() if kind == "decayed" else np.zeros_like(popularity)


def has_shifted(reference: Counts, now: Counts, *, change: float, share: float) -> bool:
    """Return whether enough experts changed their popularity.

    Popularities are compared as frequencies (sum 1), because windows differ in length:
    from [10, 10, 20] to [6, 5, 9] the changes are +20 %, 0 and -10 %. A rise from 0 to
    any value is a change. The frequencies of an array of zeros are zeros. Without
    experts the result is False. MoEvement, section 3.5: 10 % for 25 % of the experts.

    Args:
        reference: The popularity of each expert at the last reordering.
        now: The popularity of each expert now.
        change: The relative change beyond which an expert counts as changed.
        share: The share of the experts that must have changed.
    """
    if reference.size == 0:
        return False
    # Each array is multiplied by the sum of the other array, not divided by its own
    # sum: products of counts are exact, so that equal frequencies compare equal.
    before, after = reference * _sum_or_one(now), now * _sum_or_one(reference)
    changed = np.abs(after - before) > change * before
    return bool(np.count_nonzero(changed) / changed.size >= share)


def _sum_or_one(counts: Counts) -> float:
    return float(counts.sum()) or 1.0
