"""Boosted routers are Megatron's until an expert recovers: it takes more, as Megatron would, and never too much."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from launcher.loop import Trainer
from moe_ckpt.adapters.megatron_boost import BoostedRouter, CapacityBoost
from moe_ckpt.adapters.megatron_operators import bare_model, stage_group
from moe_ckpt.adapters.megatron_state import TrainingState, digest_of
from moe_ckpt.boost import boosted_capacity
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import CapacityBoosted
from tests.adapters.stage import build_stage
from tests.ranks import run_ranks

IntArray = npt.NDArray[np.int64]

NUM_EXPERTS, TOP_K = 4, 2
LIMITED = "model.moe_capacity_factor=1.0"
STAGES = ("parallel.pp=2", "parallel.ep=2", "parallel.dp=2")
BIAS = ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")


def _num_micro_batches(trainer: Trainer) -> int:
    return cast("Any", trainer)._runner.batches.num_micro_batches


def _boosted_stage(overrides: tuple[str, ...]) -> tuple[TrainingState, Trainer, CapacityBoost]:
    state, trainer = build_stage(*overrides, router=BoostedRouter)
    return state, trainer, CapacityBoost.find(state, num_micro_batches=_num_micro_batches(trainer))


def _over_stage(extra: IntArray) -> IntArray:
    total = torch.from_numpy(extra.copy())
    dist.all_reduce(total, group=stage_group())
    return total.numpy()


# --- without a deficit


def _train(overrides: tuple[str, ...], boosted: bool) -> tuple[str, list[str], list[float]]:
    """Return digest, names in the model's state and losses of two iterations, with an evaluation in between."""
    found: list[float] = []
    state, trainer = build_stage(*overrides, router=BoostedRouter if boosted else TopKRouter)
    boost = CapacityBoost.find(state, num_micro_batches=_num_micro_batches(trainer)) if boosted else None
    for iteration in (1, 2):
        if boost:
            boost.recover(np.zeros_like(boost.deficit))
            boost.begin_iteration()
        found += [trainer.run_iteration(iteration).loss, trainer.evaluate(1)]
        if boost:
            boost.make_up(boost.end_iteration())
            assert boost.boosted(iteration) is None
    return digest_of(state), list(state.model[0].state_dict()), found


@pytest.mark.parametrize(
    "overrides",
    [
        (LIMITED, *STAGES),
        (LIMITED, *STAGES, *BIAS, "train.recompute=full"),
        (*STAGES, "model.num_dense_layers=1"),  # no capacity; and a stage without experts
    ],
    ids=", ".join,
)
def test_training_is_bit_for_bit_megatrons_while_nobody_recovers(overrides: tuple[str, ...]) -> None:
    assert run_ranks(4, _train, overrides, True) == run_ranks(4, _train, overrides, False)


# --- one router


@dataclass(frozen=True)
class _Routed:
    """What a router made of logits: outputs, gradient, what it logged and counted."""

    probabilities: torch.Tensor
    kept: torch.Tensor
    gradient: torch.Tensor
    buffers: dict[str, torch.Tensor]

    def equals(self, other: _Routed) -> bool:
        tensors = zip(self._tensors(), other._tensors(), strict=True)
        return all(mine.dtype == theirs.dtype and torch.equal(mine, theirs) for mine, theirs in tensors)

    def _tensors(self) -> list[torch.Tensor]:
        return [self.probabilities, self.kept, self.gradient, *self.buffers.values()]


def _route(router: BoostedRouter, logits: torch.Tensor, factor: float | None = None) -> _Routed:
    """Route with this router, or with Megatron's own code at a capacity factor; buffers start from zero."""
    logits = logits.clone().requires_grad_()
    for buffer in router.buffers():
        buffer.zero_()
    if factor is None:
        probabilities, kept = router.routing(logits)
    else:
        config = router.config
        router.config = copy.copy(config)
        router.config.moe_expert_capacity_factor = factor
        probabilities, kept = TopKRouter.routing(router, logits)
        router.config = config
    weights = torch.arange(probabilities.numel()).view_as(probabilities) / probabilities.numel()
    (probabilities * weights).sum().backward()
    buffers = {name: buffer.clone() for name, buffer in router.named_buffers()}
    return _Routed(probabilities.detach(), kept, cast("torch.Tensor", logits.grad), buffers)


def _first_router(overrides: tuple[str, ...], policy: str) -> BoostedRouter:
    state, _ = build_stage(*overrides, router=BoostedRouter)
    router = next(m for m in bare_model(state.model[0]).modules() if isinstance(m, BoostedRouter))
    router.config.moe_token_drop_policy = cast("Any", policy)
    return router


