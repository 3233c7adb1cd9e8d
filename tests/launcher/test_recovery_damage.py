"""What cannot be trusted is refused by name, and the next better source is taken; with none left, the run says so.

Damage is done to the host memory of a running job, on the rank named, right before state is lost.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.config import Settings, compose_settings
from launcher.run import run
from moe_ckpt.adapters.megatron_operators import RankOperators
from moe_ckpt.adapters.megatron_wipe import StateWiper
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import CheckpointFailed, CheckpointSkipped, ReplayDiffered, StageRecovered
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.runtime.session import Session
from moe_ckpt.runtime.sparse import SparseStores
from moe_ckpt.store.boundary import BoundaryLog, Direction
from moe_ckpt.store.memory import HostBuffers, Window
from moe_ckpt.store.snapshot import Copied, SnapshotEngine
from moe_ckpt.types import ReadyGradients
from tests.ranks import RankFailedError, rank_store, run_ranks
from tests.training import events_of, fast, losing, losses, train

JOB = ("parallel.pp=2", "train.iterations=12")  # two ranks, one a stage
LOST = losing((11, 1, "forward"))  # complete by then: windows 1-3, 4-6, 7-9
TWO_KEPT = ("ckpt.window=3", "ckpt.keep_windows=2")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Done by `inflict` to the stores of `global_rank` when `iteration` starts."""

    inflict: Callable[[SparseStores], None]
    global_rank: int = 1
    iteration: int = 11


class DamagingHooks:
    """Damages a rank's host memory on cue."""

    def __init__(self, inner: TrainingHooks, damage: Damage) -> None:
        assert isinstance(inner, Session)
        self._inner = inner
        self._damage = damage

    def iteration_started(self, iteration: int) -> None:
        if iteration == self._damage.iteration and torch.distributed.get_rank() == self._damage.global_rank:
            assert self._inner.sparse is not None
            self._damage.inflict(self._inner.sparse.stores)
        self._inner.iteration_started(iteration)

    def loss_known(self, iteration: int, loss: float) -> None:
        self._inner.loss_known(iteration, loss)

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        return self._inner.gradients_ready(iteration, gradients)

    def update_applied(self, iteration: int) -> None:
        self._inner.update_applied(iteration)

    def step_committed(self, iteration: int) -> None:
        self._inner.step_committed(iteration)


def _newest(stores: SparseStores) -> Window:
    return stores.memory.windows()[0]


