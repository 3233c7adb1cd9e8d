"""Batches of Megatron-LM's data sets, read again from any iteration on.

Owns: the data sets that the script's provider built, and the samples of each iteration: Megatron-LM's samplers have
random access by the number of consumed samples. Reading never moves a generator: `iter(DataLoader)` draws a seed from
torch's, which a plain run does once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator


class IterationBatches:
    """Iterators over training and validation samples. An iteration takes `global_batch_size` samples from all ranks."""

    def __init__(self, training: ModuleType) -> None:
        self._training: Any = training
        self._build_datasets = self._training.build_train_valid_test_datasets
        self._train: Any = None
        self._valid: Any = None
        self._replay: tuple[int, Any] | None = None  # the iteration that an iterator of replays stands before

    def build_datasets(self, *arguments: Any, **options: Any) -> Any:
        """Stand in for Megatron-LM's function of this name, and keep its result."""
        datasets = self._build_datasets(*arguments, **options)
        self._train, self._valid, _ = datasets
        return datasets

    def training_after(self, done: int) -> Any:
        """Return an iterator from the first sample of iteration `done + 1` on; None on a rank that reads no data."""
        args = self._training.get_args()
        return self._iterator(self._train, done * args.global_batch_size)

    def validation_after(self, done: int) -> Any:
        """Return an iterator that starts with the first sample of the next evaluation after iteration `done`."""
        args = self._training.get_args()
        every = args.eval_interval
        skipped = (args.start_eval_at_iter or 0) // every if every else 0
        num_evaluations = max(0, done // every - skipped) if every else 0
        batch_size = getattr(args, "eval_global_batch_size", args.global_batch_size)
        return self._iterator(self._valid, num_evaluations * args.eval_iters * batch_size)

    @contextlib.contextmanager
    def replaying(self, iteration: int) -> Iterator[Any]:
        """Yield an iterator over one iteration's samples; the next iteration's replay continues with it."""
        before, self._replay = self._replay, None  # a pass that is cut leaves its iterator anywhere
        batches = before[1] if before and before[0] == iteration else self.training_after(iteration - 1)
        yield batches
        self._replay = (iteration + 1, batches)

    def drop_replay(self) -> None:
        """Close the iterator of replays and its loader processes."""
        self._replay = None

    def _iterator(self, dataset: Any, num_consumed: int) -> Any:
        with _generator_kept():
            loader = self._training.build_pretraining_data_loader(dataset, num_consumed)
            return None if loader is None else RerunDataIterator(iter(loader))


def build_in_turns(build: Callable[..., Any], turn: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    """Return a function that builds data sets while it is this rank's turn.

    Megatron builds the indices of a data set on rank 0 while a barrier holds the others; a rank that builds alone has
    no barrier.
    """

    def built(*arguments: Any, **options: Any) -> Any:
        with turn():
            return build(*arguments, **options)

    return built


@contextlib.contextmanager
def _generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
