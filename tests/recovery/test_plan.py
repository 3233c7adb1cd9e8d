"""Which stages roll back, together or alone, and to where: tables, and properties over random jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.plan import Inventory, Rollback, Segment, plan_recovery, plan_segments

Row = tuple[Sequence[int], int]
"""What a rank has: the starts of its windows, and the first iteration of its boundary log."""


@pytest.mark.parametrize(
    ("lost_stages", "num_stages", "boundary_log", "expected"),
    [
        pytest.param([], 4, True, [], id="nothing lost"),
        pytest.param([], 4, False, [], id="nothing lost, no log"),
        pytest.param([2], 4, True, [(2, 2)], id="one stage"),
        pytest.param([0], 4, True, [(0, 0)], id="the first stage"),
        pytest.param([3], 4, True, [(3, 3)], id="the last stage"),
        pytest.param([2, 1], 4, True, [(1, 2)], id="neighbours recover together"),
        pytest.param([5, 1, 2], 8, True, [(1, 2), (5, 5)], id="others on their own"),
        pytest.param([2, 2], 4, True, [(2, 2)], id="a stage that is named twice"),
        pytest.param([0, 1, 2, 3], 4, True, [(0, 3)], id="all stages"),
        pytest.param([2], 4, False, [(0, 3)], id="no log"),
        pytest.param([0], 1, True, [(0, 0)], id="a pipeline of one"),
    ],
)
def test_segments(lost_stages: list[int], num_stages: int, boundary_log: bool, expected: list[tuple[int, int]]) -> None:
    segments = plan_segments(lost_stages, num_stages, boundary_log=boundary_log)
    assert [(segment.first_stage, segment.last_stage) for segment in segments] == expected


@given(lost=st.sets(st.integers(0, 11)))
def test_segments_are_the_lost_stages_and_healthy_ones_lie_between(lost: set[int]) -> None:
    segments = plan_segments(lost, 12, boundary_log=True)
    covered = [stage for segment in segments for stage in range(segment.first_stage, segment.last_stage + 1)]
    assert covered == sorted(lost)
    for before, after in pairwise(segments):
        assert after.first_stage >= before.last_stage + 2


@given(lost=st.sets(st.integers(0, 11), min_size=1), further=st.integers(0, 11))
def test_a_further_loss_leaves_segments_that_it_does_not_touch(lost: set[int], further: int) -> None:
    def untouched(segment: Segment) -> bool:
        return not segment.first_stage - 1 <= further <= segment.last_stage + 1

    before, after = (plan_segments(stages, 12, boundary_log=True) for stages in (lost, lost | {further}))
    assert {segment for segment in before if untouched(segment)} <= set(after)
    assert len(set(after) - set(before)) <= 1


@pytest.mark.parametrize("stage", [-1, 4])
@pytest.mark.parametrize("boundary_log", [True, False])
def test_a_stage_that_does_not_exist_is_our_own_bug(stage: int, boundary_log: bool) -> None:
    with pytest.raises(AssertionError):
        plan_segments([1, stage], 4, boundary_log=boundary_log)


def inventories_of(*stages: Row | list[Row]) -> list[Inventory]:
    """What the ranks of each stage have; a row alone is a stage of one rank."""
    return [
        Inventory(stage=stage, windows=tuple(windows), logged_from=logged_from)
        for stage, rows in enumerate(stages)
        for windows, logged_from in (rows if isinstance(rows, list) else [rows])
    ]


def plan(lost: Sequence[int], inventories: list[Inventory], target: int, boundary_log: bool = True) -> list[Rollback]:
    return list(plan_recovery(lost, inventories, target_iteration=target, boundary_log=boundary_log))


def rollback(first_stage: int, last_stage: int, window_start: int) -> Rollback:
    return Rollback(segment=Segment(first_stage=first_stage, last_stage=last_stage), window_start=window_start)


BOTH: Row = ([10, 5], 6)  # two windows, and logs as far back as the older of them needs
NEW: Row = ([10], 11)
OLD: Row = ([5], 6)
NO_LOG: Row = ([10, 5], 15)  # past the target
NO_WINDOW: Row = ([], 6)


@pytest.mark.parametrize(
    ("lost", "stages", "expected"),
    [
        pytest.param([1], [BOTH] * 4, [rollback(1, 1, 10)], id="alone, to the newest window"),
        pytest.param([], [BOTH] * 4, [], id="nothing is lost"),
        pytest.param([2, 1], [BOTH] * 4, [rollback(1, 2, 10)], id="neighbours jointly"),
        pytest.param([0, 3], [BOTH] * 4, [rollback(0, 0, 10), rollback(3, 3, 10)], id="both ends"),
        pytest.param([0, 2], [BOTH] * 4, [rollback(0, 0, 10), rollback(2, 2, 10)], id="one between serves both"),
        pytest.param([0, 1, 2, 3], [BOTH] * 4, [rollback(0, 3, 10)], id="all stages"),
        pytest.param([0], [BOTH], [rollback(0, 0, 10)], id="a pipeline of one"),
        pytest.param([0], [NO_LOG], [rollback(0, 0, 10)], id="a pipeline of one needs no log"),
        pytest.param([1], [BOTH, OLD, BOTH], [rollback(1, 1, 5)], id="an older window where the newest is gone"),
        pytest.param([1], [BOTH, [NEW, BOTH], NEW], [rollback(1, 1, 10)], id="ranks of a stage share the newest"),
        pytest.param([1], [BOTH, [OLD, BOTH], BOTH], [rollback(1, 1, 5)], id="ranks of a stage share an older one"),
        pytest.param([1, 2], [BOTH, BOTH, OLD, BOTH], [rollback(1, 2, 5)], id="stages of a segment share a window"),
        pytest.param([0, 2], [OLD, BOTH, NEW], [rollback(0, 0, 5), rollback(2, 2, 10)], id="segments need not share"),
        pytest.param([1], [NO_WINDOW, BOTH, NO_WINDOW], [rollback(1, 1, 10)], id="others need no window"),
        pytest.param([1], [NEW, OLD, BOTH, BOTH, OLD], None, id="logs too short for the only window, none shared"),
        pytest.param([1], [BOTH, OLD, ([10, 5], 7), BOTH], [rollback(0, 3, 5)], id="a log one iteration short"),
        pytest.param([1], [NO_LOG, BOTH, BOTH, BOTH], [rollback(0, 3, 10)], id="no log before: the whole model"),
        pytest.param([1], [BOTH, BOTH, NO_LOG, BOTH], [rollback(0, 3, 10)], id="no log behind: the whole model"),
        pytest.param([1], [BOTH, BOTH, BOTH, NO_LOG], [rollback(1, 1, 10)], id="logs of others do not matter"),
        pytest.param([1], [BOTH, NO_LOG, BOTH], [rollback(1, 1, 10)], id="the lost stage's own log died with it"),
        pytest.param([1], [[BOTH, NO_LOG], BOTH, BOTH], [rollback(0, 2, 10)], id="one rank of a neighbour has no log"),
        pytest.param([1], [NEW, BOTH, BOTH], [rollback(1, 1, 10)], id="logs back to the newest window"),
        pytest.param([0, 2], [BOTH, BOTH, BOTH, NO_LOG], [rollback(0, 3, 10)], id="all alone or all together"),
        pytest.param([1], [NO_LOG, OLD, NO_LOG], [rollback(0, 2, 5)], id="the whole model to what it shares"),
    ],
)
def test_who_rolls_back_to_where(
    lost: list[int], stages: list[Row | list[Row]], expected: list[Rollback] | None
) -> None:
    inventories = inventories_of(*stages)
    if expected is None:
        with pytest.raises(CheckpointLoadError):
            plan(lost, inventories, 14)
    else:
        assert plan(lost, inventories, 14) == expected


@pytest.mark.parametrize(("lost", "expected"), [([], []), ([1], [rollback(0, 3, 10)]), ([0, 3], [rollback(0, 3, 10)])])
def test_without_boundary_logs_the_whole_model_rolls_back(lost: list[int], expected: list[Rollback]) -> None:
    assert plan(lost, inventories_of(BOTH, NO_LOG, NEW, BOTH), 14, boundary_log=False) == expected


@pytest.mark.parametrize("past", [1, 2, 100])
def test_a_window_that_ends_at_the_target_needs_no_logs(past: int) -> None:
    """After the one slot of a window, or the base of a run, nothing is run again."""
    without = ([10], 10 + past)
    assert plan([1], inventories_of(without, ([10, 5], 0), without), 10) == [rollback(1, 1, 10)]


def test_an_error_says_what_there_was() -> None:
    inventories = inventories_of(([10], 11), [([5], 15), ([], 15)], ([10, 5], 6))
    with pytest.raises(CheckpointLoadError) as caught:
        plan([1, 0], inventories, 14)
    message = str(caught.value)
    assert message.startswith("stages [0, 1] cannot be rebuilt at iteration 14: ")
    assert "got windows from [(10,), (5,), (), (10, 5)]" in message
    assert "boundary logs from iterations [11, 15, 15, 6]" in message


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Ranks with much or little left, which stages are lost, and where they shall be."""

    inventories: list[Inventory]
    lost: set[int]
    target: int
    boundary_log: bool

    @property
    def everything(self) -> range:
        return range(1 + max(inventory.stage for inventory in self.inventories))


