"""Scheduled faults: the moment of each fault, refused faults, kill plans by seed.

Each fault fires once.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.faults.schedule import (
    KILL_PHASES,
    PHASES,
    FaultSchedule,
    Kill,
    StateLoss,
    TimedFault,
    choose_ranks,
    has_come,
    plan_faults,
    poisson_kills,
    trace_kills,
    victims,
)


def loss(
    iteration: int = 7,
    stage: int = 1,
    phase: str = "backward",
    dp_rank: int | None = None,
) -> StateLoss:
    return StateLoss(iteration=iteration, stage=stage, phase=phase, dp_rank=dp_rank)


LOSSES = st.builds(
    loss,
    iteration=st.integers(1, 4),
    stage=st.integers(0, 2),
    phase=st.sampled_from(PHASES),
    dp_rank=st.one_of(st.none(), st.integers(0, 1)),
)


def test_a_loss_fires_at_its_iteration_and_phase() -> None:
    schedule = FaultSchedule(
        [loss(stage=2), loss(phase="step"), loss(stage=0), loss(iteration=8)]
    )
    assert schedule.due(6, "backward") == ()
    assert schedule.due(7, "forward") == ()
    assert schedule.due(7, "backward") == (loss(stage=2), loss(stage=0))
    assert schedule.due(7, "step") == (loss(phase="step"),)


@given(losses=st.lists(LOSSES, max_size=10))
def test_every_loss_fires_once_though_iterations_run_again(
    losses: list[StateLoss],
) -> None:
    schedule = FaultSchedule(losses)
    asked = [(iteration, phase) for iteration in range(1, 5) for phase in PHASES]
    fired = [
        fault for iteration, phase in asked for fault in schedule.due(iteration, phase)
    ]
    assert fired == sorted(
        losses, key=lambda fault: asked.index((fault.iteration, fault.phase))
    )
    assert not any(schedule.due(iteration, phase) for iteration, phase in asked)


@pytest.mark.parametrize(
    ("field", "got", "message"),
    [
        ("iteration", 0, "got 0, wanted at least 1"),
        ("stage", -1, "got -1, wanted at least 0"),
        (
            "phase",
            "backwards",
            "got 'backwards', wanted one of forward, backward, step, between",
        ),
        ("dp_rank", -1, "got -1, wanted at least 0"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(field: str, got: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^fault\.at: {field}: {message}$"):
        loss(**{field: got})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (loss(stage=2), r"stage: got 2, wanted between 0 and 1, the stages of the job"),
        (
            loss(dp_rank=4),
            (
                r"dp_rank: got 4, wanted between 0 and 3, the data-parallel ranks of"
                r" the job"
            ),
        ),
    ],
)
def test_a_loss_that_the_job_has_no_rank_for_is_refused(
    bad: StateLoss, message: str
) -> None:
    schedule = FaultSchedule([loss(), bad])
    with pytest.raises(ConfigError, match=rf"^fault\.at: {message}$"):
        schedule.check_fit(num_stages=2, dp=4)
    schedule.due(7, "backward")
    with pytest.raises(ConfigError):
        schedule.check_fit(num_stages=2, dp=4)


def test_losses_of_the_last_stage_and_rank_fit() -> None:
    FaultSchedule([loss(stage=1, dp_rank=3), loss(stage=0, dp_rank=None)]).check_fit(
        num_stages=2, dp=4
    )
    FaultSchedule([]).check_fit(num_stages=1, dp=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "iteration: got None, wanted a number here, a phase, or after_s"),
        ({"iteration": 0}, "iteration: got 0, wanted at least 1"),
        ({"iteration": 1, "rank": -1}, "rank: got -1, wanted at least 0"),
        (
            {"iteration": 1, "signal": "HUP"},
            "signal: got 'HUP', wanted one of KILL, STOP, SEGV, TERM",
        ),
        (
            {"iteration": 1, "scope": "rack"},
            "scope: got 'rack', wanted one of process, node",
        ),
        (
            {"iteration": 1, "scope": "node", "signal": "STOP"},
            "signal: got 'STOP', wanted KILL where scope=node",
        ),
        (
            {"phase": "between"},
            (
                "phase: got 'between', wanted one of forward, backward, reduce, step,"
                " snapshot, recov"
            ),
        ),
        ({"after_s": -0.1}, "after_s: got -0.1, wanted a number of at least 0"),
        ({"after_s": float("nan")}, "after_s: got nan, wanted a number of at least 0"),
        ({"after_s": float("inf")}, "after_s: got inf, wanted a number of at least 0"),
        (
            {"after_s": 1.0, "iteration": 1},
            "after_s: got 1.0, wanted null where there is an iteration or a phase",
        ),
        (
            {"after_s": 1.0, "phase": "step"},
            "after_s: got 1.0, wanted null where there is an iteration or a phase",
        ),
    ],
)
def test_a_kill_that_cannot_be_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Kill(**settings)
    assert str(caught.value).startswith(f"fault.at: {message}")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Kill(rank=2, after_s=0.0), "SIGKILL to rank 2 at once"),
        (Kill(rank=2, signal="STOP", after_s=12.34), "SIGSTOP to rank 2 after 12.3 s"),
        (
            Kill(rank=0, iteration=7, scope="node"),
            "SIGKILL to the node of rank 0 in iteration 7, forward",
        ),
        (Kill(rank=1, phase="recovery"), "SIGKILL to rank 1 the next time, recovery"),
        (
            Kill(rank=1, iteration=7, phase="step"),
            "SIGKILL to rank 1 in iteration 7, step",
        ),
        (
            TimedFault(after_s=1.0, ranks=(2, 3), signal="TERM", scope="process"),
            "SIGTERM to ranks 2, 3 after 1.0 s",
        ),
        (
            TimedFault(after_s=0.0, ranks=(2,), signal="KILL", scope="node"),
            "SIGKILL to rank 2 at once",
        ),
    ],
)
def test_a_fault_can_be_read(fault: Kill | TimedFault, words: str) -> None:
    assert str(fault) == words


SEEDS = st.integers(0, 2**32)
WORLDS = st.integers(1, 9)


@given(
    mtbf_s=st.floats(1e-3, 1e5), count=st.integers(0, 30), seed=SEEDS, world_size=WORLDS
)
def test_poisson_kills_are_reproducible_sorted_and_in_range(
    mtbf_s: float, count: int, seed: int, world_size: int
) -> None:
    kills = poisson_kills(
        mtbf_s=mtbf_s, count=count, seed=seed, world_size=world_size, signal="TERM"
    )
    assert kills == poisson_kills(
        mtbf_s=mtbf_s, count=count, seed=seed, world_size=world_size, signal="TERM"
    )
    assert len(kills) == count
    times_s = [kill.after_s or 0.0 for kill in kills]
    assert times_s == sorted(times_s)
    assert all(
        kill.rank in range(world_size) and kill.signal == "TERM" for kill in kills
    )


def test_poisson_kills_are_exponential_in_time_and_uniform_over_ranks() -> None:
    kills = poisson_kills(mtbf_s=20.0, count=20_000, seed=1, world_size=4)
    times_s = [0.0, *(kill.after_s or 0.0 for kill in kills)]
    gaps_s = [after - before for before, after in pairwise(times_s)]
    assert mean(gaps_s) == pytest.approx(20.0, rel=0.03)
    assert mean((gap - 20.0) ** 2 for gap in gaps_s) == pytest.approx(400.0, rel=0.06)
    assert sum(gap < 20.0 for gap in gaps_s) / len(gaps_s) == pytest.approx(
        0.632, rel=0.03
    )
    for rank in range(4):
        assert sum(kill.rank == rank for kill in kills) == pytest.approx(5000, rel=0.05)


def test_another_seed_is_another_plan() -> None:
    plans = {
        poisson_kills(mtbf_s=1.0, count=3, seed=seed, world_size=4)
        for seed in range(20)
    }
    assert len(plans) == 20
    text = "0,add,a\n" + "".join(f"{at},remove,n{at}\n" for at in range(1, 20))
    assert (
        len(
            {
                trace_kills(text, speedup=1.0, seed=seed, world_size=4)
                for seed in range(20)
            }
        )
        == 20
    )


@given(
    at_ms=st.lists(st.integers(0, 5000), max_size=20),
    speedup=st.floats(0.1, 100),
    seed=SEEDS,
    world_size=WORLDS,
)
def test_a_trace_kills_a_rank_of_its_own_for_each_node_of_a_burst(
    at_ms: list[int], speedup: float, seed: int, world_size: int
) -> None:
    text = "0,add,first\n" + "".join(
        f"{at},remove,n{number}\n" for number, at in enumerate(at_ms)
    )
    kills = trace_kills(
        text, speedup=speedup, seed=seed, world_size=world_size, scope="node"
    )
    assert kills == trace_kills(
        text, speedup=speedup, seed=seed, world_size=world_size, scope="node"
    )
    expected = [
        at for at in sorted(set(at_ms)) for _ in range(min(at_ms.count(at), world_size))
    ]
    assert [kill.after_s for kill in kills] == [
        pytest.approx(at / 1000 / speedup) for at in expected
    ]
    assert len({(kill.after_s, kill.rank) for kill in kills}) == len(kills)
    assert all(
        kill.rank in range(world_size) and kill.scope == "node" for kill in kills
    )


def test_a_trace_runs_as_many_times_as_fast_from_its_first_event() -> None:
    kills = trace_kills(
        "60000,add,a\n180000,remove,a\n", speedup=60.0, seed=0, world_size=1
    )
    assert kills == (Kill(rank=0, after_s=2.0),)


@given(seed=SEEDS, count=st.integers(0, 10))
def test_ranks_are_chosen_by_seed_and_only_where_there_is_none(
    seed: int, count: int
) -> None:
    kills = [Kill(iteration=1), Kill(iteration=2, rank=7)] * count
    chosen = choose_ranks(kills, seed=seed, ranks=[3, 5])
    assert chosen == choose_ranks(kills, seed=seed, ranks=[3, 5])
    assert all(kill.rank in (3, 5) for kill in chosen[::2])
    assert all(kill == Kill(iteration=2, rank=7) for kill in chosen[1::2])


def test_every_rank_may_be_chosen() -> None:
    chosen = {
        choose_ranks([Kill(iteration=1)], seed=seed, ranks=range(4))[0].rank
        for seed in range(50)
    }
    assert chosen == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("scope", "rank", "hit"),
    [
        ("process", 5, (5,)),
        ("node", 0, (0, 1, 2, 3)),
        ("node", 3, (0, 1, 2, 3)),
        ("node", 4, (4, 5, 6)),
    ],
)
def test_victims(scope: str, rank: int, hit: tuple[int, ...]) -> None:
    assert (
        victims(
            Kill(rank=rank, scope=scope, after_s=0.0), world_size=7, ranks_per_node=4
        )
        == hit
    )


@given(rank=st.integers(0, 7), ranks_per_node=st.integers(1, 9))
def test_a_node_dies_the_same_whichever_of_its_ranks_is_named(
    rank: int, ranks_per_node: int
) -> None:
    def of(named: int) -> tuple[int, ...]:
        return victims(
            Kill(rank=named, scope="node", after_s=0.0),
            world_size=8,
            ranks_per_node=ranks_per_node,
        )

    assert rank in of(rank)
    assert all(of(other) == of(rank) for other in of(rank))


def test_kills_of_one_time_are_one_strike_that_hits_each_rank_once() -> None:
    kills = [
        Kill(rank=5, after_s=9.0),
        Kill(rank=1, after_s=2.0, scope="node"),
        Kill(rank=0, after_s=2.0, scope="node"),
        Kill(rank=2, after_s=2.0, scope="node"),
        Kill(rank=3, iteration=1),
        Kill(rank=4, after_s=9.0),
        Kill(rank=4, after_s=9.0, signal="STOP"),
    ]
    assert plan_faults(kills, world_size=6, ranks_per_node=2) == (
        TimedFault(after_s=2.0, ranks=(0, 1, 2, 3), signal="KILL", scope="node"),
        TimedFault(after_s=9.0, ranks=(5, 4), signal="KILL", scope="process"),
        TimedFault(after_s=9.0, ranks=(4,), signal="STOP", scope="process"),
    )


@pytest.mark.parametrize(
    ("point", "seen", "come"),
    [
        ((7, "backward"), (8, "join"), True),
        ((7, "backward"), (7, "join"), False),
        ((7, "backward"), (7, "recovery"), False),
        # a worker writes the iteration before the phase
        ((7, "backward"), (7, "between"), False),
        ((7, None), (6, "between"), False),
        ((7, None), (7, "forward"), True),
        ((7, "recovery"), (7, "forward"), False),
        ((7, "recovery"), (6, "recovery"), False),
        ((7, "recovery"), (7, "recovery"), True),
        ((7, "recovery"), (9, "recovery"), True),
        ((7, "recovery"), (9, "forward"), False),
        ((None, "step"), (0, "step"), True),
        ((None, "step"), (9, "snapshot"), False),
        ((None, "recovery"), (0, "recovery"), True),
    ],
)
def test_when_a_point_has_come(
    point: tuple[int | None, str | None], seen: tuple[int, str], come: bool
) -> None:
    assert has_come(Kill(rank=0, iteration=point[0], phase=point[1]), *seen) is come


@given(
    wanted=st.tuples(st.integers(1, 3), st.sampled_from(KILL_PHASES[:-1])),
    passed=st.integers(1, 3),
    phase=st.sampled_from(KILL_PHASES[:-1]),
)
def test_a_point_that_has_come_stays_come(
    wanted: tuple[int, str], passed: int, phase: str
) -> None:
    at = (passed, KILL_PHASES.index(phase))
    due = (wanted[0], KILL_PHASES.index(wanted[1]))
    assert has_come(
        Kill(rank=0, iteration=wanted[0], phase=wanted[1]), passed, phase
    ) is (at >= due)
