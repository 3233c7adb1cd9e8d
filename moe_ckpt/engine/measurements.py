"""One rank's measurements: iteration times, snapshot costs, rates and popularity.

Must not: communicate, or decide anything. A snapshot costs time in three ways: training
waits for copies, training stands still while a snapshot begins, and iterations are
slower while copies run in the background. An iteration is quiet if nothing is copied in
that iteration.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from moe_ckpt.engine.snapshot_cost import SnapshotCost
from moe_ckpt.types import ENOUGH_SNAPSHOTS, RECENT_ITERS, WARM_UP_ITERS

_RECENT = 16


class Measurements:
    """This rank's measurements so far. Recoveries keep measured times and rates.

    The first iterations of a process (`WARM_UP_ITERS`) are slower and do not count.

    Attributes:
        copy_rates: Recent rates of copies to host memory, in bytes per second.
        bubbles_s: For each recent iteration, seconds in which this rank waited for
            other stages.
        popularity: Popularity of each expert of the stage, float64 [experts].
        added: Seconds that snapshots add to training beside waits for copies.
        iters_since_quiet: Iterations since the newest quiet one. The iteration time may
            have changed since then.
    """

    def __init__(
        self, num_experts: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.copy_rates: deque[float] = deque(maxlen=_RECENT)
        self.bubbles_s: deque[float] = deque(maxlen=RECENT_ITERS)
        self.popularity = np.zeros(num_experts)
        self._now = now
        self._recent: deque[float] = deque(maxlen=RECENT_ITERS)
        self._overlaps: deque[float] = deque(maxlen=RECENT_ITERS)
        self._quiet: deque[float] = deque(maxlen=RECENT_ITERS)
        self._busy: list[float] = []
        self._stall_s = 0.0
        self._wait_s = 0.0
        self._counts = False
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self.added = SnapshotCost()
        self._replayed_s: deque[float] = deque(maxlen=_RECENT)
        self._since_s = 0.0
        self._so_far_s = 0.0
        self._is_quiet = False
        self._num_iters = 0
        self.iters_since_quiet = 0

    def iteration_started(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._so_far_s = 0.0
        self._since_s = self._now()

    def paused(self) -> None:
        """Begin a part that is not the iteration's own work."""
        self._so_far_s += self._now() - self._since_s

    def resumed(self) -> None:
        self._since_s = self._now()

    def gradients_complete(self) -> None:
        """Note that gradients are complete.

        The update of this iteration follows once copies of the state before the update
        are complete.
        """
        self.paused()
        if self._num_iters >= WARM_UP_ITERS:
            self._overlaps.append(self._so_far_s)

    def iteration_finished(self) -> None:
        self.paused()
        self._num_iters += 1
        if self._num_iters <= WARM_UP_ITERS:
            return
        self._recent.append(self._so_far_s)
        (self._quiet if self._is_quiet else self._busy).append(self._so_far_s)
        self.added.iteration_finished(self._so_far_s, is_quiet=self._is_quiet)
        self.iters_since_quiet = 0 if self._is_quiet else self.iters_since_quiet + 1

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Measure a time in which training stands still while a snapshot begins."""
        since_s = self._now()
        try:
            yield
        finally:
            self._stall_s += self._now() - since_s
            self.added.stalled(self._now() - since_s)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a time in which training waits for copies.

        Sizes and rates predict such waits.
        """
        since_s = self._now()
        try:
            yield
        finally:
            # not in `added`: the choice of a window computes waits from sizes and rates
            self._wait_s += self._now() - since_s

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Note that a snapshot has reached host memory."""
        self.added.copied(size_bytes)
        # an empty snapshot has no rate: 0 bytes a second would count as the rate of the
        # slowest rank
        if size_bytes:
            self.copy_rates.append(size_bytes / max(seconds, 1e-9))

    def replayed(self, num_iters: int, seconds: float) -> None:
        """Note that this rank's stage has replayed iterations by itself."""
        if num_iters:
            self._replayed_s.append(seconds / num_iters)

    def snapshot_began(self) -> None:
        """Begin the costs of a snapshot, or of a window of snapshots.

        All waits, stalls and busy iterations until the next call belong to this
        snapshot.
        """
        if self._counts and self._quiet:
            quiet_s = statistics.fmean(self._quiet)
            self._costs.append(
                self._stall_s
                + self._wait_s
                + sum(seconds - quiet_s for seconds in self._busy)
            )
        self.added.snapshot_began()
        self._counts = True
        self._stall_s = self._wait_s = 0.0
        self._busy.clear()

    def drop_snapshot(self) -> None:
        """Leave the last snapshot out of the cost statistics.

        The snapshot is an exception that does not recur, such as one during a fault.
        """
        self._counts = False
        self.added.reset()

    def drop_counts(self) -> None:
        """Drop the popularity.

        The state now belongs to an earlier iteration, or to another run.
        """
        self.popularity = np.zeros_like(self.popularity)

    def iteration_s(self) -> float:
        """Return the median seconds of recent iterations; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    def overlap_s(self) -> float:
        """Return the median seconds from the start of an iteration to its gradients.

        Returns 0 before the first measured iteration.
        """
        return statistics.median(self._overlaps) if self._overlaps else 0.0

    def bubble_bytes(self) -> float:
        """Return the bytes that can be copied in the bubbles of an iteration.

        Returns 0 while bubbles or rates are not known.
        """
        if not self.bubbles_s or not self.copy_rates:
            return 0.0
        return statistics.median(self.bubbles_s) * statistics.median(self.copy_rates)

    def snapshot_cost_s(self) -> float | None:
        """Return the mean seconds that a snapshot adds to training.

        Returns None before `ENOUGH_SNAPSHOTS` snapshots have been measured.
        """
        # noise of iterations can make a mean of differences negative if snapshots cost
        # little
        return (
            max(0.0, statistics.fmean(self._costs))
            if len(self._costs) >= ENOUGH_SNAPSHOTS
            else None
        )

    def replayed_iteration_s(self) -> float | None:
        """Return the median seconds of replayed iterations; None before the first."""
        return statistics.median(self._replayed_s) if self._replayed_s else None