def _skewed_logits(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of 2 sequences of 60 tokens, so that some experts get more than the equal share of 60 and some less."""
    generator = torch.Generator().manual_seed(seed)
    skew = torch.tensor([1.0, 0.5, 0.0, -1.0])[torch.randperm(NUM_EXPERTS, generator=generator)]
    return (torch.randn(60, 2, NUM_EXPERTS, generator=generator) + skew).to(dtype)


ROUTINGS = [
    ("model.moe_balancing=aux_loss", "model.moe_z_loss_coeff=0.1"),
    ("model.moe_balancing=seq_aux_loss", "model.moe_router_dtype=fp64"),
    ("model.moe_balancing=global_aux_loss",),
    BIAS,
]


def _compare_without_extra(overrides: tuple[str, ...], policy: str) -> list[bool]:
    """Return whether routing that lets experts recover that have no demand beyond their capacity is Megatron's own."""
    router = _first_router((LIMITED, *overrides), policy)
    same = []
    for seed in range(5):
        logits = _skewed_logits(seed, torch.float64 if "model.moe_router_dtype=fp64" in overrides else torch.float32)
        megatrons = _route(router, logits, 1.0)
        idle = megatrons.kept.sum(dim=0) < 60
        assert idle.any()
        assert (~idle).any()
        router.boost((idle * 9).numpy()[None], factor=0.1)
        boosted = _route(router, logits)
        same += [boosted.equals(megatrons), router.take_extra().tolist() == [0] * NUM_EXPERTS]
        assert ("local_tokens_per_expert" in boosted.buffers) == (overrides == BIAS)
        assert overrides != BIAS or boosted.buffers["local_tokens_per_expert"].tolist() == boosted.kept.sum(0).tolist()
    return same


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("overrides", ROUTINGS, ids=", ".join)
def test_a_recovering_expert_without_demand_changes_nothing(overrides: tuple[str, ...], policy: str) -> None:
    ((*same,),) = run_ranks(1, _compare_without_extra, overrides, policy)
    assert all(same)
    assert len(same) == 10


def _compare_columns(overrides: tuple[str, ...], policy: str) -> int:
    """Check each expert against Megatron's own code at this expert's capacity; return how many tokens were extra."""
    router = _first_router((LIMITED, *overrides), policy)
    total = 0
    for seed in range(8):
        logits = _skewed_logits(seed, torch.float32)
        shares = np.random.default_rng(seed).integers(0, 9, NUM_EXPERTS)
        demand = _route(router, logits, 99.0).kept.sum(dim=0).numpy()
        router.boost(shares[None], factor=0.1)
        boosted = _route(router, logits)
        capacity = boosted_capacity(demand, shares, capacity=60, factor=0.1)
        for expert, tokens in enumerate(capacity):
            alone = _route(router, logits, (float(tokens) - 0.5) / 60)  # Megatron rounds up
            assert boosted.kept[:, expert].sum() == min(demand[expert], tokens)
            assert torch.equal(boosted.kept[:, expert], alone.kept[:, expert])
            assert torch.equal(boosted.probabilities[:, expert], alone.probabilities[:, expert])
        extra = boosted.kept.sum(dim=0) - _route(router, logits, 1.0).kept.sum(dim=0)
        assert router.take_extra().tolist() == extra.tolist() == (capacity - 60).tolist()
        assert router.take_extra().tolist() == [0] * NUM_EXPERTS, "asked a second time"
        assert router.capacity.tolist() == capacity.tolist()
        for name, buffer in boosted.buffers.items():
            assert name != "local_tokens_per_expert" or buffer.tolist() == boosted.kept.sum(dim=0).tolist()
        total += int(extra.sum())
    return total


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("overrides", [ROUTINGS[0], BIAS], ids=", ".join)
def test_each_expert_keeps_what_megatron_lets_it_keep_at_its_capacity(overrides: tuple[str, ...], policy: str) -> None:
    assert run_ranks(1, _compare_columns, overrides, policy)[0] > 20


def _evaluate_boosted() -> None:
    """Evaluate with an expert that recovers: by equal capacities, and without counting."""
    router = _first_router((LIMITED,), "probs").eval()
    logits = _skewed_logits(0, torch.float32)
    megatrons = _route(router, logits, 1.0)
    router.boost(np.full((1, NUM_EXPERTS), 9), factor=0.1)
    assert _route(router, logits).equals(megatrons)
    assert router.capacity.tolist() == router.take_extra().tolist() == [0] * NUM_EXPERTS
    router.train()
    assert not _route(router, logits).equals(megatrons), "the evaluation has used up no micro-batch"


def test_evaluation_goes_by_equal_capacities() -> None:
    run_ranks(1, _evaluate_boosted)


# --- iterations


class _ByHand:
    """What routers have sent beyond capacity, by layer, from what they returned."""

    def __init__(self, state: TrainingState, capacity: int) -> None:
        routers = [m for m in bare_model(state.model[0]).modules() if isinstance(m, BoostedRouter)]
        self._capacity = capacity
        self.extra = np.zeros((len(routers), NUM_EXPERTS), np.int64)
        self.most = 0
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._adding_hook(layer))

    def _adding_hook(self, layer: int) -> Callable[[Any, Any, tuple[torch.Tensor, torch.Tensor]], None]:
        return lambda _, __, routed: self._add(layer, routed[1])

    def _add(self, layer: int, kept: torch.Tensor) -> None:
        tokens = kept.sum(dim=0).numpy()
        self.most = max(self.most, int(tokens.max()))
        self.extra[layer] += np.maximum(tokens - self._capacity, 0)

    def take(self) -> IntArray:
        extra, self.extra = self.extra, np.zeros_like(self.extra)
        return extra


