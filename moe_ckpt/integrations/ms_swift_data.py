"""Samples of ms-swift's data sets, read again from any iteration on.

Owns: the positions of both iterators of the loop. A position counts this rank's
micro-batches. The sample indices at a position are the indices that the loop's own
batch sampler gives after as many micro-batches. The samplers can also start by consumed
samples, but then give other indices if passes of ranks differ in length. A plain run
draws a seed from torch's generator at the beginning of each pass over a data set. Here
the training iterator draws its own seeds, and the first read of the iteration after an
evaluation draws the seeds of that evaluation.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from moe_ckpt.integrations.consumed_samples import (
    ConsumedSamples,
    RandomAccess,
    draw_seed,
    generator_kept,
)


class SwiftBatches(RandomAccess):
    """Iterators over training and validation samples of one rank.

    Args:
        create: Makes a loader, given a data set and an iterable over the sample indices
            of micro-batches.
        settings: The arguments of the trainer.
        training: The loop's loader of training samples, from the first sample on.
        validation: The loop's loader of validation samples; None without validation.
    """

    def __init__(
        self,
        create: Callable[[Any, Any], Any],
        settings: Any,
        training: Any,
        validation: Any,
    ) -> None:
        self.consumed = ConsumedSamples()
        self._create = create
        self._settings = settings
        self._training, self._validation = training, validation
        self._of_evaluation = settings.eval_iters * settings.num_microbatches
        self._of_pass = (
            sum(1 for _ in copy.copy(validation.batch_sampler))
            if validation is not None
            else 0
        )
        self._draws_due = 0

    def draw_seeds(self, iteration: int) -> None:
        """Make the first read of an iteration draw the seeds of an evaluation.

        Only an evaluation directly before the iteration has draws that are due.
        """
        done = iteration - 1
        before, after = self.num_validated(done - 1), self.num_validated(done)
        self._draws_due = _multiples_below(after, self._of_pass) - _multiples_below(
            before, self._of_pass
        )

    def training_after(self, done: int) -> Iterator[Any]:
        """Yield training samples from the first one of iteration `done + 1` on."""
        for is_pass, samples in self._passes(
            self._training, done * self._settings.num_microbatches
        ):
            if is_pass:
                draw_seed()
            for sample in samples:
                while self._draws_due:
                    self._draws_due -= 1
                    draw_seed()
                yield sample

    def validation_after(self, done: int) -> Iterator[Any] | None:
        """Return an iterator over the samples of evaluations after iteration `done`.

        The iterator starts with the first sample of the next evaluation.

        Returns:
            The iterator; None without validation.
        """
        if self._validation is None:
            return None
        passes = self._passes(self._validation, self.num_validated(done))
        return itertools.chain.from_iterable(samples for _, samples in passes)

    def num_validated(self, done: int) -> int:
        """Return the micro-batches that evaluations read in `done` iterations."""
        every = self._settings.eval_steps
        return max(done, 0) // every * self._of_evaluation if every else 0

    def _passes(
        self, loader: Any, position: int
    ) -> Iterator[tuple[bool, Iterator[Any]]]:
        """Yield passes over a loader's data from a position on.

        Yields:
            Whether the iterator stands at the beginning of its pass, and the iterator.
        """
        # a copy, because samplers count the samples that they have given
        sampler = copy.copy(loader.batch_sampler)
        while True:
            indices = iter(sampler)
            skipped = 0
            while skipped < position and next(indices, None) is not None:
                skipped += 1
            is_whole, position = skipped == 0, position - skipped
            if position == 0:
                with generator_kept():
                    samples = iter(self._create(loader.dataset, indices))
                yield is_whole, samples


def _multiples_below(end: int, step: int) -> int:
    return -(-end // step) if step else 0
