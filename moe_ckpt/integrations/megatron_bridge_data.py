"""Samples of Megatron-Bridge's data sets, read again from any iteration on.

Owns: the arguments with which the loop has built the loaders, whose samplers have
random access by the number of consumed samples. Reading leaves torch's generator as it
was. A plain run draws a seed twice: as the loop's setup opens the training loader,
which happens here as well, and at the first read for validation. Nothing else draws
between that read and the next iteration. Here the second seed is therefore drawn by the
first read of training samples in the iteration after the first evaluation: a replay of
that iteration draws the seed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator

from moe_ckpt.integrations.consumed_samples import (
    ConsumedSamples,
    RandomAccess,
    draw_seed,
    generator_kept,
)

_CYCLIC = "cyclic"


class BridgeBatches(RandomAccess):
    """Iterators over training and validation samples of one rank.

    Samples are counted on all ranks together: an iteration takes its samples from all
    ranks.

    Args:
        build: Megatron-Bridge's `build_pretraining_data_loader`.
    """

    def __init__(self, build: Callable[..., Any]) -> None:
        self.consumed = ConsumedSamples()
        self._build = build
        # in the order of the calls: training, then validation if there is any, then
        # tests
        self._built: list[Callable[[int], Any]] = []
        self._types: list[str] = []
        self._validation: Any = None
        self._draw_is_due = False

    def build_loader(
        self, dataset: Any, consumed_samples: int, kind: str, *rest: Any, **options: Any
    ) -> Any:
        """Replace `build_pretraining_data_loader`.

        Keeps all arguments but the position, in order to build the loader again.
        """

        def build(position: int) -> Any:
            return self._build(dataset, position, kind, *rest, **options)

        self._built.append(build)
        self._types.append(kind)
        return build(consumed_samples)

    def validates_as(self, validation: Any) -> None:
        """Take the settings of `ConfigContainer.validation`."""
        self._validation = validation

    def draw_seeds(self, iteration: int) -> None:
        """Make the first read of an iteration draw the seed of the first evaluation.

        Only the iteration directly after the first evaluation draws this seed.
        """
        done = iteration - 1
        self._draw_is_due = (
            self.num_evaluations(done) == 1 and self.num_evaluations(done - 1) == 0
        )

    def training_after(self, done: int) -> Any:
        """Return an iterator from the first sample of iteration `done + 1` on.

        Returns:
            The iterator; None on a rank that reads no samples.
        """
        samples = self._open(0, self.consumed.after(done))
        return samples and RerunDataIterator(self._reading(samples))

    def validation_after(self, done: int) -> Any:
        """Return an iterator over the samples of evaluations after iteration `done`.

        The iterator starts with the first sample of the next evaluation.

        Returns:
            The iterator; None on a rank that reads no samples, and without evaluations.
        """
        samples = (
            self._open(1, self.num_validated(done))
            if self._validation.eval_iters
            else None
        )
        return samples and RerunDataIterator(samples)

    def num_validated(self, done: int) -> int:
        """Return the samples that evaluations read in the first `done` iterations."""
        settings = self._validation
        return (
            self.num_evaluations(done)
            * (settings.eval_iters or 0)
            * settings.eval_global_batch_size
        )

    def num_evaluations(self, done: int) -> int:
        """Return the number of evaluations in the first `done` iterations."""
        settings = self._validation
        every, first = settings.eval_interval, settings.start_eval_at_iter or 1
        if not settings.eval_iters or not every:
            return 0
        return max(0, done // every - (first - 1) // every)

    def _reading(self, samples: Iterator[Any]) -> Iterator[Any]:
        for sample in samples:
            if self._draw_is_due:
                self._draw_is_due = False
                draw_seed()
            yield sample

    def _open(self, kind: int, position: int) -> Iterator[Any] | None:
        with generator_kept():
            loader = self._built[kind](position)
            samples = None if loader is None else iter(loader)
        return (
            _repeated(samples, loader)
            if samples and self._types[kind] == _CYCLIC
            else samples
        )


def _repeated(samples: Iterator[Any], loader: Any) -> Iterator[Any]:
    while True:
        yield from samples
        samples = iter(loader)
