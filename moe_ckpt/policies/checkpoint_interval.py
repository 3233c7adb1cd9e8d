"""The number of iterations between two checkpoints of the whole state.

Pure arithmetic over seconds.
"""

from __future__ import annotations

import math


def expected_ettr(
    *, iteration_s: float, checkpoint_s: float, every_iters: int, mtbf_s: float
) -> float:
    """Return the share of time spent on useful training.

    A fault costs half an interval on average. MoEvement, Appendix C.

    Args:
        iteration_s: Seconds of an iteration.
        checkpoint_s: Seconds that a checkpoint adds to the iterations that overlap with
            the checkpoint.
        every_iters: Iterations between two checkpoints.
        mtbf_s: Mean time between failures, in seconds.
    """
    interval_s = every_iters * iteration_s
    return 1 / (1 + checkpoint_s / interval_s) / (1 + interval_s / 2 / mtbf_s)


def best_interval(*, iteration_s: float, checkpoint_s: float, mtbf_s: float) -> int:
    """Return the interval in iterations that maximizes `expected_ettr`, at least 1.

    Over real numbers the optimum is Young's, sqrt(2 checkpoint_s mtbf_s) seconds. The
    best integer is one of the two integers next to that optimum.
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
    """Return the shortest interval with a checkpoint overhead of at most `overhead`.

    CheckFreq, section 4.3, as described by MoEvement (section 5.2).

    Args:
        iteration_s: Seconds of an iteration.
        checkpoint_s: Seconds that a checkpoint adds to training.
        overhead: The largest time that checkpoints may add, as a share of training
            time.

    Returns:
        The number of iterations between two checkpoints, at least 1.
    """
    return max(1, math.ceil(checkpoint_s / (overhead * iteration_s)))


def copying_interval(*, iteration_s: float, copy_s: float) -> int:
    """Return the iterations that copying a checkpoint takes, at least 1.

    The next checkpoint must not wait for the copy of the previous checkpoint.
    """
    return max(1, math.ceil(copy_s / iteration_s))
