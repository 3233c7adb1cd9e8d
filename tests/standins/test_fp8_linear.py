"""FP8 linear layers on a CPU: which values are rounded, and stored weights.

Weights that were stored and read give the same forward pass.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from moe_ckpt.megatron.rounded_weights import (
    forward_tensors,
    mark_rounded,
    rounding_of,
)
from moe_ckpt.standins.fp8_linear import (
    E4M3,
    E5M2,
    WEIGHT_BLOCK,
    FP8Rounding,
    from_fp8,
    multiplying_fp8,
    to_fp8,
)

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
def test_scales_are_powers_of_two_and_nothing_overflows(
    values: torch.Tensor, dtype: torch.dtype
) -> None:
    payload, scale = to_fp8(values, dtype)
    mantissa, _ = torch.frexp(scale)
    assert mantissa.item() == 0.5
    assert torch.isfinite(payload.float()).all()
    largest = values.abs().max()
    assert (
        not largest
        or torch.finfo(dtype).max / 2
        <= payload.float().abs().max()
        <= torch.finfo(dtype).max
    )


def in_fp8(values: torch.Tensor, *, blocks: bool = False) -> torch.nn.Parameter:
    """Return a weight that a layer multiplies in FP8."""
    weight = torch.nn.Parameter(values)
    mark_rounded(weight, FP8Rounding(WEIGHT_BLOCK if blocks else None))
    return weight


def computed_with(weight: torch.Tensor) -> torch.Tensor:
    return forward_tensors(weight)[""]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_weights_read_from_fp8_into_bf16_are_rounded_to_themselves(
    values: torch.Tensor,
) -> None:
    weights = in_fp8(values.bfloat16())
    read = in_fp8(from_fp8(*to_fp8(weights)).bfloat16())
    assert torch.equal(read, computed_with(weights)), "their values are BF16 numbers"
    assert torch.equal(computed_with(read), computed_with(weights))


def test_each_block_of_a_weight_has_a_scale_of_its_own() -> None:
    values = torch.randn(300, 200, generator=GENERATOR)
    values[128:256, 128:] *= 1e6
    weights = in_fp8(values.bfloat16(), blocks=True)
    rounding = rounding_of(weights)
    assert rounding is not None
    payload, scale = rounding.rounded(weights)
    assert (payload.shape, scale.shape) == ((300, 200), (3, 2))
    for row, column in ((0, 0), (1, 1), (2, 1)):
        block = (
            slice(128 * row, 128 * (row + 1)),
            slice(128 * column, 128 * (column + 1)),
        )
        alone, its_scale = to_fp8(weights[block])
        assert torch.equal(payload[block].float(), alone.float())
        assert scale[row, column] == its_scale
    read = in_fp8(from_fp8(payload, scale, WEIGHT_BLOCK).bfloat16(), blocks=True)
    assert torch.equal(computed_with(read), computed_with(weights)), (
        "stored and read, they are the same"
    )
    owned = slice(12345, 54321)
    stored = payload.view(-1)[owned], scale.view(-1), owned
    part = rounding.values(weights, *stored)
    assert torch.equal(part, computed_with(weights).float().view(-1)[owned])


def test_inputs_and_gradients_have_a_scale_for_each_part_of_a_row() -> None:
    weight = in_fp8(torch.eye(256, dtype=torch.bfloat16), blocks=True)
    inputs = torch.randn(2, 3, 256, generator=GENERATOR).bfloat16()
    inputs[1, 2, :128] *= 1e4
    output = multiplying_fp8(lambda values, weights: F.linear(values, weights))(
        inputs, weight
    )
    for row in ((0, 0), (1, 2)):
        for part in (slice(0, 128), slice(128, 256)):
            alone = from_fp8(*to_fp8(inputs[row][part])).bfloat16()
            assert torch.equal(output[row][part], alone)


def test_a_layer_multiplies_rounded_values_and_rounds_gradients() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 16, generator=GENERATOR))
    inputs = torch.randn(4, 16, generator=GENERATOR, requires_grad=True)
    multiply = multiplying_fp8(lambda values, weights: F.linear(values, weights))
    assert rounding_of(weight) is None
    assert torch.equal(multiply(inputs, weight), F.linear(inputs, weight))

    mark_rounded(weight, FP8Rounding(None))
    output, gradient = multiply(inputs, weight), torch.randn(4, 8, generator=GENERATOR)
    output.backward(gradient)

    rounded = [
        from_fp8(*to_fp8(inputs)),
        from_fp8(*to_fp8(weight)),
        from_fp8(*to_fp8(gradient, E5M2)),
    ]
    assert torch.equal(output, rounded[0] @ rounded[1].T)
    assert weight.grad is not None
    assert inputs.grad is not None
    assert torch.equal(weight.grad, rounded[2].T @ rounded[0])
    assert torch.equal(inputs.grad, rounded[2] @ rounded[1])


def test_a_gradient_that_overflowed_stays_infinite() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    mark_rounded(weight, FP8Rounding(None))
    output = multiplying_fp8(lambda values, weights: F.linear(values, weights))(
        torch.ones(1, 2), weight
    )
    output.backward(torch.tensor([[torch.inf, 1.0]]))
    assert weight.grad is not None
    assert torch.isinf(weight.grad).any()
