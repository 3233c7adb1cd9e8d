"""Policies that save a part of the experts and lose tokens: what their papers say about sizes and losses.

MoC, equations 6 and 7 and Dynamic-K (section 5.3); MoEtion, equation 5. Until these policies train for real here, they
are simulated as one snapshot an iteration of everything but some experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moe_ckpt.config import require, require_choice
from moe_ckpt.sim.job import Job

POLICIES = ("moc", "moetion")


@dataclass(frozen=True, kw_only=True)
class PartialConfig:
    """`experts` of each layer are in a snapshot: K of MoC, S of MoEtion. See conf/partial/moc.yaml.

    `lost_tokens_limit`: share of all tokens whose loss makes K grow, doubling it after a fault until all experts are
    saved; null: K stays.
    """

    policy: str
    experts: int
    lost_tokens_limit: float | None
    first_experts: int | None = None

    def __post_init__(self) -> None:
        require_choice("partial.policy", self.policy, POLICIES)
        limit = self.lost_tokens_limit
        wanted = "more than 0 and at most 1, or null"
        require(limit is None or 0 < limit <= 1, "partial.lost_tokens_limit", limit, wanted)

    def grown(self, num_experts: int) -> PartialConfig | None:
        """Return it with twice the experts, or None where it does not grow any more."""
        if self.lost_tokens_limit is None or self.experts >= num_experts:
            return None
        first = self.first_experts or self.experts
        return replace(self, experts=min(2 * self.experts, num_experts), first_experts=first)

    def limit_now(self, num_experts: int) -> float:
        """Return the loss at which it grows: each doubling may use an equal part of the limit.

        MoC does not say how the limit is divided (section 5.3).
        """
        if self.lost_tokens_limit is None:
            return 1.0
        first = self.first_experts or self.experts
        doublings = math.ceil(math.log2(num_experts / first)) or 1
        used = math.ceil(math.log2(self.experts / first))
        return self.lost_tokens_limit * min(used + 1, doublings) / doublings


def partial_bytes(job: Job, experts: int) -> float:
    """Return the bytes of a snapshot with so many experts of each layer, over all ranks.

    (P_non-expert + K / N P_expert) times the bytes of a parameter's whole state: MoC, equation 6; MoEtion, equation 5.
    """
    counts, is_expert = job.shape.parameters, job.is_expert
    share = experts / max(1, job.shape.num_experts)
    return float(counts[~is_expert].sum() + share * counts[is_expert].sum()) * job.formats.full_bytes


def mean_age_iters(config: PartialConfig, job: Job) -> float:
    """Return how old an expert's state is on average, weighted by its tokens: what a fault loses, in iterations.

    In turn, K of N experts an iteration: 0 to N / K - 1, half of that on average. By popularity (MoEtion), the S most
    popular ones in every iteration but the rest only in turn with half of S: their tokens are the few.
    """
    num_experts, experts = job.shape.num_experts, config.experts
    in_turn = (num_experts / experts - 1) / 2
    if config.policy == "moc" or experts >= num_experts:
        return in_turn
    popular = sorted(job.shape.popularity, reverse=True)
    always = max(1, experts // 2)
    others = num_experts - always
    return float(sum(popular[always:])) * max(0.0, (others / max(1, experts - always) - 1) / 2)
