"""Samples of ms-swift's data sets, read again from any iteration on.

Owns: the positions of both iterators of the loop. A position counts this rank's
micro-batches. Its sample indices are those that the loop's own batch sampler gives
after as many: the samplers' own start by consumed samples is another one where ranks
have passes of different lengths. A plain run draws a seed from torch's generator where
a pass over a data set begins; here the training iterator draws it, and those of an
evaluation at the first read of the iteration after it.
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

    `create` makes a loader of a data set and of an iterable of sample indices by
    micro-batch.
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
        # loaders that start with the first sample
        self._training, self._validation = training, validation
        self._of_evaluation = settings.eval_iters * settings.num_microbatches
        self._of_pass = (
            sum(1 for _ in copy.copy(validation.batch_sampler))
            if validation is not None
            else 0
        )
        self._draws_due = 0

    def draw_seeds(self, iteration: int) -> None:
        """Let this iteration's first read draw the seeds of an evaluation just before
        it.
        """
        done = iteration - 1
        before, after = self.num_validated(done - 1), self.num_validated(done)
        self._draws_due = _multiples_below(after, self._of_pass) - _multiples_below(
            before, self._of_pass
        )

    def training_after(self, done: int) -> Iterator[Any]:
        """Return an iterator from the first sample of iteration `done + 1` on."""
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
        """Return an iterator that starts with the first sample of the next evaluation
        after iteration `done`.
        """
        if self._validation is None:
            return None
        passes = self._passes(self._validation, self.num_validated(done))
        return itertools.chain.from_iterable(samples for _, samples in passes)

    def num_validated(self, done: int) -> int:
        """Return the micro-batches that evaluations have read during the first `done`
        iterations.
        """
        every = self._settings.eval_steps
        return max(done, 0) // every * self._of_evaluation if every else 0

    def _passes(
        self, loader: Any, position: int
    ) -> Iterator[tuple[bool, Iterator[Any]]]:
        """Yield iterators over passes from a position on, each with whether it stands
        at the beginning of its pass.
        """
        # samplers count the samples that they have given
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
