"""Numbers of consumed samples, samples of replays, and reads that draw nothing.

Owns: how many samples the iterations of a loop consume, reading the samples of a
replay, and reading without a trace in torch's generator.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.num_microbatches_calculator import update_num_microbatches


class ConsumedSamples:
    """The number of samples that iterations consume.

    With `--step-batch-size-schedule` later batches are larger. The size of a batch
    depends only on the number of samples before the batch, and Megatron's own
    calculator computes the size.
    """

    def __init__(self) -> None:
        self._after = [0]
        self._calculator: Any = None

    def after(self, done: int) -> int:
        """Return the number of samples of the first `done` iterations."""
        # A copy: the loop's own calculator holds the micro-batches of the running
        # iteration. The loop's initialization creates that calculator, so the copy is
        # made here.
        if self._calculator is None:
            self._calculator = copy.copy(
                num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
            )
        while len(self._after) <= done:
            self._calculator.update(self._after[-1], consistency_check=False)
            self._after.append(
                self._after[-1]
                + self._calculator.get_current_running_global_batch_size()
            )
        return self._after[done]

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch: the batch of the last step of the schedule."""
        self.after(0)
        # the calculator of constant batches lacks this attribute
        last: int | None = getattr(self._calculator, "global_batch_size", None)
        return last or self._calculator.get_current_running_global_batch_size()

    def set_batch_size(self, iteration: int) -> None:
        """Set Megatron's number of micro-batches to that of an iteration.

        Args:
            iteration: The iteration, counted from 1.
        """
        update_num_microbatches(self.after(iteration - 1), consistency_check=False)


class RandomAccess:
    """Base of `LoopBatches` with random access: no samples are kept."""

    def iteration_started(self, iteration: int, oldest: int | None) -> None:
        """Do nothing."""

    def forecast(self, iteration: int) -> list[str]:
        """Return no lines."""
        del iteration
        return []


class ReplayedSamples:
    """The samples of replayed iterations.

    Args:
        training_after: Opens an iterator that starts with iteration `done + 1`, given
            `done`.
    """

    def __init__(self, training_after: Callable[[int], Any]) -> None:
        self._training_after = training_after
        # the next iteration, and the iterator that stands before its first sample
        self._opened: tuple[int, Any] | None = None

    @contextlib.contextmanager
    def of(self, iteration: int) -> Iterator[Any]:
        """Yield an iterator over the samples of one iteration.

        The replay of the next iteration continues with the same iterator.

        Args:
            iteration: The iteration, counted from 1.
        """
        # a pass that is cut off leaves the iterator at an arbitrary sample
        before, self._opened = self._opened, None
        samples = (
            before[1]
            if before and before[0] == iteration
            else self._training_after(iteration - 1)
        )
        yield samples
        self._opened = (iteration + 1, samples)

    def close(self) -> None:
        """Drop the iterator and, with it, its loader processes."""
        self._opened = None


def draw_seed() -> None:
    """Draw from torch's generator as `iter(DataLoader)` does."""
    torch.empty((), dtype=torch.int64).random_()


@contextlib.contextmanager
def generator_kept() -> Iterator[None]:
    """Keep the state of torch's generator within the block.

    `iter(DataLoader)` draws a seed from the generator.
    """
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
