"""Micro-batches are read again from memory and, in a new process, from a mark."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.kept_batches import KeptBatches

PER_ITERATION = 2
ROOMY = 1 << 20


def batch(number: int) -> dict[str, Any]:
    return {
        "tokens": torch.arange(4) + number,
        "masks": [torch.ones(2, dtype=torch.bool)],
        "number": number,
    }


def numbered() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        yield batch(number)
        number += 1


class Stateful:
    """Gives the same micro-batches as `numbered`, and can save and load its state.

    `loads` counts loads of a state, and `reads` counts micro-batches.
    """

    def __init__(self) -> None:
        self.number, self.loads, self.reads = torch.tensor(0), 0, 0

    def __next__(self) -> dict[str, Any]:
        self.number += 1
        self.reads += 1
        return batch(int(self.number) - 1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "shape": (1, 2),
            "more": [None, 0.5, "text", {"nested": True}],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["shape"] == (1, 2)
        assert state["more"] == [None, 0.5, "text", {"nested": True}]
        self.number.copy_(state["number"])
        self.loads += 1


def read(kept: KeptBatches, count: int = PER_ITERATION) -> list[int]:
    return [next(kept)["number"] for _ in range(count)]


def train(
    kept: KeptBatches, first: int, last: int, keep_since: int | None = None
) -> dict[int, dict[str, torch.Tensor]]:
    """Read the batches of these iterations; return the start of each iteration."""
    starts = {}
    for iteration in range(first, last + 1):
        kept.iteration_started(iteration, keep_since=keep_since)
        starts[iteration] = copy.deepcopy(kept.saved())
        read(kept)
    return starts


@pytest.mark.parametrize("make", [numbered, Stateful])
def test_earlier_micro_batches_come_from_memory(make: Callable[[], Any]) -> None:
    kept = KeptBatches(make(), limit_bytes=ROOMY)
    starts = train(kept, 1, 4)
    kept.restore(starts[2])
    assert read(kept, 7) == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("make", [numbered, Stateful])
def test_a_new_process_goes_on_where_the_start_says_and_can_go_back(
    make: Callable[[], Any],
) -> None:
    starts = train(KeptBatches(make(), limit_bytes=ROOMY), 1, 5)
    for iteration, start in starts.items():
        again = KeptBatches(make(), limit_bytes=ROOMY)
        again.restore(start)
        same = again.saved()
        assert {name: tensor.tolist() for name, tensor in same.items()} == {
            name: tensor.tolist() for name, tensor in start.items()
        }
        assert read(again, 3) == [2 * iteration - 2, 2 * iteration - 1, 2 * iteration]
        if iteration > 1:
            again.restore(starts[iteration - 1])
            assert read(again, 4) == list(range(2 * iteration - 4, 2 * iteration))


def test_a_state_saves_the_reads_before_it() -> None:
    starts = train(KeptBatches(Stateful(), limit_bytes=ROOMY), 1, 9)
    loader = Stateful()
    again = KeptBatches(loader, limit_bytes=ROOMY)
    again.restore(starts[9])
    read(again)
    assert loader.loads == 1
    assert loader.reads == 2 * PER_ITERATION, (
        "one iteration to compare, and one to train on"
    )


def test_callers_may_change_their_batches() -> None:
    kept = KeptBatches(numbered(), limit_bytes=ROOMY)
    starts = train(kept, 1, 1)
    for _ in range(3):
        kept.restore(starts[1])
        given = next(kept)
        assert torch.equal(given["masks"][0], torch.ones(2, dtype=torch.bool))
        given["masks"][0].zero_()


def test_old_batches_are_dropped_and_the_rest_stays() -> None:
    kept = KeptBatches(numbered(), limit_bytes=ROOMY)
    starts = train(kept, 1, 3)
    of_one = kept.kept_bytes // 6
    starts |= train(kept, 4, 4, keep_since=3)
    assert kept.kept_bytes == 4 * of_one
    kept.restore(starts[3])
    assert read(kept) == [4, 5]
    kept.restore(starts[2])
    with pytest.raises(
        ConfigError,
        match=r"^run\.keep_batches_bytes: got 1048576, wanted more: micro-batch 2 was",
    ):
        read(kept)


def test_a_limit_is_an_error_without_state_and_a_reload_with_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^run\.keep_batches_bytes: got 100, wanted at least 102, the bytes",
    ):
        train(KeptBatches(numbered(), limit_bytes=100), 1, 2)
    loader = Stateful()
    kept = KeptBatches(loader, limit_bytes=100)
    starts = train(kept, 1, 6)
    assert kept.kept_bytes <= 100
    kept.restore(starts[3])
    assert read(kept, 6) == [4, 5, 6, 7, 8, 9]
    assert loader.loads == 1


@pytest.mark.parametrize("iteration", [2, 4])
def test_another_stream_in_a_new_process_is_an_error(iteration: int) -> None:
    starts = train(KeptBatches(numbered(), limit_bytes=ROOMY), 1, 4)
    other = numbered()
    next(other)
    again = KeptBatches(other, limit_bytes=ROOMY)
    again.restore(starts[iteration])
    with pytest.raises(
        ConfigError, match=r"^data loader: got 'other micro-batches than before'"
    ):
        next(again)


def test_a_replay_that_read_another_stream_is_an_error() -> None:
    starts = train(KeptBatches(Stateful(), limit_bytes=ROOMY), 1, 4)
    loader = Stateful()
    again = KeptBatches(loader, limit_bytes=ROOMY)
    again.restore(starts[3])
    next(again)
    loader.number += 1
    next(again)
    with pytest.raises(ConfigError, match="other micro-batches than before"):
        again.restore(starts[4])


def drawing(*, each: bool) -> Iterator[dict[str, Any]]:
    """Draw from all generators of the process, at the first read or at each read.

    `iter(DataLoader)` draws from torch's generator at the first read.
    """
    for number, content in enumerate(numbered()):
        if each or number == 0:
            torch.rand(1)
            np.random.rand()
            random.random()
        yield content


def generators() -> list[Any]:
    of_numpy: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), of_numpy[1].tolist(), random.getstate()]


def test_a_read_from_memory_moves_generators_as_the_first_one_did() -> None:
    kept = KeptBatches(drawing(each=False), limit_bytes=ROOMY)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    starts = train(kept, 1, 1)
    after = generators()
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])
    kept.restore(starts[1])
    read(kept)
    assert generators() == after


def test_catching_up_moves_no_generator() -> None:
    starts = train(KeptBatches(drawing(each=False), limit_bytes=ROOMY), 1, 3)
    again = KeptBatches(drawing(each=False), limit_bytes=ROOMY)
    again.restore(starts[3])
    before = generators()
    assert read(again) == [4, 5]
    assert generators() == before


def test_reads_for_evaluations_move_no_generator() -> None:
    kept = KeptBatches(drawing(each=True), limit_bytes=ROOMY, moves_generators=False)
    before = generators()
    assert read(kept, 3) == [0, 1, 2]
    kept.go_to(1)
    assert read(kept, 3) == [1, 2, 3]
    assert generators() == before


def test_draws_at_each_read_are_refused_at_the_second_one() -> None:
    kept = KeptBatches(drawing(each=True), limit_bytes=ROOMY)
    next(kept)
    with pytest.raises(
        ConfigError, match=r"^data loader: got .draws from the process.s generators"
    ):
        next(kept)


@pytest.mark.parametrize("value", [object(), {1: 2}])
def test_a_state_that_cannot_travel_is_refused(value: object) -> None:
    class Other(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"value": value}

    with pytest.raises(ConfigError, match=r"^state_dict of the data loader: got"):
        train(KeptBatches(Other(), limit_bytes=ROOMY), 1, 1)


def test_a_rank_that_reads_nothing_needs_nothing() -> None:
    kept = KeptBatches(numbered(), limit_bytes=1)
    starts = {}
    for iteration in range(1, 4):
        kept.iteration_started(iteration, keep_since=None)
        starts[iteration] = kept.saved()
    again = KeptBatches(numbered(), limit_bytes=1)
    again.restore(starts[3])
    assert again.position == 0
