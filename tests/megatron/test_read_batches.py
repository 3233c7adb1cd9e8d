"""The hash of a pass's micro-batches depends on samples, their order and their form.

Nothing else changes the hash.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt.megatron.read_batches import ReadBatches

TOKENS = torch.arange(12).view(3, 4)


def hash_of(*batches: Any) -> str:
    read = ReadBatches()
    for batch in batches:
        read.add(batch)
    return read.hash()


@pytest.mark.parametrize(
    "other",
    [
        TOKENS.clone().index_put_((torch.tensor(2), torch.tensor(3)), torch.tensor(0)),
        TOKENS.view(4, 3),
        TOKENS.to(torch.int32),
        {"tokens": TOKENS},
        [TOKENS, None],
        TOKENS.numpy(),
    ],
    ids=["a token", "the shape", "the type", "a name", "a further part", "an array"],
)
def test_another_micro_batch_has_another_hash(other: Any) -> None:
    assert hash_of(TOKENS) == hash_of(TOKENS.clone()) != hash_of(other)


@dataclass
class Sample:
    tokens: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: TOKENS.numpy().copy(),
        lambda: (TOKENS, {"id": 7, "text": "seven"}),
        lambda: defaultdict(lambda: 1, tokens=TOKENS),
        object,
    ],
)
def test_a_nest_that_is_made_again_has_the_same_hash(make: Callable[[], Any]) -> None:
    assert hash_of(make()) == hash_of(make())


@pytest.mark.parametrize(
    "nest",
    [
        lambda tokens: UserDict(tokens=tokens),
        Sample,
        lambda tokens: [np.int64(tokens[0, 0])],
    ],
)
def test_what_is_inside_a_nest_counts(nest: Callable[[torch.Tensor], Any]) -> None:
    assert (
        hash_of(nest(TOKENS))
        == hash_of(nest(TOKENS.clone()))
        != hash_of(nest(TOKENS + 1))
    )


def test_a_transposed_array_is_another_one() -> None:
    square = np.arange(9).reshape(3, 3)
    assert hash_of(square) != hash_of(square.T)


def test_the_order_of_micro_batches_counts() -> None:
    assert hash_of(TOKENS, TOKENS + 1) != hash_of(TOKENS + 1, TOKENS)


def test_a_pass_counts_alone_with_what_its_forward_steps_read() -> None:
    read = ReadBatches()
    evaluated = read.observed(iter([TOKENS + 5]))
    next(evaluated)
    read.begin()
    trained = read.observed(iter([TOKENS, TOKENS + 1, TOKENS + 2]))
    assert [next(trained) for _ in range(2)]
    assert read.hash() == hash_of(TOKENS, TOKENS + 1)


def test_an_observed_iterator_is_its_own_but_for_that() -> None:
    class Loader:
        state = 3

        def __next__(self) -> torch.Tensor:
            return TOKENS

    observed = ReadBatches().observed(Loader())
    assert next(iter(observed)) is TOKENS
    assert observed.state == 3
    assert ReadBatches().observed(None) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_samples_on_a_gpu_count_as_well() -> None:
    on_gpu = TOKENS.cuda()
    assert hash_of(on_gpu) == hash_of(on_gpu.clone()) != hash_of(on_gpu + 1)
