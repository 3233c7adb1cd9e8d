"""Iterations consume the samples of Megatron-LM's loop, even where batches grow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from megatron.core import num_microbatches_calculator as calculator

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.integrations.consumed_samples import ConsumedSamples

START, STEP, LARGEST, SAMPLES = 8, 4, 16, 60
NUM_ITERS = 12


@pytest.fixture(params=[[START, STEP, SAMPLES], None], ids=["growing", "constant"])
def growth(request: pytest.FixtureRequest) -> Iterator[list[int] | None]:
    """Initialize Megatron's global calculator of batch sizes.

    Yields:
        The growth of batches, as `rampup_batch_size`. None: constant batches.
    """
    calculator.init_num_microbatches_calculator(
        rank=1,
        rampup_batch_size=request.param,
        global_batch_size=LARGEST,
        micro_batch_size=2,
        data_parallel_size=2,
    )
    yield request.param
    calculator.destroy_num_microbatches_calculator()


def consumed_by_loop() -> list[int]:
    """Return the samples before each iteration, as Megatron-LM's `train` counts."""
    after = [0]
    for _ in range(NUM_ITERS):
        calculator.update_num_microbatches(after[-1], consistency_check=False)
        after.append(after[-1] + calculator.get_num_microbatches() * 2 * 2)
    return after


def test_samples_before_an_iteration_are_derived(growth: list[int] | None) -> None:
    consumed = ConsumedSamples()
    backwards = [consumed.after(done) for done in reversed(range(NUM_ITERS + 1))]
    assert backwards[::-1] == consumed_by_loop()
    first = [consumed.after(1), consumed.after(2) - consumed.after(1)]
    assert first == ([START, START] if growth else [LARGEST, LARGEST])
    assert (
        consumed.after(NUM_ITERS) - consumed.after(NUM_ITERS - 1)
        == LARGEST
        == consumed.largest_batch
    )


def test_a_replay_goes_back_to_the_batch_size_of_its_iteration(
    growth: list[int] | None,
) -> None:
    consumed = ConsumedSamples()
    for iteration in (NUM_ITERS, 1, NUM_ITERS):
        consumed.set_batch_size(iteration)
        samples = consumed.after(iteration) - consumed.after(iteration - 1)
        assert calculator.get_num_microbatches() * 2 * 2 == samples
    assert growth is None or consumed.after(1) == START < LARGEST