def flip_a_byte(stores: SparseStores) -> None:
    snapshot = _newest(stores).snapshots[1]
    snapshot.payload[snapshot.header.payload_bytes // 2] ^= 1


def flip_a_byte_everywhere(stores: SparseStores) -> None:
    for window in stores.memory.windows():
        window.snapshots[0].payload[0] ^= 1


def _change_header(stores: SparseStores, **changes: Any) -> None:
    snapshot = _newest(stores).snapshots[2]
    object.__setattr__(snapshot, "header", replace(snapshot.header, **changes))


def take_another_runs(stores: SparseStores) -> None:
    identity = _newest(stores).snapshots[2].header.identity
    _change_header(stores, identity=replace(identity, run_id="another"))


def take_another_layouts(stores: SparseStores) -> None:
    identity = _newest(stores).snapshots[2].header.identity
    _change_header(stores, identity=replace(identity, layout=replace(identity.layout, ep=2)))


def take_another_shards(stores: SparseStores) -> None:
    _change_header(stores, shard=replace(_newest(stores).snapshots[2].header.shard, pp_rank=0))


def lose_a_slot(stores: SparseStores) -> None:
    window = _newest(stores)
    object.__setattr__(window, "snapshots", window.snapshots[:1] + window.snapshots[2:])


def flip_a_byte_of_the_boundary_log(stores: SparseStores) -> None:
    assert stores.boundary is not None
    stores.boundary.sent(9, Direction.ACTIVATION)[0][5] ^= 1


def _run_damaged(settings: Settings, damage: Damage) -> dict[str, Any]:
    return run(settings, store=rank_store(), around_hooks=lambda hooks: DamagingHooks(hooks, damage))


def train_damaged(folder: Path, damage: Damage, *overrides: str) -> dict[str, Any]:
    settings = compose_settings((*fast(*JOB), *overrides, f"run.dir={folder}"))
    return run_ranks(2, _run_damaged, settings, damage)[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[int, float]]:
    folder = tmp_path_factory.mktemp("whole")
    return train(2, folder, *JOB)["digest_per_rank"], losses(folder)


@pytest.mark.parametrize(
    ("inflict", "reason"),
    [
        (flip_a_byte, "rank 1's snapshot of iteration 8 .*checksum"),
        (take_another_runs, "rank 1's snapshot of iteration 9 .*another"),
        (take_another_layouts, "rank 1's snapshot of iteration 9 .*EP=2"),
        (take_another_shards, "rank 1's snapshot of iteration 9 .*pp 0"),
        (lose_a_slot, "slot"),
    ],
)
def test_a_window_that_cannot_be_trusted_is_refused_and_the_next_older_one_used(
    inflict: Callable[[SparseStores], None], reason: str, tmp_path: Path, expected: tuple[list[str], dict[int, float]]
) -> None:
    result = train_damaged(tmp_path, Damage(inflict=inflict), *LOST, *TWO_KEPT)
    (skipped,) = events_of(tmp_path, CheckpointSkipped, 1)
    assert "window" in skipped.source
    assert "7" in skipped.source
    assert re.search(reason, skipped.reason), skipped.reason
    assert [event.window_start for event in events_of(tmp_path, StageRecovered, 1)] == [4]
    assert (result["digest_per_rank"], losses(tmp_path)) == expected


def test_with_nothing_left_the_error_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as failed:
        train_damaged(tmp_path, Damage(inflict=flip_a_byte_everywhere), *LOST, "ckpt.window=3")
    assert str(failed.value).count("stages [1] cannot be rebuilt at iteration 10: looked for a complete window") == 2


def test_a_damaged_boundary_log_makes_all_stages_roll_back(
    tmp_path: Path, expected: tuple[list[str], dict[int, float]]
) -> None:
    damage = Damage(inflict=flip_a_byte_of_the_boundary_log, global_rank=0)
    result = train_damaged(tmp_path, damage, *LOST, "ckpt.window=3")
    assert [event.first_stage for event in events_of(tmp_path, StageRecovered)] == [0]
    assert (result["digest_per_rank"], losses(tmp_path)) == expected


def _change_a_weight_of_a_healthy_rank(settings: Settings) -> dict[str, Any]:
    """Corrupt a weight of rank 2, as a bit that flips in memory would, before its live state is first hashed."""
    digests, corrupted = RankOperators.digests, []

    def corrupting(operators: RankOperators) -> dict[str, str]:
        if torch.distributed.get_rank() == 2 and not corrupted:
            corrupted.append(operators.parameters[0])
            corrupted[0].weights()[0] += 1.0
        return digests(operators)

    RankOperators.digests = corrupting  # type: ignore[method-assign]
    return run(settings, store=rank_store())


def test_a_healthy_rank_that_differs_from_its_replay_is_reported(tmp_path: Path) -> None:
    overrides = (*fast("train.iterations=12"), *losing((10, 1, "forward", 1)), "ckpt.window=3", f"run.dir={tmp_path}")
    with pytest.raises(
        RankFailedError, match="rank 2: replaying to iteration 9 gave another state of layer 1 than the rank had"
    ):
        run_ranks(4, _change_a_weight_of_a_healthy_rank, compose_settings(overrides))
    assert [event.operators for event in events_of(tmp_path, ReplayDiffered, 2)] == [["layer 1"]]


def _run_with_a_copy_that_fails(settings: Settings) -> dict[str, Any]:
    """Fail the snapshot of iteration 5, slot 1 of the window from 4, on rank 1."""
    calls = 0
    take = RankOperators.pieces

    def pieces(operators: RankOperators, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6 and torch.distributed.get_rank() == 1:  # the base is the first
            raise RuntimeError("out of memory")
        return take(operators, *arguments)

    RankOperators.pieces = pieces  # type: ignore[method-assign]
    return run(settings, store=rank_store())


@pytest.mark.parametrize("strict", [False, True])
def test_a_snapshot_that_fails_never_stops_training_unless_told_to(
    strict: bool, tmp_path: Path, expected: tuple[list[str], dict[int, float]]
) -> None:
    settings = compose_settings(
        (*fast(*JOB), *losing((8, 0, "step")), "ckpt.window=3", f"ckpt.strict={strict}", f"run.dir={tmp_path}")
    )
    if strict:
        with pytest.raises(RankFailedError, match="a snapshot is not complete on every rank"):
            run_ranks(2, _run_with_a_copy_that_fails, settings)
        return
    result = run_ranks(2, _run_with_a_copy_that_fails, settings)[0]
    (failure,) = events_of(tmp_path, CheckpointFailed, 1)
    assert (failure.iteration, "out of memory" in failure.reason) == (5, True)
    assert [event.window_start for event in events_of(tmp_path, StageRecovered)] == [1]  # not 4: no rank keeps that
    assert (result["digest_per_rank"], losses(tmp_path)) == expected


def _run_with_a_copy_held_until_its_state_is_lost(settings: Settings, held: int) -> dict[str, Any]:
    """Hold the copy of snapshot `held` (from 1) on rank 1 until its state is being lost; it ends with the loss."""
    may_copy, copied = threading.Event(), threading.Event()
    copy, wipe, discard = SnapshotEngine._copy, StateWiper.wipe, SnapshotEngine.discard_torn
    num_taken = 0

    def holding_copy(engine: SnapshotEngine, *arguments: Any) -> Copied:
        nonlocal num_taken
        num_taken += 1
        if num_taken != held:
            return copy(engine, *arguments)
        assert may_copy.wait(30)
        done = copy(engine, *arguments)
        copied.set()
        return done

    def discard_at_last(engine: SnapshotEngine) -> None:
        may_copy.set()
        discard(engine)

    def wipe_and_let_copy(wiper: StateWiper) -> None:
        wipe(wiper)
        may_copy.set()
        assert copied.wait(30)

    if os.environ["RANK"] == "1":
        SnapshotEngine._copy = holding_copy  # type: ignore[method-assign]
        StateWiper.wipe = wipe_and_let_copy  # type: ignore[method-assign]
        SnapshotEngine.discard_torn = discard_at_last  # type: ignore[method-assign]
    return run(settings, store=rank_store())


@pytest.mark.parametrize(("phase", "held"), [("forward", 5), ("between", 6)])
def test_a_snapshot_that_the_loss_tears_is_not_kept(
    phase: str, held: int, tmp_path: Path, expected: tuple[list[str], dict[int, float]]
) -> None:
    again = 5 if phase == "forward" else 6  # the second recovery starts from the snapshot that the first loss tears
    lost = losing((5, 1, phase), (again, 1, "step"))
    settings = compose_settings((*fast(*JOB), *lost, "ckpt.window=1", f"run.dir={tmp_path}"))
    result = run_ranks(2, _run_with_a_copy_held_until_its_state_is_lost, settings, held)[0]
    assert (result["digest_per_rank"], losses(tmp_path)) == expected


def _run_without_memory_for_the_log(settings: Settings) -> dict[str, Any]:
    """Refuse the host memory that rank 0 wants for the boundary log of iteration 9."""
    acquire, record = HostBuffers.acquire, BoundaryLog.record

    def refuse(buffers: HostBuffers, nbytes: int) -> torch.Tensor:
        raise CheckpointSaveError(f"no memory for {nbytes} bytes")

    def failing_record(log: BoundaryLog, *arguments: Any) -> None:
        fails = torch.distributed.get_rank() == 0 and max(log._iterations, default=0) == 9
        HostBuffers.acquire = refuse if fails else acquire  # type: ignore[method-assign]
        record(log, *arguments)
        HostBuffers.acquire = acquire  # type: ignore[method-assign]

    BoundaryLog.record = failing_record  # type: ignore[method-assign]
    return run(settings, store=rank_store())


def test_a_log_that_cannot_be_written_makes_all_stages_roll_back_and_stops_nothing(
    tmp_path: Path, expected: tuple[list[str], dict[int, float]]
) -> None:
    settings = compose_settings((*fast(*JOB), *LOST, "ckpt.window=4", f"run.dir={tmp_path}"))  # windows 1-4, 5-8
    result = run_ranks(2, _run_without_memory_for_the_log, settings)[0]
    assert [event.first_stage for event in events_of(tmp_path, StageRecovered)] == [0]
    assert (result["digest_per_rank"], losses(tmp_path)) == expected


def _run_with_copies_that_always_fail(settings: Settings) -> list[int]:
    """Return the bytes that rank 1 has logged at the end, where none of its snapshots but the base succeeds."""
    calls, take = 0, RankOperators.pieces

    def pieces(operators: RankOperators, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1 and torch.distributed.get_rank() == 1:
            raise RuntimeError("out of memory")
        return take(operators, *arguments)

    RankOperators.pieces = pieces  # type: ignore[method-assign]
    sessions: list[Any] = []
    run(settings, store=rank_store(), around_hooks=lambda hooks: sessions.append(hooks) or hooks)
    stores = sessions[0].sparse.stores
    return [stores.boundary.size_bytes, stores.steps.size_bytes]


def test_logs_end_somewhere_even_if_no_window_is_ever_complete(tmp_path: Path) -> None:
    sizes = []
    for name, iterations in (("short", 30), ("long", 45)):
        job = ("parallel.pp=2", f"train.iterations={iterations}", "ckpt=moevement", "ckpt.window=2")
        settings = compose_settings((*fast(*job), f"run.dir={tmp_path / name}"))
        sizes.append(run_ranks(2, _run_with_copies_that_always_fail, settings))
    assert sizes[0] == sizes[1]
