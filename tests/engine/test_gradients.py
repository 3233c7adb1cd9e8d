"""ckpt.recovery=gradients with ranks that are threads: what is special about it.

`test_windows.py` and `test_state_losses.py` have the jobs that any recovery survives.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.events import Rejoined, SnapshotTaken, StageRecovered
from moe_ckpt.snapshot.blob_keys import gradients_key, is_gradients
from moe_ckpt.snapshot.blobs import BlobFolder, held_path, own_path
from moe_ckpt.snapshot.index_entry import entry_from_bytes
from moe_ckpt.types import Phase
from tests.engine.damage import snapshots_in
from tests.harness.threads.job import Fault, ThreadJob, exact, stay_in_the_vote
from tests.harness.threads.model import PIPE, Shape
from tests.policies.profiles import config

AT_REDUCE = Fault(rank=1, phase=Phase.REDUCE, iteration=8)
LOST_NODE = replace(AT_REDUCE, loses_memory=True)


def made(
    folder: Path,
    *faults: Fault,
    shape: Shape = PIPE,
    iterations: int = 9,
    **settings: Any,
) -> ThreadJob:
    """Return a job with windows of three slots, the newest from 4 to 6 at the fault."""
    return ThreadJob(
        folder,
        config("moevement", **{"window": 3, "recovery": "gradients"} | settings),
        shape,
        iterations=iterations,
        faults=faults,
    )


def back_to(job: ThreadJob) -> set[int]:
    return {
        event.iteration for rank in job.ranks for event in job.events(Rejoined, rank)
    }


def rebuilt(job: ThreadJob) -> dict[int, list[int]]:
    """Return the steps that each rebuilt rank took again, in each of its recoveries."""
    of_each = {
        rank: [event.gradient_steps for event in job.events(StageRecovered, rank)]
        for rank in job.ranks
    }
    return {rank: steps for rank, steps in of_each.items() if steps}


def flip_gradients(folder: Path, iteration: int) -> None:
    """Flip a bit in the gradients of an iteration in a rank's folder."""
    key = gradients_key(iteration)
    entry = entry_from_bytes(key, (folder / "index" / f"{key}.blob").read_bytes())
    path = folder / "buffers" / f"{entry.buffer}"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_only_the_dead_rank_is_rebuilt_and_no_iteration_runs_again(
    tmp_path: Path,
) -> None:
    job = exact(made(tmp_path, replace(AT_REDUCE, rank=3), shape=Shape()))
    assert rebuilt(job) == {3: [3]}
    assert back_to(job) == {7}
    rejoined = [event for rank in job.ranks for event in job.events(Rejoined, rank)]
    assert not any(event.executed_iters for event in rejoined)


def test_a_rank_of_the_lost_stage_takes_the_step_that_a_death_cut_off(
    tmp_path: Path,
) -> None:
    """Rank 3 dies before the step, and rank 2 has not returned from the vote by then.

    Ranks 0 and 1 have taken the step.
    """
    fault = Fault(rank=3, phase=Phase.STEP, iteration=8)
    job = made(tmp_path, fault, shape=Shape())
    stay_in_the_vote(job, 2, iteration=8)
    exact(job)
    assert back_to(job) == {8}
    assert rebuilt(job) == {3: [4]}


def test_windows_have_no_compute_weights(tmp_path: Path) -> None:
    """Compute weights are for the passes of a replay."""
    by_gradients = made(tmp_path / "g")
    by_replay = made(tmp_path / "r", recovery="replay")
    sizes = []
    for job in (by_gradients, by_replay):
        exact(job)
        sizes.append(sum(event.size_bytes for event in job.events(SnapshotTaken)))
    assert sizes[0] < sizes[1]
    headers = snapshots_in(own_path(by_gradients.memory(1))).values()
    assert not any(header.compute for header in headers)


def test_a_lost_node_gets_its_gradients_from_a_peer(tmp_path: Path) -> None:
    job = exact(made(tmp_path, LOST_NODE))
    assert rebuilt(job) == {1: [3]}
    assert back_to(job) == {7}


def test_gradients_that_no_peer_has_take_all_ranks_back(tmp_path: Path) -> None:
    """The others go back by their own windows and gradients, without a pass."""

    def lose_the_newest(job: ThreadJob) -> None:
        held = BlobFolder(held_path(job.memory(2), 1))
        held.discard(gradients_key(7))

    job = exact(made(tmp_path, replace(LOST_NODE, before_restart=lose_the_newest)))
    assert rebuilt(job) == {0: [2], 1: [2], 2: [2]}
    assert back_to(job) == {6}


def test_damaged_gradients_are_not_used(tmp_path: Path) -> None:
    def damage(job: ThreadJob) -> None:
        flip_gradients(own_path(job.memory(1)), 7)

    fault = replace(AT_REDUCE, before_restart=damage)
    job = exact(made(tmp_path, fault, replicas=0))
    assert back_to(job) == {6}


def test_a_damaged_copy_is_left_for_an_older_state(tmp_path: Path) -> None:
    def damage(job: ThreadJob) -> None:
        flip_gradients(held_path(job.memory(2), 1), 7)

    job = exact(made(tmp_path, replace(LOST_NODE, before_restart=damage)))
    assert back_to(job) == {6}


def test_without_copies_of_gradients_a_lost_node_ends_in_an_error(
    tmp_path: Path,
) -> None:
    """A window of several slots leads nowhere without gradients."""
    job = made(tmp_path, LOST_NODE, replicate_gradients=False)
    with pytest.raises(NothingLeftError, match="logged gradients of all ranks lead"):
        job.run()


def test_without_copies_of_gradients_a_disk_has_the_state(tmp_path: Path) -> None:
    settings = {"replicate_gradients": False, "disk_every_iters": 3}
    exact(made(tmp_path, LOST_NODE, **settings))


@pytest.mark.parametrize("keep_windows", [1, 2])
def test_gradients_are_dropped_with_their_windows(
    keep_windows: int, tmp_path: Path
) -> None:
    job = exact(made(tmp_path, iterations=20, keep_windows=keep_windows))
    log = job.rank_memory(1).gradients
    assert log is not None
    oldest = job.rank_memory(1).snapshots.oldest_needed_iteration()
    assert oldest is not None
    assert sorted(log.checksums) == list(range(oldest + 1, 21))
    held = BlobFolder(held_path(job.memory(2), 1))
    logged = list(filter(is_gradients, held.keys()))
    assert len(logged) <= len(log.checksums) + 1


def test_neighbours_log_no_tensors(tmp_path: Path) -> None:
    job = exact(made(tmp_path, AT_REDUCE))
    assert job.rank_memory(0).boundary is None


def test_an_iteration_without_gradients_in_memory_is_a_gap(tmp_path: Path) -> None:
    """Training goes on; a recovery leads to an iteration before the gap."""
    job = made(tmp_path, AT_REDUCE, replicas=0)

    def refuse(_: object) -> None:
        log = job.rank_memory(1).gradients
        assert log is not None
        log.drop(lambda iteration: iteration == 7)

    job.upsets[1, 8] = refuse
    exact(job)
    assert back_to(job) == {6}
