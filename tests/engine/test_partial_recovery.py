"""Recoveries from partial checkpoints: versions and sources of units, and the cost.

There are three jobs of two ranks. In APART each rank is a stage with experts of its
own. In TOGETHER both ranks have a piece of each expert. In SPREAD each rank has half of
the experts. In a job that `settles`, a fault at the beginning of iteration 5 finds
snapshot 4 in memory and on peers, and snapshot 3 on disk.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.errors import NothingLeftError
from moe_ckpt.events import (
    CheckpointFailed,
    CheckpointSkipped,
    ExpertsChosen,
    IterationCommitted,
    Rejoined,
    StateResumed,
    TokensLost,
)
from moe_ckpt.snapshot.blobs import held_path, own_path
from moe_ckpt.types import CORE, Phase
from tests.engine.damage import (
    Choice,
    drop_snapshots,
    flip_a_bit_of,
    is_expert_at,
    is_unit,
    let_copies_fail,
    let_writes_fail,
    snapshots_in,
)
from tests.harness.threads.history import History, LevelOf
from tests.harness.threads.job import Fault, ThreadJob, exact, uninterrupted
from tests.harness.threads.model import Shape
from tests.policies.profiles import config

APART, TOGETHER, SPREAD = (
    Shape(pp=2, dp=1),
    Shape(pp=1, dp=2),
    Shape(pp=1, dp=2, ep=2, experts=4),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "moc": {"k_snapshot": 1, "k_persist": 1, "dynamic_k": False},
    "moetion": {"experts": 1, "remote_experts": 1},
}


def _all_of(policy: str, shape: Shape, **settings: Any) -> dict[str, Any]:
    names = (
        ("k_snapshot", "k_persist")
        if policy == "moc"
        else ("experts", "remote_experts")
    )
    return dict.fromkeys(names, shape.experts) | settings


def _partial(
    folder: Path, policy: str, shape: Shape, faults: Sequence[Fault], **settings: Any
) -> ThreadJob:
    """Return a job whose snapshots take one expert each."""
    made = config(policy, **SETTINGS[policy] | settings)
    return ThreadJob(folder, made, shape, iterations=6, faults=faults, settles=True)


def _whole(
    folder: Path, policy: str, shape: Shape, faults: Sequence[Fault], **settings: Any
) -> ThreadJob:
    """Return a job whose snapshots take all experts.

    Every state is compared with the state in the job without faults.
    """
    made = config(policy, **_all_of(policy, shape, **settings))
    return ThreadJob(
        folder, made, shape, iterations=6, faults=faults, settles=True, lossless=True
    )


def _back_to(job: ThreadJob) -> list[int]:
    back_to = [
        [event.iteration for event in job.events(Rejoined, rank)] for rank in job.ranks
    ]
    assert all(each == back_to[0] for each in back_to), back_to
    return back_to[0]


BEGINS_5 = Fault(rank=1, phase=Phase.FORWARD, iteration=5)
NODE_LOST = Fault(rank=1, phase=Phase.FORWARD, iteration=5, loses_memory=True)
ALL_LOST = Fault(rank=1, phase=Phase.FORWARD, iteration=5, also=(0,), loses_memory=True)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A case of a job with all experts in each snapshot."""

    faults: Sequence[Fault]

    back_to: Sequence[int | Collection[int]]
    """Iteration to which all ranks go back in each recovery.

    A collection has all allowed iterations.
    """

    shape: Shape = APART

    policies: Sequence[str] = ("moc",)
    """Policies for which the case runs."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the policy."""


def _dies(phase: Phase, iteration: int = 4, rank: int = 1, **more: Any) -> Fault:
    return Fault(rank=rank, phase=phase, iteration=iteration, **more)


