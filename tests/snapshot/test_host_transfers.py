"""Small tensors come to the host together, after one wait.

The copies have the same values, in memory of their own.
"""

from __future__ import annotations

import pytest
import torch

from moe_ckpt.snapshot.host_transfers import HostTransfers, PendingCopy

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_tensors_of_all_types_come_in_one_transfer(device: str) -> None:
    tensors = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        torch.empty(0),
        torch.tensor([1.5, -2.5, 3.0], dtype=torch.bfloat16)[1:],
        torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    ]
    transfers = HostTransfers()
    fetched = transfers.fetch([tensor.to(device) for tensor in tensors])
    assert transfers.num_transfers == 1
    for got, want in zip(fetched, tensors, strict=True):
        assert (got.dtype, got.shape, got.device.type) == (
            want.dtype,
            want.shape,
            "cpu",
        )
        assert got.tolist() == want.tolist()
    assert (
        len(
            {
                tensor.untyped_storage().data_ptr()
                for tensor in fetched
                if tensor.numel()
            }
        )
        == 5
    ), "shared memory"


def test_a_copy_does_not_change_with_its_source() -> None:
    source = torch.ones(4)
    (fetched,) = HostTransfers().fetch([source])
    source.zero_()
    assert fetched.tolist() == [1.0] * 4


def test_nothing_takes_no_transfer() -> None:
    transfers = HostTransfers()
    assert (transfers.fetch([]), transfers.num_transfers) == ([], 0)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_a_copy_that_is_waited_for_later_is_of_its_moment(device: str) -> None:
    source = torch.arange(12.0, device=device).reshape(3, 4)
    copy = PendingCopy(source.t())
    source.zero_()
    assert copy.result().tolist() == torch.arange(12.0).reshape(3, 4).t().tolist()
    assert copy.result().device.type == "cpu"
