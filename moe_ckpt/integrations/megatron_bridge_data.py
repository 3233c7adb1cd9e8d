"""Samples of Megatron-Bridge's data sets, read again from any iteration on.

Owns: how the loop has built its loaders, whose samplers have random access by the
number of consumed samples. Reading moves no generator. A plain run draws twice: where
the loop's setup opens the training loader, here as well, and at the first read for
validation. Nothing else draws before the next iteration, so here the first read of
training samples in the iteration after the first evaluation makes that draw: a replay
of the iteration does so, too.
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
    """Iterators over training and validation samples of one rank. An iteration takes
    its samples from all ranks.
    """

    def __init__(self, build: Callable[..., Any]) -> None:
        self.consumed = ConsumedSamples()
        self._build = build
        # training, then validation where that is wanted, then tests
        self._built: list[Callable[[int], Any]] = []
        self._types: list[str] = []
        self._validation: Any = None
        self._draw_is_due = False

    def build_loader(
        self, dataset: Any, consumed_samples: int, kind: str, *rest: Any, **options: Any
    ) -> Any:
        """Stand in for `build_pretraining_data_loader`, and keep all arguments but the
        position.
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
        """Let this iteration's first read draw a seed, if the first evaluation is just
        before it.
        """
        done = iteration - 1
        self._draw_is_due = (
            self.num_evaluations(done) == 1 and self.num_evaluations(done - 1) == 0
        )

    def training_after(self, done: int) -> Any:
        """Return an iterator from the first sample of iteration `done + 1` on; None on
        a rank that reads no samples.
        """
        samples = self._open(0, self.consumed.after(done))
        return samples and RerunDataIterator(self._reading(samples))

    def validation_after(self, done: int) -> Any:
        """Return an iterator that starts with the first sample of the next evaluation
        after iteration `done`.
        """
        samples = (
            self._open(1, self.num_validated(done))
            if self._validation.eval_iters
            else None
        )
        return samples and RerunDataIterator(samples)

    def num_validated(self, done: int) -> int:
        """Return the samples that evaluations have read during the first `done`
        iterations.
        """
        settings = self._validation
        return (
            self.num_evaluations(done)
            * (settings.eval_iters or 0)
            * settings.eval_global_batch_size
        )

    def num_evaluations(self, done: int) -> int:
        """Return how many evaluations the first `done` iterations have."""
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
