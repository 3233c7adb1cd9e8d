"""FP8 linear layers on a CPU: which values are rounded, and that stored weights give the same forward pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from moe_ckpt.megatron.fp8_linear import E4M3, E5M2, forward_values, from_fp8, is_fp8, multiplying_fp8, to_fp8

GENERATOR = torch.Generator().manual_seed(0)
VALUES = {
    "normal": torch.randn(257, generator=GENERATOR),
    "small": torch.randn(257, generator=GENERATOR) * 1e-20,
    "large": torch.randn(257, generator=GENERATOR) * 1e20,
    "zeros": torch.zeros(257),
    "just above a power of two": torch.linspace(0.0, 225.0, 257),
    "at the largest": torch.linspace(-448.0, 448.0, 257),
}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_scales_are_powers_of_two_and_nothing_overflows(values: torch.Tensor, dtype: torch.dtype) -> None:
    payload, scale = to_fp8(values, dtype)
    mantissa, _ = torch.frexp(scale)
    assert mantissa.item() == 0.5
    assert torch.isfinite(payload.float()).all()
    largest = values.abs().max()
    assert not largest or torch.finfo(dtype).max / 2 <= payload.float().abs().max() <= torch.finfo(dtype).max


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_weights_read_from_fp8_into_bf16_are_rounded_to_themselves(values: torch.Tensor) -> None:
    weights = torch.nn.Parameter(values.bfloat16())
    weights.forward_is_fp8 = True  # type: ignore[attr-defined]
    computed_with = forward_values(weights)
    read = torch.nn.Parameter(from_fp8(*to_fp8(weights)).bfloat16())
    read.forward_is_fp8 = True  # type: ignore[attr-defined]
    assert torch.equal(read, computed_with), "their values are BF16 numbers"
    assert torch.equal(forward_values(read), computed_with)


def test_a_layer_multiplies_rounded_values_and_rounds_gradients() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 16, generator=GENERATOR))
    inputs = torch.randn(4, 16, generator=GENERATOR, requires_grad=True)
    multiply = multiplying_fp8(lambda values, weights: F.linear(values, weights))
    assert not is_fp8(weight)
    assert torch.equal(multiply(inputs, weight), F.linear(inputs, weight))

    weight.forward_is_fp8 = True  # type: ignore[attr-defined]
    output, gradient = multiply(inputs, weight), torch.randn(4, 8, generator=GENERATOR)
    output.backward(gradient)

    rounded = [from_fp8(*to_fp8(inputs)), from_fp8(*to_fp8(weight)), from_fp8(*to_fp8(gradient, E5M2))]
    assert torch.equal(output, rounded[0] @ rounded[1].T)
    assert weight.grad is not None
    assert inputs.grad is not None
    assert torch.equal(weight.grad, rounded[2].T @ rounded[0])
    assert torch.equal(inputs.grad, rounded[2] @ rounded[1])


def test_a_gradient_that_overflowed_stays_infinite() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.forward_is_fp8 = True  # type: ignore[attr-defined]
    output = multiplying_fp8(lambda values, weights: F.linear(values, weights))(torch.ones(1, 2), weight)
    output.backward(torch.tensor([[torch.inf, 1.0]]))
    assert weight.grad is not None
    assert torch.isinf(weight.grad).any()
