"""`ckpt=moetion`: the experts with the most tokens at risk, as many as each link
carries (MoEtion, section 4).

Owns: the experts of each snapshot, and their destinations. All ranks of a stage compute
the same plan. The experts that all links of a stage carry together are divided among
its layers; of these, each rank's link takes only as many as it carries by itself. Must
not: measure.
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
    """A checkpoint of everything at first, then partial ones. Raises ConfigError."""

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
            place: np.zeros(shape, np.int64) for place in ("memory", "peers")
        }
        self._is_affordable: set[str] = set()
        self._on_peers = self._stage.nothing  # by the snapshot before
        require_budget(config.memory_budget_bytes, self.forecast())

    @property
    def facts(self) -> tuple[float, ...]:
        """The facts that snapshots hold for `went_back`: none."""
        return ()

    def went_back(self, facts: Sequence[float], *, plt: float, iteration: int) -> None:  # noqa: ARG002 - no use for them
        """All ranks have gone back to a checkpoint: peers' states belong to another
        epoch.
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
        # apart: a newer copy in memory leaves the one on peers as old as it was
        for place, selection in (("memory", memory), ("peers", on_peers)):
            self._at_risk[place][marked(selection, self._at_risk[place].shape)] = 0
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
        # a peer's step leads on from the state of the iteration before, and from no
        # older one
        return self._config.send_gradients and self._config.every_iters == 1

    def _select(self, place: str, among: Selection, measured: Measured) -> Selection:
        """Return the experts for a destination: of `among`, those with the most tokens
        since their last copy there.
        """
        is_memory = place == "memory"
        asked = self._config.experts if is_memory else self._config.remote_experts
        rate = measured.host_bytes_per_s if is_memory else measured.peer_bytes_per_s
        num_total = (
            self._affordable(rate, measured, place)
            if asked == AUTO
            else int(asked) * self._stage.num_layers
        )
        at_risk = self._at_risk[place]
        is_candidate = marked(among, at_risk.shape)
        num_taken = np.minimum(
            allocate(np.where(is_candidate, at_risk, 0), num_total),
            is_candidate.sum(axis=1),
        )
        # -1: behind candidates that have no tokens at risk
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

    def _affordable(self, bytes_per_s: float, measured: Measured, place: str) -> int:
        """Return how many experts of the stage the next snapshot can copy; all while
        that is unknown.

        Raises ConfigError the first time if a stage has no room for one; later one is
        taken.
        """
        if _is_unknown(bytes_per_s, measured):
            return self._stage.num_layers * self._stage.num_experts
        budget = self._budget(bytes_per_s, measured)
        setting = f"ckpt.{'experts' if place == 'memory' else 'remote_experts'}=auto"
        try:
            affordable = [
                _affordable(stage, budget, setting)
                for stage in self._stages
                if stage.num_layers
            ]
        except ConfigError:
            if place not in self._is_affordable:
                raise
            return 1  # a rate that falls later must not end a run that has begun
        self._is_affordable.add(place)
        return (
            _affordable(self._stage, budget, setting)
            if self._stage.num_layers
            else max(affordable)
        )


def _is_unknown(bytes_per_s: float, measured: Measured) -> bool:
    return math.isinf(bytes_per_s) or measured.iteration_s <= 0


def _affordable(stage: MoeStage, budget: int, setting: str) -> int:
    """Return how many experts fit into a stage if each of its ranks has a budget of
    this many bytes.
    """
    return affordable_experts(
        budget * len(stage.core_bytes),
        expert_bytes=int(stage.expert_bytes.sum(axis=0).max()),
        other_bytes=int(stage.core_bytes.sum()),
        setting=setting,
    )
