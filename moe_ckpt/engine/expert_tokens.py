"""The tokens of a stage's experts, from the router to policy, account and capacity.

Tokens are counted for the policy, entered into the account, and made up by higher
capacity. Must not: decide an order of experts, or a capacity.
"""

from __future__ import annotations

import numpy as np
import torch

from moe_ckpt.config import InMemoryConfig
from moe_ckpt.engine.expert_events import ExpertEvents
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.policies.expert_popularity import accumulate, carried_over
from moe_ckpt.policies.lost_tokens import IntArray
from moe_ckpt.types import ExpertCounts, Measured, ReadyGradients


class ExpertTokens:
    """The counts of one generation. Collective in the stage.

    Without counts, boost and account the methods do nothing.

    Attributes:
        events: Reports the popularity and the order of experts.
    """

    def __init__(self, config: InMemoryConfig, parts: RankParts) -> None:
        self._kind, self._decay = config.popularity, config.popularity_decay
        self._position = parts.adapter.position
        self._counts = parts.counts
        self._boost = parts.adapter.boost
        self._account = parts.account
        self._meter = parts.meter
        self._log = parts.events
        self._counted: ExpertCounts | None = None
        self._made_up: IntArray | None = None
        writes = (
            parts.adapter.position.stage_ranks.rank == 0 and parts.counts is not None
        )
        self.events = ExpertEvents(
            parts.adapter.operators.table, parts.events, writes=writes
        )

    def begin(self) -> None:
        """Start counting, as an iteration begins."""
        if self._counts:
            self._counts.begin()
        if self._boost:
            self._boost.begin_iteration()

    def end_pass(self) -> None:
        """Stop counting.

        Later tokens, of evaluations, do not belong to the iteration.
        """
        self._counted = self._counts.end() if self._counts else None

    def log_extra(self, gradients: ReadyGradients) -> None:
        """Keep the extra tokens of the iteration until the step.

        A step that is skipped trains no expert, and makes up nothing.
        """
        if self._boost and self._boost.deficit.any():
            extra = self._boost.end_iteration()
            self._made_up = np.zeros_like(extra) if gradients.overflow else extra

    def count(self) -> None:
        """Add the iteration's tokens to the popularity."""
        counted, self._counted = self._counted, None
        if counted is not None:
            popularity = self._meter.popularity
            self._meter.popularity = accumulate(
                self._kind, popularity, counted.hard, counted.soft, decay=self._decay
            )

    def make_up(self, iteration: int) -> None:
        """Subtract this iteration's extra tokens from the experts' deficits.

        The extra tokens are those of all ranks of the stage.
        """
        extra, self._made_up = self._made_up, None
        if self._boost is None or self._account is None or extra is None:
            return
        total = torch.from_numpy(extra).to(self._position.device)
        # over the stage: all ranks of the stage then have equal deficits, and give
        # their experts equal capacity
        self._position.stage_ranks.reduce(total, "sum")
        self._boost.make_up(total.cpu().numpy())
        self._account.deficit = self._boost.deficit.copy()
        boosted = self._boost.boosted(iteration)
        if boosted:
            self._log.append(boosted)

    def of_stage(self) -> np.ndarray:
        """Return the popularity over all ranks of the stage, float64 [experts]."""
        # a copy: the reduction would write the stage's sum into this rank's own counts
        popularity = torch.from_numpy(self._meter.popularity.copy()).to(
            self._position.device
        )
        # ranks that used only their own counts would put different experts into one
        # snapshot
        if self._counts:
            self._position.stage_ranks.reduce(popularity, "sum")
        return popularity.cpu().numpy()

    def measured(self, measured: Measured) -> None:
        """Enter the tokens of these measurements into the account, and count anew.

        Args:
            measured: The measurements that the policy has received.
        """
        self.events.measured(measured.popularity)
        if self._account:
            self._account.count(measured.popularity)
        if self._counts:
            self._meter.popularity = carried_over(self._kind, self._meter.popularity)
