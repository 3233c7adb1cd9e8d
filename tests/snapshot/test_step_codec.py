"""An iteration's record and start are read as they were written, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load, save

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot.host_transfers import bytes_of
from moe_ckpt.snapshot.step_codec import (
    start_from_bytes,
    start_to_bytes,
    step_from_bytes,
    step_to_bytes,
)
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.types import ReadyGradients

INTEGERS = (
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
FLOATS_OF_A_BYTE = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
GRADIENTS = ReadyGradients(
    overflows=(True, False), total_norm=math.inf, loss_scale=0.1, num_tokens=7
)


def start() -> dict[str, torch.Tensor]:
    """Return tensors of all types.

    Two tensors of odd sizes come first, so that later tensors are not aligned.
    """
    first = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
    }
    others = {
        str(dtype): torch.arange(5).to(dtype)
        for dtype in (*INTEGERS, *FLOATS, *FLOATS_OF_A_BYTE)
    }
    shapes = {
        "none": torch.zeros(0, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "plane": torch.ones(2, 3),
    }
    return {
        **first,
        **others,
        **shapes,
        "strided": torch.arange(12.0).view(3, 4)[:, ::2],
    }


def assert_same(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), (
            name
        )
        assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name


def test_a_start_comes_back_bit_for_bit() -> None:
    assert_same(start_from_bytes(start_to_bytes(start())), start())


def test_a_step_comes_back_with_its_start() -> None:
    tied = torch.tensor([math.pi, math.nan])
    record = StepRecord(
        iteration=6, gradients=GRADIENTS, tied_gradient=tied, batches="ab12"
    )
    found, its_start = step_from_bytes(6, step_to_bytes(record, start()))
    assert (found.iteration, found.gradients, found.batches) == (6, GRADIENTS, "ab12")
    assert found.tied_gradient is not None
    assert torch.equal(found.tied_gradient.view(torch.int32), tied.view(torch.int32))
    assert_same(its_start, start())


def test_the_state_after_a_pass_comes_back_beside_the_start() -> None:
    record = StepRecord(
        iteration=6, gradients=GRADIENTS, tied_gradient=None, after_pass=start()
    )
    small = {"odd": torch.arange(2)}
    found, its_start = step_from_bytes(6, step_to_bytes(record, small))
    assert found.after_pass is not None
    assert_same(found.after_pass, start())
    assert_same(its_start, small)


def test_a_step_without_a_start_has_an_empty_one() -> None:
    record = StepRecord(iteration=6, gradients=GRADIENTS, tied_gradient=None)
    found, its_start = step_from_bytes(6, step_to_bytes(record, None))
    assert (found.gradients, found.tied_gradient, found.batches, its_start) == (
        GRADIENTS,
        None,
        None,
        {},
    )


def test_the_form_is_that_of_safetensors() -> None:
    """Earlier versions wrote windows on disks with the safetensors library."""
    assert_same(load(start_to_bytes(start())), start())
    whole = {name: tensor.contiguous() for name, tensor in start().items()}
    assert_same(start_from_bytes(save(whole)), start())


@pytest.mark.parametrize("keep", [0, 7, 8, 200, -1])
def test_a_part_of_the_bytes_is_refused(keep: int) -> None:
    with pytest.raises(CheckpointLoadError, match="step log"):
        start_from_bytes(start_to_bytes(start())[:keep])


def test_bytes_without_facts_are_no_step() -> None:
    with pytest.raises(CheckpointLoadError, match="wanted gradients as JSON"):
        step_from_bytes(6, start_to_bytes(start()))
