"""Tokens that routers send are counted once, by global expert.

Nothing is counted before `begin` or after `end`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt.megatron.operator_names import bare_model
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.router import RouterCounts
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.types import OperatorKind
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import build_stage, stage_number

NUM_EXPERTS, TOP_K = 4, 2
SIZE = (
    "model.num_layers=4",
    f"model.num_experts={NUM_EXPERTS}",
    f"model.moe_topk={TOP_K}",
)
# train.micro_batch_size * train.sequence_length of tests.harness.jobs.training.FAST
TOKENS_OF_MICRO_BATCH = 2 * 16

Counted = dict[str, tuple[float, float]]
"""Number of tokens and sum of the gate's probabilities, by expert."""


class _ByHand:
    """Records the gate's probabilities and the routed tokens of every router call.

    The probabilities are those of all experts, before the router chooses experts. Each
    record has the layer's number in Megatron, which counts from 1.
    """

    def __init__(self, state: TrainingState) -> None:
        self.routed: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for module in bare_model(state.model[0]).modules():
            if type(module).__name__ == "TopKRouter":
                module.register_forward_hook(self._routed)

    def _routed(
        self,
        router: Any,
        hidden: tuple[torch.Tensor],
        routed: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        scores = torch.nn.functional.linear(
            hidden[0].detach().double(), router.weight.detach().double()
        )
        given = (
            scores.exp()
            if router.config.moe_router_score_function == "softmax"
            else scores.sigmoid()
        )
        probabilities = (given / given.sum(dim=-1, keepdim=True)).reshape(
            -1, NUM_EXPERTS
        )
        self.routed.append((router.layer_number, probabilities, routed[1].clone()))

    def take(self) -> Counted:
        """Return the sums over all calls since the last `take`.

        Layers without a call are left out.
        """
        found: Counted = {}
        for layer_number, probabilities, routing_map in self.routed:
            for expert in range(NUM_EXPERTS):
                name = f"layer {layer_number - 1} expert {expert}"
                hard, soft = found.get(name, (0.0, 0.0))
                hard += float(routing_map[:, expert].sum())
                found[name] = (hard, soft + float(probabilities[:, expert].sum()))
        self.routed.clear()
        return found


class _Counting:
    """A stage whose tokens are counted by `RouterCounts` and by hand."""

    def __init__(self, *overrides: str) -> None:
        state, self.worker = build_stage(*SIZE, *overrides)
        table = RankOperators(state).table
        self._experts = [
            str(operator)
            for operator in table.operators
            if operator.kind is OperatorKind.EXPERT
        ]
        self._counts = RouterCounts(state, table, soft=True)
        self.begin = self._counts.begin
        self.by_hand = _ByHand(state)

    def end(self) -> Counted:
        counted = self._counts.end()
        assert counted.hard.dtype == counted.soft.dtype == np.float64
        pairs = zip(counted.hard.tolist(), counted.soft.tolist(), strict=True)
        return dict(zip(self._experts, pairs, strict=True))


def alike(counted: Counted, by_hand: Counted) -> bool:
    """Return whether tokens are equal, and probabilities equal up to rounding.

    The gate computes probabilities in 32 bits.
    """
    return counted.keys() == by_hand.keys() and all(
        hard == by_hand[name][0] and soft == pytest.approx(by_hand[name][1], rel=1e-5)
        for name, (hard, soft) in counted.items()
    )


def _count_an_iteration(
    overrides: tuple[str, ...],
) -> tuple[int, int, Counted, Counted, int]:
    """Count the tokens of one iteration.

    Returns:
        The stage, the number of micro-batches, the counts of `RouterCounts`, the counts
        by hand, and the number of router calls.
    """
    stage = _Counting(*overrides)
    stage.begin()
    stage.worker.run_iteration(1)
    num_micro_batches, num_calls = (
        stage.worker.passes.batches.num_micro_batches,
        len(stage.by_hand.routed),
    )
    return (
        stage_number(),
        num_micro_batches,
        stage.end(),
        stage.by_hand.take(),
        num_calls,
    )


@pytest.mark.parametrize(
    "overrides",
    [(), ("model.num_dense_layers=1", "model.moe_score_function=sigmoid")],
    ids=", ".join,
)
def test_counts_are_those_of_the_routers(overrides: tuple[str, ...]) -> None:
    for stage, num_micro_batches, counted, by_hand, _ in run_ranks(
        4, _count_an_iteration, overrides
    ):
        first = 1 if "model.num_dense_layers=1" in overrides and stage == 0 else 0
        layers = range(2 * stage + first, 2 * stage + 2)
        assert list(counted) == [
            f"layer {layer} expert {i}" for layer in layers for i in range(NUM_EXPERTS)
        ]
        assert alike(counted, by_hand)
        assert num_micro_batches == 2
        for layer in layers:
            tokens = sum(
                counted[f"layer {layer} expert {expert}"][0]
                for expert in range(NUM_EXPERTS)
            )
            assert tokens == 2 * TOKENS_OF_MICRO_BATCH * TOP_K
            given = sum(
                counted[f"layer {layer} expert {expert}"][1]
                for expert in range(NUM_EXPERTS)
            )
            assert given == pytest.approx(2 * TOKENS_OF_MICRO_BATCH), (
                "each token's probabilities sum to 1"
            )
            assert all(
                counted[f"layer {layer} expert {expert}"][1] > 0
                for expert in range(NUM_EXPERTS)
            )


def test_recomputed_forwards_are_not_counted_again() -> None:
    ((_, _, plain, by_hand, num_calls),) = run_ranks(1, _count_an_iteration, ())
    ((_, _, counted, _, num_recomputed_calls),) = run_ranks(
        1, _count_an_iteration, ("train.recompute=full",)
    )
    assert num_recomputed_calls == 2 * num_calls
    assert counted == plain
    assert alike(counted, by_hand)


def _count_now_and_then() -> None:
    stage = _Counting()
    stage.worker.passes.evaluate(1)
    stage.worker.run_iteration(1)
    nothing = dict.fromkeys(stage.by_hand.take(), (0.0, 0.0))
    assert stage.end() == nothing, "before the first beginning"
    stage.begin()
    stage.worker.run_iteration(2)
    stage.worker.run_iteration(3)
    two = stage.end()
    assert alike(two, stage.by_hand.take())
    stage.worker.passes.evaluate(1)
    stage.worker.run_iteration(4)
    assert stage.end() == two, (
        "an end that follows an end returns the same: nothing was added"
    )
    stage.by_hand.take()
    stage.begin()
    stage.worker.run_iteration(5)
    assert alike(stage.end(), stage.by_hand.take())
    stage.begin()
    assert stage.end() == nothing


def test_nothing_is_counted_before_the_beginning_or_after_the_end() -> None:
    run_ranks(1, _count_now_and_then)
