"""Accounting: parts tile a rank's time exactly, whatever its events are.

Each part has the time that its name says.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.account import account
from launcher.report.parts import PagePart
from moe_ckpt.events import (
    Evaluated,
    GenerationEnded,
    ModelBuilt,
    RunFinished,
    StageRecovered,
    StateLost,
    StateResumed,
    WorkerStarted,
)
from tests.report_runs import (
    DEATH,
    LOST_NODE,
    Timed,
    committed,
    log_of,
    rejoined,
)

BEGUN = WorkerStarted(pid=1, host="here", incarnation=0, device="cpu")
ANEW = WorkerStarted(pid=2, host="here", incarnation=1, device="cpu")
LEFT = GenerationEnded(generation=1, reason=DEATH, left_unix_s=0.0)
FINISHED = RunFinished(iteration=2, digest="")


def resumed(iteration: int, seconds: float = 0.5) -> StateResumed:
    return StateResumed(
        iteration=iteration, source="disk", seconds=seconds, passed_over=[]
    )


def recovered(iteration: int, seconds: float = 0.2) -> StageRecovered:
    return StageRecovered(
        iteration=iteration,
        window_start=0,
        first_stage=0,
        last_stage=0,
        replayed_iters=1,
        fetched_bytes=0,
        seconds=seconds,
    )


def ms(folder: Path, events: list[Timed], end_s: float) -> dict[str, float]:
    """Return the parts of a rank's time in milliseconds, without empty parts."""
    totals_us = account(log_of(folder, events), round(end_s * 1e6)).totals_us()
    assert sum(totals_us.values()) == round(end_s * 1e6)
    return {part.label: us / 1000 for part, us in totals_us.items() if us}


TABLE: dict[str, tuple[list[Timed], float, dict[str, float]]] = {
    "iterations, their stalls and what lies between": (
        [(1.0, BEGUN), (2.5, committed(1)), (3.1, committed(2)), (3.2, FINISHED)],
        3.2,
        {"startup": 2000, "compute": 900, "stall": 100, "other": 200},
    ),
    "an iteration that says that it is longer than there was time": (
        [(1.0, BEGUN), (1.5, committed(1)), (1.7, committed(2, seconds=9.0))],
        1.7,
        {"startup": 1000, "compute": 600, "stall": 100},
    ),
    "an evaluation, and time after the last event": (
        [(0.5, committed(1)), (0.9, Evaluated(iteration=1, loss=1.0))],
        1.5,
        {"compute": 450, "stall": 50, "evaluation": 400, "unknown": 600},
    ),
    "a survivor that waits for a stage": (
        [
            (0.5, committed(1)),
            (1.0, LEFT),
            (1.45, rejoined(1)),
            (1.95, committed(2)),
            (1.95, FINISHED),
        ],
        1.95,
        {
            "compute": 900,
            "stall": 100,
            "lost": 300,
            "detection": 100,
            "rebuild": 200,
            "fetch": 50,
            "waiting": 300,
        },
    ),
    "a rank that replays within its recovery": (
        [
            (0.5, committed(1)),
            (0.8, ANEW),
            (1.4, recovered(1)),
            (1.45, rejoined(1, executed_iters=1)),
        ],
        1.45,
        {
            "compute": 450,
            "stall": 50,
            "lost": 300,
            "detection": 100,
            "rebuild": 200,
            "fetch": 50,
            "waiting": 100,
            "replay": 200,
        },
    ),
    "a rank of a node that was silent for long, on its spare node": (
        [
            (0.5, committed(1)),
            (11.0, ANEW),
            (11.1, ModelBuilt(seconds=0.05)),
            (11.5, rejoined(1, detect_s=10.0, deaths=[LOST_NODE], classes=["node"])),
        ],
        11.5,
        {
            "compute": 450,
            "stall": 50,
            "lost": 450,
            "detection": 10000,
            "rebuild": 200,
            "fetch": 50,
            "waiting": 300,
        },
    ),
    "a worker of a given-up node that leaves its generation late": (
        [
            (0.5, committed(1)),
            (1.2, ANEW),
            (1.45, rejoined(1)),
            (1.95, committed(2)),
            (2.2, LEFT),
            (2.45, committed(3)),
            (2.45, FINISHED),
        ],
        2.45,
        {
            "compute": 1350,
            "stall": 150,
            "lost": 300,
            "detection": 100,
            "rebuild": 200,
            "fetch": 50,
            "waiting": 300,
        },
    ),
    "a simulated rank that replays, without saying when": (
        [(0.5, committed(1)), (1.45, rejoined(1, executed_iters=1))],
        1.45,
        {
            "compute": 450,
            "stall": 50,
            "lost": 300,
            "detection": 100,
            "rebuild": 200,
            "fetch": 50,
            "replay": 300,
        },
    ),
    "a recovery that was detected before the last commit: later parts are surer": (
        [(0.5, committed(1)), (0.9, rejoined(1))],
        0.9,
        {"compute": 450, "stall": 50, "rebuild": 50, "fetch": 50, "waiting": 300},
    ),
    "a recovery that itself was cut off": (
        [(0.5, committed(1)), (1.0, LEFT), (1.5, LEFT), (2.15, rejoined(1))],
        2.15,
        {
            "compute": 450,
            "stall": 50,
            "lost": 500,
            "detection": 100,
            "rebuild": 700,
            "fetch": 50,
            "waiting": 300,
        },
    ),
    "a cut-off iteration that the recovery commits was not lost": (
        [
            (0.5, committed(1)),
            (1.0, LEFT),
            (1.45, rejoined(2)),
            (1.45, committed(2, seconds=0.0)),
        ],
        1.45,
        {
            "compute": 750,
            "stall": 50,
            "detection": 100,
            "rebuild": 200,
            "fetch": 50,
            "waiting": 300,
        },
    ),
    "iterations that all go back behind are lost, and count when they are done again": (
        [
            (0.5, committed(1)),
            (1.0, committed(2)),
            (1.5, committed(3)),
            (2.15, rejoined(1)),
            (2.65, committed(2)),
        ],
        2.65,
        {
            "compute": 900,
            "stall": 100,
            "lost": 1000,
            "detection": 100,
            "rebuild": 200,
            "fetch": 50,
            "waiting": 300,
        },
    ),
    "a restart by torchrun": (
        [
            (0.5, committed(1)),
            (1.0, committed(2)),
            (3.0, ANEW),
            (4.0, ModelBuilt(seconds=1.0)),
            (5.0, resumed(1)),
            (5.5, committed(2)),
        ],
        5.5,
        {"compute": 900, "stall": 100, "lost": 500, "rebuild": 3500, "fetch": 500},
    ),
    "a run that resumes another's checkpoint": (
        [(0.1, BEGUN), (1.0, resumed(7)), (1.5, committed(8))],
        1.5,
        {"startup": 500, "fetch": 500, "compute": 450, "stall": 50},
    ),
    "a load from disk within a recovery": (
        [(0.5, committed(1)), (1.3, resumed(0, 0.1)), (1.45, rejoined(0))],
        1.45,
        {"lost": 800, "detection": 100, "rebuild": 200, "fetch": 150, "waiting": 200},
    ),
    "state that was lost in a living process, and the iteration done again": (
        [
            (0.5, committed(1)),
            (0.8, StateLost(iteration=2, phase="backward")),
            (1.1, recovered(1)),
            (1.6, committed(2, seconds=1.1, stall_s=0.25)),
        ],
        1.6,
        {"compute": 900, "stall": 100, "lost": 400, "replay": 200},
    ),
    "state that was lost after the step": (
        [
            (0.5, committed(1)),
            (1.1, recovered(2)),
            (1.2, committed(2, seconds=0.7, stall_s=0.25)),
        ],
        1.2,
        {"compute": 900, "stall": 100, "replay": 200},
    ),
    "a rank that never came to anything": (
        [(0.25, BEGUN)],
        2.0,
        {"startup": 250, "unknown": 1750},
    ),
    "nothing at all": ([], 2.0, {"unknown": 2000}),
}


