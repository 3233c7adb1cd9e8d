"""Extra expert capacity after a fault, until lost tokens are made up.

Owns: a router class for Megatron's `MoESubmodules.router`, and this rank's shares of
the deficit in an iteration. In layers without a recovering expert the router equals
Megatron's router bit for bit. Must not: sum over ranks, or know the fault. MoEtion,
section 6.

A deficit belongs to a stage; a capacity belongs to one rank and one micro-batch. Each
rank stays within its share of the deficit in each micro-batch, so all ranks together
never make up more tokens than were lost. The next iteration distributes unused shares
again.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    get_capacity,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from moe_ckpt.config import require
from moe_ckpt.events import CapacityBoosted
from moe_ckpt.megatron.groups import stage_group
from moe_ckpt.megatron.layer_specs import moe_submodules
from moe_ckpt.megatron.router import routers_of
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.policies.capacity_boost import boosted_capacity, made_up, share_of
from moe_ckpt.types import IntArray, OperatorKind


class BoostedRouter(TopKRouter):
    """Megatron's router, with more capacity for experts that have a share of a deficit.

    The router has no further parameters or buffers. Evaluation uses Megatron's equal
    capacities.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.boost(None)

    def boost(self, shares: IntArray | None, factor: float = 0.0) -> None:
        """Raise the capacity of experts in the following micro-batches.

        The call resets `capacity` and the count of extra tokens.

        Args:
            shares: Tokens that each expert may process beyond the capacity, int64
                [micro-batches, experts]. None restores Megatron's routing.
            factor: The most extra tokens of a micro-batch, as a fraction of the
                capacity.
        """
        self._shares, self._factor = shares, factor
        self._num_forwards = self._num_recomputed = 0
        self._capacity = self._extra = self._nothing()

    @property
    def capacity(self) -> IntArray:
        """Tokens that each expert could process since `boost`, int64 [experts].

        The sum over all micro-batches since then.
        """
        return self._capacity

    def take_extra(self) -> IntArray:
        """Return the tokens that experts processed beyond Megatron's capacity.

        Returns:
            The tokens since the last call or `boost`, int64 [experts].
        """
        extra, self._extra = self._extra, self._nothing()
        return extra

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens as Megatron does, but at each expert's own capacity.

        Returns:
            Probabilities and the routing map, each [tokens, experts].
        """
        if self._shares is None or not self.training:
            return super().routing(logits, padding_mask=padding_mask)
        with self._without_capacity():
            probabilities, wanted = super().routing(logits, padding_mask=padding_mask)
        kept = self._keep(probabilities.detach(), wanted, self._capacity_for(wanted))
        # Only kept tokens count for the expert bias. Megatron's own call in `routing`
        # would have counted dropped tokens, too
        self._apply_expert_bias(kept, padding_mask=padding_mask)
        return probabilities * kept, kept

    @contextlib.contextmanager
    def _without_capacity(self) -> Iterator[None]:
        """Disable Megatron's token dropping, and its token counts for the expert bias.

        The counts would include tokens that are dropped later.
        """
        config, counts = self.config, self.enable_expert_bias
        self.config = copy.copy(config)  # all modules share the original
        self.config.moe_expert_capacity_factor = None
        self.enable_expert_bias = False
        try:
            yield
        finally:
            self.config, self.enable_expert_bias = config, counts

    def _capacity_for(self, wanted: torch.Tensor) -> IntArray:
        """Return each expert's capacity for this micro-batch.

        A recomputation of the micro-batch gets the same capacity.
        """
        num_tokens, num_experts = wanted.shape
        equal = get_capacity(
            num_tokens * self.topk,
            num_experts,
            cast("float", self.config.moe_expert_capacity_factor),
        )
        demand = wanted.sum(dim=0).cpu().numpy()
        share, is_recomputed = self._next_share()
        capacity = boosted_capacity(demand, share, capacity=equal, factor=self._factor)
        if not is_recomputed:
            self._capacity = self._capacity + capacity
            # `boosted_capacity` raises a capacity at most to the demand, so tokens fill
            # all extra capacity
            self._extra = self._extra + capacity - equal
        return capacity

    def _next_share(self) -> tuple[IntArray, bool]:
        """Return this micro-batch's share, and whether the pass is a recomputation."""
        # backward recomputes micro-batches in the order of forward, so a second counter
        # suffices
        is_recomputed = torch._C._current_graph_task_id() != -1
        micro_batch = self._num_recomputed if is_recomputed else self._num_forwards
        self._num_recomputed += is_recomputed
        self._num_forwards += not is_recomputed
        assert self._shares is not None
        assert micro_batch < len(self._shares), (
            f"{len(self._shares)} micro-batches were told, this is one more"
        )
        return self._shares[micro_batch], is_recomputed

    def _keep(
        self, probabilities: torch.Tensor, wanted: torch.Tensor, capacity: IntArray
    ) -> torch.Tensor:
        """Return the tokens that Megatron would keep at each expert's capacity."""
        num_tokens, num_experts = wanted.shape
        kept = torch.zeros_like(wanted)
        # Megatron drops tokens at one capacity for all experts. The loop runs
        # Megatron's function once for each distinct capacity, and each expert takes the
        # result at its own capacity
        for tokens in np.unique(capacity):
            at_equal_capacity = apply_router_token_dropping(
                probabilities,
                wanted,
                router_topk=self.topk,
                # Megatron rounds the capacity up
                capacity_factor=(tokens - 0.5) * num_experts / (num_tokens * self.topk),
                drop_policy=self.config.moe_token_drop_policy,
            )
            kept |= at_equal_capacity[1] & torch.from_numpy(capacity == tokens).to(
                kept.device
            )
        return kept

    def _nothing(self) -> IntArray:
        return np.zeros(cast("int", self.num_experts), np.int64)


