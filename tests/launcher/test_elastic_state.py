"""`run.exactness=state`: after a death, ranks have states that they had logged before.

Training here never reaches a state twice. The jobs are real, because the tests compare
the states that real processes had in memory before one of the processes was killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.prove.compare import first_changed, read_digests
from moe_ckpt.events import StateResumed, TokensLost
from moe_ckpt.types import Phase
from tests.harness.gloo.ranks import RankFailedError
from tests.harness.jobs.campaign import Fault, Point, all_go_back, survive
from tests.harness.jobs.noise import add_noise
from tests.harness.jobs.training import Kill, events_of, train

WORLD_SIZE = 4
SETTINGS = {
    "gemini": ("ckpt.every_iters=1",),
    "checkfreq": ("ckpt.every_iters=1",),
    "moc": ("ckpt.every_iters=1", "ckpt.k_snapshot=4", "ckpt.k_persist=4"),
    "moetion": (
        "ckpt.every_iters=1",
        "ckpt.experts=4",
        "ckpt.remote_experts=4",
        "ckpt.bubble_copies=false",
    ),
    "flowcheck": ("ckpt.max_lag_iters=0",),
}
# in the default run: gemini recovers whole snapshots from memory, moetion recovers
# experts, and peers make some of the snapshots of experts
IN_SHORT = ("gemini", "moetion")
FAULTS = [
    all_go_back("as an iteration begins", range(4), Point(2, Phase.FORWARD, 4)),
    all_go_back("in backward", range(7), Point(0, Phase.BACKWARD, 7)),
    all_go_back("before the step", range(10), Point(1, Phase.REDUCE, 10)),
    all_go_back(
        "between update and gather", range(14), Point(3, Phase.STEP, 13, skip=1)
    ),
    all_go_back("before a snapshot", range(17), Point(2, Phase.SNAPSHOT, 16)),
    all_go_back("between iterations", range(20), Point(0, Phase.BETWEEN, 19)),
    all_go_back(
        "again while all go back",
        range(22),
        Point(1, Phase.FORWARD, 22),
        Point(3, Phase.RECOVERY),
    ),
]
PROMISE = ("run.exactness=state", "run.digest_tensors=true")


def test_no_state_is_reached_twice_by_training(tmp_path: Path) -> None:
    """A replay must not end in states from before the fault.

    Otherwise the tests below could not tell a replay from a recovery.
    """
    at = Point(0, Phase.BACKWARD, 7)
    fault = Fault(
        name="a replay", at=[at], back_to=range(8), replaying=None, executed=None
    )
    settings = ("ckpt.window=2", "run.digest_tensors=true")
    job = survive(
        tmp_path,
        [fault],
        "train.iterations=12",
        settings=settings,
        setup=add_noise,
        is_exact=False,
    )
    digests = read_digests(job.run)
    assert first_changed(digests, may_be_older=False) is not None, "moevement replays"


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.full)
        for name in SETTINGS
    ],
)
def test_all_ranks_have_a_state_from_before(tmp_path: Path, policy: str) -> None:
    settings = (*PROMISE, *SETTINGS[policy])
    job = survive(
        tmp_path,
        FAULTS,
        "train.iterations=24",
        ckpt=policy,
        settings=settings,
        setup=add_noise,
        is_exact=False,
    )
    digests = read_digests(job.run)
    assert digests.exactness == "state"
    # a rank that dies before it logs an iteration has no digest of that iteration to
    # compare
    assert len(digests.returns) > len(FAULTS) * (WORLD_SIZE - 1) - 1
    assert first_changed(digests, may_be_older=False) is None
    if policy in ("moc", "moetion"):
        assert all(
            event.plt == 0.0
            for rank in range(WORLD_SIZE)
            for event in events_of(job.run, TokensLost, rank)
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("moc", ("ckpt.every_iters=1", "ckpt.k_snapshot=2", "ckpt.k_persist=1")),
        ("moetion", ("ckpt.every_iters=1", "ckpt.experts=2", "ckpt.remote_experts=1")),
    ],
)
def test_experts_that_a_snapshot_left_out_have_an_older_state_of_theirs(
    tmp_path: Path, policy: str, settings: tuple[str, ...]
) -> None:
    training = ("train.iterations=24", *PROMISE)
    job = survive(
        tmp_path,
        FAULTS,
        *training,
        ckpt=policy,
        settings=settings,
        setup=add_noise,
        is_exact=False,
    )
    digests = read_digests(job.run)
    assert first_changed(digests, may_be_older=True) is None
    assert first_changed(digests, may_be_older=False) is not None, (
        "else nothing was lost"
    )


@pytest.mark.parametrize(
    "is_async",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["in place", "beside training"],
)
def test_all_ranks_have_the_state_of_a_checkpoint_after_a_start(
    tmp_path: Path,
    is_async: bool,
) -> None:
    """`dense` replaces no rank: all ranks start again, as torchrun's restarts do.

    Needs processes: a state survives if another process reads the state from a disk.
    """
    settings = (
        *("ckpt=dense", "ckpt.every_iters=2", "train.iterations=10"),
        f"ckpt.async_save={str(is_async).lower()}",
        *(*PROMISE, "run.digest_every_iters=1"),
    )
    kills = (
        Kill(ranks=(0, 1), iteration=5, phase="gradients"),
        Kill(ranks=(1,), iteration=8, phase="while-saving"),
    )
    for kill in kills:
        with pytest.raises(RankFailedError, match="died"):
            train(2, tmp_path, *settings, kill=kill, setup=add_noise)
    train(2, tmp_path, *settings, setup=add_noise)
    digests = read_digests(tmp_path)
    assert digests.exactness == "state"
    resumed = [event.iteration for event in events_of(tmp_path, StateResumed)]
    assert {each.iteration for each in digests.returns} == set(resumed)
    assert len(digests.returns) == len(kills) * 2
    assert first_changed(digests, may_be_older=False) is None
    assert max(map(len, digests.states.values())) > 1, "else noise is missing"