LONG = ("train.sequence_length=64", "model.num_layers=4")  # micro-batches of 128 tokens, capacity 64, at most 6 extra
LOST = (23, 0, 3, 1)


@dataclass(frozen=True)
class _Iteration:
    """What one rank has seen of an iteration."""

    stage: int
    deficit: list[list[int]]
    own_extra: list[list[int]]
    extra: list[list[int]]
    event: CapacityBoosted | None


def _recover_by_training(overrides: tuple[str, ...], lost: tuple[int, ...], iterations: int) -> list[_Iteration]:
    """Train after every layer but the stage's last has lost these tokens."""
    state, trainer, boost = _boosted_stage((LIMITED, *overrides))
    by_hand = _ByHand(state, capacity=64)
    deficit = np.zeros_like(boost.deficit)
    deficit[:-1] = lost
    boost.recover(deficit)
    seen = []
    for iteration in range(1, iterations + 1):
        boost.begin_iteration()
        trainer.run_iteration(iteration)
        extra = boost.end_iteration()
        assert extra.tolist() == by_hand.take().tolist()
        in_stage = _over_stage(extra)
        boost.make_up(in_stage)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        event = boost.boosted(iteration)
        seen.append(_Iteration(stage, boost.deficit.tolist(), extra.tolist(), in_stage.tolist(), event))
    assert by_hand.most <= 70
    return seen


def test_lost_tokens_are_made_up_and_not_one_more() -> None:
    """Two stages of two ranks with two micro-batches each: deficits of less than four go to some of them only."""
    ranks = run_ranks(4, _recover_by_training, (*STAGES, *LONG), LOST, 16, timeout_s=90.0)
    for stage in (0, 1):
        mine, other = (rank for rank in ranks if rank[0].stage == stage)
        assert [seen.deficit for seen in mine] == [seen.deficit for seen in other]
        left = np.array([LOST, (0, 0, 0, 0)])
        for seen in mine:
            extra = np.array(seen.extra)
            assert np.all(extra <= left)
            left -= extra
            assert seen.deficit == left.tolist()
        assert left.tolist() == [[0] * NUM_EXPERTS] * 2
        assert mine[-1].event is None, "nobody recovers in the last iteration"
    assert any(seen.own_extra != other.own_extra for seen, other in zip(ranks[0], ranks[1], strict=True))


def test_events_tell_the_capacity_and_the_deficit_of_each_expert() -> None:
    for rank in run_ranks(2, _recover_by_training, ("parallel.pp=2", *LONG), LOST, 2):
        layer = f"layer {2 * rank[0].stage}"
        for number, seen in enumerate(rank, start=1):
            capacity = (4 * 64 + np.array(seen.own_extra[0])).tolist()  # 4 micro-batches
            expected = CapacityBoosted(iteration=number, layers=[layer], capacity=[capacity], deficit=seen.deficit[:1])
            assert seen.event == expected
        assert any(any(seen.own_extra[0]) for seen in rank)


def _digest_after_recovery(overrides: tuple[str, ...]) -> tuple[str, int, int]:
    """Return digest, tokens made up and calls of the first router of three iterations with uneven shares."""
    state, trainer, boost = _boosted_stage((LIMITED, *overrides))
    num_calls, total = 0, 0

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    next(m for m in bare_model(state.model[0]).modules() if isinstance(m, BoostedRouter)).register_forward_hook(count)
    for iteration in (1, 2, 3):
        boost.recover(np.full_like(boost.deficit, 6))  # shares of 2, 2, 1, 1
        boost.begin_iteration()
        trainer.run_iteration(iteration)
        total += int(boost.end_iteration().sum())
    return digest_of(state), total, num_calls


