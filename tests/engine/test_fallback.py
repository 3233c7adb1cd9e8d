"""The fallback when a replaced rank lacks the observations of other ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moe_ckpt.collectives import Ranks
from moe_ckpt.durable.checkpoint_folder import CheckpointFolder
from moe_ckpt.engine.fallback import (
    HOST_MEMORY,
    Fallback,
    Source,
    Suspects,
    UsableState,
)
from moe_ckpt.events import EventLog, LossNotFinite
from moe_ckpt.snapshot.blobs import held_path
from moe_ckpt.types import Phase
from tests.engine.damage import snapshots_in
from tests.engine.tiers import OneFileEach, open_tier
from tests.harness.gloo.workers import wait_until
from tests.harness.threads.job import Fault, ThreadJob, uninterrupted
from tests.harness.threads.model import PAIR
from tests.harness.threads.ranks import run_threads
from tests.harness.threads.stops import At
from tests.policies.profiles import config

SIX, FOUR = (Source(location=HOST_MEMORY, iteration=iteration) for iteration in (6, 4))


def _fallback(folder: Path, ranks: Ranks) -> Fallback:
    """Return a fallback over checkpoints of iterations 1, 2 and 3."""
    tier = open_tier(folder, OneFileEach(ranks), keep=3)
    for iteration in (1, 2, 3):
        tier.save(iteration)
    events = EventLog(
        folder / "events" / f"fallback{ranks.rank}.jsonl",
        global_rank=0,
        clock_origin_unix_s=0.0,
    )
    return Fallback(tier, ranks, events)


def _source(folder: Path, iteration: int) -> Source:
    return Source(
        location=str(CheckpointFolder(folder).directory(iteration)), iteration=iteration
    )


def test_a_source_that_one_rank_distrusts_is_used_by_none(tmp_path: Path) -> None:
    def look_twice(ranks: Ranks) -> list[UsableState]:
        fallback = _fallback(tmp_path, ranks)
        if ranks.rank == 1:
            fallback.quarantine(_source(tmp_path, 3))
        return [fallback.look(None), fallback.look(None)]

    sources = [_source(tmp_path, iteration) for iteration in (3, 2, 1)]
    expected = UsableState(
        sources=sources[1:], passed_over=[f"{sources[0]}: in quarantine"]
    )
    assert run_threads(2, look_twice) == [[expected, expected]] * 2


def test_states_saved_since_a_bad_load_are_passed_over_and_named(
    tmp_path: Path,
) -> None:
    sources = [_source(tmp_path, iteration) for iteration in (3, 2, 1)]
    expected = UsableState(
        sources=sources[2:],
        passed_over=[f"{source}: in quarantine" for source in sources[:2]],
    )
    assert run_threads(
        1, lambda ranks: _fallback(tmp_path, ranks).look(None, tainted=range(2, 4))
    ) == [expected]


def test_ranks_agree_on_the_source_of_an_earlier_loss() -> None:
    """Iteration 9's loss is blamed on two sources; rank 0 is replaced in between."""

    def blame_in_turn(ranks: Ranks) -> list[bool]:
        suspects = Suspects(ranks, 2)
        is_first = [suspects.is_first_at(9, SIX)]
        if ranks.rank == 0:
            suspects = Suspects(ranks, 2)
        return [*is_first, suspects.is_first_at(9, FOUR), suspects.is_first_at(8, FOUR)]

    assert run_threads(2, blame_in_turn) == [[True, False, True]] * 2


@pytest.mark.parametrize(("iteration", "is_blamed"), [(5, True), (6, True), (7, False)])
def test_a_source_is_suspected_for_so_many_iterations(
    iteration: int, is_blamed: bool
) -> None:
    def source_of(ranks: Ranks) -> Source | None:
        suspects = Suspects(ranks, 2)
        suspects.loaded(FOUR)
        return suspects.source_of(iteration, math.nan)

    assert run_threads(2, source_of) == [FOUR if is_blamed else None] * 2


def test_a_source_is_suspected_by_ranks_that_have_not_noted_its_load() -> None:
    """Such ranks were cut off in the recovery."""

    def source_of(ranks: Ranks) -> Source | None:
        suspects = Suspects(ranks, 2)
        if ranks.rank == 0:
            suspects.loaded(FOUR)
        return suspects.source_of(5, math.inf)

    assert run_threads(2, source_of) == [FOUR] * 2


def test_a_source_without_a_better_one_is_blamed_once(tmp_path: Path) -> None:
    """All ranks go back to memory at 3; the losses of 4 and 5 are infinite."""
    fault = Fault(rank=1, phase=Phase.BACKWARD, iteration=5)
    job = ThreadJob(tmp_path, config("gemini", every_iters=3), PAIR, faults=[fault])
    job.on_worker.append(
        lambda *_: job.diverging.update({4: 1, 5: 1}) if job.struck else None
    )
    assert job.run().digests == uninterrupted(PAIR, 8).digests
    assert [event.iteration for event in job.events(LossNotFinite)] == [4]


def test_windows_that_all_ranks_have_left_are_dropped_by_peers(tmp_path: Path) -> None:
    """All ranks go back to memory at iteration 6.

    The loss of iteration 7 is infinite, and all ranks load the checkpoint at 4.
    """
    fault = Fault(rank=1, phase=Phase.BACKWARD, iteration=7)
    job = ThreadJob(
        tmp_path,
        config("gemini", every_iters=3, durable_every_iters=4),
        PAIR,
        iterations=9,
        faults=[fault],
    )
    job.on_worker.append(
        lambda *_: job.diverging.update({7: 1}) if job.struck else None
    )
    held = held_path(job.memory(0), 1)
    found: list[bool] = []

    def look() -> None:
        if job.struck:
            starts = lambda: {  # noqa: E731
                header.window_start for header in snapshots_in(held).values()
            }
            found.append(wait_until(lambda: starts() == {4}))

    At(job, 5, look)
    assert job.run().digests == uninterrupted(PAIR, 9).digests
    assert [
        (event.iteration, event.action[-1]) for event in job.events(LossNotFinite)
    ] == [(7, "4")]
    assert found == [True]
