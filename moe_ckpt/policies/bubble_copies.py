"""The part of a snapshot that is copied while a pipeline stage waits for its
neighbours.

Pure arithmetic over bytes; `snapshot.bubbles` measures the waits. MoEtion, section 5.3,
Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def parts_in_bubbles(part_bytes: Sequence[int], bubble_bytes: float) -> int:
    """Return how many parts, from the first on, are copied in bubbles; the others are
    copied during computation.

    `bubble_bytes`: the bytes that fit into the bubbles of an iteration together; an
    unfinished copy continues in the next bubble. The count goes by the bytes of the
    parts. Algorithm 4 (SplitParameter) takes floor(n * t_bubble / t_ss) of n parts,
    which is the same only for equal parts: of 20, 20 and 60 bytes, 50 have room for 2,
    not 1, and of 60, 20 and 20 for 0.
    """
    fitting = np.cumsum(part_bytes) <= bubble_bytes
    return int(np.count_nonzero(fitting))
