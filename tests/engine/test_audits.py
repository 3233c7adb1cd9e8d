"""Audits of the live state (`ckpt.audit_every_iters`), with ranks that are threads.

A bit of the state flips where no checksum can see it, and training goes on with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ckpt.engine.rank_memory import RankMemory
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.events import (
    CheckpointSkipped,
    CorruptionFound,
    StageRecovered,
    StateAudited,
)
from moe_ckpt.types import Phase
from tests.harness.threads.job import (
    MOMENTS,
    Fault,
    ThreadJob,
    exact,
    uninterrupted,
)
from tests.harness.threads.model import PIPE, Model, Shape
from tests.policies.profiles import config

EVERY = 4


def audited(
    folder: Path,
    *faults: Fault,
    shape: Shape = PIPE,
    iterations: int = 14,
    **settings: Any,
) -> ThreadJob:
    """Return a job with audits after every fourth iteration, and windows of three."""
    chosen = {"window": 3, "recovery": "gradients", "audit_every_iters": EVERY}
    return ThreadJob(
        folder,
        config("moevement", **chosen | settings),
        shape,
        iterations=iterations,
        faults=faults,
        # states and losses between a flip and the audit are wrong
        lossless=False,
    )


def ends_exactly(job: ThreadJob) -> ThreadJob:
    result = job.run()
    assert result == uninterrupted(job.shape, job.iterations)
    return job


def flip(tensor: torch.Tensor) -> None:
    """Flip a bit of the mantissa of the first element."""
    tensor.detach().view(-1)[:1].view(torch.int32)[0] ^= 1 << 18


def flip_master(model: Model) -> None:
    flip(model.owned[1].master)


def flip_moment(name: str) -> Callable[[Model], None]:
    return lambda model: flip(model.adam.state[model.owned[1].master][name])


def found(job: ThreadJob) -> list[tuple[int, list[str], str]]:
    """Return what the audits have found; the same on all ranks."""
    of_each = [
        [(e.iteration, e.where, e.action) for e in job.events(CorruptionFound, rank)]
        for rank in job.ranks
    ]
    assert all(events == of_each[0] for events in of_each)
    return of_each[0]


def audits(job: ThreadJob, rank: int = 1) -> list[tuple[int, int | None]]:
    events = job.events(StateAudited, rank)
    return [(event.iteration, event.window_start) for event in events]


def test_a_sound_state_passes_all_audits(tmp_path: Path) -> None:
    """Each audit begins with the newest window that the audit before has found kept."""
    job = exact(audited(tmp_path, shape=Shape()))
    for rank in job.ranks:
        events = job.events(StateAudited, rank)
        assert [event.iteration for event in events] == [4, 8, 12]
        assert not any(event.differing for event in events)
    assert not found(job)
    for (last, _), (iteration, start) in itertools.pairwise(audits(job)):
        assert start is not None
        assert start + 2 <= last < iteration


@pytest.mark.parametrize("at", range(1, 13))
def test_a_flip_at_any_time_is_found_by_the_next_audit(at: int, tmp_path: Path) -> None:
    job = audited(tmp_path)
    job.upsets[1, at] = flip_master
    ends_exactly(job)
    ((iteration, where, action),) = found(job)
    assert iteration == -(-at // EVERY) * EVERY
    operator = str(job.models[1].owned[1].operator)
    assert where == [f"rank 1: {operator}"]
    assert action == f"back to host memory at iteration {iteration - EVERY}"


@pytest.mark.parametrize(
    "flip_it", [flip_master, flip_moment("exp_avg"), flip_moment("exp_avg_sq")]
)
@pytest.mark.parametrize("shape", [Shape(), Shape(ep=2), Shape(tied=True)])
def test_each_part_of_the_state_is_compared(
    flip_it: Callable[[Model], None], shape: Shape, tmp_path: Path
) -> None:
    job = audited(tmp_path, shape=shape)
    job.upsets[3, 6] = flip_it
    ends_exactly(job)
    ((iteration, where, _),) = found(job)
    assert iteration == 8
    assert [each.split(":")[0] for each in where][-1] == "rank 3"


def test_flips_of_two_ranks_are_named_together(tmp_path: Path) -> None:
    job = audited(tmp_path)
    job.upsets[0, 6], job.upsets[2, 7] = flip_master, flip_master
    ends_exactly(job)
    ((_, where, _),) = found(job)
    assert [each.split(":")[0] for each in where] == ["rank 0", "rank 2"]


def test_a_flip_that_an_overflow_hides_is_found(tmp_path: Path) -> None:
    """Iterations 1 to 5 take no step, and log no gradients."""
    job = audited(tmp_path, shape=replace(PIPE, skips=5))
    job.upsets[1, 3] = flip_master
    ends_exactly(job)
    assert [iteration for iteration, *_ in found(job)] == [4]


@pytest.mark.parametrize("window", [1, 2, 6])
@pytest.mark.parametrize("keep_windows", [1, 2])
def test_windows_of_any_length_serve(
    window: int, keep_windows: int, tmp_path: Path
) -> None:
    job = audited(tmp_path, iterations=20, window=window, keep_windows=keep_windows)
    job.upsets[1, 14] = flip_master
    ends_exactly(job)
    assert [iteration for iteration, *_ in found(job)] == [16]
    kept = job.rank_memory(1).snapshots.windows()
    assert len(kept) <= keep_windows + 1


def damage_the_oldest_window(memory: RankMemory) -> None:
    snapshot = memory.snapshots.windows()[-1].snapshots[0]
    snapshot.payload[snapshot.header.payload_bytes // 2] ^= 1


def damage_gradients(memory: RankMemory) -> None:
    assert memory.gradients is not None
    tensors = memory.gradients.gradients(6)
    flip(next(iter(tensors.values())))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (damage_the_oldest_window, "the window from"),
        (damage_gradients, r"logged gradients of iterations \[6\]"),
    ],
)
def test_damaged_memory_is_named_and_not_taken_for_a_wrong_state(
    damage: Callable[[RankMemory], None], named: str, tmp_path: Path
) -> None:
    job = audited(tmp_path)
    job.upsets[1, 8] = lambda _: damage(job.rank_memory(1))
    exact(job)
    (skipped,) = job.events(CheckpointSkipped, 1)
    assert skipped.source.startswith(named.split("\\", maxsplit=1)[0])
    assert not found(job)
    assert audits(job)[-1][1] is not None, "a later window takes the place"


@pytest.mark.parametrize(("phase", "skip"), MOMENTS)
@pytest.mark.parametrize("loses_memory", [False, True])
def test_deaths_around_an_audit_leave_the_state_exact(
    phase: Phase, skip: int, loses_memory: bool, tmp_path: Path
) -> None:
    fault = Fault(
        rank=1, phase=phase, iteration=8, skip=skip, loses_memory=loses_memory
    )
    job = exact(audited(tmp_path, fault))
    assert audits(job)[-1][0] == 12
    assert not found(job)


def test_a_flip_before_the_death_of_another_rank_is_found(tmp_path: Path) -> None:
    """The window from before the flip outlives the recovery."""
    job = audited(tmp_path, Fault(rank=2, phase=Phase.REDUCE, iteration=7))
    job.upsets[1, 6] = flip_master
    ends_exactly(job)
    ((iteration, where, action),) = found(job)
    assert (iteration, where[0][:6], action[-11:]) == (8, "rank 1", "iteration 4")


def test_a_flip_is_found_after_the_job_has_gone_back(tmp_path: Path) -> None:
    """A second flip, in iterations that run again, is another fault."""
    job = audited(tmp_path)
    job.upsets[1, 6] = flip_master
    job.upsets[0, 11] = flip_master
    ends_exactly(job)
    assert [iteration for iteration, *_ in found(job)] == [8, 12]


def test_audits_need_no_copies_on_peers(tmp_path: Path) -> None:
    """The memory of a job without copies leads back as well."""
    job = audited(tmp_path, replicas=0)
    job.upsets[1, 6] = flip_master
    ends_exactly(job)
    assert len(found(job)) == 1


def test_without_a_good_state_in_memory_a_disk_has_it(tmp_path: Path) -> None:
    """Windows on disk from before the flip take the place of damaged memory."""
    job = audited(tmp_path, disk_every_iters=3, iterations=12)
    job.settles = True

    def upset(model: Model) -> None:
        flip_master(model)
        memory = job.rank_memory(0)
        damage_the_oldest_window(memory)
        assert memory.gradients is not None
        memory.gradients.drop(lambda iteration: iteration <= 5)

    job.upsets[1, 7] = upset
    ends_exactly(job)
    ((iteration, _, action),) = found(job)
    assert iteration == 8
    assert action.startswith("back to local disk")


def test_a_death_in_an_audit_finds_the_state_lost(tmp_path: Path) -> None:
    """Rank 2 dies as its state is rebuilt, and the others wait for it in the audit."""
    fault = Fault(rank=2, phase=Phase.REDUCE, iteration=8, skip=1)
    job = audited(tmp_path, fault)

    def die_in_the_audit(model: Model) -> None:
        load = model.load_own

        def load_and_die(*arguments: Any) -> None:
            load(*arguments)
            job.pages[2].enter(Phase.REDUCE)

        model.load_own = load_and_die  # type: ignore[method-assign]

    job.upsets[2, 8] = die_in_the_audit
    exact(job)
    assert len(job.struck) == 1
    assert not found(job)
    rebuilt = [rank for rank in job.ranks if job.events(StageRecovered, rank)]
    assert rebuilt == list(job.ranks)


def test_a_flip_in_weights_that_another_rank_updates_is_found(tmp_path: Path) -> None:
    """The bit flips after the gather of the step, in the shard of rank 0."""
    job = audited(tmp_path, shape=Shape())

    def flip_after_the_gather(model: Model) -> None:
        gather = model.gather

        def gather_and_flip() -> None:
            model.gather = gather  # type: ignore[method-assign]
            gather()
            model.owned[1].values[:1].view(torch.int16)[0] ^= 1 << 5

        model.gather = gather_and_flip  # type: ignore[method-assign]

    job.upsets[1, 8] = flip_after_the_gather
    ends_exactly(job)
    ((iteration, where, _),) = found(job)
    operator = str(job.models[1].owned[1].operator)
    assert (iteration, where) == (8, [f"rank 1: {operator}"])


def test_what_followed_the_flip_is_not_used_after_the_death_of_all(
    tmp_path: Path,
) -> None:
    """All ranks die in iteration 5, after it has begun for the second time."""
    fault = Fault(rank=1, phase=Phase.REDUCE, iteration=5, skip=1, also=(0, 2))
    job = audited(tmp_path, fault)
    job.upsets[1, 6] = flip_master
    ends_exactly(job)
    assert [iteration for iteration, *_ in found(job)] == [8]


def test_what_followed_the_flip_is_not_loaded_from_a_disk(tmp_path: Path) -> None:
    """The disk has a window of the wrong state as a node without copies is lost."""
    fault = Fault(rank=1, phase=Phase.REDUCE, iteration=5, skip=1, loses_memory=True)
    job = audited(tmp_path, fault, window=1, disk_every_iters=1, replicas=0)
    job.settles = True
    job.upsets[1, 6] = flip_master
    with pytest.raises(CheckpointLoadError, match="in quarantine"):
        job.run()
    assert [iteration for iteration, *_ in found(job)] == [8]