BOTH = ("moc", "moetion")
WHOLE = {
    "as an iteration begins": Whole(faults=[_dies(Phase.FORWARD)], back_to=[3]),
    "in backward": Whole(faults=[_dies(Phase.BACKWARD)], back_to=[3], policies=BOTH),
    "while gradients are reduced": Whole(
        faults=[_dies(Phase.REDUCE)], back_to=[3], shape=TOGETHER
    ),
    "before the update": Whole(faults=[_dies(Phase.STEP)], back_to=[3], shape=TOGETHER),
    "between update and gather": Whole(
        faults=[_dies(Phase.STEP, skip=1)], back_to=[3], shape=TOGETHER, policies=BOTH
    ),
    "before the snapshot": Whole(faults=[_dies(Phase.SNAPSHOT)], back_to=[3]),
    "during the snapshot": Whole(
        faults=[_dies(Phase.BETWEEN)], back_to=[(3, 4)], policies=BOTH
    ),
    "in the first iteration": Whole(
        faults=[_dies(Phase.BACKWARD, 1)], back_to=[0], policies=BOTH
    ),
    "in the first step": Whole(
        faults=[_dies(Phase.STEP, 1, skip=1)], back_to=[0], shape=TOGETHER
    ),
    "again while all go back": Whole(
        faults=[
            _dies(Phase.BACKWARD),
            Fault(rank=1, phase=Phase.RECOVERY),
            Fault(rank=0, phase=Phase.RECOVERY),
        ],
        back_to=[3],
    ),
    "right after a recovery": Whole(
        faults=[_dies(Phase.BACKWARD), _dies(Phase.FORWARD, rank=0)], back_to=[3, 3]
    ),
    "one after the other": Whole(
        faults=[_dies(Phase.STEP, 3, rank=0, skip=1), _dies(Phase.BACKWARD, 5)],
        back_to=[2, 4],
        policies=BOTH,
    ),
    "all ranks": Whole(faults=[_dies(Phase.BACKWARD, also=(0,))], back_to=[3]),
    "experts on two ranks": Whole(
        faults=[_dies(Phase.BACKWARD)], back_to=[3], shape=SPREAD
    ),
    "steps are skipped": Whole(
        faults=[_dies(Phase.BACKWARD)], back_to=[3], shape=Shape(pp=1, dp=2, skips=4)
    ),
    "a tied embedding": Whole(
        faults=[_dies(Phase.BACKWARD)], back_to=[3], shape=Shape(pp=2, dp=1, tied=True)
    ),
    "units of weights": Whole(
        faults=[_dies(Phase.BACKWARD)], back_to=[3], settings={"partial": "weights"}
    ),
    "units of moments": Whole(
        faults=[_dies(Phase.BACKWARD)], back_to=[3], settings={"partial": "moments"}
    ),
    "every other iteration": Whole(
        faults=[_dies(Phase.BACKWARD)], back_to=[2], settings={"every_iters": 2}
    ),
    "a node, from its peer": Whole(
        faults=[NODE_LOST], back_to=[4], shape=TOGETHER, policies=["moetion"]
    ),
    "a node, from its peer, sent whole": Whole(
        faults=[NODE_LOST],
        back_to=[4],
        policies=["moetion"],
        settings={"send_gradients": False},
    ),
    "a node, from disk": Whole(faults=[NODE_LOST], back_to=[3]),
    "all nodes, from disk": Whole(faults=[ALL_LOST], back_to=[3], shape=TOGETHER),
}


@pytest.mark.parametrize(
    ("policy", "case"),
    [
        pytest.param(policy, case, id=f"{policy}, {name}")
        for name, case in WHOLE.items()
        for policy in case.policies
    ],
)
def test_with_all_experts_nothing_is_lost(
    policy: str, case: Whole, tmp_path: Path
) -> None:
    job = exact(_whole(tmp_path, policy, case.shape, case.faults, **case.settings))
    for found, wanted in zip(_back_to(job), case.back_to, strict=True):
        assert found in ((wanted,) if isinstance(wanted, int) else wanted)
    for rank in job.ranks:
        assert all(
            event.plt == 0.0 and not any(event.lost_by_layer)
            for event in job.events(TokensLost, rank)
        )
        assert not list((job.memory(rank) / "fetched").rglob("*.blob")), (
            "units that came from peers were left behind"
        )


