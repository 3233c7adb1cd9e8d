"""Batches of Megatron-LM's data sets, read again from any iteration on.

Owns: the data sets that the script's provider built, and the samples of each iteration: Megatron-LM's samplers have
random access by the number of consumed samples. Reading never moves a generator: `iter(DataLoader)` draws a seed from
torch's, which a plain run does once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.rerun_state_machine import RerunDataIterator


class ConsumedSamples:
    """The samples that iterations consume, where `--step-batch-size-schedule` makes later batches larger.

    The size of a batch depends on the samples before it alone: Megatron-LM's own calculator says how.
    """

    def __init__(self) -> None:
        self._after = [0]
        self._calculator: Any = None

    def after(self, done: int) -> int:
        """Return the samples of the first `done` iterations."""
        if self._calculator is None:  # the loop makes it when it is initialized
            self._calculator = copy.copy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)
        while len(self._after) <= done:
            self._calculator.update(self._after[-1], consistency_check=False)
            self._after.append(self._after[-1] + self._calculator.get_current_running_global_batch_size())
        return self._after[done]

    @property
    def largest_batch(self) -> int:
        """The samples of the largest batch: those of the last step of the schedule."""
        self.after(0)
        last: int | None = getattr(self._calculator, "global_batch_size", None)  # only of a schedule of sizes
        return last or self._calculator.get_current_running_global_batch_size()

    def set_batch_size(self, iteration: int) -> None:
        """Let Megatron-LM compute with the number of micro-batches of an iteration."""
        update_num_microbatches(self.after(iteration - 1), consistency_check=False)


class IterationBatches:
    """Iterators over training and validation samples. An iteration takes its samples from all ranks together.

    With virtual stages each model chunk has data sets and an iterator of its own: then all are lists, by chunk.
    """

    def __init__(self, training: ModuleType) -> None:
        self.consumed = ConsumedSamples()
        self._training: Any = training
        self._build_datasets = self._training.build_train_valid_test_datasets
        self._train: list[Any] = []
        self._valid: list[Any] = []
        self._replay: tuple[int, Any] | None = None  # the iteration that an iterator of replays stands before

    def build_datasets(self, *arguments: Any, **options: Any) -> Any:
        """Stand in for Megatron-LM's function of this name, and keep its result: it is called once a model chunk."""
        datasets = self._build_datasets(*arguments, **options)
        self._train.append(datasets[0])
        self._valid.append(datasets[1])
        return datasets

    def training_after(self, done: int) -> Any:
        """Return an iterator from the first sample of iteration `done + 1` on; None on a rank that reads no data."""
        return self._iterators(self._train, self.consumed.after(done))

    def validation_after(self, done: int) -> Any:
        """Return an iterator that starts with the first sample of the next evaluation after iteration `done`."""
        args = self._training.get_args()
        every = args.eval_interval
        skipped = (args.start_eval_at_iter or 0) // every if every else 0
        num_evaluations = max(0, done // every - skipped) if every else 0
        batch_size = getattr(args, "eval_global_batch_size", args.global_batch_size)
        return self._iterators(self._valid, num_evaluations * args.eval_iters * batch_size)

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

    def _iterators(self, datasets: list[Any], num_consumed: int) -> Any:
        found = [self._iterator(dataset, num_consumed) for dataset in datasets]
        return found[0] if self._training.get_args().virtual_pipeline_model_parallel_size is None else found

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
