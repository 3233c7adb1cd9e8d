"""Values that all layers use. No behaviour beyond what follows from the fields."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """The number of ways in which each axis of parallelism splits the job.

    `ep` (expert parallel) divides `dp` (data parallel): experts spread over ranks that
    see different tokens. Context parallelism counts as data parallelism: its ranks hold
    one state, too, and see other tokens of the same sequences.
    """

    pp: int
    dp: int
    ep: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that train one pipeline stage: consecutive ones."""
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"PP={self.pp} DP={self.dp} EP={self.ep} TP={self.tp}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """The facts on which a checkpoint and the run that loads it must agree.

    `run_id` tells runs apart; `model` fingerprints everything that shapes the saved
    tensors (architecture, precision, optimizer), so that equal fingerprints and layouts
    mean interchangeable state.
    """

    run_id: str
    model: str
    layout: ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file of a checkpoint: its path inside the directory, size and CRC-32."""

    name: str
    size_bytes: int
    crc32: int


class OperatorKind(Enum):
    """The kinds of operators; the members' order is that of a layer's operators, and of
    layers around them.
    """

    EMBEDDING = "embedding"
    # a layer's attention, norms and shared expert, or its dense MLP; in a dense model
    # the whole layer
    BLOCK = "block"
    GATE = "gate"  # a layer's router: weights and buffers
    EXPERT = "expert"
    FINAL_NORM = "final norm"
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorId:
    """The unit of snapshotting, by its place in the whole model: global layer (from 0)
    and global expert (from 0).

    `mtp_depth` is set for the operators of a multi-token prediction module, whose
    layers count from 0 again.
    """

    kind: OperatorKind
    layer: int | None = None
    expert: int | None = None
    mtp_depth: int | None = None

    def __str__(self) -> str:
        names = [] if self.mtp_depth is None else [f"mtp {self.mtp_depth}"]
        names += [] if self.layer is None else [f"layer {self.layer}"]
        names += [] if self.kind is OperatorKind.BLOCK else [self.kind.value]
        names += [] if self.expert is None else [str(self.expert)]
        return " ".join(names) or self.kind.value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedBytes:
    """The bytes of a stage's operators, by pairs of a rank and an operator.

    A rank of a sharded optimizer owns bytes of a few of a thousand operators: pairs
    without bytes are left out. Pairs are ordered by rank, and by operator within a
    rank.
    """

    num_ranks: int
    """The ranks of the stage group."""

    num_operators: int
    """The operators of the stage."""

    ranks: npt.NDArray[np.int32]
    """The rank of each pair in the stage group, int32 [pairs]."""

    operators: npt.NDArray[np.int32]
    """The position of each pair's operator in the table, int32 [pairs]."""

    full: IntArray
    """Bytes of master weights, moments and buffers, int64 [pairs]."""

    compute: IntArray
    """Bytes of weights as forward uses them, and of buffers, int64 [pairs]."""

    moments: IntArray | None
    """Bytes of moments, a part of `full`, int64 [pairs]; None: two thirds of `full`."""

    def dense(self, nbytes: IntArray) -> IntArray:
        """Return the bytes of all pairs, int64 [ranks, operators].

        Args:
            nbytes: The bytes of the pairs that are here: `full`, `compute` or
                `moments`.
        """
        found = np.zeros((self.num_ranks, self.num_operators), np.int64)
        found[self.ranks, self.operators] = nbytes
        return found

    def by_rank(self, nbytes: IntArray) -> IntArray:
        """Return the sum of each rank, int64 [ranks].

        Args:
            nbytes: The bytes of the pairs that are here: `full`, `compute` or
                `moments`.
        """
        found = np.zeros(self.num_ranks, np.int64)
        np.add.at(found, self.ranks, nbytes)
        return found


