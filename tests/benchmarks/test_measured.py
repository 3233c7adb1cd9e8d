"""Measurements for the page about partial checkpoints, from a written run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.lossy.measured import Fault, read_measured
from launcher.faults.log import append_faults
from moe_ckpt.events import CapacityBoosted, ExpertsChosen
from tests.benchmarks.faults import injected
from tests.report_runs import Story, line_of, write_run


def run_of(path: Path, *, scope: str = "process") -> Path:
    """Write a run of 12 iterations whose rank 1 dies in iteration 6.

    Ranks 0 and 1 are a stage, ranks 2 and 3 are the other. The log of faults also has a
    fault of rank 3 in iteration 9.
    """
    run = write_run(path)
    result = {"iteration": 12, "digest_per_rank": ["a", "b", "c", "d"]}
    (run / "result.json").write_text(json.dumps(result))
    append_faults(run, [injected(3, 9), injected(1, 6, scope)])
    return run


def boosted(
    iteration: int, layer: str, deficit: Sequence[Sequence[int]]
) -> CapacityBoosted:
    """Return the event of a boost in one layer."""
    return CapacityBoosted(
        iteration=iteration,
        layers=[layer],
        capacity=[[9, 9]],
        deficit=[list(d) for d in deficit],
    )


def add(run: Path, rank: int, event: object) -> None:
    """Append an event to the event file of a rank."""
    with (run / "events" / f"rank{rank:04d}.jsonl").open("a") as file:
        file.write(line_of(20.0, rank, event))


def test_losses_faults_shares_and_bytes_of_a_run(tmp_path: Path) -> None:
    measured = read_measured(run_of(tmp_path))
    assert measured.evaluated == {0: 5.0, 12: 2.5}
    assert measured.last_evaluation == 2.5
    assert measured.losses == {
        iteration: 5.0 / (1 + 0.1 * iteration) for iteration in range(1, 13)
    }
    assert measured.faults == (Fault(struck=6, back_to=5, who="rank 1"),)
    assert measured.plt == pytest.approx(0.01 * 5 / 12), (
        "told of 5 iterations, of 12 in all"
    )
    assert measured.mlt == pytest.approx(0.02 * 5 / 12)
    assert measured.plt_of_first == measured.plt, "there was one"
    assert measured.lost_tokens == 4 * 5 + 2
    assert measured.snapshot_bytes == 4 * (2 << 20)
    assert measured.digests == ("a", "b", "c", "d")
    assert measured.boost_left == 0, "all is made up"
    assert measured.experts is None


def test_a_node_is_named_as_one(tmp_path: Path) -> None:
    assert (
        read_measured(run_of(tmp_path, scope="node")).faults[0].who == "node of rank 1"
    )


def test_a_run_without_faults_and_snapshots_has_lost_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, Story(fault_after=None))
    for file in (tmp_path / "events").iterdir():
        kept = [
            line
            for line in file.read_text().splitlines(keepends=True)
            if "SnapshotTaken" not in line
        ]
        file.write_text("".join(kept))
    (tmp_path / "result.json").write_text(
        json.dumps({"iteration": 12, "digest_per_rank": []})
    )
    measured = read_measured(tmp_path)
    assert (measured.faults, measured.plt, measured.mlt, measured.lost_tokens) == (
        (),
        0.0,
        0.0,
        0,
    )
    assert measured.snapshot_bytes is None


def test_what_is_left_to_make_up_is_the_last_of_each_stage_once(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for rank, layer, last in (
        (0, "1", [[3, 0]]),
        (1, "1", [[3, 0]]),
        (2, "2", [[0, 4]]),
        (3, "2", [[0, 4]]),
    ):
        add(run, rank, boosted(7, layer, [[50, 50]]))
        add(run, rank, boosted(8, layer, last))
    assert read_measured(run).boost_left == 7


def test_experts_are_those_of_the_last_snapshot(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for iteration, experts in ((1, [0, 1, 2, 3]), (2, [0, 1])):
        taken, none = [experts, experts[:1]], [[], []]
        add(
            run,
            0,
            ExpertsChosen(
                iteration=iteration,
                memory=taken,
                on_peers=none,
                on_disk=none,
                by_gradient=none,
            ),
        )
    assert read_measured(run).experts == 2