def _of_lost_rank(level: str, shape: Shape) -> LevelOf:
    """Return the levels from which units come after rank 1 has lost its memory.

    Units of which rank 1 has a piece come from `level`, and all others from memory.
    """

    def level_of(stage: int, expert: int) -> str:
        is_lost = {APART: stage == 1, TOGETHER: True, SPREAD: expert % 2 == 1}[shape]
        return level if is_lost else "memory"

    return level_of


@pytest.mark.parametrize(
    ("policy", "shape", "faults", "settings"),
    [
        pytest.param("moc", APART, [BEGINS_5], {}, id="moc, in turns"),
        pytest.param(
            "moc",
            SPREAD,
            [BEGINS_5],
            {"selection": "load"},
            id="moc, by load, experts on two ranks",
        ),
        pytest.param(
            "moc", TOGETHER, [BEGINS_5], {"partial": "weights"}, id="moc, weights"
        ),
        pytest.param(
            "moc", APART, [BEGINS_5], {"partial": "moments"}, id="moc, moments"
        ),
        pytest.param("moetion", TOGETHER, [BEGINS_5], {}, id="moetion"),
        pytest.param(
            "moetion", SPREAD, [BEGINS_5], {}, id="moetion, experts on two ranks"
        ),
        pytest.param(
            "moc",
            APART,
            [_dies(Phase.STEP, 3, rank=0), BEGINS_5],
            {},
            id="twice, counted once",
        ),
        pytest.param(
            "moc", APART, [_dies(Phase.STEP, 1, skip=1), BEGINS_5], {}, id="began anew"
        ),
        pytest.param(
            "moetion",
            APART,
            [BEGINS_5, _dies(Phase.FORWARD, 5, rank=0)],
            {},
            id="right after a recovery",
        ),
    ],
)
def test_each_expert_is_as_it_was_last_saved(
    policy: str,
    shape: Shape,
    faults: Sequence[Fault],
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    job = _partial(tmp_path, policy, shape, faults, **settings)
    history = History(job)
    job.run()
    back_to, partial = _back_to(job), settings.get("partial", "both")
    num_old = [
        history.check_recovery(epoch, partial=partial)
        for epoch, at in enumerate(back_to, 1)
        if at > 0
    ]
    assert back_to[-1] == 4
    assert num_old[0] > 0


@pytest.mark.parametrize(
    ("policy", "shape", "fault", "level", "back_to"),
    [
        ("moc", APART, NODE_LOST, "on_disk", 3),
        ("moc", TOGETHER, NODE_LOST, "on_disk", 3),
        ("moc", SPREAD, NODE_LOST, "on_disk", 3),
        ("moetion", APART, NODE_LOST, "on_peers", 4),
        ("moetion", TOGETHER, NODE_LOST, "on_peers", 4),
        ("moetion", SPREAD, NODE_LOST, "on_peers", 4),
        ("moc", APART, ALL_LOST, "on_disk", 3),
    ],
)
def test_a_lost_rank_loads_older_experts_and_others_their_own(
    policy: str, shape: Shape, fault: Fault, level: str, back_to: int, tmp_path: Path
) -> None:
    k = {"k_snapshot": 2} if policy == "moc" else {"experts": 2}
    job = _partial(tmp_path, policy, shape, [fault], **k)
    history = History(job)
    job.run()
    assert _back_to(job) == [back_to]
    level_of: LevelOf = (
        (lambda _, __: level) if fault.also else _of_lost_rank(level, shape)
    )
    assert history.check_recovery(level_of=level_of) > 0
    (rejoined,) = job.events(Rejoined, 1)
    assert (rejoined.fetched_bytes > 0) == (level == "on_peers")
    assert [event.source for event in job.events(StateResumed)] == (
        ["local disk"] if fault.also else []
    )


@pytest.mark.parametrize("level", ["own", "held", "disk"])
@pytest.mark.parametrize(
    "is_gone",
    [is_expert_at, lambda iteration: is_unit(CORE, iteration)],
    ids=["units", "core"],
)
def test_a_torn_snapshot_is_passed_over(
    level: str, is_gone: Callable[[int], Choice], tmp_path: Path
) -> None:
    """A worker that dies while it publishes a snapshot leaves some of the units.

    Such units would not fit older units.
    """
    torn = {"own": 4, "held": 4, "disk": 3}[level]

    def tear(job: ThreadJob) -> None:
        path = {
            "own": own_path(job.memory(1)),
            "held": held_path(job.memory(0), 1),
            "disk": job.disk(1),
        }[level]
        drop_snapshots(path, is_gone(torn))

    policy = "moetion" if level == "held" else "moc"
    fault = Fault(
        rank=1,
        phase=Phase.FORWARD,
        iteration=5,
        loses_memory=level != "own",
        before_restart=tear,
    )
    job = exact(_whole(tmp_path, policy, APART, [fault]))
    assert _back_to(job) == [torn - 1]


@pytest.mark.parametrize(
    ("policy", "elsewhere"), [("moc", "local disk"), ("moetion", "memory of rank 0")]
)
def test_a_damaged_unit_comes_from_another_level(
    policy: str, elsewhere: str, tmp_path: Path
) -> None:
    """A bit is wrong in the only version of an expert in the rank's own memory.

    Another level has the same version.
    """
    damaged: list[str] = []

    def damage(job: ThreadJob) -> None:
        units = list(snapshots_in(own_path(job.memory(1))).values())
        names = Counter(unit.unit.name for unit in units if unit.unit)
        only = next(unit for unit in units if unit.unit and names[unit.unit.name] == 1)
        assert only.unit
        damaged.append(str(only))
        flip_a_bit_of(own_path(job.memory(1)), is_unit(only.unit.name))

    fault = replace(BEGINS_5, before_restart=damage)
    job = _partial(tmp_path, policy, APART, [fault])
    history = History(job)
    job.run()
    assert _back_to(job) == [4]
    assert history.check_recovery() > 0
    assert {event.source for event in job.events(CheckpointSkipped, 1)} == set(damaged)
    assert elsewhere in job.notes[1][0]


def test_a_damaged_core_takes_all_ranks_one_snapshot_further_back(
    tmp_path: Path,
) -> None:
    def damage(job: ThreadJob) -> None:
        flip_a_bit_of(own_path(job.memory(1)), is_unit(CORE, 4))

    job = exact(
        _whole(tmp_path, "moc", APART, [replace(BEGINS_5, before_restart=damage)])
    )
    assert _back_to(job) == [3]


def _foreign_run(folder: Path) -> Path:
    """Return the memory of rank 1 after a job of another run, which trained further."""
    other = ThreadJob(
        folder / "other",
        config("moc", **SETTINGS["moc"]),
        APART,
        iterations=7,
        run_id="other",
    )
    other.run()
    return own_path(other.memory(1))


@pytest.mark.parametrize(
    ("foreign_of", "reason"),
    [
        (_foreign_run, "got run id other"),
        (lambda folder: own_path(folder / "job" / "memory" / "rank0000"), "shard"),
    ],
    ids=["run", "rank"],
)
def test_foreign_units_are_refused(
    foreign_of: Callable[[Path], Path], reason: str, tmp_path: Path
) -> None:
    """Rank 1's memory has foreign units, and rank 1's disk has the rank's own units."""

    def put_in_its_place(job: ThreadJob) -> None:
        shutil.rmtree(own_path(job.memory(1)), ignore_errors=True)
        shutil.copytree(foreign_of(tmp_path), own_path(job.memory(1)))

    fault = Fault(
        rank=1,
        phase=Phase.FORWARD,
        iteration=5,
        loses_memory=True,
        before_restart=put_in_its_place,
    )
    job = _partial(tmp_path / "job", "moc", APART, [fault])
    history = History(job)
    job.run()
    assert _back_to(job) == [3]
    history.check_recovery(level_of=_of_lost_rank("on_disk", APART))
    reasons = [event.reason for event in job.events(CheckpointSkipped, 1)]
    assert reasons
    assert all(reason in each for each in reasons), reasons


def _epochs_in(job: ThreadJob) -> set[int]:
    """Return the epochs of all units in the ranks' own memory."""
    units = [
        unit
        for rank in job.ranks
        for unit in snapshots_in(own_path(job.memory(rank))).values()
    ]
    return {unit.unit.epoch for unit in units if unit.unit}


@pytest.mark.parametrize(
    ("faults", "epoch"),
    [
        ([], 0),
        ([BEGINS_5], 1),
        ([_dies(Phase.BACKWARD, 1), BEGINS_5], 2),
        ([_dies(Phase.BACKWARD, 3), BEGINS_5], 2),
        ([_dies(Phase.BACKWARD, 3), NODE_LOST], 2),
        ([_dies(Phase.BACKWARD, 3), ALL_LOST], 2),
    ],
    ids=[
        "none",
        "one",
        "began anew",
        "two",
        "a node, from disk",
        "all nodes, from disk",
    ],
)
def test_every_recovery_begins_an_epoch(
    faults: Sequence[Fault], epoch: int, tmp_path: Path
) -> None:
    job = _partial(tmp_path, "moc", APART, faults)
    job.run()
    assert _epochs_in(job) == {epoch}


def test_after_a_checkpoint_nothing_on_disks_is_of_the_epoch(tmp_path: Path) -> None:
    """Rank 1's disk and all memory are lost.

    Rank 0's disk has units of iterations that may run again, and may differ then.
    """
    left: set[int] = set()

    def lose_a_disk(job: ThreadJob) -> None:
        shutil.rmtree(job.disk(1))
        left.update(header.iteration for header in snapshots_in(job.disk(0)).values())

    fault = Fault(
        rank=1,
        phase=Phase.FORWARD,
        iteration=5,
        also=(0,),
        loses_memory=True,
        before_restart=lose_a_disk,
    )
    job = _partial(tmp_path, "moc", APART, [fault], durable_every_iters=2)
    job.run()
    (resumed,) = job.events(StateResumed)
    assert resumed.iteration == 4
    assert Path(resumed.source).name == "iter_0000004"
    assert resumed.passed_over == [
        "local disk: got snapshots up to iteration (rank 0: 3, rank 1: None), " + _SAME
    ]
    assert max(left) == 3
    assert _epochs_in(job) == {1}


_SAME = (
    "wanted whole ones, of this run and layout, that lead all ranks to one iteration"
)


def _lose_copies(job: ThreadJob) -> None:
    shutil.rmtree(held_path(job.memory(0), 1))


NOTHING_LEFT = Fault(
    rank=1,
    phase=Phase.FORWARD,
    iteration=5,
    loses_memory=True,
    before_restart=_lose_copies,
)


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({"durable_every_iters": 3}, "iter_0000003"),
        ({"durable_every_iters": 2, "disk_every_iters": 1}, None),
    ],
    ids=["to a checkpoint", "to local disks"],
)
def test_where_memory_is_no_use_all_go_to_disk(
    settings: dict[str, Any], source: str | None, tmp_path: Path
) -> None:
    """The recovery itself reads local disks. Checkpoints are the next level below."""
    job = exact(_whole(tmp_path, "moetion", APART, [NOTHING_LEFT], **settings))
    assert _back_to(job) == [3]
    resumed = job.events(StateResumed)
    assert [Path(event.source).name for event in resumed] == (
        [source] if source else []
    )
    assert all(
        event.passed_over[0].startswith("host memory: partial checkpoints: got")
        for event in resumed
    )


