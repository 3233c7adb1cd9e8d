"""Boosted routers equal Megatron's routers until an expert recovers.

A recovering expert takes more tokens, as Megatron's own code would at the raised
capacity, and never more tokens than were lost.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from moe_ckpt.errors import ConfigError
from moe_ckpt.events import CapacityBoosted
from moe_ckpt.megatron.capacity_boost import BoostedRouter, CapacityBoost
from moe_ckpt.megatron.groups import stage_group
from moe_ckpt.megatron.operator_names import bare_model
from moe_ckpt.megatron.state import TrainingState, digest_of
from moe_ckpt.policies.capacity_boost import boosted_capacity
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import (
    StageLoop,
    Tensors,
    build_stage,
    differing,
    stage_number,
)
from tests.scenarios import BIAS

IntArray = npt.NDArray[np.int64]

NUM_EXPERTS = 4
LIMITED = "model.moe_capacity_factor=1.0"


def _boosted_stage(*overrides: str) -> tuple[TrainingState, StageLoop, CapacityBoost]:
    state, loop = build_stage(*overrides, router=BoostedRouter)
    return (
        state,
        loop,
        CapacityBoost(state, num_micro_batches=loop.passes.batches.num_micro_batches),
    )


def _routers(state: TrainingState) -> list[BoostedRouter]:
    return [
        module
        for module in bare_model(state.model[0]).modules()
        if isinstance(module, BoostedRouter)
    ]


def _train(
    overrides: tuple[str, ...], is_boosted: bool
) -> tuple[str, list[str], list[float]]:
    """Train two iterations, each with an evaluation after it.

    Returns:
        The digest, the names in the model's state dict, and the losses of training and
        evaluation.
    """
    state, loop, boost = (
        _boosted_stage(*overrides) if is_boosted else (*build_stage(*overrides), None)
    )
    losses: list[float] = []
    for iteration in (1, 2):
        if boost:
            boost.recover(np.zeros_like(boost.deficit))
            boost.begin_iteration()
        losses += [loop.run_iteration(iteration).loss, loop.passes.evaluate(1)]
        if boost:
            boost.make_up(boost.end_iteration())
            assert boost.boosted(iteration) is None
    return digest_of(state), list(state.model[0].state_dict()), losses


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, (LIMITED,)),
        pytest.param(
            4, (LIMITED, *BIAS, "train.recompute=full"), marks=pytest.mark.full
        ),
        # no capacity limit, and a stage without experts
        (2, ("parallel.pp=2", "model.num_dense_layers=1")),
    ],
    ids=str,
)
def test_training_without_deficit_is_megatrons(
    world_size: int, overrides: tuple[str, ...]
) -> None:
    assert run_ranks(world_size, _train, overrides, True) == run_ranks(
        world_size, _train, overrides, False
    )


def _route(
    router: BoostedRouter, logits: torch.Tensor, factor: float | None = None
) -> Tensors:
    """Route with this router, or with Megatron's own code at a capacity factor.

    All buffers of the router start from zero.

    Args:
        router: The router.
        logits: The scores of the gate.
        factor: The capacity factor for Megatron's code; None: the router's own code
            runs.

    Returns:
        The outputs, the gradient of the logits, and the buffers in which the router
        logs and counts.
    """
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
    weights = (
        torch.arange(probabilities.numel()).view_as(probabilities)
        / probabilities.numel()
    )
    (probabilities * weights).sum().backward()
    buffers = {name: buffer.clone() for name, buffer in router.named_buffers()}
    assert (
        buffers.get("local_tokens_per_expert", kept.sum(dim=0)).tolist()
        == kept.sum(dim=0).tolist()
    )
    gradient = cast("torch.Tensor", logits.grad)
    return {
        "probabilities": probabilities.detach(),
        "kept": kept,
        "gradient": gradient,
        **buffers,
    }


def _skewed_logits(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return logits of 2 sequences of 60 tokens.

    Some experts get more tokens than the equal share of 60, and some experts get fewer.
    """
    generator = torch.Generator().manual_seed(seed)
    skew = torch.tensor([1.0, 0.5, 0.0, -1.0])[
        torch.randperm(NUM_EXPERTS, generator=generator)
    ]
    return (torch.randn(60, 2, NUM_EXPERTS, generator=generator) + skew).to(dtype)