@pytest.mark.parametrize(
    ("events", "end_s", "wanted"), TABLE.values(), ids=TABLE.keys()
)
def test_parts(
    tmp_path: Path, events: list[Timed], end_s: float, wanted: dict[str, float]
) -> None:
    assert ms(tmp_path, events, end_s) == wanted


def test_stretches_of_an_iteration_name_it(tmp_path: Path) -> None:
    tiling = account(log_of(tmp_path, [(1.0, committed(7))]), 1_500_000)
    told = zip(
        tiling.ends_us.tolist(),
        tiling.parts.tolist(),
        tiling.iterations.tolist(),
        strict=True,
    )
    assert list(told) == [
        (500_000, PagePart.STARTUP, -1),
        (950_000, PagePart.COMPUTE, 7),
        (1_000_000, PagePart.STALL, 7),
        (1_500_000, PagePart.UNKNOWN, -1),
    ]


def seconds() -> st.SearchStrategy[float]:
    odd = st.sampled_from([0.0, -1.0, 1e-7, 1e12, math.nan, math.inf])
    return st.one_of(st.floats(0, 3), odd)


def events() -> st.SearchStrategy[Any]:
    iterations = st.integers(0, 8)
    return st.one_of(
        st.builds(
            lambda i, s, stall: committed(i, seconds=s, stall_s=stall),
            iterations,
            seconds(),
            seconds(),
        ),
        st.builds(
            lambda i, detect, rebuild, fetch, replay, executed: rejoined(
                i,
                detect_s=detect,
                rebuild_s=rebuild,
                fetch_s=fetch,
                replay_s=replay,
                executed_iters=executed,
            ),
            iterations,
            seconds(),
            seconds(),
            seconds(),
            seconds(),
            iterations,
        ),
        st.builds(recovered, iterations, seconds()),
        st.builds(resumed, iterations, seconds()),
        st.sampled_from(
            [
                BEGUN,
                ANEW,
                LEFT,
                FINISHED,
                ModelBuilt(seconds=1.0),
                Evaluated(iteration=1, loss=1.0),
            ]
        ),
    )


@given(
    st.lists(st.tuples(st.floats(-1, 12), events()), max_size=25),
    st.integers(1, 10_000_000),
    st.booleans(),
)
def test_parts_of_any_rank_sum_to_the_wall_time(
    found: list[Timed], end_us: int, in_order: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ordered = sorted(found, key=lambda each: each[0]) if in_order else found
        tiling = account(log_of(Path(folder), ordered), end_us)
    assert (tiling.lengths_us > 0).all()
    assert tiling.ends_us[-1] == end_us
    assert sum(tiling.totals_us().values()) == end_us
