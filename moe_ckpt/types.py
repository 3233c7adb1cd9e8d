"""Value types that all layers use.

A type has no behaviour beyond the consequences of its fields.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Degree of each axis of parallelism.

    Context parallelism counts as data parallelism: its ranks also hold one state, and
    also see different tokens, of the same sequences.
    """

    pp: int
    """Pipeline stages."""

    dp: int
    """Data-parallel ranks of a stage, context parallelism included."""

    ep: int
    """Expert-parallel ranks; divides `dp`.

    Experts are spread over ranks that see different tokens.
    """

    tp: int
    """Tensor-parallel ranks."""

    @property
    def world_size(self) -> int:
        return self.pp * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that train one pipeline stage; the ranks are consecutive."""
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"PP={self.pp} DP={self.dp} EP={self.ep} TP={self.tp}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """The facts on which a checkpoint and the run that loads it must agree.

    Equal `model` and `layout` mean interchangeable state.
    """

    run_id: str
    """Id that distinguishes runs."""

    model: str
    """Fingerprint of everything that shapes the saved tensors.

    The architecture, the precision and the optimizer shape tensors.
    """

    layout: ParallelLayout
    """Parallel layout of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str
    """Path inside the checkpoint's directory."""

    size_bytes: int
    """Size of the file."""

    crc32: int
    """CRC-32 of the content."""


class OperatorKind(Enum):
    """Kinds of operators.

    The order of the members is the order of a layer's operators, and of the operators
    before and after the layers.
    """

    EMBEDDING = "embedding"
    BLOCK = "block"
    """Attention, norms and shared expert of a layer, or its dense MLP.

    In a dense model: the whole layer.
    """

    GATE = "gate"
    """Router of a layer: weights and buffers."""
    EXPERT = "expert"
    FINAL_NORM = "final norm"
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorId:
    """The unit of snapshots, named by its position in the whole model."""

    kind: OperatorKind
    """Kind of the operator."""

    layer: int | None = None
    """Global number of the layer, from 0; None outside of layers.

    In a multi-token prediction module layers count from 0 again.
    """

    expert: int | None = None
    """Global number of the expert, from 0; None for other operators."""

    mtp_depth: int | None = None
    """Depth of the multi-token prediction module; None for operators of the main model.
    """

    def __str__(self) -> str:
        names = [] if self.mtp_depth is None else [f"mtp {self.mtp_depth}"]
        names += [] if self.layer is None else [f"layer {self.layer}"]
        names += [] if self.kind is OperatorKind.BLOCK else [self.kind.value]
        names += [] if self.expert is None else [str(self.expert)]
        return " ".join(names) or self.kind.value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedBytes:
    """Bytes of a stage's operators, for each pair of a rank and an operator.

    A rank of a sharded optimizer owns bytes of a few out of a thousand operators, so
    pairs without bytes are left out. The order of pairs is by rank, then by operator.
    """

    num_ranks: int
    """Number of ranks in the stage group."""

    num_operators: int
    """Number of operators in the stage."""

    ranks: npt.NDArray[np.int32]
    """Rank of each pair in the stage group, int32 [pairs]."""

    operators: npt.NDArray[np.int32]
    """Position of each pair's operator in the table, int32 [pairs]."""

    full: IntArray
    """Bytes of master weights, moments and buffers, int64 [pairs]."""

    compute: IntArray
    """Bytes of weights as forward uses them, and of buffers, int64 [pairs]."""

    moments: IntArray | None
    """Bytes of moments, a part of `full`, int64 [pairs]; None: two thirds of `full`."""

    def dense(self, nbytes: IntArray) -> IntArray:
        """Return the bytes of all possible pairs, int64 [ranks, operators].

        Args:
            nbytes: The bytes of the stored pairs: `full`, `compute` or `moments`.
        """
        found = np.zeros((self.num_ranks, self.num_operators), np.int64)
        found[self.ranks, self.operators] = nbytes
        return found

    def by_rank(self, nbytes: IntArray) -> IntArray:
        """Return the sum of each rank, int64 [ranks].

        Args:
            nbytes: The bytes of the stored pairs: `full`, `compute` or `moments`.
        """
        found = np.zeros(self.num_ranks, np.int64)
        np.add.at(found, self.ranks, nbytes)
        return found


