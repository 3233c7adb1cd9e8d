"""Probability that captures at several ranks of a ring lack a part of the gradients.

Pure. FlowCheck, section 6.2. Of N ranks M are captured. A share of M / N of the packets
is in M - 1 captures, all others in M. Each capture loses a packet with probability p.
An iteration of K packets is incomplete if all captures have lost the same packet.
"""

from __future__ import annotations

import math

PACKET_BYTES = 1448
"""Payload of a TCP segment on a network with an MTU of 1500, in bytes."""


def failure_probability(
    *, packets: float, ranks: int, captures: int, loss: float
) -> float:
    """Return the probability that an iteration is incomplete: equation (2).

    With 16 million packets, 8 ranks, 2 captures and a loss of 1e-9 the result is 4e-3.
    With 3 captures the result is 6e-12.

    Args:
        packets: Packets of an iteration.
        ranks: Ranks of the ring.
        captures: Captured ranks, from 1 to `ranks`.
        loss: Probability that a capture loses a packet.
    """
    assert 1 <= captures <= ranks, (captures, ranks)
    assert 0.0 <= loss <= 1.0, loss
    if loss == 1.0 or captures == 1:
        return 1.0  # a single capture lacks a share of the gradients
    # log1p and expm1: with three captures and a loss of 1e-9, 1 - 1e-27 would be 1
    thin = captures / ranks * packets * math.log1p(-(loss ** (captures - 1)))
    thick = (ranks - captures) / ranks * packets * math.log1p(-(loss**captures))
    return -math.expm1(thin + thick)
