"""The target of all ranks, over random standings.

tests/engine/test_windows.py tests jobs that stop anywhere.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.recovery.target import Standing, plan_target

Row = tuple[int | None, str]
"""Iteration that a rank has reached, and flags of the rank.

"p": the rank is prepared for one more iteration. "w": the state is whole.
"""


def standings_of(*stages: list[Row]) -> list[Standing]:
    return [
        Standing(
            stage=stage, reached=reached, prepared="p" in flags, whole="w" in flags
        )
        for stage, rows in enumerate(stages)
        for reached, flags in rows
    ]


rows = st.tuples(st.none() | st.integers(0, 3), st.sampled_from(["", "p", "w", "pw"]))


@given(stages=st.lists(st.lists(rows, min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_stage_stays_if_each_of_its_ranks_can(stages: list[list[Row]]) -> None:
    target = plan_target(standings_of(*stages))
    reached = [row[0] for ranks in stages for row in ranks if row[0] is not None]
    if target is None:
        assert not reached
        return
    assert target.iteration == max(reached)
    for stage, ranks in enumerate(stages):
        can = [
            at == target.iteration or (at == target.iteration - 1 and "p" in flags)
            for at, flags in ranks
        ]
        there = [at == target.iteration and "w" in flags for at, flags in ranks]
        assert (stage in target.lost_stages) == (not all(can))
        assert (stage in target.finishing_stages) == (all(can) and not all(there))
