"""The part of a snapshot that is copied in pipeline bubbles.

A bubble is the time in which a pipeline stage waits for its neighbours. The module is
pure arithmetic over bytes; `snapshot.bubbles` measures the waits. MoEtion, section 5.3,
Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def parts_in_bubbles(part_bytes: Sequence[int], bubble_bytes: float) -> int:
    """Return the number of leading parts of a snapshot that are copied in bubbles.

    The remaining parts are copied during computation. The count depends on the bytes of
    each part. Algorithm 4 (SplitParameter) takes floor(n * t_bubble / t_ss) of n parts,
    which is the same only for parts of equal size. For parts of 20, 20 and 60 bytes and
    room for 50 bytes, 2 parts fit where Algorithm 4 takes 1. For parts of 60, 20 and 20
    bytes, none fits.

    Args:
        part_bytes: The bytes of each part, in the order of copying.
        bubble_bytes: The bytes that fit into all bubbles of an iteration together. A
            copy that one bubble leaves unfinished continues in the next bubble.
    """
    fitting = np.cumsum(part_bytes) <= bubble_bytes
    return int(np.count_nonzero(fitting))
