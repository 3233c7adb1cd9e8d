"""The popularity of each expert, and the change after which operators are ordered anew.

Pure arithmetic on counts that routers report; the caller collects them and sums them
over ranks. MoEvement, section 3.5 and Appendix B.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_ckpt.types import IntArray

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.float64] | IntArray
KINDS = ("hard", "soft", "decayed")


def accumulate(
    kind: str, so_far: Array, hard: Counts, soft: Counts, *, decay: float
) -> Array:
    """Return the popularity (float64, one value per expert, any shape) after one more
    iteration.

    `hard` are the tokens routed to each expert, `soft` the sums of its gating
    probabilities. `hard` adds the former, `soft` the latter; `decayed` is decay *
    so_far + (1 - decay) * hard: 10, then 20 at a decay of 0.9 make 11. Linear in all
    three: ranks may accumulate what they see and sum the results later. MoEvement,
    section 3.5 and Appendix B.
    """
    assert kind in KINDS, kind
    if kind == "decayed":
        return decay * so_far + (1.0 - decay) * hard
    return so_far + (soft if kind == "soft" else hard)


def carried_over(kind: str, popularity: Array) -> Array:
    """Return the start of a new window's counts: zeros, or with `decayed` the average
    so far (float64, a copy).
    """
    assert kind in KINDS, kind
    return popularity.copy() if kind == "decayed" else np.zeros_like(popularity)


def has_shifted(reference: Counts, now: Counts, *, change: float, share: float) -> bool:
    """Return whether at least `share` of the experts changed their popularity by more
    than the share `change`.

    Both count as frequencies (sum 1), since windows differ in length: from [10, 10, 20]
    to [6, 5, 9] the changes are +20 %, 0 and -10 %. From 0 to anything is a change;
    arrays of zeros stay zeros; no experts never shift. MoEvement, section 3.5: 10 % for
    25 % of the experts.
    """
    if reference.size == 0:
        return False
    # Multiplied with each other's sum instead of divided by their own: exact for
    # counts, so that equal ones stay equal.
    before, after = reference * _sum_or_one(now), now * _sum_or_one(reference)
    changed = np.abs(after - before) > change * before
    return bool(np.count_nonzero(changed) / changed.size >= share)


def _sum_or_one(counts: Counts) -> float:
    return float(counts.sum()) or 1.0
