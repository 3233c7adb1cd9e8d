"""The number of iterations between two checkpoints of the whole state. Pure arithmetic
over seconds.
"""

from __future__ import annotations

import math


def expected_ettr(
    *, iteration_s: float, checkpoint_s: float, every_iters: int, mtbf_s: float
) -> float:
    """Return the share of time spent on useful training if a fault costs half an
    interval on average.

    `checkpoint_s` are the seconds that a checkpoint adds to the iterations that it
    overlaps. MoEvement, Appendix C.
    """
    interval_s = every_iters * iteration_s
    return 1 / (1 + checkpoint_s / interval_s) / (1 + interval_s / 2 / mtbf_s)


def best_interval(*, iteration_s: float, checkpoint_s: float, mtbf_s: float) -> int:
    """Return the iterations between checkpoints that make `expected_ettr` largest, at
    least 1.

    The optimum over real numbers is Young's, sqrt(2 checkpoint_s mtbf_s) seconds; an
    integer beside it is the best.
    """
    exact = math.sqrt(2 * checkpoint_s * mtbf_s) / iteration_s
    candidates = {max(1, math.floor(exact)), max(1, math.ceil(exact))}
    return max(
        sorted(candidates),
        key=lambda every_iters: expected_ettr(
            iteration_s=iteration_s,
            checkpoint_s=checkpoint_s,
            every_iters=every_iters,
            mtbf_s=mtbf_s,
        ),
    )


def capped_interval(*, iteration_s: float, checkpoint_s: float, overhead: float) -> int:
    """Return the fewest iterations between checkpoints with which these add at most
    `overhead`, a share of time.

    CheckFreq, section 4.3, as MoEvement describes it (section 5.2).
    """
    return max(1, math.ceil(checkpoint_s / (overhead * iteration_s)))


def copying_interval(*, iteration_s: float, copy_s: float) -> int:
    """Return the iterations that copying a checkpoint takes: the next one must not wait
    for it.
    """
    return max(1, math.ceil(copy_s / iteration_s))