def test_after_a_checkpoint_ranks_of_a_stage_account_alike(tmp_path: Path) -> None:
    """The checkpoint has no token account.

    The surviving rank begins a new account, as its replaced peer does.
    """
    job = _partial(tmp_path, "moetion", TOGETHER, [NOTHING_LEFT], durable_every_iters=3)
    job.run()
    assert [event.iteration for event in job.events(StateResumed)] == [3]
    seen = [_seen_tokens(job, rank) for rank in job.ranks]
    assert seen[0] == seen[1]
    assert any(seen[0].values())


def _seen_tokens(job: ThreadJob, rank: int) -> dict[tuple[str, int], int]:
    headers = snapshots_in(own_path(job.memory(rank))).values()
    units = [
        (header.unit, header.iteration)
        for header in headers
        if header.unit and header.unit.name != CORE
    ]
    return {(unit.name, iteration): unit.seen_tokens for unit, iteration in units}


def test_where_nothing_is_left_the_job_says_so(tmp_path: Path) -> None:
    job = _whole(tmp_path, "moetion", APART, [NOTHING_LEFT])
    with pytest.raises(
        NothingLeftError,
        match=r"got those of iterations \(rank 0: 3, 4; rank 1: none\), wanted one",
    ):
        job.run()


def test_copies_that_a_peer_cannot_send_count_as_none(tmp_path: Path) -> None:
    """The copies disappear after all ranks have planned with the copies.

    All ranks plan again, and rank 1 loads its units from disk.
    """
    job = _partial(
        tmp_path, "moetion", APART, [NODE_LOST], experts=2, disk_every_iters=1
    )
    asked: list[tuple[int, int]] = []

    def lose(rank: int, holder: int) -> None:
        asked.append((rank, holder))
        _lose_copies(job)

    job.before_fetch = lose
    history = History(job)
    job.run()
    assert asked == [(1, 0)]
    assert _back_to(job) == [3]
    history.check_recovery(level_of=_of_lost_rank("on_disk", APART))


