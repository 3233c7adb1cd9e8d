"""Products of narrow formats, computed in float32, are nearest to exact products.

Products of other formats do not change.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_ckpt.standins import matmul
from tests.harness.gloo.ranks import run_ranks

NARROW = (torch.bfloat16, torch.float16)
PRODUCTS: dict[
    str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
] = {
    "mm": lambda left, right, _: left[0] @ right[0],
    "bmm": lambda left, right, _: torch.bmm(left, right),
    "addmm": lambda left, right, added: torch.addmm(
        added[0], left[0], right[0], beta=0.5, alpha=2.0
    ),
    "added row": lambda left, right, added: torch.nn.functional.linear(
        left[0], right[0].t().contiguous(), added[0, 0]
    ),
    "baddbmm": lambda left, right, added: torch.baddbmm(
        added, left, right, beta=0.5, alpha=2.0
    ),
    "nothing added": lambda left, right, added: torch.baddbmm(
        added * torch.nan, left, right, beta=0.0, alpha=0.5
    ),
    "transposed": lambda left, right, _: torch.bmm(
        right.transpose(1, 2), left.transpose(1, 2)
    ),
    "empty": lambda left, right, _: left[0, :0] @ right[0],
}


def _operands(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [
        torch.randn(shape).to(dtype)
        for shape in ((3, 17, 70), (3, 70, 33), (3, 17, 33))
    ]


def _products(dtype: torch.dtype) -> list[torch.Tensor]:
    return [product(*_operands(dtype)) for product in PRODUCTS.values()]


def _check_products() -> None:
    wide = _products(torch.float32)
    matmul.multiply_in_float32(frozenset(NARROW))
    matmul.multiply_in_float32(frozenset(NARROW))
    assert all(map(torch.equal, _products(torch.float32), wide))
    for name, product in PRODUCTS.items():
        for dtype in NARROW:
            exact = product(*(tensor.double() for tensor in _operands(dtype)))
            found = product(*_operands(dtype))
            assert found.dtype == dtype, name
            assert torch.equal(
                found,
                product(*(tensor.float() for tensor in _operands(dtype))).to(dtype),
            ), name
            torch.testing.assert_close(
                found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6
            )


def _check_gradients() -> None:
    matmul.multiply_in_float32(frozenset(NARROW))
    for dtype in NARROW:
        left, right, added = (tensor.requires_grad_() for tensor in _operands(dtype))
        torch.baddbmm(added, left, right).sum().backward()
        ones = torch.ones(3, 17, 33, dtype=dtype)
        assert left.grad is not None
        assert torch.equal(left.grad, torch.bmm(ones, right.detach().transpose(1, 2)))


def _check_other_formats() -> None:
    before = _products(torch.float16)
    matmul.multiply_in_float32(frozenset({torch.bfloat16}))
    assert all(map(torch.equal, _products(torch.float16), before))


@pytest.mark.parametrize(
    "check", [_check_products, _check_gradients, _check_other_formats]
)
def test_in_a_process_of_its_own(check: Callable[[], None]) -> None:
    run_ranks(1, check)


def test_formats_with_fast_products_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(matmul._HAS_FAST_PRODUCTS, torch.bfloat16, lambda: True)
    monkeypatch.setitem(matmul._HAS_FAST_PRODUCTS, torch.float16, lambda: False)
    assert matmul.slow_formats() == {torch.float16}
