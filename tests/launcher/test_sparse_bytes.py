"""What snapshots and logs of a real job take: the bytes that the formulas say, and no more over time."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from launcher.config import Settings, compose_settings
from launcher.run import run
from moe_ckpt.engine.session import Session
from moe_ckpt.events import CheckpointFailed, HostMemoryUsed, SnapshotTaken, WindowChosen
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.snapshot.units import UnitMemory
from moe_ckpt.snapshot.windows import SnapshotMemory
from tests.ranks import RankFailedError, rank_store, run_ranks
from tests.training import events_of, fast, train

BYTES_AN_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}


def _bytes_by_slot_and_role(settings: Settings) -> list[dict[str, int]]:
    """Return, for each slot of the newest window, this rank's bytes by role, once the run is over."""
    sessions: list[TrainingHooks] = []
    run(settings, store=rank_store(), around_hooks=lambda hooks: sessions.append(hooks) or hooks)
    (session,) = sessions
    assert isinstance(session, Session)
    assert session.sparse is not None
    return _by_role(session.sparse.stores.memory)


def _by_role(memory: SnapshotMemory | UnitMemory) -> list[dict[str, int]]:
    slots = []
    for snapshot in memory.windows()[0].snapshots:
        sizes: dict[str, int] = defaultdict(int)
        for part in snapshot.header.parts:
            sizes[part.key.role] += part.nbytes
        assert sum(sizes.values()) == snapshot.header.payload_bytes
        slots.append(dict(sizes))
    return slots


@pytest.mark.parametrize(
    ("dtype", "sharding"),
    [
        ("bf16", "sharded"),
        ("fp32", "not sharded"),
        pytest.param("bf16", "not sharded", marks=pytest.mark.full),
        pytest.param("fp32", "sharded", marks=pytest.mark.full),
    ],
)
def test_a_slot_holds_its_share_in_full_and_later_operators_as_weights(
    dtype: str, sharding: str, tmp_path: Path
) -> None:
    """12 bytes a parameter of the operators of its share, and the compute weights of those of later slots."""
    settings = compose_settings(
        (
            *fast("parallel.pp=2", f"precision={dtype}", "train.iterations=7", "ckpt=moevement", "ckpt.window=3"),
            f"train.distributed_optimizer={str(sharding == 'sharded').lower()}",
            f"run.dir={tmp_path}",
        )
    )
    by_rank = run_ranks(4, _bytes_by_slot_and_role, settings)
    for stage in (by_rank[:2], by_rank[2:]):  # the ranks of a stage group together hold every byte once
        slots = [{role: sum(rank[slot].get(role, 0) for rank in stage) for role in stage[0][0]} for slot in range(3)]
        slots = [defaultdict(int, slot) for slot in slots]
        num_taken = [slot["master"] // 4 for slot in slots]
        for index, slot in enumerate(slots):
            assert slot["master"] == slot["exp_avg"] == slot["exp_avg_sq"]  # 12 bytes a parameter
            assert slot["compute"] == BYTES_AN_ELEMENT[dtype] * sum(num_taken[index + 1 :])
        shares = [taken / sum(num_taken) for taken in num_taken]
        assert max(shares) < 0.5, shares  # a = 1/3, as far as operators allow


@pytest.fixture(scope="module")
def ten_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two stages that has taken ten windows of three snapshots."""
    folder = tmp_path_factory.mktemp("job")
    train(2, folder, "parallel.pp=2", "train.iterations=30", "ckpt=moevement", "ckpt.window=3")
    return folder


def test_snapshots_are_reported_beside_dense_ones(ten_windows: Path) -> None:
    base, *sparse = events_of(ten_windows, SnapshotTaken)
    assert base.size_bytes == base.dense_bytes
    assert all(taken.size_bytes < 0.75 * taken.dense_bytes for taken in sparse)
    assert [(taken.iteration, taken.slot) for taken in sparse[:4]] == [(1, 0), (2, 1), (3, 2), (4, 0)]


def test_host_memory_is_reused_and_does_not_grow(ten_windows: Path) -> None:
    used = events_of(ten_windows, HostMemoryUsed)
    assert len(used) == 10
    assert len({memory.allocated_bytes for memory in used[4:]}) == 1


def test_logs_end_with_the_window_that_needs_them(ten_windows: Path) -> None:
    used = events_of(ten_windows, HostMemoryUsed)[1:]
    per_iteration = 4 * (16 * 2 * 32 * 2)  # micro-batches x tokens x sequences x hidden x bf16, sent downstream
    assert {memory.boundary_log_bytes for memory in used} == {3 * per_iteration}  # iterations after the window's start


def test_the_policy_chooses_its_own_window(tmp_path: Path) -> None:
    train(2, tmp_path, "parallel.pp=2", "train.iterations=12", "ckpt=moevement", "ckpt.profile_iters=3")
    first, *_ = events_of(tmp_path, WindowChosen)
    assert (first.iteration, first.num_slots) == (4, first.fitting)
    assert first.iteration_s > 0
    assert first.copy_bytes_per_s > 0


def test_operators_are_ordered_anew_when_enough_experts_have_changed(tmp_path: Path) -> None:
    job = ("parallel.pp=2", "train.iterations=8", "ckpt=moevement", "ckpt.window=2")
    train(2, tmp_path / "always", *job, "ckpt.reorder_share=0")
    train(2, tmp_path / "never", *job, "ckpt.reorder_change=1000")
    reordered = [
        [chosen.reordered for chosen in events_of(tmp_path / run, WindowChosen)] for run in ("always", "never")
    ]
    assert reordered == [[True, True, True, True], [True, False, False, False]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("ckpt.window=400",), r"ckpt\.window: got 400, wanted at most \d+, the operators of the largest stage"),
        (("ckpt.memory_budget_bytes=1000",), r"ckpt\.memory_budget_bytes: got 1000, wanted with a window of 1"),
        (
            ("ckpt.memory_budget_bytes=1000", "ckpt.window=3"),
            r"ckpt\.memory_budget_bytes: got 1000, wanted with a window of 3",
        ),
    ],
)
def test_a_window_or_budget_that_cannot_work_is_refused_with_the_numbers(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailedError, match=message):
        train(2, tmp_path, "ckpt=moevement", "train.iterations=2", *overrides)


def test_a_budget_is_respected(tmp_path: Path) -> None:
    train(1, tmp_path / "free", "train.iterations=8", "ckpt=moevement", "ckpt.window=2")
    budget = max(memory.allocated_bytes for memory in events_of(tmp_path / "free", HostMemoryUsed)) * 5 // 4
    tight = (f"ckpt.memory_budget_bytes={budget}", "ckpt.window=2")
    train(1, tmp_path / "tight", "train.iterations=8", "ckpt=moevement", *tight)
    assert max(memory.allocated_bytes for memory in events_of(tmp_path / "tight", HostMemoryUsed)) <= budget
    assert not events_of(tmp_path / "tight", CheckpointFailed)