def _check_without_demand(router: BoostedRouter, logits: torch.Tensor) -> None:
    """Check that recovering experts without excess demand change nothing.

    The demand of such an expert does not exceed the capacity.
    """
    megatrons = _route(router, logits, 1.0)
    idle = megatrons["kept"].sum(dim=0) < 60
    assert idle.any()
    assert not idle.all()
    router.boost((idle * 9).numpy()[None], factor=0.1)
    assert not differing(_route(router, logits), megatrons)
    assert router.take_extra().tolist() == [0] * NUM_EXPERTS


def _check_columns(
    router: BoostedRouter, logits: torch.Tensor, shares: IntArray
) -> int:
    """Check each expert against Megatron's own code at this expert's capacity.

    Returns:
        The number of extra tokens.
    """
    demand = _route(router, logits, 99.0)["kept"].sum(dim=0).numpy()
    router.boost(shares[None], factor=0.1)
    boosted = _route(router, logits)
    capacity = boosted_capacity(demand, shares, capacity=60, factor=0.1)
    for expert, tokens in enumerate(capacity):
        alone = _route(router, logits, (float(tokens) - 0.5) / 60)  # Megatron rounds up
        assert boosted["kept"][:, expert].sum() == min(demand[expert], tokens)
        assert all(
            torch.equal(boosted[of][:, expert], alone[of][:, expert])
            for of in ("kept", "probabilities")
        )
    extra = boosted["kept"].sum(dim=0) - _route(router, logits, 1.0)["kept"].sum(dim=0)
    assert router.take_extra().tolist() == extra.tolist() == (capacity - 60).tolist()
    assert router.take_extra().tolist() == [0] * NUM_EXPERTS, "asked a second time"
    assert router.capacity.tolist() == capacity.tolist()
    return int(extra.sum())


def _check_evaluation(router: BoostedRouter, logits: torch.Tensor) -> None:
    """Check that evaluation uses equal capacities, and no shares of experts.

    The shares of recovering experts are for micro-batches of training.
    """
    router.eval()
    megatrons = _route(router, logits, 1.0)
    router.boost(np.full((1, NUM_EXPERTS), 9), factor=0.1)
    assert not differing(_route(router, logits), megatrons)
    assert router.capacity.tolist() == router.take_extra().tolist() == [0] * NUM_EXPERTS
    router.train()
    assert differing(_route(router, logits), megatrons)


def _check_routing(overrides: tuple[str, ...], policy: str) -> int:
    state, _ = build_stage(LIMITED, *overrides, router=BoostedRouter)
    router, total = _routers(state)[0], 0
    router.config.moe_token_drop_policy = cast("Any", policy)
    assert ("local_tokens_per_expert" in dict(router.named_buffers())) == (
        overrides == BIAS
    )
    for seed in range(8):
        dtype = (
            torch.float64
            if "model.moe_router_dtype=fp64" in overrides
            else torch.float32
        )
        logits = _skewed_logits(seed, dtype)
        _check_without_demand(router, logits)
        total += _check_columns(
            router, logits, np.random.default_rng(seed).integers(0, 9, NUM_EXPERTS)
        )
    _check_evaluation(router, _skewed_logits(0))
    return total


@pytest.mark.parametrize(
    ("overrides", "policy"),
    [
        (("model.moe_balancing=aux_loss", "model.moe_z_loss_coeff=0.1"), "probs"),
        (("model.moe_balancing=aux_loss", "model.moe_z_loss_coeff=0.1"), "position"),
        (
            ("model.moe_balancing=seq_aux_loss", "model.moe_router_dtype=fp64"),
            "position",
        ),
        (("model.moe_balancing=global_aux_loss",), "probs"),
        (BIAS, "probs"),
        (BIAS, "position"),
    ],
    ids=str,
)
def test_each_expert_is_routed_as_by_megatron_at_its_capacity(
    overrides: tuple[str, ...], policy: str
) -> None:
    assert run_ranks(1, _check_routing, overrides, policy)[0] > 20


