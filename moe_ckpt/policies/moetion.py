"""`ckpt=moetion`: snapshots of the experts with the most tokens at risk.

A snapshot takes as many experts as each link can carry (MoEtion, section 4). The module
owns the experts of each snapshot and their destinations. All ranks of a stage compute
the same plan. The number of experts that all links of a stage carry together is divided
among the stage's layers. Of these experts, the link of each rank takes only as many as
that link carries. The module must not measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moe_ckpt.config import AUTO, MoetionConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.expert_budget import affordable_experts, allocate, budget_bytes
from moe_ckpt.policies.expert_selection import (
    Selection,
    most_popular,
    sent_by_gradient,
    within_links,
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


class PopularExperts(PartialSnapshots):
    """Policy that takes a checkpoint of everything at first, then partial checkpoints.

    Args:
        config: The settings.
        stages: The profiles of all stages.
        own_stage: The number of this rank's stage.
        num_copies: The number of other ranks that keep copies of a rank's experts.

    Raises:
        ConfigError: The model has no experts, a setting asks for more experts than a
            layer has, or the memory budget is too small.
    """

    def __init__(
        self,
        config: MoetionConfig,
        stages: Sequence[StageProfile],
        own_stage: int,
        num_copies: int = 0,
    ) -> None:
        super().__init__(
            config,
            [MoeStage(stage.table) for stage in stages],
            own_stage,
            ("experts", "remote_experts"),
        )
        self._config = config
        self._num_copies = num_copies
        shape = (self._stage.num_layers, self._stage.num_experts)
        self._at_risk: dict[str, IntArray] = {
            level: np.zeros(shape, np.int64) for level in ("memory", "peers")
        }
        self._is_affordable: set[str] = set()
        self._on_peers = self._stage.nothing  # by the snapshot before
        require_budget(config.memory_budget_bytes, self.forecast())

    @property
    def facts(self) -> tuple[float, ...]:
        """The facts that snapshots store for `went_back`: none."""
        return ()

    # ARG002: the policy needs no facts and no losses
    def went_back(self, facts: Sequence[float], *, plt: float, iteration: int) -> None:  # noqa: ARG002
        """Forget the experts on peers after all ranks have gone back to a checkpoint.

        The states on peers belong to another epoch.
        """
        self._on_peers = self._stage.nothing

    def notes(self) -> list[str]:
        """Return the costs, line by line, for the log."""
        asked = {
            "in memory": self._config.experts,
            "on peers": self._config.remote_experts,
        }
        said = [
            f"{'as many as fit' if num == AUTO else num} {where}"
            for where, num in asked.items()
        ]
        return [
            f"host memory of the largest rank, experts a layer: {', '.join(said)}:",
            *self.forecast().lines(),
        ]

    def _choose(self, measured: Measured, *, to_disk: bool) -> ExpertChoice:
        stage = self._stage
        for at_risk in self._at_risk.values():
            at_risk += counted(stage, measured.popularity)
        if not self._has_begun:
            for at_risk in self._at_risk.values():
                at_risk[:] = 0
            self._on_peers = everything = stage.everything
            on_disk = everything if to_disk else stage.nothing
            return ExpertChoice(
                memory=everything,
                on_peers=everything,
                on_disk=on_disk,
                by_gradient=stage.nothing,
            )
        memory = self._select("memory", stage.everything, measured)
        on_peers = (
            self._select("peers", memory, measured)
            if self._num_copies
            else stage.nothing
        )
        # separate counts: a newer copy in memory does not make the copy on peers newer
        for level, selection in (("memory", memory), ("peers", on_peers)):
            self._at_risk[level][marked(selection, self._at_risk[level].shape)] = 0
        before, self._on_peers = self._on_peers, on_peers
        return ExpertChoice(
            memory=memory,
            on_peers=on_peers,
            on_disk=memory if to_disk else stage.nothing,
            by_gradient=sent_by_gradient(before, on_peers)
            if self._sends_gradients
            else stage.nothing,
        )

    def _forecast(self, stage: MoeStage) -> MemoryForecast:
        return forecast_units(
            stage, self._num_copies, by_gradient=self._sends_gradients
        )

    @property
    def _sends_gradients(self) -> bool:
        # a peer can apply gradients only to the state of the previous iteration
        return self._config.send_gradients and self._config.every_iters == 1

    def _select(self, level: str, among: Selection, measured: Measured) -> Selection:
        """Return the experts for one destination.

        The experts are those of `among` with the most tokens since their last copy to
        the destination.
        """
        is_memory = level == "memory"
        asked = self._config.experts if is_memory else self._config.remote_experts
        rate = measured.host_bytes_per_s if is_memory else measured.peer_bytes_per_s
        num_total = (
            self._affordable(rate, measured, level)
            if asked == AUTO
            else int(asked) * self._stage.num_layers
        )
        at_risk = self._at_risk[level]
        is_candidate = marked(among, at_risk.shape)
        num_taken = np.minimum(
            allocate(np.where(is_candidate, at_risk, 0), num_total),
            is_candidate.sum(axis=1),
        )
        # -1 sorts experts outside `among` behind candidates without tokens at risk
        tokens = np.where(is_candidate, at_risk, -1)
        if asked != AUTO or _is_unknown(rate, measured):
            return most_popular(tokens, num_taken.tolist())
        left_bytes = self._budget(rate, measured) - self._stage.core_bytes
        return within_links(
            tokens, num_taken.tolist(), self._stage.expert_bytes, left_bytes
        )

    def _budget(self, bytes_per_s: float, measured: Measured) -> int:
        return budget_bytes(
            bytes_per_s, measured.iteration_s * self._config.every_iters
        )

    def _affordable(self, bytes_per_s: float, measured: Measured, level: str) -> int:
        """Return the number of experts of the stage that the next snapshot can copy.

        Returns all experts as long as the rate or the iteration time is unknown. After
        a first successful decision, returns 1 if a stage has no room for one expert.

        Raises:
            ConfigError: At the first decision, a stage has no room for one expert.
        """
        if _is_unknown(bytes_per_s, measured):
            return self._stage.num_layers * self._stage.num_experts
        budget = self._budget(bytes_per_s, measured)
        setting = f"ckpt.{'experts' if level == 'memory' else 'remote_experts'}=auto"
        try:
            affordable = [
                _affordable(stage, budget, setting)
                for stage in self._stages
                if stage.num_layers
            ]
        except ConfigError:
            if level not in self._is_affordable:
                raise
            return 1  # a rate that falls later must not end a run that has begun
        self._is_affordable.add(level)
        return (
            _affordable(self._stage, budget, setting)
            if self._stage.num_layers
            else max(affordable)
        )


def _is_unknown(bytes_per_s: float, measured: Measured) -> bool:
    return math.isinf(bytes_per_s) or measured.iteration_s <= 0


def _affordable(stage: MoeStage, budget: int, setting: str) -> int:
    """Return the number of a stage's experts that fit if each rank has this budget."""
    return affordable_experts(
        budget * len(stage.core_bytes),
        expert_bytes=int(stage.expert_bytes.sum(axis=0).max()),
        other_bytes=int(stage.core_bytes.sum()),
        setting=setting,
    )