class OperatorTable:
    """The operators of one stage group, from front to back, and each rank's share of
    them.

    Every byte is counted on the one rank that snapshots it. Arrays of all pairs of a
    rank and an operator are built when they are asked for, and not kept: for 16,384
    ranks of a model with 15,000 operators they would take 70 MB on every rank.

    Args:
        operators: The operators.
        full_bytes: Bytes of master weights, moments and buffers, int64 [ranks,
            operators].
        compute_bytes: Bytes of weights as forward uses them, and of buffers, of the
            same shape.
        moment_bytes: The moments' part of `full_bytes`; None: two thirds, as of FP32
            state.
    """

    def __init__(
        self,
        *,
        operators: Sequence[OperatorId],
        full_bytes: IntArray,
        compute_bytes: IntArray,
        moment_bytes: IntArray | None = None,
    ) -> None:
        self.operators = operators
        has_bytes = (full_bytes > 0) | (compute_bytes > 0)
        ranks, positions = np.nonzero(has_bytes)
        self.owned = OwnedBytes(
            num_ranks=full_bytes.shape[0],
            num_operators=full_bytes.shape[1],
            ranks=ranks.astype(np.int32),
            operators=positions.astype(np.int32),
            full=full_bytes[has_bytes],
            compute=compute_bytes[has_bytes],
            moments=None if moment_bytes is None else moment_bytes[has_bytes],
        )
        """The bytes of the pairs that have any."""

    @property
    def full_bytes(self) -> IntArray:
        """Bytes of master weights, moments and buffers, int64 [ranks, operators]; a new
        array.
        """
        return self.owned.dense(self.owned.full)

    @property
    def compute_bytes(self) -> IntArray:
        """Bytes of compute weights and buffers, int64 [ranks, operators]; a new array."""
        return self.owned.dense(self.owned.compute)

    @property
    def moment_bytes(self) -> IntArray | None:
        """The moments' part of `full_bytes`; a new array, or None for two thirds."""
        moments = self.owned.moments
        return None if moments is None else self.owned.dense(moments)

    def named(self, operators: Sequence[OperatorId]) -> OperatorTable:
        """Return a table of other operators with the same bytes, which both tables
        share.
        """
        found = copy.copy(self)
        found.operators = operators
        return found

    def bytes_of(self, partial_state: str) -> IntArray:
        """Return the bytes of each operator in full: `both`, or its `weights` or
        `moments` only.
        """
        full, moments = self.full_bytes, self.moment_bytes
        if moments is None:
            moments = 2 * full // 3
        return {"both": full, "weights": full - moments, "moments": moments}[
            partial_state
        ]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Version:
    """A state of a run whose recoveries may lose tokens: after `iteration` steps in
    `epoch`.

    Every recovery begins a new epoch: states of one iteration in two epochs differ.
    """

    epoch: int
    iteration: int

    def __str__(self) -> str:
        return (
            f"{self.iteration}"
            if not self.epoch
            else f"{self.iteration} (epoch {self.epoch})"
        )


