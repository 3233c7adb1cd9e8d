"""The samples that the iterations of a loop consume, reading them again, and reading
without a trace in a generator.
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
    """The samples that iterations consume, where `--step-batch-size-schedule` makes
    later batches larger.

    The size of a batch depends on the samples before it alone: Megatron's own
    calculator says how.
    """

    def __init__(self) -> None:
        self._after = [0]
        self._calculator: Any = None

    def after(self, done: int) -> int:
        """Return the samples of the first `done` iterations."""
        # a copy, since the loop's own says how many micro-batches the running iteration
        # has; it is there after the loop's initialization
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
        """The samples of the largest batch: those of the last step of the schedule."""
        self.after(0)
        # only of a schedule of sizes
        last: int | None = getattr(self._calculator, "global_batch_size", None)
        return last or self._calculator.get_current_running_global_batch_size()

    def set_batch_size(self, iteration: int) -> None:
        """Let Megatron compute with the number of micro-batches of an iteration."""
        update_num_microbatches(self.after(iteration - 1), consistency_check=False)


class RandomAccess:
    """The methods of `LoopBatches` for samples that have random access: none are kept."""

    def iteration_started(self, iteration: int, oldest: int | None) -> None:
        """Keep nothing."""

    def forecast(self, iteration: int) -> list[str]:
        """Return nothing."""
        del iteration
        return []


class ReplayedSamples:
    """The samples of replayed iterations; `training_after(done)` opens an iterator from
    iteration `done + 1` on.
    """

    def __init__(self, training_after: Callable[[int], Any]) -> None:
        self._training_after = training_after
        # the iteration that this iterator stands before
        self._opened: tuple[int, Any] | None = None

    @contextlib.contextmanager
    def of(self, iteration: int) -> Iterator[Any]:
        """Yield an iterator over one iteration's samples; the next iteration's replay
        continues with it.
        """
        # a pass that is cut leaves its iterator anywhere
        before, self._opened = self._opened, None
        samples = (
            before[1]
            if before and before[0] == iteration
            else self._training_after(iteration - 1)
        )
        yield samples
        self._opened = (iteration + 1, samples)

    def close(self) -> None:
        """Drop the iterator, and with it its loader processes."""
        self._opened = None


def draw_seed() -> None:
    """Draw as `iter(DataLoader)` does."""
    torch.empty((), dtype=torch.int64).random_()


@contextlib.contextmanager
def generator_kept() -> Iterator[None]:
    """Keep the state of torch's generator: `iter(DataLoader)` draws a seed from it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
