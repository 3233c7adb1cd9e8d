"""How long a pipeline stage idles in an iteration, and which part of a checkpoint is copied meanwhile.

Pure arithmetic over seconds and bytes; launching copies is the caller's. MoEtion, section 5.3, Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubbles:
    """Seconds in which a stage has nothing to do: before its first forward, between, and after its last backward."""

    before_s: float
    between_s: float
    after_s: float

    @property
    def total_s(self) -> float:
        return self.before_s + self.between_s + self.after_s


def one_f_one_b(pp_rank: int, *, pp: int, forward_s: float, backward_s: float) -> Bubbles:
    """Return the bubbles of a stage under 1F1B, from the seconds of one micro-batch's forward and backward.

    (pp - 1) * (forward_s + backward_s) in all, whatever the stage and the number of micro-batches: pp_rank forwards
    until the first micro-batch is there, pp_rank backwards of the last one further up, and a forward and a backward for
    each stage below, between warm-up and the last backward. Stage 1 of 4, 1 s and 2 s: 1, 6 and 2 of 9. All stages are
    equal, and sending takes no time. Of other schedules measure the bubbles: `parts_in_bubble` takes any.
    """
    assert 0 <= pp_rank < pp, (pp_rank, pp)
    return Bubbles(
        before_s=pp_rank * forward_s,
        between_s=(pp - 1 - pp_rank) * (forward_s + backward_s),
        after_s=pp_rank * backward_s,
    )


def parts_in_bubble(part_bytes: Sequence[int], *, copy_bytes_per_s: float, bubble_s: float) -> int:
    """Return how many parts, from the first on, are copied within the bubble; the others go beside computation.

    By their bytes, where Algorithm 4 (SplitParameter) takes floor(n * t_bubble / t_ckpt) of n parts, which is the same
    only if all are equal: of 20, 20 and 60 bytes at 10 bytes/s, 5 s have room for 2, not 1, and of 60, 20 and 20 for 0.
    Several bubbles of an iteration count as one: a copy that is not done goes on in the next.
    """
    fitting = np.cumsum(part_bytes) <= copy_bytes_per_s * bubble_s
    return int(np.count_nonzero(fitting))