CORE, SLOT = "core", "slot"
"""The unit that every partial snapshot takes, while all others may be older; and the
one unit of a window's slot.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """A part of a snapshot that is stored and replaced by itself: some state of some
    operators.

    Numbers are positions in the stage's OperatorTable: of operators in `weights` master
    weights are taken, in `moments` moments, in `full` both and buffers, in `compute`
    compute weights. Beside own memory a unit is stored on peers, on disk, or both;
    `by_gradient`: peers that have the unit of the iteration before receive its
    gradients.
    """

    name: str = SLOT
    full: tuple[int, ...] = ()
    compute: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    moments: tuple[int, ...] = ()
    on_peers: bool = True
    on_disk: bool = True
    by_gradient: bool = False

    @property
    def trained(self) -> tuple[int, ...]:
        """The operators of which masters, moments, or both are taken."""
        return (*self.full, *self.weights, *self.moments)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """One snapshot: slot `slot` of a window of `num_slots` iterations that began after
    iteration `window_start`.

    A slot of a sparse window has one unit. A partial snapshot is a window of one slot
    with several: the core and some others; `checkpoint` are all units that make a
    checkpoint together, and `facts` are restored to the policy by a recovery. The next
    window begins `pause_iters` iterations after the last slot's iteration.
    """

    window_start: int
    slot: int = 0
    num_slots: int = 1
    units: tuple[UnitPlan, ...]
    pause_iters: int = 0
    checkpoint: tuple[UnitPlan, ...] = ()
    facts: tuple[float, ...] = ()

    @property
    def iteration(self) -> int:
        """The snapshot has the state after this iteration."""
        return self.window_start + self.slot

    @property
    def full(self) -> tuple[int, ...]:
        return tuple(position for unit in self.units for position in unit.full)

    @property
    def compute(self) -> tuple[int, ...]:
        return tuple(position for unit in self.units for position in unit.compute)

    @property
    def is_last(self) -> bool:
        """Whether the window ends with this slot."""
        return self.slot == self.num_slots - 1

    @property
    def has_start(self) -> bool:
        """Whether the snapshot has the start of the next iteration, as a core has; if
        not, a step log has.
        """
        return any(unit.name == CORE for unit in self.units)

    @property
    def period_iters(self) -> int:
        """Iterations from the start of this window to that of the next one."""
        # with the pause: logs are kept this long, and a fault in the pause goes back to
        # this window
        return self.num_slots + self.pause_iters


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowChoice:
    """The choice of a sparse window: its slots and pause, and whether the order is new.

    Shares of time that snapshots and replays are expected to take; None if the window
    is not chosen by them.
    """

    num_slots: int
    iteration_s: float
    copy_bytes_per_s: float
    reordered: bool
    pause_iters: int = 0
    snapshot_share: float | None = None
    replay_share: float | None = None

    @property
    def period_iters(self) -> int:
        """Iterations from the start of this window to that of the next one."""
        return self.num_slots + self.pause_iters

    def describe(self) -> str:
        """Return the window with its terms, in a line."""
        window = f"{self.num_slots} slots and a pause of {self.pause_iters} iterations"
        if self.snapshot_share is None or self.replay_share is None:
            return window
        return (
            f"{window}: snapshots take {self.snapshot_share:.2%} of the time, replays"
            f" {self.replay_share:.2%}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalChoice:
    """The choice of the iterations between two whole snapshots: the chosen, the best,
    and the measurements.

    `snapshot_cost_s`: what a snapshot adds to training, by stopping it and by slowing
    it down.
    """

    every_iters: int
    best: int
    iteration_s: float
    copy_bytes_per_s: float
    snapshot_cost_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertChoice:
    """The experts of each of a stage's MoE layers that a snapshot takes to memory, and
    those of them that go further.

    `by_gradient`: those of `on_peers` that peers have of the iteration before.
    """

    memory: tuple[tuple[int, ...], ...]
    on_peers: tuple[tuple[int, ...], ...]
    on_disk: tuple[tuple[int, ...], ...]
    by_gradient: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlan:
    """The saves that a policy asks for after an iteration; the session executes them.

    `window` is set at the start of a window, `interval` when it was reconsidered,
    `experts` if only some are taken. `to_disk`: the window that begins here goes to the
    local disk, too.
    """

    durable: bool = False
    sparse: SlotPlan | None = None
    window: WindowChoice | None = None
    interval: IntervalChoice | None = None
    experts: ExpertChoice | None = None
    to_disk: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """A committed checkpoint on disk: the state after `iteration` optimizer steps."""

    iteration: int
    directory: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGradients:
    """The facts that a step needs beside the gradients, equal on all ranks; an overflow
    on any rank means no update.

    `overflows`: whether fp16 found inf or NaN, for each of Megatron's chained
    optimizers, which scale losses separately. An update advances the schedule of
    learning rates by `schedule_increment`. `num_tokens` are those of all ranks'
    batches, if they divide the gradients (a loss per token), else None.
    """

    overflows: tuple[bool, ...]
    total_norm: float | None
    loss_scale: float
    schedule_increment: int = 1
    num_tokens: int | None = None

    @property
    def overflow(self) -> bool:
        return any(self.overflows)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertCounts:
    """Tokens routed to each expert (`hard`) and sums of its gating probabilities
    (`soft`), float64 [experts].
    """

    hard: npt.NDArray[np.float64]
    soft: npt.NDArray[np.float64]


WARM_UP_ITERS = 2
"""The first iterations of a process, which are slower than others: they are not
measured.
"""

RECENT_ITERS = 16
"""The time of an iteration is the median of as many recent ones."""

ENOUGH_SNAPSHOTS = 3
"""The mean cost of whole snapshots counts as measured after as many."""

ENOUGH_WINDOWS = 5
"""So many windows separate the price of a snapshot from that of its bytes: two kinds,
each twice, and one more.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """The measurements that a policy may use at the start of a window, agreed by all
    ranks.

    Seconds of an iteration without stalls, on the slowest rank; bytes a second that the
    slowest rank copies to host memory and peers; popularity of the own stage's experts
    since the last window, float64 [experts in the table's order]; seconds that a
    snapshot has added to training on average, by stopping it and by slowing it down, on
    the rank where that was most (None: not known yet); iterations since nothing was
    being copied; bytes a second that the slowest rank copies to host memory alone, and
    to peers alone; whether any rank is still writing to its disk. Seconds that a
    snapshot of no bytes, and one of a rank's whole state, add to training beside
    waiting for copies (None: not known yet), and whether these costs are settled:
    enough windows have been measured to choose by them. Seconds in which a lost stage
    replays an iteration by itself (None: no stage has). Seconds from the start of an
    iteration to its complete gradients, on the fastest rank: a copy to host memory that
    takes longer makes the update wait (0: not known yet). The start of the newest
    window that all ranks keep (None: a rank keeps none). Whether units are missing in
    the newest partial checkpoint of any rank.
    """

    iteration_s: float
    copy_bytes_per_s: float
    popularity: npt.NDArray[np.float64]
    snapshot_cost_s: float | None = None
    iters_since_quiet: int = 0
    host_bytes_per_s: float = math.inf
    peer_bytes_per_s: float = math.inf
    is_persisting: bool = False
    empty_snapshot_s: float | None = None
    dense_snapshot_s: float | None = None
    costs_are_settled: bool = True
    replayed_iteration_s: float | None = None
    overlap_s: float = 0.0
    kept_since: int | None = None
    lacks_units: bool = False

    @property
    def hidden_copy_s(self) -> float:
        """The seconds of a copy to host memory for which no update waits: the whole
        iteration until more is known.
        """
        return self.overlap_s or self.iteration_s


class Phase(IntEnum):
    """The activity of a worker. BUILD comes first; JOIN to RECOVERY come again with
    every generation.
    """

    BUILD = 0
    JOIN = 1
    RECOVERY = 2
    FORWARD = 3
    BACKWARD = 4
    REDUCE = 5  # gradients and their norm
    STEP = 6  # from the vote to the whole new state
    SNAPSHOT = 7
    BETWEEN = 8  # evaluation, and whatever the loop does between iterations
    DONE = 9
