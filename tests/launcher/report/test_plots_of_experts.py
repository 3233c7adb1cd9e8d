"""Plots of experts show the values of events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.report.facts import Facts, gather
from launcher.report.figure import Plot
from launcher.report.plots_of_experts import (
    lost_tokens,
    made_up,
    order,
    plots_of_experts,
    popularity,
)
from launcher.report.plots_of_runs import moved
from launcher.report.read import read_run
from moe_ckpt.events import ExpertPopularity
from tests.report_runs import Story, write_run


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    return gather(read_run(write_run(tmp_path, Story(iterations=9))))


def shown(plot: Plot, number: int = 0) -> list[dict[str, Any]]:
    return plot.choices[number][1]["data"]


def test_popularity_is_a_share_of_the_layer(facts: Facts) -> None:
    (heat,) = shown(popularity(facts))
    assert heat["x"] == list(range(1, 10))
    assert heat["y"][:9:8] == ["layer 0, expert 0", "layer 1, expert 0"]
    third = [10 + (3 * expert) % 7 for expert in range(8)]
    assert [row[2] for row in heat["z"][:8]] == pytest.approx(
        [100 * count / sum(third) for count in third], rel=1e-5
    )


def test_slots_are_shown_from_where_they_are_new(facts: Facts) -> None:
    (heat,) = shown(order(facts))
    assert heat["x"] == [1, 5, 9]
    assert [row[1] for row in heat["z"]] == [1, 0] * 8
    first, _ = shown(order(facts), 1)
    assert first["y"] == sorted(first["y"], reverse=True)


def test_records_of_another_model_do_not_hide_the_last(facts: Facts) -> None:
    odd = ExpertPopularity(iteration=0, layers=["layer 0"], tokens=[[1, 2, 3]])
    (heat,) = shown(popularity(replace(facts, popularity=(odd, *facts.popularity))))
    assert heat["x"] == list(range(1, 10))
    assert {len(row) for row in heat["z"]} == {9}


def test_what_is_lost_and_made_up(facts: Facts) -> None:
    plt, mlt = shown(lost_tokens(facts))
    assert (plt["x"], plt["y"], mlt["y"]) == ([5], [1.0], [2.0])
    first, _ = shown(made_up(facts))
    assert list(zip(first["x"], first["y"], strict=True)) == [
        (5, 64),
        (6, 48),
        (7, 32),
        (8, 16),
        (9, 0),
    ]


def test_windows_are_shown_with_what_all_peers_got(facts: Facts) -> None:
    (windows,) = (
        trace for trace in shown(moved([facts])) if "windows to peers" in trace["name"]
    )
    assert (windows["x"], windows["y"]) == (list(range(1, 10)), [8.0] * 9)


def test_a_dense_run_has_none_of_it(tmp_path: Path) -> None:
    facts = gather(read_run(write_run(tmp_path, Story(with_experts=False))))
    assert all(not plot.choices and plot.missing for plot in plots_of_experts(facts))