def job_of(seed: int) -> Job:
    random = Random(seed)
    target, has_window, has_log = random.randint(8, 10), random.choice([0.7, 0.9, 0.99]), random.choice([0.5, 0.9, 1])

    def row() -> Row:
        windows = [start for start in (8, 6, 4, 2) if random.random() < has_window]
        return windows, random.randint(1, 7) if random.random() < has_log else target + random.randint(-1, 2)

    ranks, stages = random.randint(1, 4), random.randint(1, 8)
    inventories = inventories_of(*[[row() for _ in range(ranks)] for _ in range(stages)])
    lost = set(random.sample(range(stages), random.randint(1, min(stages, random.choice([1, 3, 8])))))
    return Job(inventories=inventories, lost=lost, target=target, boundary_log=random.random() < 0.9)


def shared(inventories: list[Inventory], stages: Sequence[int]) -> list[int]:
    """Return the windows that all ranks of these stages have, newest first."""
    every = {start for inventory in inventories for start in inventory.windows}
    mine = [inventory for inventory in inventories if inventory.stage in stages]
    return sorted((start for start in every if all(start in i.windows for i in mine)), reverse=True)


def can_replay(inventories: list[Inventory], stages: Sequence[int], start: int, target: int) -> bool:
    """Whether neighbours of these stages logged every iteration after `start` up to the target."""
    neighbours = [i for i in inventories if i.stage in (stages[0] - 1, stages[-1] + 1)]
    replayed = range(start + 1, target + 1)
    return all(neighbour.logged_from <= iteration for neighbour in neighbours for iteration in replayed)


