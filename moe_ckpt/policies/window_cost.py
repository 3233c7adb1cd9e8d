"""The share of time that a job is expected to lose by its windows: snapshots without
faults, replays after faults.

Pure arithmetic over sizes and measured seconds. A longer window makes snapshots smaller
and a replay longer; a pause between two windows makes both snapshots and replays rarer
and longer.
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
    """Seconds and rates of a job, each of the slowest rank.

    A snapshot adds `per_snapshot_s + per_byte_s * bytes` to training beside waits for
    copies; `replay_share` is the time of a replayed iteration as a share of
    `iteration_s`. The update waits for copies to host memory that take longer than
    `overlap_s`.
    """

    iteration_s: float
    overlap_s: float
    per_snapshot_s: float
    per_byte_s: float
    host_bytes_per_s: float
    peer_bytes_per_s: float
    replay_share: float
    mtbf_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSize:
    """Bytes of each slot and of a whole window, on the ranks with the most of each, and
    the allowed pauses.
    """

    slot_bytes: tuple[int, ...]
    window_bytes: int
    least_pause_iters: int
    most_pause_iters: int

    @property
    def num_slots(self) -> int:
        return len(self.slot_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTerms:
    """A window and the pause after it, with the expected shares of time that snapshots
    and replays take.
    """

    num_slots: int
    pause_iters: int
    snapshot_share: float
    replay_share: float

    @property
    def lost_share(self) -> float:
        return self.snapshot_share + self.replay_share


def alone_share(num_micro_batches: int, num_stages: int) -> float:
    """Return the time in which one of several stages replays an iteration by itself, as
    a share of an iteration.

    A replay from logs has no bubbles: M / (M + S - 1). MoEvement, Appendix C. Two
    stages and two micro-batches: 2/3.
    """
    return num_micro_batches / (num_micro_batches + num_stages - 1)


def window_terms(size: WindowSize, job: JobCost, pause_iters: int) -> WindowTerms:
    """Return the costs of windows of one size with pauses of this many iterations.

    With W slots and a pause of G iterations, W snapshots are taken in W + G iterations.
    A fault finds the newest complete window between W and 2 W + G iterations old, from
    its start: 1.5 W + G / 2 on average. The update waits for copies to host memory that
    are not complete before it, and the next window for copies to peers. 10 ms a
    snapshot, W = 2, G = 8, iterations of 1 s: 0.002; at an MTBF of 1000 s replays add
    0.007. MoEvement, Appendix C, with a pause and with the measured costs of snapshots.
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
    """Return the window and pause that lose the least, among those whose snapshots take
    at most `overhead`, a share.

    If none stays within `overhead`, the one whose snapshots take the least. Of equals
    the shorter window and pause.
    """
    terms = [best for size in sizes for best in _candidates(size, job, overhead)]
    allowed = [each for each in terms if each.snapshot_share <= overhead]
    if allowed:
        return min(allowed, key=lambda each: each.lost_share)
    return min(terms, key=lambda each: each.snapshot_share)


def shortest_pause(size: WindowSize, job: JobCost, *, overhead: float) -> int:
    """Return the shortest pause with which windows of one size take at most `overhead`,
    a share of the time.

    Returns the longest allowed pause if none is enough. A snapshot that adds 1 s to
    iterations of 2 s takes 0.05 of the time with W = 1 and G = 9.
    """
    pauses = np.arange(size.least_pause_iters, size.most_pause_iters + 1)
    snapshot_shares, _ = _shares(size, job, pauses)
    enough = pauses[snapshot_shares <= overhead]
    return int(enough[0] if enough.size else pauses[-1])


def _candidates(size: WindowSize, job: JobCost, overhead: float) -> list[WindowTerms]:
    """Return the pause that loses the least within `overhead`, and the pause whose
    snapshots take the least.
    """
    pauses = np.arange(size.least_pause_iters, size.most_pause_iters + 1)
    snapshot_shares, replay_shares = _shares(size, job, pauses)
    lost = np.where(
        snapshot_shares <= overhead, snapshot_shares + replay_shares, np.inf
    )
    chosen = {int(pauses[np.argmin(lost)]), int(pauses[np.argmin(snapshot_shares)])}
    # `min` takes the first of equals
    return [window_terms(size, job, pause) for pause in sorted(chosen)]


def _shares(size: WindowSize, job: JobCost, pauses: Array) -> tuple[Array, Array]:
    """Return the shares of time that snapshots and replays take, each float64 [pauses]."""
    num_slots, period_s = size.num_slots, (size.num_slots + pauses) * job.iteration_s
    added_s = num_slots * job.per_snapshot_s + size.window_bytes * job.per_byte_s
    host_wait_s = sum(
        max(0.0, nbytes / job.host_bytes_per_s - job.overlap_s)
        for nbytes in size.slot_bytes
    )
    # peers' copies go on while the update waits for those of the host
    peer_wait_s = np.maximum(
        0.0, size.window_bytes / job.peer_bytes_per_s - period_s - host_wait_s
    )
    replayed_iters = 1.5 * num_slots + pauses / 2
    replay_shares = replayed_iters * job.replay_share * job.iteration_s / job.mtbf_s
    return (added_s + host_wait_s + peer_wait_s) / period_s, replay_shares
