"""The common part of partial policies: stages as MoE layers and the rest, and plans.

The core is all state except experts and is part of every snapshot. Every expert is a
unit of its own. The module owns the plans of the units and the iterations of snapshots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from moe_ckpt.config import AUTO, PartialConfig, require
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.expert_selection import Selection
from moe_ckpt.policies.memory_forecast import MemoryForecast, StageForecasts
from moe_ckpt.policies.stage_profile import is_due
from moe_ckpt.types import (
    CORE,
    ExpertChoice,
    IntArray,
    Measured,
    OperatorKind,
    OperatorTable,
    SlotPlan,
    SnapshotPlan,
    UnitPlan,
)

PARTIAL_STATE = ("both", "weights", "moments")
"""The choices for the part of an expert that is a unit; the rest is in the core.

The choices differ from MoC's W, O and WO (section 6.3). MoC's W is the 2-byte weights,
which this library derives from the master weights and stores in no snapshot, so a
checkpoint that leaves MoC's W out loses nothing.
"""


class MoeStage:
    """The operators of a stage: experts by MoE layer, and all others.

    Args:
        table: The operators, and each rank's bytes of them.
        partial_state: The part of an expert that is a unit, one of `PARTIAL_STATE`.
    """

    def __init__(self, table: OperatorTable, partial_state: str = "both") -> None:
        assert partial_state in PARTIAL_STATE, partial_state
        self.table = table
        self._partial_state = partial_state
        experts = [
            position
            for position, op in enumerate(table.operators)
            if op.kind is OperatorKind.EXPERT
        ]
        layers = {
            (table.operators[position].mtp_depth, table.operators[position].layer)
            for position in experts
        }
        self.num_layers = len(layers)
        self.num_experts = len(experts) // max(1, len(layers))
        self._experts = np.array(experts, np.int64).reshape(
            self.num_layers, self.num_experts
        )
        self._others = tuple(
            np.setdiff1d(np.arange(len(table.operators)), self._experts).tolist()
        )
        self._units: dict[tuple[int, ...], UnitPlan] = {}
        num_ranks = len(table.full_bytes)
        of_experts = table.bytes_of(partial_state)[:, experts]
        self.expert_bytes: IntArray = of_experts.reshape(
            num_ranks, self.num_layers, self.num_experts
        )
        """Bytes of each expert's unit on each rank, int64 [ranks, layers, experts]."""
        self.core_bytes: IntArray = table.full_bytes.sum(
            axis=1
        ) - self.expert_bytes.sum(axis=(1, 2))
        """Bytes of the core on each rank, int64 [ranks]."""

    @property
    def everything(self) -> Selection:
        """All experts of all layers."""
        return (tuple(range(self.num_experts)),) * self.num_layers

    @property
    def nothing(self) -> Selection:
        return ((),) * self.num_layers

    def plan(
        self,
        iteration: int,
        choice: ExpertChoice,
        *,
        core_on_disk: bool,
        facts: Sequence[float],
    ) -> SlotPlan:
        """Return the plan of a snapshot; the core goes to peers if there are any.

        Args:
            iteration: The number of steps of the state.
            choice: The experts of each destination.
            core_on_disk: Whether the core also goes to disk.
            facts: The facts of the policy, which a recovery restores.
        """
        return SlotPlan(
            window_start=iteration,
            units=(self._core(on_disk=core_on_disk), *self._expert_units(choice)),
            checkpoint=self._checkpoint,
            facts=tuple(facts),
        )

    def snapshot_bytes(self, selection: Selection) -> IntArray:
        """Return the bytes of a snapshot of these experts by rank, int64 [ranks]."""
        taken = marked(selection, (self.num_layers, self.num_experts))
        return self.core_bytes + (self.expert_bytes * taken).sum(axis=(1, 2))

    def _core(self, *, on_disk: bool) -> UnitPlan:
        experts = tuple(self._experts.reshape(-1).tolist())
        return UnitPlan(
            name=CORE,
            full=self._others,
            weights=experts if self._partial_state == "moments" else (),
            moments=experts if self._partial_state == "weights" else (),
            on_peers=True,
            on_disk=on_disk,
        )

    def _expert_units(self, choice: ExpertChoice) -> list[UnitPlan]:
        units: list[UnitPlan] = []
        for layer, experts in enumerate(choice.memory):
            others = (
                choice.on_peers[layer],
                choice.on_disk[layer],
                choice.by_gradient[layer],
            )
            on_peers, on_disk, by_gradient = map(frozenset, others)
            units += [
                self._expert_unit(
                    layer,
                    expert,
                    expert in on_peers,
                    expert in on_disk,
                    expert in by_gradient,
                )
                for expert in experts
            ]
        return units

    def _expert_unit(
        self, layer: int, expert: int, on_peers: bool, on_disk: bool, by_gradient: bool
    ) -> UnitPlan:
        key = (layer, expert, on_peers, on_disk, by_gradient)
        if key not in self._units:
            position = int(self._experts[layer, expert])
            field = {"both": "full", "weights": "weights", "moments": "moments"}[
                self._partial_state
            ]
            name, taken = str(self.table.operators[position]), {field: (position,)}
            self._units[key] = UnitPlan(
                name=name,
                on_peers=on_peers,
                on_disk=on_disk,
                by_gradient=by_gradient,
                **taken,
            )
        return self._units[key]

    @cached_property
    def _checkpoint(self) -> tuple[UnitPlan, ...]:
        """All units of a checkpoint, the same for every snapshot."""
        nothing = self.nothing
        in_memory = ExpertChoice(
            memory=self.everything,
            on_peers=nothing,
            on_disk=nothing,
            by_gradient=nothing,
        )
        return (self._core(on_disk=False), *self._expert_units(in_memory))


