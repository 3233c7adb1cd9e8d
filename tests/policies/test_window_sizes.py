"""Windows of many stages are computed once for each kind of stage.

The result is the same as for each stage alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.policies.window_sizes import WindowSizes
from tests.policies.profiles import config, equal, profile

KINDS = (
    equal(3),
    equal(3, boundary_log_bytes=5),
    profile([[1, 2, 3, 4], [4, 3, 2, 1]], num_experts=2),
    profile([[1, 2, 3, 4], [4, 3, 2, 1]], num_experts=3),
    profile([[1, 2, 3, 4], [4, 3, 2, 2]], num_experts=3),
)


def like(stage: StageProfile) -> StageProfile:
    """Return a stage with the same bytes in new arrays."""
    table = stage.table
    return StageProfile(
        table=type(table)(
            operators=list(table.operators),
            full_bytes=table.full_bytes.copy(),
            compute_bytes=table.compute_bytes.copy(),
        ),
        boundary_log_bytes=stage.boundary_log_bytes,
        step_log_bytes=stage.step_log_bytes,
    )


@given(
    numbers=st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=12),
    num_slots=st.integers(1, 5),
    settings=st.sampled_from(
        [{}, {"keep_windows": 2}, {"window": 2, "paper_exact": True}]
    ),
)
def test_stages_of_a_kind_are_computed_once(
    numbers: Sequence[int], num_slots: int, settings: dict[str, Any]
) -> None:
    moevement = config("moevement", **settings)
    stages = [like(KINDS[number]) for number in numbers]
    together = WindowSizes(moevement, stages, 1)
    assert len(together.kinds) == len(set(numbers))
    for stage, kind in zip(stages, together.kind_of, strict=True):
        alone = WindowSizes(moevement, [stage], 1).kinds[0].window(num_slots)
        np.testing.assert_array_equal(
            kind.window(num_slots).slot_bytes, alone.slot_bytes
        )
        assert kind.window(num_slots).window_bytes == alone.window_bytes
    sizes = [kind.window(num_slots) for kind in together.kind_of]
    size = together.size(num_slots)
    assert size.window_bytes == max(each.window_bytes for each in sizes)
    assert (
        list(size.slot_bytes)
        == np.max([each.slot_bytes for each in sizes], axis=0).tolist()
    )


@st.composite
def stages_of_any_size(draw: st.DrawFn) -> list[StageProfile]:
    """Draw one to three stages of one to three ranks.

    Operators have up to 2^37 parameters, more than a terabyte; many have no bytes.
    """
    found = []
    for _ in range(draw(st.integers(1, 3))):
        num_operators = draw(st.integers(1, 24))
        sizes = st.just(0) | st.integers(1, 9) | st.integers(1, 1 << 37)
        row = st.lists(sizes, min_size=num_operators, max_size=num_operators)
        parameters = draw(st.lists(row, min_size=1, max_size=3))
        logs = {"boundary_log_bytes": draw(st.integers(0, 9))}
        num_experts = draw(st.integers(0, num_operators))
        found.append(profile(parameters, num_experts=num_experts, **logs))
    return found


@given(
    stages=stages_of_any_size(), paper_exact=st.booleans(), num_copies=st.integers(0, 2)
)
def test_a_window_of_more_slots_needs_no_less_memory(
    stages: list[StageProfile], paper_exact: bool, num_copies: int
) -> None:
    """The bisection for the most slots within a budget needs this property."""
    sizes = WindowSizes(
        config("moevement", paper_exact=paper_exact), stages, num_copies
    )
    numbers = range(1, sizes.max_slots + 1)
    needed = [sizes.forecast(num_slots).total_bytes for num_slots in numbers]
    assert needed == sorted(needed)
    for kind in sizes.kinds:
        slots = [kind.cut(kind.natural, num_slots).slot_of for num_slots in numbers]
        assert all((one <= more).all() for one, more in itertools.pairwise(slots))
