"""The simulated job: its operators, their distribution over ranks, and their bytes.

The module owns the sizes that a rank saves. The module must not know seconds. Ranks of
a stage with equal shares count once: an expert lies on one of `ep` ranks, its state on
`dp / ep` of these ranks, and everything else on `dp`. Hence tables have `ep` rows,
however many GPUs there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moe_ckpt.config import require, require_all_at_least, require_at_least
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable, ParallelLayout

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


STEP_LOG_BYTES = 15_176
STEP_LOG_BYTES_ON_CPU = 35_336
"""States of the generators of Python, NumPy and torch. On a CPU, torch has five
generators, all as large as that of the host.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelShape:
    """The operators of the whole model, and the sizes of tensors."""

    operators: Sequence[OperatorId]
    """The operators from front to back."""

    parameters: IntArray
    """Parameters of each operator, int64 [operators]."""

    num_layers: int
    """Number of layers."""

    hidden_size: int
    """Size of the hidden dimension."""

    topk: int
    """Number of experts to which the router sends a token."""

    popularity: Array
    """Share of a layer's tokens that each expert gets, float64 [experts of a layer],
    sum 1.
    """

    @property
    def num_experts(self) -> int:
        return len(self.popularity)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The sequences of an iteration, and their division; keys of conf/simulate.yaml."""

    micro_batch_size: int
    """Sequences that a data-parallel rank handles at a time."""

    global_batch_size: int
    """Sequences of an iteration."""

    sequence_length: int
    """Tokens of a sequence."""

    def __post_init__(self) -> None:
        require_all_at_least(
            "batch.", self, micro_batch_size=1, global_batch_size=1, sequence_length=1
        )


@dataclass(frozen=True, kw_only=True)
class FormatsConfig:
    """The bytes of parameters, activations and logs."""

    compute_bytes: float
    """Bytes of a parameter as forward uses it."""

    full_bytes: float
    """Bytes of a parameter's whole state."""

    activation_bytes: float = 2.0
    """Bytes of an element of an activation or its gradient."""

    step_log_bytes: int = STEP_LOG_BYTES
    """Bytes of generator states and positions that a rank logs at the start of an
    iteration.
    """

    def __post_init__(self) -> None:
        for name in ("compute_bytes", "full_bytes", "activation_bytes"):
            require(
                getattr(self, name) > 0,
                f"formats.{name}",
                getattr(self, name),
                "more than 0",
            )
        require_at_least("formats.step_log_bytes", self.step_log_bytes, 0)


