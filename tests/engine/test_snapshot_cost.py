"""Seconds that snapshots add to training, from pairs of busy and quiet iterations.

The seconds are fitted by number and bytes of snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from moe_ckpt.engine.snapshot_cost import BlockCost, SnapshotCost, fit_costs
from moe_ckpt.types import ENOUGH_WINDOWS


@pytest.mark.parametrize(
    ("windows", "per_snapshot_s", "per_byte_s"),
    [
        pytest.param([(1, 100, 3.0), (4, 160, 7.2)], 1.0, 0.02, id="each its own"),
        pytest.param(
            [(1, 10**9, 1.5), (4, 16 * 10**8, 4.8)],
            1.0,
            0.5e-9,
            id="very different sizes",
        ),
        pytest.param(
            [(1, 100, 3.0), (1, 100, 5.0)],
            0.0,
            0.04,
            id="one kind of window: bytes explain all",
        ),
        pytest.param([(1, 100, 1.0), (4, 160, 1.6)], 0.0, 0.01, id="bytes alone"),
        pytest.param([(1, 100, 1.0), (4, 160, 4.0)], 1.0, 0.0, id="snapshots alone"),
        pytest.param(
            [(1, 100, 1.0), (4, 160, 5.0)],
            21 / 17,
            0.0,
            id="no byte makes a window cheaper",
        ),
        pytest.param(
            [(1, 100, -0.5), (4, 160, -0.2)],
            0.0,
            0.0,
            id="noise makes nothing cheaper than free",
        ),
        pytest.param([(1, 0, 1.0), (2, 0, 2.0)], 1.0, 0.0, id="a rank without bytes"),
    ],
)
def test_costs_are_fitted(
    windows: list[tuple[int, int, float]], per_snapshot_s: float, per_byte_s: float
) -> None:
    costs = [
        BlockCost(num_snapshots=count, size_bytes=nbytes, seconds=seconds)
        for count, nbytes, seconds in windows
    ]
    assert fit_costs(costs) == pytest.approx((per_snapshot_s, per_byte_s))


def measured(
    *blocks: tuple[Sequence[float], float],
    first_s: float = 1.0,
    stall_s: float = 0.0,
    forgotten: Collection[int] = (),
) -> SnapshotCost:
    """Return the costs after blocks of busy iterations and one quiet iteration each.

    Args:
        blocks: Seconds of each busy iteration, with a snapshot of 10 bytes each, and
            seconds of the quiet iteration at the end of the block.
        first_s: Seconds of the quiet iteration before the first block.
        stall_s: Seconds for which each snapshot stalls training.
        forgotten: Numbers of blocks that are dropped, from 0.
    """
    cost = SnapshotCost()
    cost.iteration_finished(first_s, is_quiet=True)
    for number, (busy, quiet_s) in enumerate(blocks):
        for seconds in busy:
            cost.snapshot_began()
            cost.copied(10)
            cost.stalled(stall_s)
            cost.iteration_finished(seconds, is_quiet=False)
        if number in forgotten:
            cost.reset()
        cost.iteration_finished(quiet_s, is_quiet=True)
    cost.snapshot_began()
    return cost


def test_a_machine_that_gets_faster_makes_snapshots_neither_free_nor_dear() -> None:
    """Each block lies between quiet iterations of its own, and stalls for 0.25 s.

    The quiet iterations of the first block take 10.5 s and 9.5 s.
    """
    blocks = [((10.0 - number,), 9.5 - number) for number in range(ENOUGH_WINDOWS)]
    assert measured(*blocks, first_s=10.5, stall_s=0.25).fit(10) == pytest.approx(
        (0.0, 0.25)
    )


def test_windows_without_a_quiet_iteration_between_them_are_one_block() -> None:
    block = ((1.5, 1.25, 1.75), 1.0)
    assert not measured(*[block] * (ENOUGH_WINDOWS - 1)).is_settled
    cost = measured(*[block] * ENOUGH_WINDOWS)
    assert cost.is_settled
    assert cost.fit(10) == pytest.approx((0.0, 0.5))


def test_costs_are_known_after_one_block_and_settled_after_enough() -> None:
    costs = [
        measured(*[((1.5,), 1.0)] * number) for number in range(ENOUGH_WINDOWS + 1)
    ]
    known = [(cost.fit(10), cost.is_settled) for cost in costs]
    assert known == [
        (None, False),
        *[((0.0, 0.5), False)] * (ENOUGH_WINDOWS - 1),
        ((0.0, 0.5), True),
    ]


def test_a_block_with_a_fault_does_not_count() -> None:
    blocks = [
        ((99.0 if number == 1 else 1.5,), 1.0) for number in range(ENOUGH_WINDOWS + 1)
    ]
    assert measured(*blocks, forgotten=[1]).fit(10) == pytest.approx((0.0, 0.5))