def alone(inventories: list[Inventory], lost: set[int], target: int) -> list[tuple[range, list[int]]]:
    """Return the runs of lost stages, and the windows with which each can recover without others."""
    runs: list[range] = []
    for stage in sorted(lost):
        follows = bool(runs) and runs[-1].stop == stage
        runs[-1:] = [range(runs[-1].start, stage + 1)] if follows else [*runs[-1:], range(stage, stage + 1)]
    found = []
    for run in runs:
        windows = shared(inventories, run)
        found.append((run, [start for start in windows if can_replay(inventories, run, start, target)]))
    return found


def expected_of(job: Job) -> list[tuple[range, int]] | None:
    """Return what is to be found, by trying: each run of lost stages alone, else everything, else nothing."""
    runs = alone(job.inventories, job.lost, job.target) if job.boundary_log else []
    if runs and all(windows for _, windows in runs):
        return [(run, windows[0]) for run, windows in runs]
    common = shared(job.inventories, job.everything)
    return [(job.everything, common[0])] if common else None


def plan_of(job: Job, lost: Sequence[int], inventories: list[Inventory]) -> list[Rollback] | None:
    try:
        return plan(lost, inventories, job.target, job.boundary_log)
    except CheckpointLoadError:
        return None


def assert_can_be_carried_out(job: Job, rollbacks: list[Rollback]) -> None:
    rolled_back = [stage for rollback in rollbacks for stage in rollback.segment.stages]
    assert job.lost <= set(rolled_back)
    assert len(rolled_back) == len(set(rolled_back))
    for rollback in rollbacks:
        stages, start = rollback.segment.stages, rollback.window_start
        assert all(start in i.windows for i in job.inventories if i.stage in stages)
        assert can_replay(job.inventories, stages, start, job.target)
        assert not {stages[0] - 1, stages[-1] + 1} & set(rolled_back), "a neighbour that should serve rolls back"


def test_in_any_job_as_few_stages_as_possible_go_back_as_little_as_possible() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(5000):
        job = job_of(seed)
        expected, rollbacks = expected_of(job), plan_of(job, sorted(job.lost), job.inventories)
        found = (
            None if rollbacks is None else [(rollback.segment.stages, rollback.window_start) for rollback in rollbacks]
        )
        assert found == expected, f"job {seed}"
        if rollbacks is not None:
            assert_can_be_carried_out(job, rollbacks)
        is_whole = found is not None and found[0][0] == job.everything
        outcomes["none" if found is None else "whole" if is_whole else "alone"] += 1
        outcomes["older window"] += found is not None and found[0][1] < 8
    assert min(outcomes[name] for name in ("none", "whole", "alone", "older window")) > 500, outcomes


def test_every_rank_comes_to_the_same_plan() -> None:
    for seed in range(500):
        job = job_of(seed)
        shuffled = Random(seed).sample(job.inventories, len(job.inventories))
        once, again = sorted(job.lost), [*sorted(job.lost, reverse=True), *job.lost]
        assert plan_of(job, once, job.inventories) == plan_of(job, again, shuffled), f"job {seed}"