def test_units_that_a_dead_worker_left_fail_no_level(tmp_path: Path) -> None:
    """A worker that dies in its recovery leaves fetched units.

    The next worker does not mistake such units for units of a peer.
    """

    def leave_units(job: ThreadJob) -> None:
        shutil.copytree(own_path(job.memory(0)), job.memory(1) / "fetched")

    job = exact(
        _whole(
            tmp_path,
            "moetion",
            TOGETHER,
            [replace(NODE_LOST, before_restart=leave_units)],
        )
    )
    assert _back_to(job) == [4]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [1, 2, 4]),
        ({"k_snapshot": 3, "plt_limit": 0.99}, [3, 3, 3]),
        ({"dynamic_k": False}, [1, 1, 1]),
    ],
    ids=["doubled", "below the limit", "switched off"],
)
def test_experts_double_where_faults_cost_too_much(
    settings: dict[str, Any], sizes: list[int], tmp_path: Path
) -> None:
    """Snapshots store the number of experts that a recovery has chosen.

    The stored number holds after the next recovery.
    """
    faults = [_dies(Phase.BACKWARD, 3), _dies(Phase.BACKWARD, 5, rank=0)]
    job = _partial(
        tmp_path,
        "moc",
        Shape(pp=2, dp=1, experts=4),
        faults,
        **{"dynamic_k": True} | settings,
    )
    job.run()
    chosen = {
        event.iteration: len(event.memory[0]) for event in job.events(ExpertsChosen)
    }
    assert _back_to(job) == [2, 4]
    assert [chosen[1], chosen[3], chosen[6]] == sizes