class CapacityBoost:
    """The stage's deficit of tokens, and the routers that make up the deficit.

    In each iteration call `begin_iteration`, forward and backward, and `end_iteration`.
    Then sum the results of `end_iteration` over the ranks of the stage, and pass the
    sum to `make_up` before the next iteration. The deficit, int64 [layers, experts], is
    therefore the same on all ranks. Layers are in order from front to back.

    The extra tokens of a micro-batch are rounded down: with a capacity below 1 /
    `factor` an expert gets no extra tokens.

    Args:
        state: This rank's training state.
        num_micro_batches: Micro-batches of one rank in an iteration.
        factor: The most extra tokens of a micro-batch, as a fraction of the capacity.

    Raises:
        ConfigError: The capacity of Megatron's experts cannot be raised.
    """

    def __init__(
        self, state: TrainingState, *, num_micro_batches: int, factor: float = 0.10
    ) -> None:
        found = dict(routers_of(state))
        self.layers = tuple(found)
        self._routers: list[BoostedRouter] = []
        self._num_micro_batches = num_micro_batches
        self._factor = factor
        config = cast("Any", state.model[0]).config
        if config.moe_expert_capacity_factor is not None:
            _check_can_be_boosted(config)
            for router in found.values():
                wanted = (
                    "BoostedRouter (`use_router` puts it into a block's specification)"
                )
                require(
                    isinstance(router, BoostedRouter),
                    "MoESubmodules.router",
                    type(router).__name__,
                    wanted,
                )
                self._routers.append(cast("BoostedRouter", router))
        num_experts = cast("int", self._routers[0].num_experts) if self._routers else 0
        self._deficit = np.zeros((len(self._routers), num_experts), np.int64)
        self._recovering: list[int] = []

    @property
    def is_capacity_limited(self) -> bool:
        """Whether experts have a capacity.

        Without a capacity the deficit stays 0, and no method has an effect.
        """
        return bool(self._routers)

    @property
    def note(self) -> str:
        """One line for the log: the treatment of lost tokens."""
        if self.is_capacity_limited:
            return (
                f"experts take up to {self._factor:.0%} more than their capacity until"
                " lost tokens are made up"
            )
        return (
            "experts take all tokens (model.moe_capacity_factor=null): nothing to"
            " boost, lost tokens stay lost"
        )

    @property
    def deficit(self) -> IntArray:
        """Lost tokens of each expert that are yet to be made up. Read-only.

        The numbers are those of all ranks of the stage together, int64 [layers,
        experts].
        """
        return self._deficit

    def recover(self, deficit: IntArray) -> None:
        """Replace the deficit, from the next `begin_iteration` on.

        Args:
            deficit: Lost tokens, over all ranks of the stage, int64 [layers, experts].
        """
        if not self.is_capacity_limited:
            return
        assert deficit.shape == self._deficit.shape, (
            deficit.shape,
            self._deficit.shape,
        )
        assert deficit.dtype == np.int64, deficit.dtype
        self._deficit = deficit.copy()
        self._release()

    def begin_iteration(self) -> None:
        """Give this rank's shares of the deficit to the routers.

        The counts of an abandoned attempt are dropped.
        """
        self._release()
        self._recovering = np.flatnonzero(self._deficit.any(axis=1)).tolist()
        for layer in self._recovering:
            self._routers[layer].boost(
                _shares_of_rank(self._deficit[layer], self._num_micro_batches),
                self._factor,
            )

    def end_iteration(self) -> IntArray:
        """Return the tokens beyond capacity that this rank has sent to each expert.

        Returns:
            Extra tokens of this rank, int64 [layers, experts].
        """
        extra = np.zeros_like(self._deficit)
        for layer in self._recovering:
            extra[layer] = self._routers[layer].take_extra()
        return extra

    def make_up(self, extra: IntArray) -> None:
        """Subtract the tokens that all ranks of the stage have made up.

        Args:
            extra: The sum of the results of `end_iteration` over the ranks of the
                stage.
        """
        self._deficit = made_up(self._deficit, extra)

    def boosted(self, iteration: int) -> CapacityBoosted | None:
        """Return the capacities of the last iteration; None if no expert recovered."""
        if not self._recovering:
            return None
        return CapacityBoosted(
            iteration=iteration,
            layers=[
                str(replace(self.layers[layer], kind=OperatorKind.BLOCK))
                for layer in self._recovering
            ],
            capacity=[
                self._routers[layer].capacity.tolist() for layer in self._recovering
            ],
            deficit=self._deficit[self._recovering].tolist(),
        )

    def _release(self) -> None:
        """Restore Megatron's routing in all routers."""
        for router in self._routers:
            router.boost(None)
        self._recovering = []


