"""Processes share a status page, even after a death, and orders strike as ordered.

An order strikes at the phase, the iteration and the entry that the order names.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.elastic.status_page import ANY_ITERATION, StatusPage
from moe_ckpt.errors import ConfigError
from moe_ckpt.types import Phase
from tests.harness.gloo.ranks import RankFailedError, run_ranks

Step = tuple[Phase, int]
STEP_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.STEP)
TWO_MICRO_BATCHES = [
    (phase, iteration)
    for iteration in (1, 2, 3)
    for phase in (
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.REDUCE,
        Phase.STEP,
    )
]


@pytest.fixture
def caught() -> list[int]:
    """Return the list to which the page adds signals. This process gets no signal."""
    return []


@pytest.fixture
def page(tmp_path: Path, caught: list[int]) -> StatusPage:
    page = StatusPage(tmp_path / "page", execute=caught.append)
    page.reset()
    return page


def strikes(page: StatusPage, caught: list[int], steps: list[Step]) -> list[int]:
    """Go through steps; return the positions of the steps at which a signal came."""
    found: list[int] = []
    for position, (phase, iteration) in enumerate(steps):
        caught.clear()
        page.enter(phase, iteration)
        found += [position] * len(caught)
    return found


@given(
    st.lists(st.tuples(st.sampled_from(STEP_PHASES), st.integers(0, 3)), max_size=30),
    st.sampled_from(STEP_PHASES),
    st.integers(ANY_ITERATION, 3),
    st.integers(0, 3),
)
def test_any_order_strikes_where_counting_says(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[Step],
    phase: Phase,
    iteration: int,
    skip: int,
) -> None:
    caught: list[int] = []
    page = StatusPage(tmp_path_factory.getbasetemp() / "page", execute=caught.append)
    page.reset()
    obeyed_before = page.orders_obeyed
    page.order(signal.SIGUSR1, phase, iteration=iteration, skip=skip)
    meant = [
        i
        for i, (at, of) in enumerate(steps)
        if at == phase and iteration in (ANY_ITERATION, of)
    ]
    wanted = meant[skip : skip + 1]
    assert strikes(page, caught, steps) == wanted
    assert (page.orders_obeyed - obeyed_before, page.has_order) == (
        len(wanted),
        not wanted,
    )


def test_a_later_order_counts_alone(page: StatusPage, caught: list[int]) -> None:
    page.order(signal.SIGUSR1, Phase.FORWARD)
    page.enter(Phase.FORWARD)
    assert caught.pop() == signal.SIGUSR1
    page.order(signal.SIGUSR1, Phase.FORWARD, iteration=1, skip=1)
    page.order(signal.SIGUSR2, Phase.STEP)
    assert strikes(page, caught, TWO_MICRO_BATCHES[:6]) == [5]
    assert (caught, page.orders_obeyed) == ([signal.SIGUSR2], 2)


def test_joining_is_a_phase_that_can_be_struck_too(
    page: StatusPage, caught: list[int]
) -> None:
    page.order(signal.SIGUSR1, Phase.JOIN)
    page.join(4)
    assert (caught, page.generation, page.phase) == ([signal.SIGUSR1], 4, Phase.JOIN)


def test_an_order_for_the_dead_is_void_for_the_successor(
    page: StatusPage, caught: list[int]
) -> None:
    page.order(signal.SIGUSR1, Phase.FORWARD)
    page.enter(Phase.FORWARD)
    page.order(signal.SIGUSR1, Phase.FORWARD, skip=3)
    page.reset()
    assert not page.has_order
    assert strikes(page, caught, TWO_MICRO_BATCHES) == []
    assert page.orders_obeyed == 1, "what was obeyed is counted over all lives"


def test_a_page_that_is_reset_is_a_newborns(page: StatusPage) -> None:
    page.join(3)
    page.wait(True)
    page.enter(Phase.STEP, 7)
    before_s = time.monotonic()
    page.reset()
    assert (page.generation, page.iteration, page.phase, page.waiting) == (
        0,
        0,
        Phase.BUILD,
        False,
    )
    assert min(page.heartbeat_s, page.progress_s) >= before_s, (
        "a newborn looked as if it had hung"
    )


def test_copies_yield_to_training_unless_it_waits_for_copies(page: StatusPage) -> None:
    seen = [(page.waiting, page.communicates)]
    for act in (page.wait, page.wait_for_copies):
        act(True)
        seen.append((page.waiting, page.communicates))
        act(False)
        assert not page.waiting
    assert seen == [(False, False), (True, True), (True, False)]


@pytest.mark.parametrize(
    ("act", "beats", "progresses"),
    [
        (StatusPage.beat, True, False),
        (lambda page: page.wait(True), False, True),
        (lambda page: page.wait(False), False, True),
        (lambda page: page.wait_for_copies(True), False, True),
        (lambda page: page.enter(Phase.STEP), False, True),
        (lambda page: page.join(1), False, True),
    ],
    ids=["beat", "wait", "go on", "wait for copies", "enter", "join"],
)
def test_beating_is_no_progress_and_progress_no_beat(
    page: StatusPage, act, beats: bool, progresses: bool
) -> None:
    before = (page.heartbeat_s, page.progress_s)
    act(page)
    assert (page.heartbeat_s > before[0], page.progress_s > before[1]) == (
        beats,
        progresses,
    )


def test_all_processes_with_a_page_see_the_same(
    page: StatusPage, tmp_path: Path
) -> None:
    other = StatusPage(tmp_path / "page")
    page.enter(Phase.FORWARD, 7)
    page.enter(Phase.STEP)
    other.wait(True)
    assert (other.phase, other.iteration) == (Phase.STEP, 7), (
        "an iteration lasts until the next is named"
    )
    assert page.waiting, "opening a page changed it"


def train_until_killed(path: str) -> None:
    page = StatusPage(Path(path))
    page.join(2)
    for phase, iteration in TWO_MICRO_BATCHES:
        page.enter(phase, iteration)


def test_a_page_tells_where_its_process_died(page: StatusPage, tmp_path: Path) -> None:
    page.order(signal.SIGKILL, Phase.BACKWARD, iteration=2, skip=1)
    with pytest.raises(RankFailedError, match="rank 0 died"):
        run_ranks(1, train_until_killed, str(tmp_path / "page"))
    for seen in (page, StatusPage(tmp_path / "page")):
        assert (seen.generation, seen.iteration, seen.phase) == (2, 2, Phase.BACKWARD)
        assert (seen.has_order, seen.orders_obeyed) == (False, 1)


def test_a_page_is_its_owners_alone_and_has_its_memory_from_the_first(
    page: StatusPage, tmp_path: Path
) -> None:
    found = os.stat(tmp_path / "page")
    assert (found.st_mode & 0o777, found.st_size) == (0o600, 4096)
    StatusPage(tmp_path / "unwritten")
    assert 512 * os.stat(tmp_path / "unwritten").st_blocks >= 4096


def test_a_lack_of_room_for_a_page_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    wanted = (
        rf"runtime.shared_memory: got '{tmp_path}', wanted room for 4096 more bytes"
        r" \(.*No space left"
    )
    with pytest.raises(ConfigError, match=wanted):
        StatusPage(tmp_path / "page")


def test_a_save_is_no_hang_until_it_has_ended(page: StatusPage) -> None:
    """Collectives of a save begin and end waits, and storage is slow between them."""
    with page.saving():
        page.wait(True)
        page.wait(False)
        assert page.waiting
        began_s = page.progress_s
    assert not page.waiting
    assert page.progress_s > began_s, (
        "the supervisor would kill a rank as soon as a long save has ended"
    )