def test_units_on_disk_are_the_next_start_s_if_memory_is_gone(tmp_path: Path) -> None:
    settings = config("moc", **_all_of("moc", APART))
    ThreadJob(
        tmp_path, settings, APART, iterations=3, settles=True, lossless=True
    ).run()
    shutil.rmtree(tmp_path / "memory")
    job = ThreadJob(tmp_path, settings, APART, iterations=6, lossless=True)
    assert job.run().digests == uninterrupted(APART, 6).digests
    assert [event.source for event in job.events(StateResumed)] == ["local disk"]
    committed = [event.iteration for event in job.events(IterationCommitted)]
    assert committed.count(1) == 1
    assert committed[-1] == 6


def test_units_of_another_run_on_disk_are_no_start(tmp_path: Path) -> None:
    settings = config("moc", **SETTINGS["moc"])
    ThreadJob(tmp_path, settings, APART, iterations=3, settles=True).run()
    shutil.rmtree(tmp_path / "memory")
    job = ThreadJob(
        tmp_path, settings, APART, iterations=3, run_id="other", lossless=True
    )
    assert job.run().digests == uninterrupted(APART, 3).digests
    assert not job.events(StateResumed)
    assert all(
        "got run id run, wanted other" in event.reason
        for event in job.events(CheckpointSkipped, 1)
    )
    assert job.events(CheckpointSkipped, 1)


