"""Iterations between whole checkpoints.

The best number by the formula, the fewest under a cap, and the number that copying
takes.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.checkpoint_interval import (
    best_interval,
    capped_interval,
    copying_interval,
    expected_ettr,
)

SECONDS = st.floats(0.01, 100.0)


def test_ettr_is_the_formula_of_the_paper() -> None:
    assert (
        expected_ettr(iteration_s=2.0, checkpoint_s=1.0, every_iters=5, mtbf_s=100.0)
        == 1 / 1.1 / 1.05
    )
    assert expected_ettr(
        iteration_s=2.0, checkpoint_s=0.0, every_iters=1, mtbf_s=1e12
    ) == pytest.approx(1.0)


@given(
    iteration_s=SECONDS, checkpoint_s=st.floats(0.0, 50.0), mtbf_s=st.floats(10.0, 1e5)
)
def test_no_interval_is_better_than_the_best(
    iteration_s: float, checkpoint_s: float, mtbf_s: float
) -> None:
    def ettr(every_iters: int) -> float:
        return expected_ettr(
            iteration_s=iteration_s,
            checkpoint_s=checkpoint_s,
            every_iters=every_iters,
            mtbf_s=mtbf_s,
        )

    best = best_interval(
        iteration_s=iteration_s, checkpoint_s=checkpoint_s, mtbf_s=mtbf_s
    )
    assert best >= 1
    others = {1, 2, 3, best - 1, best + 1, best // 2, 2 * best, 10 * best} - {0, -1}
    assert all(ettr(best) >= ettr(other) - 1e-12 for other in others)


@given(iteration_s=SECONDS, checkpoint_s=SECONDS, overhead=st.floats(0.001, 0.5))
def test_a_capped_interval_is_the_shortest_there_is(
    iteration_s: float, checkpoint_s: float, overhead: float
) -> None:
    fewest = capped_interval(
        iteration_s=iteration_s, checkpoint_s=checkpoint_s, overhead=overhead
    )
    assert checkpoint_s / (fewest * iteration_s) <= overhead * (1 + 1e-9)
    assert fewest == 1 or checkpoint_s / ((fewest - 1) * iteration_s) > overhead * (
        1 - 1e-9
    )


@pytest.mark.parametrize(
    ("copy_s", "iterations"), [(0.0, 1), (0.9, 1), (2.0, 1), (2.1, 2), (9.0, 5)]
)
def test_a_checkpoint_is_copied_before_the_next(copy_s: float, iterations: int) -> None:
    assert copying_interval(iteration_s=2.0, copy_s=copy_s) == iterations
