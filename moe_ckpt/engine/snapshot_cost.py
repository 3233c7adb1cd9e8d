"""Seconds that snapshots add to training beside waits for copies.

The costs are measured in pairs and fitted by number and bytes of snapshots. Iterations
in which snapshots are copied are compared with iterations just before and after,
without copies. So neither a slow start nor another job on the machine counts as the
price of snapshots.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.types import ENOUGH_WINDOWS

_RECENT_BLOCKS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """The cost of the snapshots between two quiet stretches."""

    num_snapshots: int
    """Number of snapshots in the block."""

    size_bytes: int
    """Bytes of these snapshots."""

    seconds: float
    """Seconds that these snapshots have added to training."""


class SnapshotCost:
    """Collects blocks: busy iterations with their snapshots, between quiet ones."""

    def __init__(self) -> None:
        self._blocks: deque[BlockCost] = deque(maxlen=_RECENT_BLOCKS)
        self.reset()

    def iteration_finished(self, seconds: float, *, is_quiet: bool) -> None:
        (self._quiet_after if is_quiet else self._busy).append(seconds)

    def stalled(self, seconds: float) -> None:
        self._stall_s += seconds

    def copied(self, size_bytes: int) -> None:
        self._num_snapshots += 1
        self._size_bytes += size_bytes

    def snapshot_began(self) -> None:
        """Close the block if quiet iterations followed the block's last snapshot.

        Otherwise the block continues.
        """
        if self._quiet_after:
            self._blocks.extend(self._open_block())
            # also the quiet iterations before the next block
            self._begin(self._quiet_after)

    def reset(self) -> None:
        """Drop the open block.

        The block contains a fault, or a first snapshot for which training waits.
        """
        self._begin([])

    @property
    def is_settled(self) -> bool:
        """Whether enough blocks separate the cost of a snapshot from that of bytes."""
        return len(self._known()) >= ENOUGH_WINDOWS

    def fit(self, dense_bytes: int) -> tuple[float, float] | None:
        """Return the seconds that snapshots of two sizes add to training.

        Args:
            dense_bytes: Bytes of a rank's whole state.

        Returns:
            The seconds of a snapshot of no bytes, and of a snapshot of `dense_bytes`.
            None before the first block.
        """
        blocks = self._known()
        if not blocks:
            return None
        per_snapshot_s, per_byte_s = fit_costs(blocks)
        return per_snapshot_s, per_snapshot_s + dense_bytes * per_byte_s

    def _known(self) -> list[BlockCost]:
        """Return all blocks, and the open block if it lies between quiet iterations."""
        return [*self._blocks, *self._open_block()]

    def _open_block(self) -> list[BlockCost]:
        if not (self._num_snapshots and self._quiet_before and self._quiet_after):
            return []
        # from both sides: if the machine got faster meanwhile, snapshots would look
        # free; if slower, expensive
        quiet_s = (
            statistics.fmean(self._quiet_before) + statistics.fmean(self._quiet_after)
        ) / 2
        added_s = self._stall_s + sum(seconds - quiet_s for seconds in self._busy)
        return [
            BlockCost(
                num_snapshots=self._num_snapshots,
                size_bytes=self._size_bytes,
                seconds=added_s,
            )
        ]

    def _begin(self, quiet: list[float]) -> None:
        self._quiet_before = quiet
        self._quiet_after: list[float] = []
        self._busy: list[float] = []
        self._stall_s, self._num_snapshots, self._size_bytes = 0.0, 0, 0


def fit_costs(blocks: Sequence[BlockCost]) -> tuple[float, float]:
    """Fit seconds per snapshot and seconds per byte to the blocks (least squares).

    Blocks of one kind of window cannot separate the two: then bytes explain all.

    Returns:
        Seconds per snapshot and seconds per byte, neither negative.
    """
    factors = np.array(
        [(block.num_snapshots, block.size_bytes) for block in blocks], np.float64
    )
    seconds = np.array([block.seconds for block in blocks])
    # bytes and counts differ by nine orders of magnitude
    scale = np.maximum(factors.max(axis=0), 1.0)
    factors = factors / scale
    if np.linalg.matrix_rank(factors, tol=1e-3) == 2:
        both = np.linalg.lstsq(factors, seconds, rcond=None)[0]
        # if snapshots cost little, noise makes one coefficient negative: then a single
        # factor explains the blocks
        if both.min() >= 0:
            return float(both[0] / scale[0]), float(both[1] / scale[1])
    by_bytes, by_count = (_fit_one(factors[:, column], seconds) for column in (1, 0))
    if by_bytes[1] <= by_count[1]:
        return 0.0, by_bytes[0] / float(scale[1])
    return by_count[0] / float(scale[0]), 0.0


def _fit_one(
    factor: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """Return the factor's coefficient, at least 0, and the remaining sum of squares."""
    squares = float(factor @ factor)
    coefficient = max(0.0, float(factor @ seconds) / squares) if squares else 0.0
    rest = seconds - coefficient * factor
    return coefficient, float(rest @ rest)
