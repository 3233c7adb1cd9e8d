"""Plans of random jobs, compared with a search through every choice of stages.

Fetches bring the windows that ranks need, and all ranks come to the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random

import pytest

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.inventory import Inventory, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, plan_recovery

Slots = tuple[int, int]
"""Start and number of slots of a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job with losses."""

    inventories: list[Inventory]
    """Inventories of all ranks, with much or little left."""

    lost: set[int]
    """Stages that are lost."""

    target: int | None
    """Iteration that ranks are to reach. None: no rank has state."""

    boundary_log: bool
    """Whether stages log the tensors that they send."""

    @property
    def num_stages(self) -> int:
        return 1 + max(inventory.stage for inventory in self.inventories)

    def ranks(self, stage: int) -> list[Inventory]:
        return [inventory for inventory in self.inventories if inventory.stage == stage]

    def anywhere(self, global_rank: int) -> list[WindowRef]:
        memories = [
            i.windows if i.global_rank == global_rank else i.held.get(global_rank, ())
            for i in self.inventories
        ]
        return [window for windows in memories for window in windows]


def job_of(random: Random) -> Job:
    num_stages, num_ranks, target = (
        random.randint(1, 5),
        random.randint(1, 3),
        random.randint(8, 12),
    )
    is_own, is_copy, is_as_usual = (
        random.choice([0, 0.7, 0.97]),
        random.choice([0, 0.1, 0.4]),
        random.choice([0.9, 1]),
    )
    has_log, num_slots = random.choice([0.5, 0.8, 1]), random.randint(1, 4)

    def windows_of(stage: int, chance: float) -> tuple[WindowRef, ...]:
        starts = [start for start in (8, 6, 4, 2) if random.random() < chance]
        return tuple(ref(stage, start) for start in starts)

    def ref(stage: int, start: int) -> WindowRef:
        slots = num_slots if random.random() < is_as_usual else random.randint(1, 4)
        assignment = f"{stage}{'a' if random.random() < is_as_usual else 'b'}"
        end = start + slots - 1
        replayable_to = max(
            end,
            target if random.random() < is_as_usual else target + random.randint(-4, 2),
        )
        return WindowRef(
            start=start,
            num_slots=slots,
            replayable_to=replayable_to,
            assignment=assignment,
        )

    def inventory(global_rank: int) -> Inventory:
        logged = (random.randint(1, 7), target + random.randint(0, 1))
        if random.random() >= has_log:
            logged = (random.randint(5, 15), random.randint(5, 15))
        return Inventory(
            global_rank=global_rank,
            stage=stage_of[global_rank],
            windows=windows_of(stage_of[global_rank], is_own),
            held={
                owner: windows_of(stage, is_copy)
                for owner, stage in stage_of.items()
                if owner != global_rank
            },
            logged_from=logged[0],
            logged_to=logged[1],
        )

    stage_of = dict(
        enumerate(
            random.sample(list(range(num_stages)) * num_ranks, num_stages * num_ranks)
        )
    )
    lost = set(
        random.sample(
            range(num_stages),
            random.randint(1, min(num_stages, random.choice([1, 2, 5]))),
        )
    )
    everything_gone = random.random() < 0.1
    return Job(
        inventories=[inventory(global_rank) for global_rank in stage_of],
        lost=set(range(num_stages)) if everything_gone else lost,
        target=None if everything_gone else target,
        boundary_log=random.random() < 0.9,
    )


def runs_of(stages: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for stage in sorted(stages):
        if not runs or runs[-1][-1] + 1 != stage:
            runs.append([])
        runs[-1].append(stage)
    return runs


def shared(job: Job, stages: Iterable[int], iteration: int = 0) -> set[Slots]:
    """Return the windows from which all ranks of some stages can get to an iteration.

    All ranks of a stage have the same assignment of operators to slots.
    """

    def of_rank(rank: Inventory) -> set[tuple[int, int, str]]:
        windows = [
            window
            for window in job.anywhere(rank.global_rank)
            if window.replayable_to >= iteration
        ]
        return {
            (window.start, window.num_slots, window.assignment) for window in windows
        }

    def of_stage(stage: int) -> set[Slots]:
        return {
            (start, slots)
            for start, slots, _ in set.intersection(*map(of_rank, job.ranks(stage)))
        }

    return set.intersection(*(of_stage(stage) for stage in stages))


def is_logged(job: Job, run: list[int], start: int, target: int) -> bool:
    """Return whether the ranks next to a run of stages logged all needed iterations.

    Needed are the iterations `start` + 1 to `target`.
    """
    ranks = job.ranks(run[0] - 1) + job.ranks(run[-1] + 1)
    return all(
        rank.logged_from <= i <= rank.logged_to
        for rank in ranks
        for i in range(start + 1, target + 1)
    )


def newest(windows: Collection[Slots]) -> Slots | None:
    """Return the window that starts last; of several, the one with the fewest slots."""
    return min(windows, key=lambda slots: (-slots[0], slots[1]), default=None)


def choices(job: Job, target: int) -> Iterator[list[tuple[list[int], Slots]]]:
    """Yield every choice of stages to roll back that reaches the target by logs.

    The smallest choices come first. A choice lists runs of neighbouring stages, each
    with a window.
    """
    healthy = [stage for stage in range(job.num_stages) if stage not in job.lost]
    for extra in (
        extra
        for size in range(len(healthy) + 1)
        for extra in combinations(healthy, size)
    ):
        runs = runs_of(job.lost.union(extra))
        found = []
        for run in runs:
            windows = {
                (start, slots)
                for start, slots in shared(job, run, target)
                if start + slots - 1 <= target
            }
            found.append(
                newest(
                    [
                        window
                        for window in windows
                        if is_logged(job, run, window[0], target)
                    ]
                )
            )
        if None not in found:
            yield [
                (run, window)
                for run, window in zip(runs, found, strict=True)
                if window is not None
            ]


Expected = tuple[int, list[tuple[list[int], Slots]]]
"""Iteration at which ranks end, and the stages that roll back, with their windows."""


def expected_of(job: Job) -> Expected | None:
    """Return the expected plan, found by trying.

    The plan rolls back the fewest stages, or else all stages. None: nothing is left.
    """
    everything = list(range(job.num_stages))
    if job.target is not None and job.boundary_log:
        local = next(choices(job, job.target), None)
        if local is not None:
            return job.target, local
    window = newest(shared(job, everything))
    if window is None:
        return None
    end = sum(window) - 1
    wanted = end if job.target is None else max(end, job.target)
    reached = next(
        i for i in range(wanted, end - 1, -1) if window in shared(job, everything, i)
    )
    return reached, [(everything, window)]


def plan_of(job: Job) -> RecoveryPlan | None:
    try:
        return plan_recovery(
            job.lost,
            job.inventories,
            target_iteration=job.target,
            boundary_log=job.boundary_log,
        )
    except CheckpointLoadError:
        return None


def assert_as_expected(job: Job) -> RecoveryPlan | None:
    expected, plan = expected_of(job), plan_of(job)
    if plan is None or expected is None:
        assert plan is None
        assert expected is None
        return None
    rollbacks = [
        (list(r.stages), (r.window_start, len(r.span))) for r in plan.rollbacks
    ]
    assert (plan.target_iteration, rollbacks) == expected
    assert plan.num_stages == job.num_stages
    return plan


def assert_fetches_suffice(job: Job, plan: RecoveryPlan) -> None:
    """Assert that after the fetches, each rank that rolls back has a suitable window.

    All ranks of a stage have the same assignment of operators to slots, and steps to
    the target.
    """
    memories = {
        i.global_rank: {window.start: window for window in i.windows}
        for i in job.inventories
    }
    inventories = {inventory.global_rank: inventory for inventory in job.inventories}
    for fetch in plan.fetches:
        assert fetch.source_rank != fetch.global_rank
        copies = {
            window.start: window
            for window in inventories[fetch.source_rank].held[fetch.global_rank]
        }
        memories[fetch.global_rank][fetch.window_start] = copies[fetch.window_start]
    for rollback in plan.rollbacks:
        for stage in rollback.stages:
            windows = [
                memories[rank.global_rank][rollback.window_start]
                for rank in job.ranks(stage)
            ]
            assert {(window.num_slots, window.assignment) for window in windows} == {
                (len(rollback.span), windows[0].assignment)
            }
            assert all(
                window.replayable_to >= plan.target_iteration for window in windows
            )


def assert_fetches_are_needed_and_even(job: Job, plan: RecoveryPlan) -> None:
    """Assert that no rank fetches a window that the rank has, and that sources share.

    Each source is the holder with the fewest fetches until then.
    """
    inventories, asked = {i.global_rank: i for i in job.inventories}, Counter[int]()
    assert [fetch.global_rank for fetch in plan.fetches] == sorted(
        {fetch.global_rank for fetch in plan.fetches}
    )
    for fetch in plan.fetches:
        copies = inventories[fetch.source_rank].held[fetch.global_rank]
        (taken,) = (copy for copy in copies if copy.start == fetch.window_start)

        def has(windows: Iterable[WindowRef], taken: WindowRef = taken) -> bool:
            same = [
                w
                for w in windows
                if (w.start, w.num_slots, w.assignment)
                == (taken.start, taken.num_slots, taken.assignment)
            ]
            return any(window.replayable_to >= plan.target_iteration for window in same)

        assert not has(inventories[fetch.global_rank].windows)
        holders = [
            rank
            for rank, i in inventories.items()
            if has(i.held.get(fetch.global_rank, ()))
        ]
        assert fetch.source_rank == min(holders, key=lambda rank: (asked[rank], rank))
        asked[fetch.source_rank] += 1


def outcome_of(job: Job, plan: RecoveryPlan | None) -> list[str]:
    if plan is None:
        return ["nothing is left"]
    rolling = {stage for rollback in plan.rollbacks for stage in rollback.stages}
    names = {
        "only the lost": rolling == job.lost and job.target is not None,
        "some healthy": job.lost < rolling and len(rolling) < plan.num_stages,
        "all, which were not lost": len(rolling) == plan.num_stages > len(job.lost),
        "several segments": len(plan.rollbacks) > 1,
        "an older window": any(
            rollback.window_start < 8 for rollback in plan.rollbacks
        ),
        "fetches": len(plan.fetches) > 1,
        "ends earlier": job.target is not None and plan.target_iteration < job.target,
        "ends later": job.target is not None and plan.target_iteration > job.target,
        "from nothing": job.target is None,
    }
    return [name for name, is_so in names.items() if is_so]


@pytest.mark.parametrize(
    ("num_jobs", "least"), [(1500, 3), pytest.param(6000, 50, marks=pytest.mark.full)]
)
def test_all_kinds_of_plans_are_the_smallest_and_can_be_carried_out(
    num_jobs: int, least: int
) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(num_jobs):
        job = job_of(Random(seed))
        plan = assert_as_expected(job)
        if plan is not None:
            assert_fetches_suffice(job, plan)
            assert_fetches_are_needed_and_even(job, plan)
        outcomes.update(outcome_of(job, plan))
    assert len(outcomes) == 10, outcomes
    assert min(outcomes.values()) > least, outcomes


def test_every_rank_comes_to_the_same_plan() -> None:
    for seed in range(200):
        job = job_of(Random(seed))
        shuffled = [
            replace(
                inventory,
                windows=inventory.windows[::-1],
                held=dict(
                    reversed(
                        [
                            (owner, windows[::-1])
                            for owner, windows in inventory.held.items()
                        ]
                    )
                ),
            )
            for inventory in Random(seed).sample(job.inventories, len(job.inventories))
        ]
        assert plan_of(job) == plan_of(replace(job, inventories=shuffled)), (
            f"job {seed}"
        )
