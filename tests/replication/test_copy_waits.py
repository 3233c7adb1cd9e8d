"""Waits for copies end with the copies, at the time limit, or as ranks are lost."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from moe_ckpt.errors import CheckpointSaveError, PeersLostError
from moe_ckpt.replication.copy_waits import CopyWaits
from tests.waits import WAIT_S


@pytest.fixture
def reported() -> list[bool]:
    return []


@pytest.fixture
def waits(reported: list[bool]) -> CopyWaits:
    return CopyWaits(WAIT_S, reported.append)


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def failed() -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(CheckpointSaveError("no route"))
    return future


def test_a_wait_ends_with_the_first_failure(waits: CopyWaits) -> None:
    """A copy that never ends would otherwise use up the time limit."""
    waits.wait_for([done(), failed(), Future()])


def test_a_wait_ends_at_the_time_limit_of_all_copies_together(
    waits: CopyWaits, reported: list[bool]
) -> None:
    waits.copy_s = 0.2
    since_s = time.monotonic()
    waits.wait_for([Future() for _ in range(500)])
    assert 0.2 <= time.monotonic() - since_s < 50.0
    assert reported == [True, False]


def test_an_interruption_lasts_until_waits_are_allowed_again(
    waits: CopyWaits, reported: list[bool]
) -> None:
    waits.interrupt()
    waits.interrupt()
    waits.wait_for([done()])
    with pytest.raises(PeersLostError):
        waits.wait_for([done(), Future()])
    assert reported == [True, False] * 2
    waits.allow()
    waits.copy_s = 0.01
    waits.wait_for([Future()])