MANY = Shape(pp=2, dp=1, experts=6)
"""A snapshot takes one of six experts. An expert's next turn is after the job's end."""


def test_a_unit_whose_write_failed_is_written_with_the_next_snapshot(
    tmp_path: Path,
) -> None:
    """Until then the disk keeps the initial state of the expert."""
    job = _partial(
        tmp_path,
        "moc",
        MANY,
        [Fault(rank=1, phase=Phase.FORWARD, iteration=6, loses_memory=True)],
    )

    def fail_once(_: object) -> None:
        disk = job.rank_memory(1).disk
        assert disk is not None
        let_writes_fail(disk, lambda number: number == 1)

    job.upsets[1, 1] = fail_once
    job.run()
    [failed] = job.events(CheckpointFailed, 1)
    assert failed.iteration in (1, 2), "a disk may be busy with the snapshot before"
    assert _back_to(job)[0] > failed.iteration


@pytest.mark.parametrize(
    ("phase", "iteration", "back_to"), [(Phase.STEP, 4, 2), (Phase.BACKWARD, 5, 4)]
)
@pytest.mark.parametrize(
    "shape",
    [MANY, Shape(pp=1, dp=2, ep=2, experts=2)],
    ids=["all lack some", "one has all"],
)
def test_an_epoch_whose_first_snapshot_failed_replaces_none(
    shape: Shape, phase: Phase, iteration: int, back_to: int, tmp_path: Path
) -> None:
    """Older snapshots stay until one takes all experts again, as the second does."""
    faults = [_dies(Phase.BACKWARD, 3), _dies(phase, iteration)]
    job = _partial(tmp_path, "moc", shape, faults, disk_every_iters=0)

    def fail_in_the_second_epoch(rank: int, _: object) -> None:
        if rank == 1 and len(job.struck) == 1:
            let_copies_fail(job.models[1], 1, 1)

    job.on_worker.append(fail_in_the_second_epoch)
    job.run()
    assert _back_to(job) == [2, back_to]


def test_epochs_go_on_where_all_begin_anew(tmp_path: Path) -> None:
    """All ranks go back to the beginning twice, the second time without a snapshot.

    Then a node is lost.
    """
    faults = [_dies(Phase.BACKWARD, 2), _dies(Phase.BACKWARD, 1), NODE_LOST]
    job = exact(
        _whole(
            tmp_path, "moetion", Shape(pp=1, dp=3), faults, replicas=2, every_iters=2
        )
    )
    assert _back_to(job) == [0, 0, 4]
