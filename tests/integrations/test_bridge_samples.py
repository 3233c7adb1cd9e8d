"""Samples and generators of an attachment to Megatron-Bridge are those of a plain run, from any iteration on."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from torch.utils.data import DataLoader

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.integrations.consumed_samples import ReplayedSamples
from moe_ckpt.integrations.megatron_bridge_data import BridgeBatches

NUM_ITERS, BATCH, NUM_VALIDATED = 9, 4, 2


@pytest.fixture(autouse=True)
def batch_sizes() -> Iterator[None]:
    """Initialize Megatron's global calculator of batch sizes."""
    calculator.init_num_microbatches_calculator(0, None, BATCH, 1, 1)
    yield
    calculator.destroy_num_microbatches_calculator()


def build(dataset: list[int], consumed: int, kind: str) -> DataLoader[int]:
    """Return a loader that starts after the consumed samples; that of validation is endless, as in Bridge's loop."""
    assert kind in ("single", "cyclic")
    return DataLoader(dataset[consumed:], batch_size=None)  # type: ignore[arg-type]


def settings(**changes: Any) -> Any:
    fine = {"eval_interval": 3, "eval_iters": 1, "start_eval_at_iter": None, "eval_global_batch_size": NUM_VALIDATED}
    return SimpleNamespace(**fine | changes)


def evaluates_after(iteration: int, validation: Any) -> bool:
    """Return the condition of Bridge's loop."""
    start = validation.start_eval_at_iter
    return bool(
        validation.eval_iters
        and validation.eval_interval
        and (start is None or iteration >= start)
        and iteration % validation.eval_interval == 0
    )


def cyclic(loader: DataLoader[int]) -> Iterator[int]:
    while True:
        yield from loader


def plain_run(validation: Any) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Return of each iteration its samples, and torch's generator before it and after a draw of its model."""
    torch.manual_seed(7)
    training, validating = iter(build(list(range(99)), 0, "single")), cyclic(build(list(range(99)), 0, "cyclic"))
    done = []
    before = torch.get_rng_state()
    for iteration in range(1, NUM_ITERS + 1):
        samples = [int(next(training)) for _ in range(BATCH)]
        torch.rand(3)
        done.append((samples, before, torch.get_rng_state()))
        before = torch.get_rng_state()  # a snapshot is taken before the evaluation
        if evaluates_after(iteration, validation):
            [next(validating) for _ in range(NUM_VALIDATED)]
    return done


def attached(validation: Any) -> BridgeBatches:
    batches = BridgeBatches(build)
    for kind in ("single", "cyclic"):
        batches.build_loader(list(range(99)), 0, kind)
    batches.validates_as(validation)
    return batches


VALIDATIONS = [{}, {"start_eval_at_iter": 4}, {"start_eval_at_iter": 6}, {"eval_iters": 0}, {"eval_interval": None}]


@pytest.mark.parametrize("changes", VALIDATIONS, ids=str)
@pytest.mark.parametrize("done", [0, 2, 3, 4, 6, 7])
def test_iterations_read_and_draw_as_in_a_plain_run(changes: dict[str, Any], done: int) -> None:
    validation = settings(**changes)
    wanted = plain_run(validation)
    batches = attached(validation)
    torch.set_rng_state(wanted[done][1])
    training, validating = batches.training_after(done), batches.validation_after(done)
    for iteration, (samples, _, after) in enumerate(wanted[done:], start=done + 1):
        batches.draw_seeds(iteration)
        assert [int(next(training)) for _ in range(BATCH)] == samples
        torch.rand(3)
        assert torch.equal(torch.get_rng_state(), after), iteration
        if evaluates_after(iteration, validation):
            first = batches.num_validated(iteration - 1)
            assert [int(next(validating)) for _ in range(NUM_VALIDATED)] == list(range(first, first + NUM_VALIDATED))


@pytest.mark.parametrize("changes", VALIDATIONS, ids=str)
def test_replays_read_and_draw_as_in_a_plain_run(changes: dict[str, Any]) -> None:
    validation = settings(**changes)
    wanted = plain_run(validation)
    batches = attached(validation)
    replayed = ReplayedSamples(batches.training_after)
    for iteration in (3, 4, 5, 4, 7):
        samples, before, after = wanted[iteration - 1]
        torch.set_rng_state(before)
        batches.draw_seeds(iteration)
        with replayed.of(iteration) as training:
            assert [int(next(training)) for _ in range(BATCH)] == samples
        torch.rand(3)
        assert torch.equal(torch.get_rng_state(), after), iteration