class Job:
    """A model on a number of ranks.

    Args:
        shape: The operators of the model.
        layout: The degrees of parallelism.
        batch: The sequences of an iteration.
        formats: The bytes of parameters, activations and logs.
        is_sharded: Whether ranks share the optimizer's state (distributed optimizer).

    Raises:
        ConfigError: A division has a remainder; the message names the setting.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        batch: BatchConfig,
        formats: FormatsConfig,
        *,
        is_sharded: bool = True,
    ) -> None:
        self.shape, self.layout, self.batch, self.formats = (
            shape,
            layout,
            batch,
            formats,
        )
        self.is_sharded = is_sharded
        _check(shape, layout, batch)

    def unsharded(self) -> Job:
        """Return the same job without a distributed optimizer.

        Each rank steps the whole state of its parameters. The profiles give the state
        on a GPU. Each rank still saves an even share of the state, as with shards.
        """
        return Job(self.shape, self.layout, self.batch, self.formats, is_sharded=False)

    @property
    def num_micro_batches(self) -> int:
        return self.batch.global_batch_size // (
            self.batch.micro_batch_size * self.layout.dp
        )

    @property
    def micro_batch_tokens(self) -> int:
        return self.batch.micro_batch_size * self.batch.sequence_length

    def stage_of_rank(self, global_rank: int) -> int:
        """Return the stage of a rank in Megatron's order.

        The pipeline is the slowest axis.
        """
        return global_rank // self.layout.ranks_per_stage

    def ep_rank_of(self, global_rank: int) -> int:
        """Return which of the `ep` kinds of ranks of its stage a rank is."""
        return (
            global_rank % self.layout.ranks_per_stage // self.layout.tp % self.layout.ep
        )

    @cached_property
    def is_expert(self) -> npt.NDArray[np.bool_]:
        return np.array(
            [operator.kind is OperatorKind.EXPERT for operator in self.shape.operators]
        )

    @cached_property
    def work(self) -> Array:
        """Multiplications per token in forward of each operator, float64 [operators].

        An expert counts only its share of the tokens.
        """
        work = self.shape.parameters.astype(np.float64)
        # causal attention: half of the sequence, for scores and for values
        attention = self.batch.sequence_length * self.shape.hidden_size
        for position, operator in enumerate(self.shape.operators):
            if operator.kind is OperatorKind.EXPERT:
                assert operator.expert is not None
                work[position] *= (
                    self.shape.topk * self.shape.popularity[operator.expert]
                )
            elif operator.kind is OperatorKind.BLOCK:
                work[position] += attention
            elif operator.kind is OperatorKind.EMBEDDING:
                work[position] = 0.0
        return work

    @cached_property
    def stage_of(self) -> IntArray:
        """The stage of each operator, int64 [operators], ascending."""
        shape, pp = self.shape, self.layout.pp
        if pp <= shape.num_layers:
            front, back, of_layers = (
                0,
                pp - 1,
                [layer * pp // shape.num_layers for layer in range(shape.num_layers)],
            )
        else:
            # one stage per layer; embedding, final norm and output get stages of their
            # own as far as stages are left
            front, of_layers = (
                0,
                [min(layer + 1, pp - 1) for layer in range(shape.num_layers)],
            )
            back = min(shape.num_layers + 1, pp - 1)
        special = {
            OperatorKind.EMBEDDING: front,
            OperatorKind.FINAL_NORM: back,
            OperatorKind.OUTPUT: pp - 1,
        }
        return np.array(
            [
                special[operator.kind]
                if operator.layer is None
                else of_layers[operator.layer]
                for operator in shape.operators
            ],
            np.int64,
        )

    def positions(self, stage: int) -> slice:
        """Return the positions of a stage's operators among all operators."""
        first, last = np.searchsorted(self.stage_of, [stage, stage + 1])
        return slice(int(first), int(last))

    @cached_property
    def profiles(self) -> list[StageProfile]:
        """The profile of each stage, in the form that policies use."""
        return [self._profile(stage) for stage in range(self.layout.pp)]

    def _profile(self, stage: int) -> StageProfile:
        where = self.positions(stage)
        return StageProfile(
            table=self._table(
                self.shape.operators[where], self._rank_parameters(where)
            ),
            boundary_log_bytes=self.boundary_log_bytes(stage),
            step_log_bytes=self.formats.step_log_bytes,
        )

    def _table(
        self, operators: Sequence[OperatorId], parameters: Array
    ) -> OperatorTable:
        """Return a table of operators from the parameters on each rank.

        Args:
            parameters: The parameters of each operator on each rank, float64 [ranks,
                operators].
        """
        return OperatorTable(
            operators=operators,
            full_bytes=np.ceil(parameters * self.formats.full_bytes).astype(np.int64),
            compute_bytes=np.ceil(parameters * self.formats.compute_bytes).astype(
                np.int64
            ),
        )

    def whole_profile(self) -> StageProfile:
        """Return the profile of the whole job as one rank that copies everything.

        All ranks of the job share one link.
        """
        ranks, stages = self.layout.ranks_per_stage, range(self.layout.pp)
        return StageProfile(
            table=self._table(
                self.shape.operators,
                self.shape.parameters[np.newaxis].astype(np.float64),
            ),
            boundary_log_bytes=ranks * sum(map(self.boundary_log_bytes, stages)),
            step_log_bytes=self.layout.world_size * self.formats.step_log_bytes,
        )

    def boundary_log_bytes(self, stage: int) -> int:
        """Return the bytes that a rank sends to neighbouring stages in an iteration.

        The bytes are those of activations and gradients.
        """
        num_neighbours = (stage > 0) + (stage < self.layout.pp - 1)
        tensor_bytes = (
            self.micro_batch_tokens
            * self.shape.hidden_size
            * self.formats.activation_bytes
            / self.layout.tp
        )
        return int(num_neighbours * self.num_micro_batches * tensor_bytes)

    def _rank_parameters(self, where: slice) -> Array:
        """Return the parameters of each kind of rank, float64 [ep, operators].

        A rank saves the state of these parameters.
        """
        layout, counts, is_expert = (
            self.layout,
            self.shape.parameters[where],
            self.is_expert[where],
        )
        if not self.is_sharded:  # each rank with an operator has all state of it
            counts = counts * np.where(is_expert, layout.dp // layout.ep, layout.dp)
        # dp * tp ranks hold shared parameters, and each saves an even share: every byte
        # is saved once
        shared = counts / (layout.dp * layout.tp)
        rows = np.tile(np.where(is_expert, 0.0, shared), (layout.ep, 1))
        if not is_expert.any():
            return rows
        numbers = np.array(
            [operator.expert or 0 for operator in self.shape.operators[where]]
        )
        homes = numbers * layout.ep // self.shape.num_experts
        own = np.flatnonzero(is_expert)
        rows[homes[own], own] = counts[own] / (layout.dp // layout.ep * layout.tp)
        return rows


def _check(shape: ModelShape, layout: ParallelLayout, batch: BatchConfig) -> None:
    # embedding, final norm and output may have stages of their own
    most = shape.num_layers + 3
    wanted = (
        f"at most {most}: {shape.num_layers} layers, embedding, final norm and output"
    )
    require(layout.pp <= most, "parallel.pp", layout.pp, wanted)
    require(
        layout.dp % layout.ep == 0,
        "parallel.ep",
        layout.ep,
        f"a divisor of parallel.dp={layout.dp}",
    )
    if shape.num_experts:
        wanted = f"a divisor of model.num_experts={shape.num_experts}"
        require(shape.num_experts % layout.ep == 0, "parallel.ep", layout.ep, wanted)
    else:
        require(layout.ep == 1, "parallel.ep", layout.ep, "1 where model.num_experts=0")
    step = batch.micro_batch_size * layout.dp
    wanted = (
        f"a multiple of batch.micro_batch_size={batch.micro_batch_size} *"
        f" parallel.dp={layout.dp}"
    )
    require(
        batch.global_batch_size % step == 0,
        "batch.global_batch_size",
        batch.global_batch_size,
        wanted,
    )
