"""Copies to peers that a test holds back or lets fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from moe_ckpt.engine.session import Session


def answer_copies(
    session: Session,
    is_chosen: Callable[[str], bool],
    answer: Callable[[], Future[Any]],
) -> None:
    """Let `answer` stand in for the daemon's copies of a worker's chosen blobs.

    The daemon copies all other blobs.

    Args:
        session: The worker's session.
        is_chosen: Chooses blobs by their keys. One chosen key chooses the whole copy.
        answer: Returns the future of a chosen copy.
    """
    assert session._elastic is not None
    assert session._elastic.daemon is not None
    daemon, copy = session._elastic.daemon, session._elastic.daemon.copy

    def copy_others(keys: Sequence[str]) -> Future[Any]:
        return answer() if any(map(is_chosen, keys)) else copy(keys)

    daemon.copy = copy_others  # type: ignore[method-assign]
