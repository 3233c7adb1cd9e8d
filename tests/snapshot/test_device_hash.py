"""Hashes of live state by sums depend on each bit, the order and the size.

Chunks of the sums do not change a hash.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.snapshot import device_hash
from moe_ckpt.snapshot.device_hash import hashes_of, sums_of
from moe_ckpt.snapshot.host_transfers import TRANSFERS

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)
STATES = st.lists(st.binary(max_size=40), min_size=1, max_size=4)


CPU = torch.device("cpu")


def hash_of(*parts: bytes | torch.Tensor, by_sums: bool = True) -> str:
    tensors = [
        part if isinstance(part, torch.Tensor) else _tensor_of(part) for part in parts
    ]
    state = {"state": tensors}
    return (sums_of(state, tensors[0].device) if by_sums else hashes_of(state))["state"]


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(state=STATES, data=st.data())
def test_one_bit_changes_the_hash(state: list[bytes], data: st.DataObject) -> None:
    part = data.draw(
        st.sampled_from([index for index, each in enumerate(state) if each] or [None])
    )
    if part is None:
        return
    byte, bit = (
        data.draw(st.integers(0, len(state[part]) - 1)),
        data.draw(st.integers(0, 7)),
    )
    changed = bytearray(state[part])
    changed[byte] ^= 1 << bit
    assert hash_of(*state[:part], bytes(changed), *state[part + 1 :]) != hash_of(*state)


@given(state=STATES, words=st.integers(1, 5))
def test_chunks_do_not_change_the_hash(state: list[bytes], words: int) -> None:
    whole = hash_of(*state)
    before = device_hash._CHUNK_WORDS
    device_hash._CHUNK_WORDS = words
    try:
        assert hash_of(*state) == whole
    finally:
        device_hash._CHUNK_WORDS = before


DIFFERENT = {
    "order of words": ([b"aaaabbbb"], [b"bbbbaaaa"]),
    "order of tensors": ([b"aaaa", b"bbbb"], [b"bbbb", b"aaaa"]),
    "zeros at the end": ([b"aaaa"], [b"aaaa\0"]),
    "a tensor of zeros": ([b"aaaa"], [b"aaaa", b"\0\0\0\0"]),
    "no bytes": ([b""], [b"\0"]),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_other_states_have_other_hashes(one: list[bytes], other: list[bytes]) -> None:
    assert hash_of(*one) != hash_of(*other)


def test_a_signed_zero_and_a_view_are_hashed_by_their_bytes() -> None:
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))
    matrix = torch.arange(12.0).reshape(3, 4)
    assert hash_of(matrix.t()) == hash_of(matrix.t().contiguous())
    odd = torch.arange(9, dtype=torch.uint8)[1:]
    assert hash_of(odd) == hash_of(odd.clone())


def test_all_hashes_come_to_the_host_at_once() -> None:
    before = TRANSFERS.num_transfers
    hashes = sums_of(
        {str(number): [torch.full((5,), float(number))] for number in range(30)}, CPU
    )
    assert len(set(hashes.values())) == 30
    assert all(len(digits) == 32 for digits in hashes.values())
    assert TRANSFERS.num_transfers - before == 1
    assert (sums_of({}, CPU), hashes_of({})) == ({}, {})


def test_state_on_a_host_is_hashed_at_once_and_by_its_bytes() -> None:
    halves = hash_of(torch.tensor([0.0, 1.0]), torch.tensor([2.0]), by_sums=False)
    assert (
        halves == xxhash.xxh3_128(np.array([0, 1, 2], np.float32).tobytes()).hexdigest()
    )


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_a_device_has_the_same_hash_whatever_its_order_of_sums(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    large = torch.randint(
        -(2**31), 2**31, (100_003,), dtype=torch.int32, generator=generator
    )
    assert hash_of(large.to(device)) == "d58fc84e371c682bab1f91094433b3bd"