class PartialSnapshots(StageForecasts[MoeStage]):
    """Base class of policies that take partial snapshots.

    The class decides the iterations of snapshots, the snapshots that go to disk, and
    the iterations of whole checkpoints. All ranks compute the same plan.

    Args:
        config: The settings of the intervals, and those named in `counts`.
        stages: All stages.
        own_stage: The number of this rank's stage.
        counts: The names of the settings that give a number of experts per layer.

    Raises:
        ConfigError: The model has no experts, or a setting named in `counts` asks for
            more experts than a layer has.
    """

    def __init__(
        self,
        config: PartialConfig,
        stages: Sequence[MoeStage],
        own_stage: int,
        counts: Sequence[str],
    ) -> None:
        if not any(stage.num_layers for stage in stages):
            wanted = "a policy for dense models: model.num_experts is 0"
            raise ConfigError(f"ckpt.policy: got {config.policy!r}, wanted {wanted}")
        self._num_experts = max(stage.num_experts for stage in stages)
        for name in counts:
            got, wanted = (
                getattr(config, name),
                f"at most {self._num_experts}, the experts of a layer",
            )
            require(
                got == AUTO or int(got) <= self._num_experts,
                f"ckpt.{name}",
                got,
                wanted,
            )
        super().__init__(stages, own_stage)
        self._intervals = config
        self._newest: int | None = None
        self._newest_on_disk: int | None = None

    @property
    @abstractmethod
    def facts(self) -> tuple[float, ...]:
        """Numbers of the policy's history, which each snapshot stores.

        A policy has no history of its own after a recovery: `went_back` gets the
        numbers of the snapshot to which all ranks have gone back.
        """

    @abstractmethod
    def went_back(self, facts: Sequence[float], *, plt: float, iteration: int) -> None:
        """Restore the policy's facts of `iteration`, to which all ranks go back.

        Args:
            facts: The facts, as the policy put them into the plan of that snapshot.
            plt: Proportion of lost tokens (PLT) over all faults so far.
            iteration: The iteration to which all ranks go back.
        """

    @abstractmethod
    def _choose(self, measured: Measured, *, to_disk: bool) -> ExpertChoice:
        """Return the experts of a snapshot; at first all, for all destinations."""

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:
        """Return the plan for the state after `iteration` steps.

        The first snapshot takes everything to all destinations. If units are missing in
        the newest checkpoint of any rank, the snapshot takes everything again, because
        units that were not taken since would stay missing.

        Args:
            iteration: The number of steps of the state.
            measure: Returns the measurements. Collective; called when a snapshot is
                due.
        """
        every = self._intervals.durable_every_iters
        # no whole checkpoint at the first snapshot, which also follows a load
        durable = self._has_begun and every > 0 and iteration % every == 0
        if not is_due(iteration, self._newest, self._intervals.every_iters):
            return SnapshotPlan(durable=durable)
        measured, disk_every = measure(), self._intervals.disk.every_iters
        if measured.lacks_units:
            self._newest = self._newest_on_disk = None
        # a rank may still be writing the previous snapshot to disk
        to_disk = (
            is_due(iteration, self._newest_on_disk, disk_every)
            and not measured.is_persisting
        )
        choice = self._choose(measured, to_disk=to_disk)
        self._newest = iteration
        if to_disk:
            self._newest_on_disk = iteration
        plan = self._stage.plan(
            iteration, choice, core_on_disk=to_disk, facts=self.facts
        )
        return SnapshotPlan(
            durable=durable, sparse=plan, experts=choice, to_disk=to_disk
        )

    @property
    def _has_begun(self) -> bool:
        return self._newest is not None


def counted(stage: MoeStage, tokens: np.ndarray) -> IntArray:
    """Return token counts in the table's order as int64 [layers, experts]."""
    return tokens.astype(np.int64).reshape(stage.num_layers, stage.num_experts)


def marked(selection: Selection, shape: tuple[int, int]) -> np.ndarray:
    """Return which experts are selected, bool [layers, experts]."""
    mask = np.zeros(shape, bool)
    for layer, experts in enumerate(selection):
        mask[layer, list(experts)] = True
    return mask


def forecast_units(
    stage: MoeStage, num_copies: int, *, by_gradient: bool = False
) -> MemoryForecast:
    """Return the most host memory that a rank of a stage can need.

    A rank keeps three copies of everything (MoC, section 5.2: three buffers): the
    newest copy of each unit, the copy in flight, and the copy on its way to disk or to
    peers. For `num_copies` other ranks, a rank keeps the newest and the next copy.

    Args:
        stage: The stage.
        num_copies: The number of other ranks whose units a rank keeps.
        by_gradient: Whether the gradients of all experts are also on their way to
            peers.
    """
    dense_bytes = int((stage.core_bytes + stage.expert_bytes.sum(axis=(1, 2))).max())
    gradient_bytes = (
        int(stage.expert_bytes.sum(axis=(1, 2)).max()) // 3
        if by_gradient and num_copies
        else 0
    )
    snapshots_bytes, copies_bytes = (
        3 * dense_bytes,
        2 * num_copies * dense_bytes + gradient_bytes,
    )
    return MemoryForecast(
        snapshots_bytes=snapshots_bytes,
        boundary_log_bytes=0,
        step_log_bytes=0,
        copies_bytes=copies_bytes,
        total_bytes=snapshots_bytes + copies_bytes,
        double_buffered_dense_bytes=2 * dense_bytes,
    )
