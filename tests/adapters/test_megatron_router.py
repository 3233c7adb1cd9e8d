"""Tokens are counted where routers send them: once, by global expert, and only while counting."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from launcher.loop import Trainer
from moe_ckpt.adapters.megatron_operators import RankOperators, bare_model
from moe_ckpt.adapters.megatron_router import RouterCounts
from moe_ckpt.adapters.megatron_state import TrainingState
from moe_ckpt.types import OperatorKind, OperatorTable
from tests.adapters.stage import build_stage
from tests.ranks import run_ranks

NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 4, 2
SIZE = (f"model.num_layers={NUM_LAYERS}", f"model.num_experts={NUM_EXPERTS}", f"model.moe_topk={TOP_K}")
TOKENS_OF_MICRO_BATCH = 2 * 16  # train.micro_batch_size, train.sequence_length of the fast settings

Counted = dict[str, tuple[float, float]]
"""Tokens and sums of probabilities by expert."""


class _ByHand:
    """Every call of every router: what it routed, by the layer's number in Megatron, which counts from 1."""

    def __init__(self, state: TrainingState) -> None:
        self.routed: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for module in bare_model(state.model[0]).modules():
            if type(module).__name__ == "TopKRouter":
                module.register_forward_hook(self._routed)

    def _routed(self, router: Any, _: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        probabilities, routing_map = routed
        self.routed.append((router.layer_number, probabilities.detach().clone(), routing_map.clone()))

    def counted(self) -> Counted:
        """Return the sums over all calls; a layer that was never called is not there."""
        found: Counted = {}
        for layer_number, probabilities, routing_map in self.routed:
            for expert in range(NUM_EXPERTS):
                name = f"layer {layer_number - 1} expert {expert}"
                hard, soft = found.get(name, (0.0, 0.0))
                hard += float(routing_map[:, expert].sum())
                found[name] = (hard, soft + float(probabilities[:, expert].double().sum()))
        return found


def _end(counts: RouterCounts, table: OperatorTable) -> Counted:
    counted = counts.end()
    assert counted.hard.dtype == counted.soft.dtype == np.float64
    experts = [str(operator) for operator in table.operators if operator.kind is OperatorKind.EXPERT]
    return dict(zip(experts, zip(counted.hard.tolist(), counted.soft.tolist(), strict=True), strict=True))


def _prepare(overrides: tuple[str, ...]) -> tuple[Trainer, OperatorTable, RouterCounts, _ByHand]:
    state, trainer = build_stage(*SIZE, *overrides)
    table = RankOperators(state).table
    counts = RouterCounts(state, table)
    return trainer, table, counts, _ByHand(state)


def _count_an_iteration(overrides: tuple[str, ...]) -> tuple[int, int, Counted, Counted, int]:
    """Return stage, number of micro-batches, what was counted, what by hand, and how often routers were called."""
    trainer, table, counts, by_hand = _prepare(overrides)
    counts.begin()
    trainer.run_iteration(1)
    counted = _end(counts, table)
    num_micro_batches = cast("Any", trainer)._runner.batches.num_micro_batches
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return stage, num_micro_batches, counted, by_hand.counted(), len(by_hand.routed)


STAGES = ("parallel.pp=2", "parallel.ep=2", "parallel.dp=2")


@pytest.mark.parametrize(
    "overrides",
    [STAGES, (*STAGES, "model.num_dense_layers=1"), (*STAGES, "model.moe_score_function=sigmoid")],
    ids=", ".join,
)
def test_counts_are_those_of_the_routers(overrides: tuple[str, ...]) -> None:
    for stage, num_micro_batches, counted, by_hand, _ in run_ranks(4, _count_an_iteration, overrides):
        first = 1 if "model.num_dense_layers=1" in overrides and stage == 0 else 0
        layers = range(2 * stage + first, 2 * stage + 2)
        assert list(counted) == [f"layer {layer} expert {i}" for layer in layers for i in range(NUM_EXPERTS)]
        assert counted == by_hand
        assert num_micro_batches == 2
        for layer in layers:
            tokens = sum(counted[f"layer {layer} expert {expert}"][0] for expert in range(NUM_EXPERTS))
            assert tokens == 2 * TOKENS_OF_MICRO_BATCH * TOP_K


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_forwards_are_not_counted_again(recompute: str) -> None:
    ((_, _, plain, by_hand, num_calls),) = run_ranks(1, _count_an_iteration, ())
    ((_, _, counted, _, num_recomputed_calls),) = run_ranks(1, _count_an_iteration, (f"train.recompute={recompute}",))
    assert num_recomputed_calls == (2 * num_calls if recompute == "full" else num_calls)
    assert plain == by_hand
    assert counted == plain


def _count_now_and_then() -> tuple[Counted, ...]:
    """Return what is counted before the first begin, in two iterations, in one, after the end, and from zero."""
    trainer, table, counts, by_hand = _prepare(())
    found: list[Counted] = []
    trainer.evaluate(1)
    trainer.run_iteration(1)
    found.append(_end(counts, table))
    by_hand.routed.clear()
    counts.begin()
    trainer.run_iteration(2)
    trainer.run_iteration(3)
    found += [_end(counts, table), by_hand.counted()]
    trainer.evaluate(1)
    trainer.run_iteration(4)
    found.append(_end(counts, table))
    by_hand.routed.clear()
    counts.begin()
    trainer.run_iteration(5)
    found += [_end(counts, table), by_hand.counted()]
    counts.begin()
    found.append(_end(counts, table))
    return tuple(found)


def test_nothing_is_counted_before_the_beginning_or_after_the_end() -> None:
    ((before, two, two_by_hand, after, one, one_by_hand, none),) = run_ranks(1, _count_now_and_then)
    nothing = dict.fromkeys(two, (0.0, 0.0))
    assert before == nothing
    assert two == two_by_hand
    assert after == two, "an end that follows an end returns the same: nothing was added"
    assert one == one_by_hand
    assert none == nothing