def test_recomputed_routing_is_the_same_and_counts_once() -> None:
    overrides = ("parallel.pp=2", *LONG)  # the first stage sees the second micro-batch before it recomputes the first
    plain = run_ranks(2, _digest_after_recovery, overrides)
    again = run_ranks(2, _digest_after_recovery, (*overrides, "train.recompute=full"))
    assert [(digest, total) for digest, total, _ in again] == [(digest, total) for digest, total, _ in plain]
    assert all(total > 0 for _, total, _ in plain)
    assert [num_calls for *_, num_calls in plain] == [12, 12]
    assert [num_calls for *_, num_calls in again] == [24, 24]


def _abandon_an_attempt() -> None:
    """Stop an iteration after its backward and begin it again, then recover from something else in the middle."""
    state, trainer, boost = _boosted_stage((LIMITED, *LONG))
    by_hand = _ByHand(state, capacity=64)
    runner = cast("Any", trainer)._runner
    boost.recover(np.full_like(boost.deficit, 1000))
    boost.begin_iteration()
    runner.train_on(1)
    assert by_hand.take().any()
    boost.begin_iteration()
    runner.train_on(1)
    extra = boost.end_iteration()
    assert extra.any()
    assert extra.tolist() == by_hand.take().tolist()
    boost.begin_iteration()
    boost.recover(np.full_like(boost.deficit, 7))
    runner.train_on(1)
    assert not boost.end_iteration().any()
    assert not by_hand.take().any(), "nobody recovers before the next iteration begins"
    assert boost.deficit.tolist() == np.full_like(boost.deficit, 7).tolist()


def test_an_abandoned_attempt_is_not_counted() -> None:
    run_ranks(1, _abandon_an_attempt)


# --- what cannot be boosted


def _say_and_ignore(overrides: tuple[str, ...]) -> tuple[str, bool, list[str]]:
    """Return the note, and train after a loss that cannot be made up."""
    _, trainer, boost = _boosted_stage(overrides)
    boost.recover(np.full((len(boost.layers), NUM_EXPERTS), 50))
    boost.begin_iteration()
    trainer.run_iteration(1)
    boost.make_up(boost.end_iteration())
    assert (boost.boosted(1) is None) == (not boost.is_capacity_limited)
    assert boost.deficit.any() == boost.is_capacity_limited
    return boost.note, boost.is_capacity_limited, [str(layer) for layer in boost.layers]


def test_without_capacities_there_is_nothing_to_boost() -> None:
    ((note, is_limited, layers),) = run_ranks(1, _say_and_ignore, ())
    assert "nothing to boost" in note
    assert "\n" not in note
    assert not is_limited
    assert layers == ["layer 0 gate", "layer 1 gate"]


def test_with_capacities_it_says_how_much_more() -> None:
    ((note, is_limited, _),) = run_ranks(1, _say_and_ignore, (LIMITED,))
    assert "10% more" in note
    assert is_limited


def _refusal(overrides: tuple[str, ...], router: type[TopKRouter], settings: dict[str, Any]) -> str:
    state, _ = build_stage(*overrides, router=router)
    for name, value in settings.items():
        setattr(cast("Any", state.model[0]).config, name, value)
    with pytest.raises(ConfigError) as raised:
        CapacityBoost.find(state, num_micro_batches=1)
    return str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "router", "settings", "message"),
    [
        ((LIMITED, "model.moe_pad_to_capacity=true"), BoostedRouter, {}, "model.moe_pad_to_capacity: got True, wanted"),
        ((LIMITED,), TopKRouter, {}, "MoESubmodules.router: got 'TopKRouter', wanted BoostedRouter"),
        ((LIMITED,), BoostedRouter, {"cuda_graph_impl": "local"}, "cuda_graph_impl: got 'local', wanted 'none'"),
        (
            (LIMITED,),
            BoostedRouter,
            {"num_microbatches_with_partial_activation_checkpoints": 1},
            "num_microbatches_with_partial_activation_checkpoints: got 1, wanted None",
        ),
    ],
    ids=["padding", "megatrons-router", "cuda-graphs", "partial-recomputation"],
)
def test_a_capacity_that_cannot_be_raised_is_refused(
    overrides: tuple[str, ...], router: type[TopKRouter], settings: dict[str, Any], message: str
) -> None:
    assert run_ranks(1, _refusal, overrides, router, settings)[0].startswith(message)
