"""Copies at peers are good for a recovery at every moment, also while one recovery has them changed for the next."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGKILL, SIGSTOP

from launcher.proc import stands_still
from moe_ckpt.events import Rejoined
from moe_ckpt.runtime.kept import KeptCopies
from moe_ckpt.runtime.sparse import SparseTier
from moe_ckpt.types import Phase, ReadyGradients
from tests.elastic import ElasticJob
from tests.references import outcome_of, uninterrupted
from tests.training import events_of

PATIENT = ("ckpt.window=2", "runtime.heartbeat_s=20")  # who stands still is not to be taken for dead


def test_a_node_is_lost_as_soon_as_its_copies_change_again(tmp_path: Path) -> None:
    """All have but the snapshot of everything after iteration 4: of no use without what iteration 5 starts from."""
    training = ("train.iterations=8",)
    with ElasticJob(4, tmp_path, *training, *PATIENT, setup=_die_twice_and_stand_still, timeout_s=120.0) as job:
        job.order(1, Phase.BACKWARD, iteration=5)
        pid = job.trainer(1, life=2).pid
        job.wait_for(lambda: stands_still(pid) or None, "rank 1 to stand still in its third life")
        job.lose_nodes(1)
        result = job.wait()
    assert result["faults_survived"] == 3
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    recoveries = events_of(job.run, Rejoined, 0)
    assert [event.iteration for event in recoveries] == [4, 4, 4]
    assert recoveries[-1].fetched_bytes > 0


def test_a_damaged_copy_that_nobody_needs_does_no_harm(tmp_path: Path) -> None:
    training = ("train.iterations=10",)
    with ElasticJob(4, tmp_path, *training, *PATIENT, timeout_s=120.0) as job:
        job.hold(1, Phase.BACKWARD, iteration=6)
        (Path(job.trainer(0).memory) / "held" / "rank0001" / "index" / "record-1.blob").write_bytes(b"garbage")
        job.lose_nodes(1)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    assert "done without: fetching record-1 of rank 1" in job.said()


def _die_twice_and_stand_still() -> None:
    """Let rank 1 die in its second life, when all have its first snapshot; in its third let it begin copying, and stop.

    Then peers have done what they were asked for, and rank 1 has not gone on.
    """
    ready, resume = SparseTier.ready, KeptCopies.resume_copying
    generation = 0

    def ready_or_die(self: SparseTier, iteration: int, gradients: ReadyGradients) -> None:
        ready(self, iteration, gradients)
        if os.environ["RANK"] == "1" and generation == 2:
            os.kill(os.getpid(), SIGKILL)

    def resume_and_stop(self: KeptCopies) -> None:
        nonlocal generation
        resume(self)
        generation = self._elastic.page.generation
        if os.environ["RANK"] == "1" and generation == 3:
            assert self._elastic.keeper is not None
            self._elastic.keeper.copy([]).result()
            os.kill(os.getpid(), SIGSTOP)

    SparseTier.ready = ready_or_die  # type: ignore[method-assign]
    KeptCopies.resume_copying = resume_and_stop  # type: ignore[method-assign]
