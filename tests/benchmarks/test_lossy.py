"""Partial checkpoints are judged by numbers made by hand.

Covers lifts, jumps, verdicts, table, panels and axes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from benchmarks.lossy.claims import above, judge, jumps, peaks, remains, spread
from benchmarks.lossy.figure import Line, Panel, draw, ticks
from benchmarks.lossy.measured import Fault, Measured
from benchmarks.lossy.page import Circumstances, page_of, panels_of
from benchmarks.lossy.variants import (
    GEMINI,
    LIMITED,
    MOC,
    MOC_FOURTH,
    MOC_FOURTH_DYNAMIC,
    MOC_LOAD,
    MOC_SELDOM,
    MOC_SELDOM_DYNAMIC,
    MOETION,
    MOETION_BOOST,
    MOEVEMENT,
    NONE,
    NUDGED,
    NUDGED_MORE,
    faults,
)

PLAIN = Measured(
    evaluated={0: 5.0, 10: 4.0, 20: 3.0, 30: 2.0},
    losses={iteration: 5.0 - iteration / 10 for iteration in range(1, 31)},
    faults=(),
    plt=0.0,
    mlt=0.0,
    plt_of_first=0.0,
    lost_tokens=0,
    boost_left=None,
    experts=None,
    snapshot_bytes=None,
    digests=("a", "b"),
)
TWICE = (
    Fault(struck=10, back_to=8, who="rank 2"),
    Fault(struck=20, back_to=19, who="node of rank 3"),
)
STRUCK = replace(PLAIN, faults=TWICE, snapshot_bytes=3.0 * (1 << 20))
LOSSY = replace(
    STRUCK,
    evaluated={0: 5.0, 10: 4.25, 20: 3.0625, 30: 2.03125},
    losses={**PLAIN.losses, 9: PLAIN.losses[9] + 0.125, 20: PLAIN.losses[20] + 0.5},
    plt=0.02,
    mlt=0.04,
    lost_tokens=640,
    experts=2,
)


def ending(run: Measured, end: float, plt: float = 0.02) -> Measured:
    """Return the run with another last evaluation and another PLT."""
    return replace(run, evaluated={**run.evaluated, 30: end}, plt=plt)


ALL = {
    NONE: PLAIN,
    NUDGED: ending(PLAIN, 1.9375, 0.0),
    NUDGED_MORE: ending(PLAIN, 2.0625, 0.0),
    GEMINI: STRUCK,
    MOEVEMENT: STRUCK,
    MOC: LOSSY,
    MOC_LOAD: LOSSY,
    MOC_FOURTH: ending(LOSSY, 2.1875, 0.06),
    MOC_FOURTH_DYNAMIC: replace(LOSSY, experts=8),
    MOC_SELDOM: ending(LOSSY, 2.25, 0.2),
    MOC_SELDOM_DYNAMIC: replace(LOSSY, experts=8),
    LIMITED: PLAIN,
    MOETION: replace(LOSSY, evaluated={**LOSSY.evaluated, 10: 4.0, 20: 3.0}),
    MOETION_BOOST: replace(
        LOSSY, evaluated={**LOSSY.evaluated, 10: 4.0, 20: 3.0}, boost_left=0
    ),
}
GIVEN = Circumstances(
    command="it", iterations=30, commit="abc", hardware="a CPU", packages="torch"
)


def test_lifts_are_differences_to_the_run_without_faults() -> None:
    assert above(LOSSY, PLAIN) == {0: 0.0, 10: 0.25, 20: 0.0625, 30: 0.03125}
    assert jumps(LOSSY, PLAIN) == pytest.approx([0.125, 0.5], abs=1e-12)


def test_a_peak_is_the_most_until_the_next_fault_in_either_loss() -> None:
    assert peaks(LOSSY, PLAIN) == pytest.approx([0.25, 0.5], abs=1e-12)


def test_what_remains_is_that_of_the_last_evaluation_before_the_next_fault() -> None:
    assert remains(LOSSY, PLAIN) == {10: 0.25, 30: 0.03125}


def test_nudged_runs_are_apart_by_the_most_less_the_least() -> None:
    assert spread(ALL, 30) == 0.125
    assert spread(ALL, 10) == 0.0


def test_all_claims_hold_where_the_numbers_are_as_the_papers_say() -> None:
    assert [verdict.holds for verdict in judge(ALL)] == [True] * 8


BROKEN = {
    "a loss of gemini differs": (
        0,
        {GEMINI: replace(STRUCK, losses={**PLAIN.losses, 17: 3.3000000001})},
        False,
    ),
    "an evaluation of moevement differs": (
        0,
        {MOEVEMENT: ending(STRUCK, 2.0000000001)},
        False,
    ),
    "a digest differs": (0, {GEMINI: replace(STRUCK, digests=("a", "c"))}, False),
    "harmed below the limit": (1, {MOC_LOAD: ending(LOSSY, 2.2)}, False),
    "nothing below the limit": (
        1,
        {
            name: replace(LOSSY, plt=0.05)
            for name in (MOC, MOC_LOAD, MOC_FOURTH_DYNAMIC, MOC_SELDOM_DYNAMIC)
        },
        None,
    ),
    "unharmed above the limit": (2, {MOC_SELDOM: ending(LOSSY, 2.1, 0.2)}, False),
    "nothing above the limit": (2, {MOC_SELDOM: LOSSY, MOC_FOURTH: LOSSY}, None),
    "Dynamic-K above the limit": (
        3,
        {MOC_SELDOM_DYNAMIC: replace(LOSSY, plt=0.04)},
        False,
    ),
    "Dynamic-K not needed": (3, {MOC_SELDOM: LOSSY, MOC_FOURTH: LOSSY}, None),
    "load-aware is better": (4, {MOC_LOAD: ending(LOSSY, 1.9)}, False),
    "a spike in training": (
        5,
        {MOETION: replace(LOSSY, losses={**PLAIN.losses, 9: 4.7})},
        False,
    ),
    "a spike in an evaluation": (
        5,
        {MOETION_BOOST: replace(LOSSY, evaluated={**LOSSY.evaluated, 20: 3.6})},
        False,
    ),
    "a lift that stays": (6, {MOETION: ending(LOSSY, 2.13)}, False),
    "lost tokens are left": (7, {MOETION_BOOST: replace(LOSSY, boost_left=3)}, False),
    "no boost": (7, {MOETION_BOOST: LOSSY}, None),
}


@pytest.mark.parametrize(
    ("number", "instead", "holds"), BROKEN.values(), ids=BROKEN.keys()
)
def test_a_claim_falls_where_the_numbers_say_so(
    number: int, instead: dict[str, Measured], holds: bool | None
) -> None:
    verdict = judge(ALL | instead)[number]
    assert verdict.holds is holds, verdict


def test_a_claim_about_runs_that_are_not_there_says_which() -> None:
    verdicts = judge({NONE: PLAIN, MOC: LOSSY})
    assert {verdict.holds for verdict in verdicts} == {None}
    assert verdicts[0].measured == "not run: gemini; moevement"


def test_a_claim_is_judged_by_those_of_its_runs_that_are_there() -> None:
    fewer = {
        name: run
        for name, run in ALL.items()
        if name not in (MOC_FOURTH, MOC_FOURTH_DYNAMIC, MOC_LOAD)
    }
    assert [verdict.holds for verdict in judge(fewer)][1:5] == [True, True, True, None]


def test_the_numbers_stand_in_the_page() -> None:
    page = page_of(ALL | {MOC_SELDOM: ending(LOSSY, 2.1, 0.2)}, GIVEN)
    rows = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in page.splitlines()
        if line.startswith("| ")
    }
    assert rows[MOC].endswith(
        "| 2.00% | 4.00% | 3.00 | 2.0312 | +0.0312 | +0.250, +0.500 | +0.125, +0.500 |"
    )
    assert "`ckpt=moc`" in rows[MOC]
    assert "**does not hold**" in page
    assert "rank 2 in iteration 10, node of rank 3 in iteration 20" in page
    assert "nudged runs are 0.1250 apart" in page
    assert "Commit abc, a CPU" in page


def test_a_page_of_few_runs_says_what_is_missing() -> None:
    page = page_of({NONE: PLAIN, MOC: LOSSY}, GIVEN)
    assert "not run: none, nudged; none, nudged more" in page
    assert len(panels_of({NONE: PLAIN, MOC: LOSSY})[0]) == 1


def test_the_figure_has_all_runs_twice_with_fault_marks_and_titles() -> None:
    svg = draw(panels_of(ALL), "iteration")
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}polyline")) == 2 * (9 + 3)
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts.count("node of rank 3") == 4
    assert texts.count("iteration") == 4
    assert texts.count("evaluation loss, nats per token") == 2
    assert {MOC_SELDOM_DYNAMIC, MOETION_BOOST} <= set(texts)
    assert "prefers-color-scheme: dark" in svg


def test_points_lie_where_the_axes_say() -> None:
    svg = draw(
        [
            [
                Panel(
                    title="<&",
                    y="y",
                    lines=[Line(name="a", style="none", points=[(0, 1), (4, 2)])],
                    marks=[],
                )
            ]
        ],
        "x",
    )
    (x0, y0), (x1, y1) = (
        map(float, point.split(","))
        for point in svg.split('points="')[1].partition('"')[0].split(" ")
    )
    assert (x0, x1) == (62.0, 486.0)
    assert y0 > y1, "more is higher"
    assert "&lt;&amp;" in svg


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.0, 400.0, [0, 100, 200, 300, 400]),
        (-0.03, 0.21, [0, 0.05, 0.1, 0.15, 0.2]),
        (2.4, 5.6, [3, 4, 5]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)


def test_four_faults_a_fifth_of_the_run_apart() -> None:
    (kind, at) = faults(400)
    assert kind == "fault=at"
    assert [f"iteration:{iteration}," in at for iteration in (80, 160, 240, 320)] == [
        True
    ] * 4
