"""The log of gradients: copies, memory, damage, and how far the log leads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.snapshot.codec import GRADIENT, Snapshot
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.gradient_log import (
    GradientLog,
    intact_checksums,
    reach_by_gradients,
)
from moe_ckpt.snapshot.step_log import Reach, StepLog, StepRecord
from moe_ckpt.types import ReadyGradients
from tests.snapshot.samples import IDENTITY, SHARD, Piece, piece, pool, snapshot_of

BYTES = 24  # of one iteration's gradients


class Published:
    """A publisher that keeps entries, or refuses them."""

    def __init__(self) -> None:
        self.entries: dict[int, Snapshot] = {}
        self.refuses = False

    def add_gradients(self, entry: Snapshot) -> None:
        if self.refuses:
            raise CheckpointSaveError("the folder is full")
        self.entries[entry.header.iteration] = entry

    def drop_gradients(self, iterations: Iterable[int]) -> None:
        for iteration in iterations:
            del self.entries[iteration]


class Written:
    """A log with its buffers and its publisher."""

    def __init__(self, copier: HostCopier, limit_bytes: int | None = None) -> None:
        self.copier = copier
        self.buffers = pool(limit_bytes)
        self.published = Published()
        self.log = GradientLog(copier, self.buffers, self.published, IDENTITY, SHARD)

    def write(self, *iterations: int) -> None:
        for iteration in iterations:
            self.log.add(iteration, gradients_of(iteration))


@pytest.fixture
def written() -> Iterator[Written]:
    copier = HostCopier()
    yield Written(copier)
    copier.close()


def gradients_of(iteration: int) -> list[Piece]:
    return [
        piece(torch.full((4,), float(iteration)), "dense", GRADIENT),
        piece(torch.full((4,), -iteration, dtype=torch.bfloat16), "expert", GRADIENT),
    ]


def values(log: GradientLog, iteration: int) -> dict[str, list[float]]:
    found = log.gradients(iteration)
    return {key.tensor: tensor.tolist() for key, tensor in found.items()}


def test_gradients_are_copies_in_the_type_of_training(written: Written) -> None:
    pieces = gradients_of(3)
    written.log.add(3, pieces)
    for _, tensor, _ in pieces:
        tensor.zero_()  # as clipping does, in place
    assert values(written.log, 3) == {"dense": [3.0] * 4, "expert": [-3.0] * 4}
    dtypes = {key.tensor: each.dtype for key, each in written.log.gradients(3).items()}
    assert dtypes == {"dense": torch.float32, "expert": torch.bfloat16}


def test_an_iteration_that_runs_again_has_its_new_gradients(written: Written) -> None:
    written.write(3, 4)
    written.log.add(4, gradients_of(40))
    assert values(written.log, 4)["dense"] == [40.0] * 4
    assert written.buffers.in_use_bytes == 2 * BYTES


def test_dropped_entries_give_their_memory_back(written: Written) -> None:
    written.write(1, 2, 3, 4)
    assert written.log.size_bytes == 4 * BYTES
    written.log.drop(lambda iteration: iteration <= 3)
    assert (list(written.log.checksums), written.published.entries.keys()) == (
        [4],
        {4},
    )
    assert written.buffers.in_use_bytes == BYTES
    with pytest.raises(CheckpointLoadError, match=r"no iteration 2, got \[4\]"):
        written.log.gradients(2)


def test_a_successor_takes_over_what_was_published(written: Written) -> None:
    written.write(1, 2)
    successor = Written(written.copier)
    successor.log.adopt(written.published.entries.values())
    assert values(successor.log, 2) == values(written.log, 2)
    assert successor.buffers.in_use_bytes == 2 * BYTES


@pytest.mark.parametrize("reason", ["no memory", "no publication"])
def test_what_cannot_be_logged_is_a_gap_and_no_end(
    reason: str, written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    log = Written(written.copier, limit_bytes=BYTES if reason == "no memory" else None)
    log.write(1)
    log.published.refuses = reason == "no publication"
    log.write(2)
    assert list(log.log.checksums) == [1]
    assert log.buffers.in_use_bytes == BYTES
    assert "gradients of iteration 2 are not logged, training goes on" in caplog.text


def test_damaged_entries_are_dropped_as_they_are_needed(written: Written) -> None:
    written.write(1, 2, 3)
    written.published.entries[1].payload[0] ^= 1
    written.published.entries[3].payload[5] ^= 1
    assert not written.log.drop_damaged(2, 2)
    assert written.log.drop_damaged(2, 3)
    assert list(written.log.checksums) == [1, 2]


def test_entries_of_another_rank_are_not_used(written: Written) -> None:
    written.write(1)
    entries = written.published.entries.values()
    assert intact_checksums(entries, IDENTITY, SHARD).keys() == {1}
    other = replace(SHARD, global_rank=4)
    assert intact_checksums(entries, IDENTITY, other) == {}


def steps(
    *iterations: int,
    overflows: tuple[int, ...] = (),
    without: int = 0,
    branches: Mapping[int, int] | None = None,
) -> StepLog:
    """Return a step log. The gradients of iteration i have the checksum 100 + i.

    Args:
        iterations: The iterations with a record.
        overflows: Those whose steps were skipped.
        without: The iteration whose record comes from another rank.
        branches: The branches of iterations that were not trained in branch 1.
    """
    log, trained_in = StepLog(), branches or {}
    log.log_start(iterations[0], {})
    for iteration in iterations:
        skips = iteration in overflows
        log.add(
            StepRecord(
                iteration=iteration,
                gradients=ReadyGradients(
                    overflows=(skips,), total_norm=1.0, loss_scale=1.0
                ),
                tied_gradient=None,
                after_pass=None if iteration == without else {"rng": torch.zeros(1)},
                gradients_checksum=None if skips else 100 + iteration,
                branch=trained_in.get(iteration, 1),
                follows=trained_in.get(iteration - 1, 1),
            )
        )
    return log


def window(*, end: int = 3, branch: int = 1) -> list[Snapshot]:
    """Return the snapshots of a window that starts at 3."""
    slots = end - 2
    taken = [snapshot_of(pool(), (3, slot, slots)) for slot in range(slots)]
    return [replace(each, header=replace(each.header, branch=branch)) for each in taken]


@pytest.mark.parametrize(
    ("log", "logged", "branches"),
    [
        pytest.param(steps(4, 5, 6), {4, 5, 6}, (1, 1, 1, 1), id="all"),
        pytest.param(steps(4, 5, 6), {4, 6}, (1, 1), id="a gap"),
        pytest.param(steps(4, 5, 6), set(), (1,), id="none"),
        pytest.param(steps(4, 5), {4, 5, 6}, (1, 1, 1), id="a record is missing"),
        pytest.param(
            steps(4, 5, 6, overflows=(5,)), {4, 6}, (1, 1, 1, 1), id="a skipped step"
        ),
        pytest.param(
            steps(4, 5, 6, without=5), {4, 5, 6}, (1, 1), id="no state after the pass"
        ),
        pytest.param(
            steps(4, 5, 6, branches={5: 2, 6: 2}),
            {4, 5, 6},
            (1, 1, 2, 2),
            id="a branch that begins after 4",
        ),
    ],
)
def test_a_window_leads_as_far_as_both_logs_do(
    log: StepLog, logged: set[int], branches: tuple[int, ...]
) -> None:
    checksums = {iteration: 100 + iteration for iteration in logged}
    reach = reach_by_gradients(log, checksums, window())
    assert reach == Reach(last=2 + len(branches), branches=branches)


ALL = {iteration: 100 + iteration for iteration in (4, 5, 6)}


def test_gradients_of_another_pass_do_not_go_with_the_record() -> None:
    """An iteration has run again, and a peer has the newer record only."""
    reach = reach_by_gradients(steps(4, 5, 6), ALL | {5: 7}, window())
    assert reach == Reach(last=4, branches=(1, 1))


@pytest.mark.parametrize(
    ("log", "snapshots"),
    [
        pytest.param(steps(5, 6), window(), id="no start"),
        pytest.param(steps(4, 5, without=5), window(end=5), id="an end too far"),
        pytest.param(
            steps(4, 5, branches={4: 2, 5: 2}),
            window(end=5),
            id="a window of an older branch",
        ),
    ],
)
def test_a_window_may_lead_nowhere(log: StepLog, snapshots: list[Snapshot]) -> None:
    assert reach_by_gradients(log, ALL, snapshots) is None


def test_steps_of_a_newer_branch_do_not_follow_an_older_state() -> None:
    log = steps(4, 5, branches={3: 2, 4: 2, 5: 2})
    assert reach_by_gradients(log, ALL, window()) == Reach(last=3, branches=(1,))
    assert reach_by_gradients(log, ALL, window(branch=2)) == Reach(
        last=5, branches=(2, 2, 2)
    )
