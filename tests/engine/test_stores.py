"""Host memory through recoveries: logs lead from the oldest window to the state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ckpt.engine.rank_memory import RankMemory
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.boundary_log import Direction
from moe_ckpt.types import Phase
from tests.engine.damage import snapshots_in
from tests.harness.threads.job import Fault, Observer, ThreadJob, exact
from tests.harness.threads.model import PAIR, PIPE, Model, Shape
from tests.policies.profiles import config


class Keeping(Observer):
    """Checks every rank's host memory.

    The checks run when ranks continue from a state, and after each iteration.
    """

    def __init__(self, job: ThreadJob) -> None:
        self._job = job
        self.began_anew = 0
        job.observers.append(self)

    def started(self, iteration: int, rank: int, model: Model) -> None:
        memory = self._job.rank_memory(rank)
        self._check(memory, iteration)
        if iteration == 0:
            self.began_anew += 1
            assert (memory.snapshots.windows(), memory.steps.size_bytes) == ([], 0)
        else:
            assert memory.steps.has_start(iteration + 1)

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        memory = self._job.rank_memory(rank)
        self._check(memory, iteration)
        assert memory.boundary is not None
        logged_bytes = memory.boundary.size_bytes
        # evaluations send like this between iterations, and are not logged
        memory.boundary.record(Direction.ACTIVATION, torch.zeros(4))
        assert memory.boundary.size_bytes == logged_bytes
        oldest = memory.snapshots.oldest_needed_iteration()
        if oldest is not None:
            assert not any(
                memory.steps.has_start(earlier) for earlier in range(oldest + 1)
            ), oldest
            assert min(memory.steps.gradients, default=iteration) > oldest

    def _check(self, memory: RankMemory, iteration: int) -> None:
        assert not any(
            memory.steps.has_start(later)
            for later in range(iteration + 2, self._job.iterations + 2)
        )
        assert max(memory.steps.gradients, default=0) <= iteration


@pytest.mark.parametrize("window", [1, 2, 3])
def test_logs_lead_from_the_oldest_window_to_the_state(
    window: int, tmp_path: Path
) -> None:
    faults = [
        Fault(rank=2, phase=Phase.REDUCE, iteration=1),  # all ranks begin anew
        Fault(rank=1, phase=Phase.REDUCE, iteration=6, loses_memory=True),
        Fault(rank=0, phase=Phase.STEP, iteration=9, also=(1, 2)),  # all ranks go back
    ]
    job = ThreadJob(
        tmp_path, config("moevement", window=window), PIPE, iterations=12, faults=faults
    )
    keeping = Keeping(job)
    exact(job)
    assert keeping.began_anew == 2 * PIPE.world_size


def test_of_windows_on_the_local_disk_old_ones_are_dropped(tmp_path: Path) -> None:
    job = ThreadJob(
        tmp_path,
        config("moevement", window=2, disk_every_iters=2),
        PAIR,
        iterations=12,
        settles=True,
    )
    job.run()
    for rank in job.ranks:
        starts = {
            header.window_start for header in snapshots_in(job.disk(rank)).values()
        }
        assert len(starts) in (1, 2)
        assert max(starts) >= 8
        assert min(starts) >= 5, "the one before it"


def test_of_units_on_the_local_disk_old_ones_are_dropped(tmp_path: Path) -> None:
    job = ThreadJob(
        tmp_path, config("moc", every_iters=2), PAIR, iterations=16, settles=True
    )
    job.run()
    for rank in job.ranks:
        assert (
            min(header.window_start for header in snapshots_in(job.disk(rank)).values())
            >= 8
        )


class Copied(Observer):
    """Checks that the newest window that counts is in the memory of the rank's peer."""

    def __init__(self, job: ThreadJob) -> None:
        self._job = job
        self.num_seen = 0
        job.observers.append(self)

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        windows = self._job.rank_memory(rank).snapshots.windows()
        if windows:
            # only keys are read: the peer may drop an older snapshot meanwhile
            keys = BlobFolder(
                self._job.memory(1 - rank) / "held" / f"rank{rank:04d}"
            ).keys()
            starts_and_slots = [
                key.split("-")[1:3] for key in keys if key.startswith("snapshot-")
            ]
            slots = [
                int(slot)
                for start, slot in starts_and_slots
                if int(start) == windows[0].start
            ]
            assert sorted(slots) == list(range(windows[0].num_snapshots)), (
                rank,
                iteration,
                windows[0].start,
            )
            self.num_seen += 1


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("moevement", {"window": 2}), ("gemini", {"every_iters": 2})],
)
def test_a_window_counts_once_peers_hold_it(
    policy: str, settings: dict[str, int], tmp_path: Path
) -> None:
    job = ThreadJob(
        tmp_path, config(policy, **settings), Shape(pp=2, dp=1), iterations=7
    )
    job.sends_slowly = True
    copied = Copied(job)
    job.run()
    assert copied.num_seen >= 4