class OperatorTable:
    """The operators of one stage group, and the share of each rank.

    Operators are ordered from front to back. Every byte is counted on the one rank that
    snapshots the byte. Arrays over all pairs of a rank and an operator are built on
    each request and not kept: for 16,384 ranks of a model with 15,000 operators such
    arrays would take 70 MB on every rank.

    Args:
        operators: The operators.
        full_bytes: Bytes of master weights, moments and buffers, int64 [ranks,
            operators].
        compute_bytes: Bytes of weights as forward uses them, and of buffers, int64
            [ranks, operators].
        moment_bytes: The moments' part of `full_bytes`; None: two thirds, as in FP32
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
        """Bytes of the pairs that have any."""

    @property
    def full_bytes(self) -> IntArray:
        """Bytes of master weights, moments and buffers, int64 [ranks, operators].

        A new array.
        """
        return self.owned.dense(self.owned.full)

    @property
    def compute_bytes(self) -> IntArray:
        """Bytes of compute weights and buffers, int64 [ranks, operators].

        A new array.
        """
        return self.owned.dense(self.owned.compute)

    @property
    def moment_bytes(self) -> IntArray | None:
        """The moments' part of `full_bytes`, a new array; None means two thirds."""
        moments = self.owned.moments
        return None if moments is None else self.owned.dense(moments)

    def with_operators(self, operators: Sequence[OperatorId]) -> OperatorTable:
        """Return a table of other operators that shares the bytes of this table."""
        found = copy.copy(self)
        found.operators = operators
        return found

    def without_compute(self) -> OperatorTable:
        """Return a table of the same operators whose compute weights take no bytes."""
        found = copy.copy(self)
        found.owned = replace(self.owned, compute=np.zeros_like(self.owned.compute))
        return found

    def bytes_of(self, partial_state: str) -> IntArray:
        """Return the bytes of each operator in full, int64 [ranks, operators].

        Args:
            partial_state: `both`, or only the `weights` or `moments`.
        """
        full, moments = self.full_bytes, self.moment_bytes
        if moments is None:
            moments = 2 * full // 3
        return {"both": full, "weights": full - moments, "moments": moments}[
            partial_state
        ]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Version:
    """A state after `iteration` steps, in a run whose recoveries may lose tokens.

    Every recovery begins a new epoch: the states of one iteration in two epochs differ.
    """

    epoch: int
    """Number of the epoch, from 0."""

    iteration: int
    """Number of optimizer steps."""

    def __str__(self) -> str:
        return (
            f"{self.iteration}"
            if not self.epoch
            else f"{self.iteration} (epoch {self.epoch})"
        )


