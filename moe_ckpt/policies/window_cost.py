"""The expected share of time that a job loses by its windows.

A job loses time by snapshots without faults and by replays after faults. Pure
arithmetic over sizes and measured seconds. A longer window makes snapshots smaller and
replays longer. A pause between two windows makes snapshots and replays rarer and
longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.types import IntArray

Array = npt.NDArray[np.float64] | IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCost:
    """Times and rates of a job, each of the slowest rank.

    A snapshot adds `per_snapshot_s + per_byte_s * bytes` seconds to training, beside
    waits for copies.
    """

    iteration_s: float
    """Seconds of an iteration."""

    overlap_s: float
    """Seconds of a copy to host memory for which the update need not wait. The update
    waits for the rest of a longer copy.
    """

    per_snapshot_s: float
    """Seconds that a snapshot of no bytes adds to training."""

    per_byte_s: float
    """Seconds that each byte of a snapshot adds to training."""

    host_bytes_per_s: float
    """Rate of copies to host memory, in bytes per second."""

    peer_bytes_per_s: float
    """Rate of copies to peers, in bytes per second."""

    replay_share: float
    """Time of a replayed iteration, as a share of `iteration_s`."""

    mtbf_s: float
    """Mean time between failures of the job, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSize:
    """Sizes of the slots of a window, and the allowed pauses after the window."""

    slot_bytes: tuple[int, ...]
    """Bytes of each slot on the rank with the most bytes of that slot."""

    window_bytes: int
    """Bytes of the whole window on the rank with the most bytes."""

    least_pause_iters: int
    """Shortest allowed pause, in iterations."""

    most_pause_iters: int
    """Longest allowed pause, in iterations."""

    @property
    def num_slots(self) -> int:
        return len(self.slot_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTerms:
    """A window and the pause after it, with the expected shares of time."""

    num_slots: int
    """Number of slots of the window."""

    pause_iters: int
    """Iterations of the pause after the window."""

    snapshot_share: float
    """Expected share of time that snapshots take."""

    replay_share: float
    """Expected share of time that replays take."""

    @property
    def lost_share(self) -> float:
        return self.snapshot_share + self.replay_share


def alone_share(num_micro_batches: int, num_stages: int) -> float:
    """Return the replay time of one stage alone, as a share of an iteration's time.

    A replay from logs has no bubbles: M / (M + S - 1), MoEvement, Appendix C. Two
    stages and two micro-batches give 2/3.
    """
    return num_micro_batches / (num_micro_batches + num_stages - 1)


def window_terms(size: WindowSize, job: JobCost, pause_iters: int) -> WindowTerms:
    """Return the costs of windows of one size with pauses of `pause_iters` iterations.

    With W slots and a pause of G iterations, a job takes W snapshots in W + G
    iterations. A fault finds the start of the newest complete window between W and 2 W
    + G iterations old, which is 1.5 W + G / 2 iterations on average. The update waits
    for copies to host memory that are not complete before it, and the next window waits
    for copies to peers.

    With 10 ms per snapshot, W = 2, G = 8 and iterations of 1 s, the snapshot share is
    0.002. With an MTBF of 1000 s, the replay share is 0.007. MoEvement, Appendix C,
    extended by a pause and by the measured costs of snapshots.
    """
    snapshot_shares, replay_shares = _shares(size, job, np.array([pause_iters]))
    return WindowTerms(
        num_slots=size.num_slots,
        pause_iters=pause_iters,
        snapshot_share=float(snapshot_shares[0]),
        replay_share=float(replay_shares[0]),
    )


def cheapest_window(
    sizes: Iterable[WindowSize], job: JobCost, *, overhead: float
) -> WindowTerms:
    """Return the window and the pause that lose the least time within `overhead`.

    If no window stays within `overhead`, the function returns the one whose snapshots
    take the least time. Of equal windows, the shorter window and pause win.

    Args:
        sizes: The windows to choose from.
        job: The costs of the job.
        overhead: The largest time that snapshots may take, as a share of the time.
    """
    terms = [best for size in sizes for best in _candidates(size, job, overhead)]
    allowed = [each for each in terms if each.snapshot_share <= overhead]
    if allowed:
        return min(allowed, key=lambda each: each.lost_share)
    return min(terms, key=lambda each: each.snapshot_share)


def shortest_pause(size: WindowSize, job: JobCost, *, overhead: float) -> int:
    """Return the shortest pause with a snapshot share of at most `overhead`.

    If no allowed pause is long enough, the function returns the longest. A snapshot
    that adds 1 s to iterations of 2 s takes 0.05 of the time with W = 1 and G = 9.
    """
    pauses = np.arange(size.least_pause_iters, size.most_pause_iters + 1)
    snapshot_shares, _ = _shares(size, job, pauses)
    enough = pauses[snapshot_shares <= overhead]
    return int(enough[0] if enough.size else pauses[-1])


def _candidates(size: WindowSize, job: JobCost, overhead: float) -> list[WindowTerms]:
    """Return the pauses of a window that may win.

    One pause loses the least time within `overhead`, and one pause makes snapshots take
    the least time.
    """
    pauses = np.arange(size.least_pause_iters, size.most_pause_iters + 1)
    snapshot_shares, replay_shares = _shares(size, job, pauses)
    lost = np.where(
        snapshot_shares <= overhead, snapshot_shares + replay_shares, np.inf
    )
    chosen = {int(pauses[np.argmin(lost)]), int(pauses[np.argmin(snapshot_shares)])}
    # sorted, because `min` takes the first of equal pauses
    return [window_terms(size, job, pause) for pause in sorted(chosen)]


def _shares(size: WindowSize, job: JobCost, pauses: Array) -> tuple[Array, Array]:
    """Return the shares of time of snapshots and of replays, float64 [pauses]."""
    num_slots, period_s = size.num_slots, (size.num_slots + pauses) * job.iteration_s
    added_s = num_slots * job.per_snapshot_s + size.window_bytes * job.per_byte_s
    host_wait_s = sum(
        max(0.0, nbytes / job.host_bytes_per_s - job.overlap_s)
        for nbytes in size.slot_bytes
    )
    # copies to peers continue while the update waits for copies to host memory
    peer_wait_s = np.maximum(
        0.0, size.window_bytes / job.peer_bytes_per_s - period_s - host_wait_s
    )
    replayed_iters = 1.5 * num_slots + pauses / 2
    replay_shares = replayed_iters * job.replay_share * job.iteration_s / job.mtbf_s
    return (added_s + host_wait_s + peer_wait_s) / period_s, replay_shares
