"""The CPU reference of FusedAdam has the arithmetic of AdamW.

Stored states can be put back bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from moe_ckpt.megatron.initial_weights import synchronize_fresh
from moe_ckpt.megatron.optimizer_state import holds_masters, payload_and_scale
from moe_ckpt.standins.precision_adam import (
    E4M3,
    MASTER_PARAM,
    PrecisionAwareAdam,
    decode,
    encode,
    join_master,
    split_master,
)
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import build_stage

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
FORMATS = {
    "FP16/FP16/FP16+FP16": (FP16, FP16, FP16, FP16, False),
    "FP8/FP16/FP32+FP32": (BF16, FP16, FP32, FP32, False),
    "FP8/FP16/FP8+FP16": (BF16, FP16, FP8, FP16, False),
    "FP8/FP8/FP8+FP16": (BF16, FP8, FP8, FP16, False),
    "BF16/REMAINDER/FP8+FP16": (BF16, FP32, FP8, FP16, True),
}


KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""The CPU reference, and the original: FusedAdam of Transformer Engine."""


def made(name: str, kind: str = "cpu") -> PrecisionAwareAdam:
    compute, master, exp_avg, exp_avg_sq, has_remainders = FORMATS[name]
    adam = PrecisionAwareAdam
    if kind == "cuda":
        adam = pytest.importorskip("transformer_engine.pytorch.optimizers").FusedAdam
        if master == FP8:
            pytest.skip("FusedAdam has no FP8 masters")
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(
        kind, compute
    )
    return adam(
        [torch.nn.Parameter(values)],
        **SETTINGS,
        master_weights=True,
        use_decoupled_grad=True,
        master_weight_dtype=master,
        exp_avg_dtype=exp_avg,
        exp_avg_sq_dtype=exp_avg_sq,
        store_param_remainders=has_remainders,
    )


def weights_of(adam: torch.optim.Optimizer) -> torch.nn.Parameter:
    return adam.param_groups[0]["params"][0]


def gradients(first: int, last: int) -> list[torch.Tensor]:
    return [
        torch.randn(4096, generator=torch.Generator().manual_seed(seed)) * 1e-2
        for seed in range(first, last)
    ]


def step(adam: PrecisionAwareAdam, each: list[torch.Tensor]) -> None:
    for gradient in each:
        weights = weights_of(adam)
        weights.decoupled_grad = gradient.to(weights.device)  # type: ignore[attr-defined]
        adam.step()


def stored(adam: PrecisionAwareAdam) -> dict[str, torch.Tensor]:
    weights, found = weights_of(adam), {"compute": weights_of(adam).data}
    for name in adam.state[weights]:
        found |= payload_and_scale(adam, weights, name, name)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    bits = lambda tensor: tensor.contiguous().view(torch.uint8)  # noqa: E731
    return one.keys() == other.keys() and all(
        torch.equal(bits(one[name]), bits(other[name])) for name in one
    )


def put_back(
    adam: PrecisionAwareAdam, saved: dict[str, torch.Tensor], steps: int
) -> None:
    adam.initialize_state(weights_of(adam), adam.store_param_remainders)
    for name, tensor in stored(adam).items():
        tensor.copy_(saved[name])
    adam.param_groups[0]["step"] = steps


