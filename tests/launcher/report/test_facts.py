"""Facts about a run: totals, recoveries, series over ranks and time, and a headline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from launcher.report.facts import Facts, gather
from launcher.report.figure import left_out
from launcher.report.parts import PagePart
from launcher.report.read import read_run
from launcher.report.summary import QUANTITIES, duration, headline, shown
from launcher.report.thin import evenly, in_steps, thin
from moe_ckpt.events import ExpertPopularity, StateResumed, WorkerStarted
from tests.report_runs import (
    DEATH,
    FIRST_S,
    Story,
    committed,
    rejoined,
    write_events,
    write_run,
)


def facts_of(run: Path) -> Facts:
    return gather(read_run(run))


def quantity(facts: Facts, key: str) -> float | None:
    return next(each.of(facts) for each in QUANTITIES if each.key == key)


def test_a_recovery_is_found_with_its_cause_and_cost(tmp_path: Path) -> None:
    (episode,) = facts_of(write_run(tmp_path)).episodes
    assert (episode.start_us, episode.end_us) == (4_850_000, 5_500_000)
    assert (episode.causes, episode.struck, episode.iteration) == ((DEATH,), 6, 5)
    assert (episode.replaying_ranks, episode.replayed_iters, episode.fetched_bytes) == (
        (0, 1),
        2,
        1 << 20,
    )
    assert {part: us for part, us in episode.mean_us.items() if us} == {
        PagePart.LOST: 350_000,
        PagePart.DETECTION: 100_000,
        PagePart.REBUILD: 200_000,
        PagePart.FETCH: 50_000,
        PagePart.WAITING: 200_000,
        PagePart.REPLAY: 100_000,
    }
    notes = {
        (each.rank, each.note)
        for each in episode.stretches
        if each.part is PagePart.REPLAY
    }
    assert notes == {(0, "iterations 4 to 5"), (1, "iterations 4 to 5")}


def test_totals_of_ranks_that_end_at_different_times_sum_to_the_same(
    tmp_path: Path,
) -> None:
    write_events(tmp_path, 0, [(1.0, committed(1))])
    write_events(tmp_path, 1, [(1.0, committed(1)), (1.5, committed(2))])
    facts = facts_of(tmp_path)
    assert [sum(of.values()) for of in facts.totals_us.values()] == [
        1_500_000,
        1_500_000,
    ]
    assert facts.totals_us[0][PagePart.UNKNOWN] == 500_000


def test_work_that_is_given_up_is_charged_to_the_recovery_that_gave_it_up(
    tmp_path: Path,
) -> None:
    events = [
        (0.5, committed(1)),
        (1.0, committed(2)),
        (1.65, rejoined(2)),
        (2.15, committed(3)),
        (2.8, rejoined(1)),
    ]
    write_events(tmp_path, 0, [*events, (3.3, committed(2))])
    first, second = facts_of(tmp_path).episodes
    assert (first.mean_us[PagePart.LOST], second.mean_us[PagePart.LOST]) == (
        0,
        1_000_000,
    )


def test_recoveries_of_ranks_that_overlap_are_one(tmp_path: Path) -> None:
    write_events(
        tmp_path,
        0,
        [
            (0.5, committed(1)),
            (2.0, rejoined(1)),
            (2.5, committed(2)),
            (9.0, rejoined(2)),
        ],
    )
    write_events(
        tmp_path,
        1,
        [
            (0.5, committed(1)),
            (2.3, rejoined(1)),
            (2.8, committed(2)),
            (9.0, rejoined(2)),
        ],
    )
    assert [(each.start_us, each.end_us) for each in facts_of(tmp_path).episodes] == [
        (1_350_000, 2_300_000),
        (8_350_000, 9_000_000),
    ]


def test_a_recovery_within_the_time_of_another_belongs_to_it(tmp_path: Path) -> None:
    write_events(tmp_path, 0, [(0.5, committed(1)), (5.0, rejoined(1, replay_s=3.5))])
    short = [(2.3, rejoined(1)), (2.8, committed(2)), (3.8, rejoined(2))]
    write_events(tmp_path, 1, [(0.5, committed(1)), *short])
    assert [(each.start_us, each.end_us) for each in facts_of(tmp_path).episodes] == [
        (1_150_000, 5_000_000)
    ]


def test_a_restart_by_torchrun_is_a_recovery(tmp_path: Path) -> None:
    resumed = StateResumed(iteration=0, source="disk", seconds=0.5, passed_over=[])
    for rank in range(2):
        anew = WorkerStarted(pid=2, host="here", incarnation=1, device="cpu")
        write_events(
            tmp_path,
            rank,
            [(0.5, committed(1)), (3.0, anew), (4.0, resumed), (4.5, committed(1))],
        )
    (tmp_path / "run.json").write_text(
        json.dumps({"world_size": 2, "clock_origin_unix_s": 100.0})
    )
    (episode,) = facts_of(tmp_path).episodes
    assert episode.causes == ("all processes were started again",)
    assert (episode.start_us, episode.end_us, episode.mean_us[PagePart.LOST]) == (
        500_000,
        4_000_000,
        500_000,
    )

    fault = {
        "rank": 1,
        "pid": 2,
        "signal": "KILL",
        "scope": "process",
        "generation": 1,
        "iteration": 1,
        "phase": "x",
    }
    (tmp_path / "faults.jsonl").write_text(
        json.dumps({**fault, "unix_s": 101.0, "ordered": False})
    )
    (episode,) = facts_of(tmp_path).episodes
    assert episode.causes == ("rank 1 was sent SIGKILL",)


def test_series_take_the_last_time_of_each_iteration(tmp_path: Path) -> None:
    write_events(
        tmp_path,
        0,
        [
            (0.5, committed(1, stall_s=0.1)),
            (1.0, committed(1, stall_s=0.2)),
            (1.5, committed(2)),
        ],
    )
    write_events(tmp_path, 1, [(0.5, committed(1, stall_s=0.4))])
    series = facts_of(tmp_path).series
    assert series.iteration.tolist() == [1, 2]
    assert series.stall_mean_s.tolist() == pytest.approx([0.3, 0.05])
    assert series.stall_max_s.tolist() == pytest.approx([0.4, 0.05])
    assert series.sent_bytes.tolist() == [2 << 16, 1 << 16]


def test_snapshots_are_summed_over_ranks_where_the_iteration_was_committed(
    tmp_path: Path,
) -> None:
    facts = facts_of(
        write_run(tmp_path, Story(ranks=3, iterations=2, fault_after=None))
    )
    assert facts.series.snapshot_bytes.tolist() == [3 * (2 << 20)] * 2


def test_quantities(tmp_path: Path) -> None:
    facts = facts_of(write_run(tmp_path, Story(iterations=10)))
    wall_s, compute_s = FIRST_S + 10 * 0.5 + 1.0 + 0.3, 10 * 0.45
    counted_s = wall_s - FIRST_S - 0.2
    wanted = {
        "ettr": 100 * compute_s / counted_s,
        "wall_s": wall_s,
        "launch_s": 23.0,
        "iterations": 10,
        "recoveries": 1,
        "faults_cost_s": 1.0,
        "recovery_s": 0.65,
        "lost_s": 0.35,
        "stall_percent": 10.0,
        "stall_ms": 50.0,
        "iteration_s": 0.5,
        "snapshot_mib": 8.0,
        "boundary_mib": 0.25,
        "memory_mib": 24.0,
        "window_iters": 2.0,
        "peers_mib": 8.0,
        "deficit_tokens": 0.0,
        "eval_loss": 2.5,
        "tokens_lost": 22.0,
        "plt_percent": 1.0,
        "mlt_percent": 2.0,
    }
    assert {key: quantity(facts, key) for key in wanted} == pytest.approx(
        wanted, rel=1e-6
    )
    assert quantity(facts, "interval_iters") is None


def test_the_curve_of_ettr_ends_at_the_ettr(tmp_path: Path) -> None:
    facts = facts_of(write_run(tmp_path))
    assert facts.ettr == pytest.approx(facts.over_time.ettr[-1])
    assert np.isnan(facts.over_time.ettr[0])


def test_what_stages_tell_of_experts_comes_together(tmp_path: Path) -> None:
    facts = facts_of(write_run(tmp_path, Story(iterations=5, ranks=4, fault_after=4)))
    assert [record.iteration for record in facts.popularity] == [1, 2, 3, 4, 5]
    assert facts.popularity[0].layers == ["layer 0", "layer 1"]
    assert (
        facts.popularity[2].tokens
        == [[10 + (3 * expert) % 7 for expert in range(8)]] * 2
    )
    assert [(order.iteration, order.slots) for order in facts.orders] == [
        (1, [[0, 1] * 4] * 2),
        (5, [[1, 0] * 4] * 2),
    ]
    assert facts.deficits == {
        "layer 0": [(4, 64), (5, 48)],
        "layer 1": [(4, 0), (5, 0)],
    }


def test_the_last_record_of_an_iteration_counts_and_layers_are_in_order(
    tmp_path: Path,
) -> None:
    def told(**tokens: float) -> ExpertPopularity:
        layers = [name.replace("_", " ") for name in tokens]
        return ExpertPopularity(
            iteration=1, layers=layers, tokens=[[count] for count in tokens.values()]
        )

    first, again = told(mtp_0_layer_0=6, layer_10=1), told(mtp_0_layer_0=7, layer_10=2)
    write_events(tmp_path, 0, [(0.5, first), (9.0, again)])
    write_events(tmp_path, 1, [(0.6, told(layer_9=3))])
    (record,) = facts_of(tmp_path).popularity
    assert (record.layers, record.tokens) == (
        ["layer 9", "layer 10", "mtp 0 layer 0"],
        [[3], [2], [7]],
    )


HEADLINES = {
    "a run with a fault": (
        Story(iterations=10),
        True,
        (
            "73.8 % of the time without startup and evaluation was training: 10"
            " iterations in 8.30 s of wall time, after 23.0 s of launch. 1 recovery"
            " cost 1.00 s, with what had to be computed again (run.exactness=bitwise)."
            " Checkpointing took 0.50 s from iterations."
        ),
    ),
    "a run without a fault, which ended badly": (
        Story(iterations=2, fault_after=None),
        False,
        (
            "90.0 % of the time without startup and evaluation was training: 2"
            " iterations in 3.20 s of wall time, after 23.0 s of launch. No rank had to"
            " recover. Checkpointing took 0.10 s from iterations. The run ended without"
            " a result, or goes on where this machine does not see it."
        ),
    ),
    "a run that came to nothing": (
        Story(iterations=0, fault_after=None),
        False,
        (
            "The run ended without a result, or goes on where this machine does not see"
            " it. No event tells of an iteration that was committed."
        ),
    ),
}


@pytest.mark.parametrize(
    ("story", "ends_well", "wanted"), HEADLINES.values(), ids=HEADLINES.keys()
)
def test_headline(tmp_path: Path, story: Story, ends_well: bool, wanted: str) -> None:
    assert (
        headline(facts_of(write_run(tmp_path / "run", story, ends_well=ends_well)))
        == wanted
    )


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [(0.456, "0.46 s"), (12.34, "12.3 s"), (250, "4 min 10 s"), (11_100, "3 h 5 min")],
)
def test_durations_for_people(seconds: float, wanted: str) -> None:
    assert duration(seconds) == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (1234.5, "1,234"),
        (0.123456, "0.1235"),
        (40.0, "40"),
    ],
)
def test_numbers_for_people(value: float | None, wanted: str) -> None:
    assert shown(value) == wanted


def test_thinning_keeps_the_extremes_and_says_so() -> None:
    values = np.zeros(10_000)
    values[[17, 5555]] = [9.0, -9.0]
    values[3] = np.nan
    keep = thin(values, 100)
    assert {0, 17, 5555, 9999} <= set(keep.tolist())
    assert 3 not in keep
    assert len(keep) <= 100
    assert thin(values[:50], 100).tolist() == [0, 1, 2, *range(4, 50)]
    assert left_out(len(keep), 9_999, "points").startswith(
        f"{len(keep)} of 9,999 points"
    )
    assert left_out(5, 5, "points") == ""
    assert evenly(5, 3).tolist() == [0, 2, 4]
    assert evenly(0, 3).tolist() == []


def test_thinning_in_steps_keeps_the_last_that_came_of_each() -> None:
    assert in_steps(np.array([], np.int64), 4).tolist() == []
    assert in_steps(np.array([1, 3, 2, 3]), 4).tolist() == [0, 2, 3], (
        "it went back to 2"
    )
    assert in_steps(np.arange(1, 11), 4).tolist() == [2, 6, 9]
    for far in (100_000, 100_700):
        assert (
            in_steps(np.arange(0, far, 6), 512).tolist()[:300]
            == in_steps(np.arange(0, 99_000, 6), 512).tolist()[:300]
        )
        assert 256 <= len(in_steps(np.arange(0, far, 6), 512)) <= 512


def test_of_a_long_run_each_stage_keeps_the_same_records(tmp_path: Path) -> None:
    for rank, last in ((0, 3000), (1, 3002)):
        told = [
            ExpertPopularity(iteration=i, layers=[f"layer {rank}"], tokens=[[i, 1]])
            for i in range(1, last)
        ]
        write_events(
            tmp_path, rank, [(float(event.iteration), event) for event in told]
        )
    facts = facts_of(tmp_path)
    assert 256 <= len(facts.popularity) <= 512
    assert (
        sum(len(record.layers) == 2 for record in facts.popularity)
        >= len(facts.popularity) - 2
    )