def use_router(block: TransformerBlockSubmodules, router: type[TopKRouter]) -> None:
    """Use this router in place of Megatron's in all MoE layers of a block.

    Args:
        block: The specification of the block, which is changed in place.
        router: The router class.
    """
    for submodules in moe_submodules(block):
        submodules.router = router


def _check_can_be_boosted(config: Any) -> None:
    """Raise ConfigError for settings that prevent a boost.

    Such settings fix the number of an expert's tokens, or hide the current micro-batch
    from a router.
    """
    why = "where the capacity of experts is raised after a recovery"
    padded, graphs = config.moe_pad_expert_input_to_capacity, config.cuda_graph_impl
    some = config.num_microbatches_with_partial_activation_checkpoints
    require(not padded, "model.moe_pad_to_capacity", padded, f"false {why}")
    require(graphs == "none", "cuda_graph_impl", graphs, f"'none' {why}")
    require(
        some is None,
        "num_microbatches_with_partial_activation_checkpoints",
        some,
        f"None {why}",
    )


def _shares_of_rank(deficit: IntArray, num_micro_batches: int) -> IntArray:
    """Return this rank's shares of a layer's deficit, int64 [micro-batches, experts].

    The remainder goes to the first micro-batch of the first ranks of the stage, then to
    the second micro-batch.
    """
    rank_in_stage, num_ranks = (
        dist.get_rank(stage_group()),
        dist.get_world_size(stage_group()),
    )
    shares = [
        share_of(
            deficit,
            index=micro_batch * num_ranks + rank_in_stage,
            num_shares=num_micro_batches * num_ranks,
        )
        for micro_batch in range(num_micro_batches)
    ]
    return np.stack(shares)
