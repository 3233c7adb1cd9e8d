"""Ranks telling each other how it went, so that one rank's failure is everybody's and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from moe_ckpt.errors import MoeCkptError

T = TypeVar("T")


def from_rank_zero(compute: Callable[[], T], failure: type[MoeCkptError]) -> T:
    """Compute on global rank 0 and return the value on all ranks. Collective.

    An OSError or MoeCkptError on rank 0 is raised as `failure` on all ranks.
    """
    outcome: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except (OSError, MoeCkptError) as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise failure(outcome[1])
    return outcome[0]  # type: ignore[return-value]


def on_all_ranks(compute: Callable[[], T], failure: type[MoeCkptError]) -> list[T]:
    """Compute on every rank and return all values, by global rank, on all ranks. Collective.

    An OSError or MoeCkptError on any rank is raised as `failure` on all ranks, naming the first rank's reason.
    """
    value, reason = None, None
    try:
        value = compute()
    except (OSError, MoeCkptError) as error:
        reason = str(error)
    outcomes: list[tuple[T, str | None]] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(outcomes, (value, reason))
    for _, other_reason in outcomes:
        if other_reason is not None:
            raise failure(other_reason)
    return [other_value for other_value, _ in outcomes]