CORE, SLOT = "core", "slot"
"""Names of units: `CORE` is in every partial snapshot, while all others may be older.

`SLOT` is the single unit of a window's slot.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """The planned part of a snapshot that is stored and replaced as a whole.

    Each tuple has positions in the stage's OperatorTable. A unit is in the rank's own
    memory, and on peers and disk as asked.
    """

    name: str = SLOT
    """Name of the unit."""

    full: tuple[int, ...] = ()
    """Operators of which master weights, moments and buffers are taken."""

    compute: tuple[int, ...] = ()
    """Operators of which compute weights are taken."""

    weights: tuple[int, ...] = ()
    """Operators of which only master weights are taken."""

    moments: tuple[int, ...] = ()
    """Operators of which only moments are taken."""

    on_peers: bool = True
    """Whether peers store the unit."""

    on_disk: bool = True
    """Whether the disk stores the unit."""

    by_gradient: bool = False
    """Whether peers that have the unit of the iteration before receive only its
    gradients.
    """

    @property
    def trained(self) -> tuple[int, ...]:
        """Operators of which masters, moments, or both are taken."""
        return (*self.full, *self.weights, *self.moments)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """One planned snapshot: a slot of a window of snapshots.

    A slot of a sparse window has one unit. A partial snapshot is a window of one slot
    with several units: the core and some others.
    """

    window_start: int
    """Iteration after which the window began."""

    slot: int = 0
    """Position of the snapshot in the window, from 0."""

    num_slots: int = 1
    """Length of the window, in iterations."""

    units: tuple[UnitPlan, ...]
    """Units to take now."""

    pause_iters: int = 0
    """Iterations without snapshots between this window and the next one."""

    checkpoint: tuple[UnitPlan, ...] = ()
    """All units that together make a checkpoint, for a partial snapshot."""

    facts: tuple[float, ...] = ()
    """Numbers that a recovery returns to the policy."""

    @property
    def iteration(self) -> int:
        """Iteration after which the snapshot takes the state."""
        return self.window_start + self.slot

    @property
    def full(self) -> tuple[int, ...]:
        """Operators taken in full, over all units."""
        return tuple(position for unit in self.units for position in unit.full)

    @property
    def compute(self) -> tuple[int, ...]:
        """Operators of which compute weights are taken, over all units."""
        return tuple(position for unit in self.units for position in unit.compute)

    @property
    def is_last(self) -> bool:
        """Whether the window ends with this slot."""
        return self.slot == self.num_slots - 1

    @property
    def has_start(self) -> bool:
        """Whether the snapshot contains the start of the next iteration.

        A core contains the start. Otherwise a step log contains the start.
        """
        return any(unit.name == CORE for unit in self.units)

    @property
    def period_iters(self) -> int:
        """Iterations from the start of this window to the start of the next one."""
        # with the pause: logs are kept this long, and a fault in the pause rolls back
        # to this window
        return self.num_slots + self.pause_iters


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowChoice:
    """The choice of a sparse window, with its terms."""

    num_slots: int
    """Slots of the window."""

    iteration_s: float
    """Iteration time on which the choice is based, in seconds."""

    copy_bytes_per_s: float
    """Rate of copies on which the choice is based, in bytes per second."""

    reordered: bool
    """Whether the order of experts is new."""

    pause_iters: int = 0
    """Iterations without snapshots after the window."""

    snapshot_share: float | None = None
    """Expected share of time for snapshots; None if the choice does not depend on
    shares.
    """

    replay_share: float | None = None
    """Expected share of time for replays; None if the choice does not depend on shares.
    """

    @property
    def period_iters(self) -> int:
        """Iterations from the start of this window to the start of the next one."""
        return self.num_slots + self.pause_iters

    def describe(self) -> str:
        """Return the window with its terms, in one line."""
        window = f"{self.num_slots} slots and a pause of {self.pause_iters} iterations"
        if self.snapshot_share is None or self.replay_share is None:
            return window
        return (
            f"{window}: snapshots take {self.snapshot_share:.2%} of the time, replays"
            f" {self.replay_share:.2%}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalChoice:
    """The choice of the iterations between whole snapshots, with measurements."""

    every_iters: int
    """Chosen number of iterations."""

    best: int
    """Best number of iterations for these measurements."""

    iteration_s: float
    """Iteration time, in seconds."""

    copy_bytes_per_s: float
    """Rate of copies, in bytes per second."""

    snapshot_cost_s: float
    """Seconds that a snapshot adds to training, by stops and by slower iterations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertChoice:
    """The experts that a partial snapshot takes, by destination.

    Each field has one tuple of experts for each MoE layer of the stage.
    """

    memory: tuple[tuple[int, ...], ...]
    """Experts copied to host memory."""

    on_peers: tuple[tuple[int, ...], ...]
    """Experts of `memory` that peers receive."""

    on_disk: tuple[tuple[int, ...], ...]
    """Experts of `memory` written to disk."""

    by_gradient: tuple[tuple[int, ...], ...]
    """Experts of `on_peers` that peers have of the iteration before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlan:
    """The saves that a policy requests after an iteration.

    The session carries out the saves.
    """

    durable: bool = False
    """Whether to save a whole checkpoint on disk."""

    sparse: SlotPlan | None = None
    """The snapshot to host memory; None: none."""

    window: WindowChoice | None = None
    """The choice of a window, set at its start."""

    interval: IntervalChoice | None = None
    """The choice of an interval, set when the policy has reconsidered the interval."""

    experts: ExpertChoice | None = None
    """The experts taken; None if the snapshot takes all."""

    to_disk: bool = False
    """Whether the window that begins here also goes to the local disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """A committed checkpoint on disk."""

    iteration: int
    """Number of optimizer steps before the state."""

    directory: str
    """Path of the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGradients:
    """The facts that an optimizer step needs beside the gradients, equal on all ranks.

    After an overflow on any rank, no rank updates parameters.
    """

    overflows: tuple[bool, ...]
    """Whether FP16 found inf or NaN, for each of Megatron's chained optimizers.

    Chained optimizers scale losses separately.
    """

    total_norm: float | None
    """Norm of all gradients; None after an overflow."""

    loss_scale: float
    """Scale of the loss under FP16; 1 without scaling."""

    schedule_increment: int = 1
    """Amount by which an update advances the learning-rate schedule."""

    num_tokens: int | None = None
    """Tokens of all ranks' batches, if the loss is per token and gradients are divided
    by them.

    Otherwise None.
    """

    @property
    def overflow(self) -> bool:
        """Whether any optimizer found an overflow."""
        return any(self.overflows)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertCounts:
    """Popularity of experts by two measures, each float64 [experts]."""

    hard: npt.NDArray[np.float64]
    """Tokens routed to each expert."""

    soft: npt.NDArray[np.float64]
    """Sums of each expert's gating probabilities."""


