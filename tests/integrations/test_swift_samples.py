"""Samples and generators of an attachment to ms-swift are those of a plain run, from any iteration on."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.integrations.consumed_samples import ReplayedSamples
from moe_ckpt.integrations.ms_swift_data import SwiftBatches

NUM_ITERS, MICRO_BATCHES = 9, 2


class Sampler:
    """Passes of 5 micro-batches of one sample, in another order each time; `consumed` is kept between passes."""

    def __init__(self, length: int) -> None:
        self.length, self.consumed = length, 0

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed
        for index in range(self.length):
            self.consumed += 1
            yield [(first + index * 3) % 97]


def create(dataset: Any, indices: Any) -> Any:
    return DataLoader(dataset, batch_sampler=indices)


def settings(**changes: Any) -> Any:
    return SimpleNamespace(**{"eval_steps": 3, "eval_iters": 1, "num_microbatches": MICRO_BATCHES} | changes)


def cyclic(loader: Any) -> Iterator[int]:
    """Return the loop's `cyclic_iter`."""
    while True:
        for sample in loader:
            yield int(sample)


def loader_of(length: int) -> Any:
    return create(list(range(97)), Sampler(length))


Iteration = tuple[list[int], list[int], torch.Tensor, torch.Tensor]


def plain_run(args: Any) -> list[Iteration]:
    """Return of each iteration its samples, those of the evaluation after it, and the generator before and after it."""
    torch.manual_seed(7)
    training, validating = cyclic(loader_of(5)), cyclic(loader_of(3))
    done: list[Iteration] = []
    before = torch.get_rng_state()
    for iteration in range(1, NUM_ITERS + 1):
        samples = [next(training) for _ in range(MICRO_BATCHES)]
        torch.rand(3)
        after = torch.get_rng_state()
        evaluates = args.eval_steps and iteration % args.eval_steps == 0
        validated = [next(validating) for _ in range(args.eval_iters * MICRO_BATCHES if evaluates else 0)]
        done.append((samples, validated, before, after))
        before = after  # a snapshot is taken before the evaluation
    return done


CHANGES = [{}, {"eval_iters": 3}, {"eval_iters": 0}, {"eval_steps": None}, {"eval_steps": 1}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("done", range(NUM_ITERS))
def test_iterations_read_and_draw_as_in_a_plain_run(changes: dict[str, Any], done: int) -> None:
    args = settings(**changes)
    wanted = plain_run(args)
    batches = SwiftBatches(create, args, loader_of(5), loader_of(3))
    torch.set_rng_state(wanted[done][2])
    training, validating = batches.training_after(done), batches.validation_after(done)
    assert validating is not None
    for iteration, (samples, validated, _, after) in enumerate(wanted[done:], start=done + 1):
        batches.draw_seeds(iteration)
        assert [int(next(training)) for _ in samples] == samples
        torch.rand(3)
        assert torch.equal(torch.get_rng_state(), after), iteration
        assert [int(next(validating)) for _ in validated] == validated


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_replays_read_and_draw_as_in_a_plain_run(changes: dict[str, Any]) -> None:
    args = settings(**changes)
    wanted = plain_run(args)
    batches = SwiftBatches(create, args, loader_of(5), loader_of(3))
    replayed = ReplayedSamples(batches.training_after)
    for iteration in (3, 4, 5, 4, 7):
        samples, _, before, after = wanted[iteration - 1]
        torch.set_rng_state(before)
        batches.draw_seeds(iteration)
        with replayed.of(iteration) as training:
            assert [int(next(training)) for _ in samples] == samples
        torch.rand(3)
        assert torch.equal(torch.get_rng_state(), after), iteration
