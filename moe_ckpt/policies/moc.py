"""`ckpt=moc`: partial snapshots of K experts of each layer (MoC, sections 3 and 5).

Snapshots take K_snapshot experts of each layer to host memory and K_persist of these
experts to storage. The module owns the experts of each snapshot, and K. All ranks
compute the same plan. The module must not measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from moe_ckpt.config import AUTO, MocConfig
from moe_ckpt.policies.expert_selection import (
    Selection,
    bottleneck_by_k,
    fitting_k,
    limit_per_k,
    most_popular,
    most_unsaved_of,
    next_k,
    sequential_experts,
)
from moe_ckpt.policies.memory_forecast import MemoryForecast, require_budget
from moe_ckpt.policies.partial import (
    MoeStage,
    PartialSnapshots,
    counted,
    forecast_units,
    marked,
)
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.types import ExpertChoice, IntArray, Measured

_MOST_SHOWN = 16


class PartialExperts(PartialSnapshots):
    """Policy that takes a checkpoint of everything at first, then partial checkpoints.

    Experts take turns, or the experts with the most unsaved tokens go first.

    Args:
        config: The settings.
        stages: The profiles of all stages.
        own_stage: The number of this rank's stage.
        ep: The number of EP ranks.

    Raises:
        ConfigError: The model has no experts, a setting asks for more experts than a
            layer has, or the memory budget is too small.
    """

    def __init__(
        self, config: MocConfig, stages: Sequence[StageProfile], own_stage: int, ep: int
    ) -> None:
        stages_of_experts = [MoeStage(stage.table, config.partial) for stage in stages]
        super().__init__(
            config, stages_of_experts, own_stage, ("k_snapshot", "k_persist")
        )
        self._config = config
        self._is_sequential = config.selection == "sequential"
        self._ep = ep
        self._k = (
            config.k_persist if config.k_snapshot == AUTO else int(config.k_snapshot)
        )
        self._first_k = self._k
        self._lost_before_k_iters = 0.0
        shape = (self._stage.num_layers, self._stage.num_experts)
        self._unsaved_in_memory = np.zeros(shape, np.int64)
        self._unsaved_on_disk = np.zeros(shape, np.int64)
        self._turn, self._turn_to_disk = 0, 0
        require_budget(config.memory_budget_bytes, self.forecast())

    @property
    def facts(self) -> tuple[float, ...]:
        """The facts that snapshots store for `went_back`.

        The first fact is K. The second is the loss of tokens before K took its value,
        in iterations' worth of tokens.
        """
        return float(self._k), self._lost_before_k_iters

    def went_back(self, facts: Sequence[float], *, plt: float, iteration: int) -> None:
        """Update K after all ranks have gone back to `iteration`.

        With Dynamic-K the number of experts doubles if the faults since the last change
        of K have cost too much. Earlier losses are stored in iterations' worth of
        tokens (PLT times iterations), because PLT falls while training continues.

        Args:
            facts: The facts of the restored snapshot.
            plt: The PLT of all faults so far.
            iteration: The iteration of the restored state.
        """
        k, self._lost_before_k_iters = facts
        self._k = int(k)
        if not self._config.dynamic_k or iteration == 0:
            return
        plt_since = plt - self._lost_before_k_iters / iteration
        limit = limit_per_k(
            self._config.plt_limit, first_k=self._first_k, num_experts=self._num_experts
        )
        doubled = next_k(
            self._k, num_experts=self._num_experts, plt_since=plt_since, limit=limit
        )
        if doubled != self._k:
            self._k, self._lost_before_k_iters = doubled, plt * iteration

    def notes(self) -> list[str]:
        """Return the costs, line by line, for the log."""
        k = "as many as fit" if self._config.k_snapshot == AUTO else str(self._k)
        what = (
            f"{k} of {self._num_experts} experts a layer, {self._config.k_persist} of"
            " them to storage"
        )
        return [
            f"host memory of the largest rank, {what}:",
            *self.forecast().lines(),
            *self._bytes_of_ranks(),
        ]

    def _bytes_of_ranks(self) -> list[str]:
        """Return the bytes that each rank of this stage saves in a snapshot."""
        stage = self._stage
        if not stage.num_layers:
            return []
        saved = stage.snapshot_bytes(self._in_turns(0, self._k)).tolist()
        each = ", ".join(map(str, saved[:_MOST_SHOWN])) + (
            ", ..." if len(saved) > _MOST_SHOWN else ""
        )
        return [
            f"a snapshot of this stage, bytes by rank: {each}; most {max(saved)}, least"
            f" {min(saved)}"
        ]

    def _forecast(self, stage: MoeStage) -> MemoryForecast:
        return forecast_units(stage, 0)

    def _choose(self, measured: Measured, *, to_disk: bool) -> ExpertChoice:
        everything, nothing = self._stage.everything, self._stage.nothing
        tokens = counted(self._stage, measured.popularity)
        self._unsaved_in_memory += tokens
        self._unsaved_on_disk += 0 if self._is_sequential else tokens
        if not self._has_begun:
            self._unsaved_in_memory[:], self._unsaved_on_disk[:] = 0, 0
            on_disk = everything if to_disk else nothing
            return ExpertChoice(
                memory=everything,
                on_peers=nothing,
                on_disk=on_disk,
                by_gradient=nothing,
            )
        memory = self._select(self._k_of(measured), to_disk=to_disk)
        on_disk = nothing
        if to_disk:
            # sequential selection counts turns instead of tokens
            self._unsaved_on_disk += 1 if self._is_sequential else 0
            on_disk = most_unsaved_of(
                memory, self._unsaved_on_disk, self._config.k_persist, ep=self._ep
            )
        self._unsaved_in_memory[marked(memory, tokens.shape)] = 0
        self._unsaved_on_disk[marked(on_disk, tokens.shape)] = 0
        return ExpertChoice(
            memory=memory, on_peers=nothing, on_disk=on_disk, by_gradient=nothing
        )

    def _select(self, k: int, *, to_disk: bool) -> Selection:
        if not self._is_sequential:
            # MoC, section 3.2
            return most_popular(self._unsaved_in_memory, [k] * self._stage.num_layers)
        # separate turns for storage: if a write takes as long as several snapshots, a
        # common turn would never bring some experts to storage
        turn = self._turn_to_disk if to_disk else self._turn
        self._turn_to_disk, self._turn = (
            self._turn_to_disk + to_disk,
            self._turn + (not to_disk),
        )
        return self._in_turns(turn, k)

    def _in_turns(self, turn: int, k: int) -> Selection:
        num_layers, num_experts = self._stage.num_layers, self._stage.num_experts
        return sequential_experts(
            turn, num_layers=num_layers, num_experts=num_experts, ep=self._ep, k=k
        )

    def _k_of(self, measured: Measured) -> int:
        """Return K_snapshot: the configured K, or the K of Dynamic-K.

        With k_snapshot=auto K is at least the number of experts that are copied in
        time.
        """
        if self._config.k_snapshot != AUTO or measured.iteration_s <= 0:
            return self._k
        rate, overlap_s = measured.copy_bytes_per_s, measured.iteration_s
        # the minimum over stages: all ranks wait for the stage that copies most
        fitting = min(
            fitting_k(each, copy_bytes_per_s=rate, overlap_s=overlap_s)
            for each in self._bottlenecks
        )
        return max(self._k, fitting)

    @cached_property
    def _bottlenecks(self) -> list[IntArray]:
        """The most bytes that a rank copies, by number of experts.

        One array for each stage with experts.
        """
        return [
            bottleneck_by_k(
                each.core_bytes,
                each.expert_bytes,
                ep=self._ep,
                sequential=self._is_sequential,
            )
            for each in self._stages
            if each.num_layers
        ]