WARM_UP_ITERS = 2
"""First iterations of a process, which are slower than others and not measured."""

RECENT_ITERS = 16
"""Number of recent iterations whose median is the iteration time."""

ENOUGH_SNAPSHOTS = 3
"""Number of whole snapshots after which the mean cost counts as measured."""

ENOUGH_WINDOWS = 5
"""Number of windows that separate the fixed cost of a snapshot from the cost per byte.

Two kinds of windows, each twice, and one more.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """Measurements for a policy at the start of a window, agreed by all ranks."""

    iteration_s: float
    """Iteration time on the slowest rank, without checkpoint stalls, in seconds."""

    copy_bytes_per_s: float
    """Rate of the slowest rank's copies to host memory and peers, in bytes per second.

    With `waits_for_disk`, the cap on the disk also bounds this rate.
    """

    popularity: npt.NDArray[np.float64]
    """Popularity of the own stage's experts since the last window.

    float64 [experts in the order of the table].
    """

    snapshot_cost_s: float | None = None
    """Mean seconds that a snapshot adds to training, by stops and by slower iterations.

    On the rank with the largest mean; None: not yet known.
    """

    iters_since_quiet: int = 0
    """Iterations since the last one in which nothing was copied."""

    host_bytes_per_s: float = math.inf
    """Rate of the slowest rank's copies to host memory alone, in bytes per second."""

    peer_bytes_per_s: float = math.inf
    """Rate of the slowest rank's copies to peers alone, in bytes per second."""

    is_persisting: bool = False
    """Whether any rank is still writing to its disk."""

    empty_snapshot_s: float | None = None
    """Seconds that a snapshot of no bytes adds to training, beside waits for copies.

    None: not yet known.
    """

    dense_snapshot_s: float | None = None
    """Seconds that a snapshot of a rank's whole state adds to training, beside waits
    for copies.

    None: not yet known.
    """

    costs_are_settled: bool = True
    """Whether enough windows were measured to choose by the two costs."""

    replayed_iteration_s: float | None = None
    """Seconds in which a lost stage replays an iteration by itself; None: no stage has.
    """

    overlap_s: float = 0.0
    """Seconds from the start of an iteration to complete gradients, on the fastest
    rank.

    A copy to host memory that takes longer makes the update wait. 0: not yet known.
    """

    kept_since: int | None = None
    """Start of the newest window that all ranks keep; None: a rank keeps none."""

    lacks_units: bool = False
    """Whether units are missing in the newest partial checkpoint of any rank."""

    @property
    def hidden_copy_s(self) -> float:
        """Longest time of a copy to host memory for which no update waits, in seconds.

        The whole iteration until `overlap_s` is known.
        """
        return self.overlap_s or self.iteration_s


class Phase(IntEnum):
    """The activity of a worker.

    BUILD comes first. JOIN to RECOVERY are repeated in every generation.
    """

    BUILD = 0
    """Build groups, model and optimizer."""

    JOIN = 1
    """Meet the other ranks and form the process groups."""

    RECOVERY = 2
    """Recover the state from which the generation continues."""

    FORWARD = 3
    """Forward passes."""

    BACKWARD = 4
    """Backward passes."""

    REDUCE = 5
    """Reduction of gradients and of the norm."""

    STEP = 6
    """From the vote on the update to the whole new state."""

    SNAPSHOT = 7
    """Snapshot of the new state."""

    BETWEEN = 8
    """Evaluation, and other work of the loop between iterations."""

    DONE = 9
    """All iterations are done."""