@pytest.mark.parametrize("decoupled", [True, False])
def test_fp32_states_give_the_weights_of_torchs_adam(decoupled: bool) -> None:
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 256)) for _ in range(2))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    adam, reference = (
        PrecisionAwareAdam([ours], **SETTINGS, adam_w_mode=decoupled),
        kind([theirs], **SETTINGS),
    )
    for seed in range(20):
        gradient = torch.randn(256, generator=torch.Generator().manual_seed(seed))
        ours.grad, theirs.grad = gradient, gradient.clone()
        adam.step()
        reference.step()
    # FP32, with another order of operations
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_stored_states_are_put_back_bit_for_bit(name: str, kind: str) -> None:
    adam, other = made(name, kind), made(name, kind)
    step(adam, gradients(10, 30))
    put_back(
        other, {key: tensor.clone() for key, tensor in stored(adam).items()}, steps=20
    )
    step(adam, gradients(30, 40))
    step(other, gradients(30, 40))
    assert same(stored(adam), stored(other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "left_out", ["exp_avg.scale", "exp_avg_sq.scale", "master_param.scale", "exp_avg"]
)
def test_a_scale_that_is_left_out_is_missed(left_out: str, kind: str) -> None:
    name = "FP8/FP16/FP8+FP16"
    adam, other = made(name, kind), made(name, kind)
    step(adam, gradients(10, 30))
    saved = {key: tensor.clone() for key, tensor in stored(adam).items()}
    put_back(other, saved | {left_out: torch.ones_like(saved[left_out])}, steps=20)
    step(adam, gradients(30, 31))
    step(other, gradients(30, 31))
    assert not same(stored(adam), stored(other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["FP16/FP16/FP16+FP16", "FP8/FP16/FP8+FP16"])
def test_compute_weights_are_not_the_rounding_of_an_fp16_master(
    name: str, kind: str
) -> None:
    adam = made(name, kind)
    step(adam, gradients(10, 30))
    weights = weights_of(adam)
    derived = adam.get_unscaled_state(weights, "master_param").to(weights.dtype)
    assert 0 < (derived != weights).sum() < weights.numel() / 2


def test_compute_weights_are_the_rounding_of_an_fp8_master() -> None:
    adam = made("FP8/FP8/FP8+FP16")
    step(adam, gradients(10, 30))
    weights = weights_of(adam)
    assert torch.equal(
        adam.get_unscaled_state(weights, "master_param").to(weights.dtype), weights
    )


def test_a_weight_and_its_remainder_are_the_fp32_master() -> None:
    generator = torch.Generator().manual_seed(0)
    ties = (torch.arange(1 << 12, dtype=torch.int32) << 16 | 0x3F808000).view(
        torch.float32
    )
    for master in (
        torch.randn(1 << 16, generator=generator),
        ties,
        torch.zeros(8),
        -torch.ones(8),
    ):
        weight, remainder = split_master(master)
        assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
        assert torch.equal(
            join_master(weight, remainder).view(torch.int32), master.view(torch.int32)
        )
        assert torch.equal(weight.float(), master) == (not remainder.any())


@pytest.mark.parametrize("dtype", [FP16, E4M3])
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    """FusedAdam divides by the scale of zeros.

    With such a division, an expert without tokens in its first step would become NaN.
    """
    payload, scale = torch.ones(16).to(dtype), torch.full((1,), 3.0)
    encode(torch.zeros(16), payload, scale)
    assert torch.equal(decode(payload, scale), torch.zeros(16))
    encode(decode(payload, scale), payload, scale)
    assert torch.equal(decode(payload, scale), torch.zeros(16))


def test_the_largest_value_is_kept_and_others_to_the_formats_digits() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-7
    for dtype, digits in ((torch.float16, 2.0**-11), (E4M3, 2.0**-4)):
        payload, scale = torch.empty(4096, dtype=dtype), torch.ones(1)
        encode(values, payload, scale)
        large = values.abs() > values.abs().max() / 16
        assert (
            (decode(payload, scale) - values).abs()[large]
            <= digits * 1.001 * values.abs()[large]
        ).all()


def test_parameters_without_gradients_and_empty_groups_do_not_step() -> None:
    adam = made("FP16/FP16/FP16+FP16")
    adam.param_groups.append({**adam.param_groups[0], "params": []})
    before = weights_of(adam).detach().clone()
    adam.step()
    assert torch.equal(before, weights_of(adam))
    assert [group.get("step") for group in adam.param_groups] == [1, None]


def test_settings_and_stored_states_are_loaded_as_they_are() -> None:
    adam, other = made("FP8/FP16/FP8+FP16"), made("FP8/FP16/FP8+FP16")
    step(adam, gradients(10, 13))
    content = copy.deepcopy(adam.state_dict())
    content["param_groups"][0]["lr"] = 0.5
    other.load_state_dict(content)
    assert other.param_groups[0]["lr"] == 0.5
    for name in ("master_param", "exp_avg", "exp_avg_sq"):
        mine, theirs = (each.state[weights_of(each)][name] for each in (adam, other))
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def _masters_of_other_weights() -> None:
    state, loop = build_stage("precision=fp16_fp16_fp16")
    [optimizer, *_] = [each for each in state.inner_optimizers if holds_masters(each)]
    adam: Any = optimizer.optimizer
    updated = next(iter(adam.state))
    before = adam.state[updated][MASTER_PARAM].clone()

    def renewed() -> bool:
        with torch.no_grad():
            updated.mul_(-0.5)
        synchronize_fresh(state)
        payload, scale = (
            adam.state[updated][MASTER_PARAM],
            adam._scales[updated][MASTER_PARAM],
        )
        expected, expected_scale = torch.empty_like(payload), torch.empty_like(scale)
        encode(updated.detach().float(), expected, expected_scale)
        return torch.equal(payload, expected) and torch.equal(scale, expected_scale)

    assert renewed()
    assert not torch.equal(adam.state[updated][MASTER_PARAM], before)
    loop.run_iteration(1)
    assert not renewed(), "those of a later step are the state"


def test_masters_are_of_the_weights_that_a_run_starts_with() -> None:
    """Weights are broadcast or loaded after masters were allocated.

    Megatron does not renew the masters.
    """
    run_ranks(1, _masters_of_other_weights)