# micro-batches of 128 tokens; an expert takes at most 6 more than CAPACITY
LONG = (LIMITED, "train.sequence_length=64", "model.num_layers=4")
CAPACITY = 64
LOST = (23, 0, 3, 1)


class _ByHand:
    """Tokens that routers have sent beyond capacity, counted from outputs, by layer."""

    def __init__(self, state: TrainingState) -> None:
        self._kept: list[list[IntArray]] = []
        for router in _routers(state):
            self._kept.append(calls := [])
            router.register_forward_hook(functools.partial(self._add, calls))

    def _add(
        self,
        calls: list[IntArray],
        _: Any,
        __: Any,
        routed: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        calls.append(routed[1].sum(dim=0).numpy())

    def take(self) -> IntArray:
        extra = np.maximum(np.array(self._kept) - CAPACITY, 0)
        assert extra.max() <= 6
        for calls in self._kept:
            calls.clear()
        return extra.sum(axis=1)


@dataclass(frozen=True)
class _Iteration:
    """The view that one rank has of an iteration."""

    own_extra: IntArray
    """Tokens that this rank has sent beyond capacity, by layer and expert."""

    extra: IntArray
    """Tokens that all ranks of the stage have sent beyond capacity."""

    deficit: IntArray
    """Lost tokens that are yet to be made up."""

    event: CapacityBoosted | None
    """Event of the iteration; None if no expert recovered."""


def _recover_by_training(iterations: int) -> tuple[int, list[_Iteration]]:
    """Train a stage of which every layer but the last has lost the tokens of LOST."""
    state, loop, boost = _boosted_stage(*LONG)
    by_hand = _ByHand(state)
    deficit = np.zeros_like(boost.deficit)
    deficit[:-1] = LOST
    boost.recover(deficit)
    seen = []
    for iteration in range(1, iterations + 1):
        boost.begin_iteration()
        loop.run_iteration(iteration)
        extra = boost.end_iteration()
        assert extra.tolist() == by_hand.take().tolist()
        in_stage = torch.from_numpy(extra.copy())
        dist.all_reduce(in_stage, group=stage_group())
        boost.make_up(in_stage.numpy())
        seen.append(
            _Iteration(
                extra, in_stage.numpy(), boost.deficit.copy(), boost.boosted(iteration)
            )
        )
    return stage_number(), seen


def test_exactly_the_lost_tokens_are_made_up() -> None:
    """Run two stages of two ranks, with two micro-batches on each rank.

    Only some of the four micro-batches of a stage have a share in a deficit below four.
    """
    ranks = run_ranks(4, _recover_by_training, 8)
    for stage, seen in ranks:
        left = np.array([LOST, (0, 0, 0, 0)])
        for number, iteration in enumerate(seen, start=1):
            expected = CapacityBoosted(
                iteration=number,
                layers=[f"layer {2 * stage}"],
                capacity=[(2 * CAPACITY + iteration.own_extra[0]).tolist()],
                deficit=iteration.deficit[:1].tolist(),
            )
            assert iteration.event == (expected if left.any() else None)
            assert np.all(iteration.extra <= left)
            left -= iteration.extra
            assert iteration.deficit.tolist() == left.tolist()
        assert not left.any()
        assert seen[-1].event is None, "no expert recovers in the last iteration"
    own = [[iteration.own_extra.tolist() for iteration in seen] for _, seen in ranks]
    assert own[0] != own[1]


def _digest_after_recovery(*overrides: str) -> tuple[str, int, int]:
    """Train three iterations with uneven shares.

    Returns:
        The digest, the number of tokens made up, and the number of calls of the first
        router.
    """
    state, loop, boost = _boosted_stage("parallel.pp=2", *LONG, *overrides)
    calls: list[None] = []
    total = 0
    _routers(state)[0].register_forward_hook(lambda *_: calls.append(None))
    for iteration in (1, 2, 3):
        boost.recover(np.full_like(boost.deficit, 6))  # 2, 2, 1 and 1
        boost.begin_iteration()
        loop.run_iteration(iteration)
        total += int(boost.end_iteration().sum())
    return digest_of(state), total, len(calls)


def test_recomputed_routing_is_the_same_and_counts_once() -> None:
    """The first stage runs forward of micro-batch 2 before it recomputes the first."""
    plain = run_ranks(2, _digest_after_recovery)
    again = run_ranks(2, _digest_after_recovery, "train.recompute=full")
    assert all(total > 0 and num_calls == 12 for _, total, num_calls in plain)
    assert again == [(digest, total, 24) for digest, total, _ in plain]


def _abandon_an_attempt() -> None:
    """Begin an iteration again after its backward; later replace a deficit midway.

    The deficit is replaced after another iteration has begun, before its passes.
    """
    state, loop, boost = _boosted_stage(*LONG)
    by_hand, runner = _ByHand(state), loop.passes
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
    assert not by_hand.take().any(), (
        "no expert recovers before the next iteration begins"
    )
    assert np.all(boost.deficit == 7)


def test_an_abandoned_attempt_is_not_counted() -> None:
    run_ranks(1, _abandon_an_attempt)


def _say_and_ignore(overrides: tuple[str, ...]) -> tuple[str, bool, list[str]]:
    """Train an iteration after a loss of tokens that one iteration cannot make up.

    Returns:
        The note, whether experts have a capacity, and the names of the layers.
    """
    _, loop, boost = _boosted_stage(*overrides)
    boost.recover(np.full((len(boost.layers), NUM_EXPERTS), 50))
    boost.begin_iteration()
    loop.run_iteration(1)
    boost.make_up(boost.end_iteration())
    assert (boost.boosted(1) is None) == (not boost.is_capacity_limited)
    assert boost.deficit.any() == boost.is_capacity_limited
    return boost.note, boost.is_capacity_limited, [str(layer) for layer in boost.layers]


@pytest.mark.parametrize(
    ("overrides", "says", "limited"),
    [((), "nothing to boost", False), ((LIMITED,), "10% more", True)],
)
def test_a_note_tells_what_is_boosted(
    overrides: tuple[str, ...], says: str, limited: bool
) -> None:
    ((note, is_limited, layers),) = run_ranks(1, _say_and_ignore, overrides)
    assert says in note
    assert "\n" not in note
    assert (is_limited, layers) == (limited, ["layer 0 gate", "layer 1 gate"])


def _refusal(override: str, router: type[TopKRouter], setting: dict[str, Any]) -> str:
    state, _ = build_stage(LIMITED, override, router=router)
    for name, value in setting.items():
        setattr(cast("Any", state.model[0]).config, name, value)
    with pytest.raises(ConfigError) as raised:
        CapacityBoost(state, num_micro_batches=1)
    return str(raised.value)


PADDED = "model.moe_pad_to_capacity"
PARTIAL = "num_microbatches_with_partial_activation_checkpoints"


@pytest.mark.parametrize(
    ("padded", "router", "setting", "message"),
    [
        ("true", BoostedRouter, {}, f"{PADDED}: got True, wanted"),
        (
            "false",
            TopKRouter,
            {},
            "MoESubmodules.router: got 'TopKRouter', wanted BoostedRouter",
        ),
        (
            "false",
            BoostedRouter,
            {"cuda_graph_impl": "local"},
            "cuda_graph_impl: got 'local', wanted 'none'",
        ),
        ("false", BoostedRouter, {PARTIAL: 1}, f"{PARTIAL}: got 1, wanted None"),
    ],
    ids=["padding", "megatrons-router", "cuda-graphs", "partial-recomputation"],
)
def test_a_capacity_that_cannot_be_raised_is_refused(
    padded: str, router: type[TopKRouter], setting: dict[str, Any], message: str
) -> None:
    assert run_ranks(1, _refusal, f"{PADDED}={padded}", router, setting)[0].startswith(
        message
    )
