"""Batches of Megatron-LM's data sets, read again from any iteration on.

Owns: the data sets that the script's provider built, and the samples of each iteration: Megatron-LM's samplers have
random access by the number of consumed samples. Reading never moves a generator: `iter(DataLoader)` draws a seed from
torch's, which a plain run does once. With `--dataloader-type external` the provider returns iterators, of which
`KeptBatches` keeps the batches that a recovery may need again.
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

from moe_ckpt.config import require
from moe_ckpt.megatron.kept_batches import KeptBatches, require_iterator


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
    External iterators may take `keep_bytes` of host memory, and as much again for validation.
    """

    def __init__(self, training: ModuleType, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self.consumed = ConsumedSamples()
        self._training: Any = training
        self._build_datasets = self._training.build_train_valid_test_datasets
        self._train: list[Any] = []
        self._valid: list[Any] = []
        self._replay: tuple[int, Any] | None = None  # the iteration that an iterator of replays stands before

    def build_datasets(self, *arguments: Any, **options: Any) -> Any:
        """Stand in for Megatron-LM's function of this name, and keep its result: it is called once a model chunk."""
        datasets = self._build_datasets(*arguments, **options)
        if self._is_external:
            train, valid, *rest = datasets
            datasets = (self._kept(train), self._kept(valid, moves_generators=False), *rest)
        self._train.append(datasets[0])
        self._valid.append(datasets[1])
        return datasets

    @property
    def data(self) -> KeptBatches | None:
        """This rank's training batches, if they come from an iterator without random access."""
        return self._train[0] if self._is_external and self._train else None

    def iteration_started(self, iteration: int, oldest: int | None) -> None:
        """Drop external batches that no recovery may need again: those before `oldest`; None: all may be needed."""
        for kept in (*self._train, *self._valid) if self._is_external else ():
            if kept is not None:
                kept.iteration_started(iteration, keep_since=oldest)

    def forecast(self, iteration: int) -> list[str]:
        """Return a line on the host memory of external batches, measured in an iteration; none without such batches."""
        of_one = self.data.bytes_since(iteration) if self.data else 0
        if not of_one:
            return []
        fitting = f"{self._keep_bytes // of_one} iterations fit into run.keep_batches_bytes={self._keep_bytes}"
        return [f"batches are kept since the oldest snapshot: {of_one} bytes an iteration, {fitting}"]

    def training_after(self, done: int) -> Any:
        """Return an iterator from the first sample of iteration `done + 1` on; None on a rank that reads no data.

        An external iterator's position is part of the state after `done` iterations.
        """
        if self._is_external:
            return self.data and RerunDataIterator(self.data)
        return self._iterators(self._train, self.consumed.after(done))

    def validation_after(self, done: int) -> Any:
        """Return an iterator that starts with the first sample of the next evaluation after iteration `done`."""
        args = self._training.get_args()
        every = args.eval_interval
        skipped = (args.start_eval_at_iter or 0) // every if every else 0
        num_evaluations = max(0, done // every - skipped) if every else 0
        batch_size = getattr(args, "eval_global_batch_size", args.global_batch_size)
        num_consumed = num_evaluations * args.eval_iters * batch_size
        if not self._is_external:
            return self._iterators(self._valid, num_consumed)
        kept = self._valid[0] if self._valid else None
        if kept is not None:
            size = getattr(args, "eval_micro_batch_size", args.micro_batch_size) * args.data_parallel_size
            kept.go_to(num_consumed // size)
        return kept and RerunDataIterator(kept)

    @contextlib.contextmanager
    def replaying(self, iteration: int) -> Iterator[Any]:
        """Yield an iterator over one iteration's samples; the next iteration's replay continues with it.

        An external iterator has come to the iteration's start with all other state.
        """
        if self._is_external:
            yield self.training_after(iteration - 1)
            return
        before, self._replay = self._replay, None  # a pass that is cut leaves its iterator anywhere
        batches = before[1] if before and before[0] == iteration else self.training_after(iteration - 1)
        yield batches
        self._replay = (iteration + 1, batches)

    def drop_replay(self) -> None:
        """Close the iterator of replays and its loader processes."""
        self._replay = None

    @property
    def _is_external(self) -> bool:
        return self._training.get_args().dataloader_type == "external"

    def _kept(self, loader: Any, *, moves_generators: bool = True) -> KeptBatches | None:
        require(not isinstance(loader, list), "--dataloader-type external", "several iterators", "one of each kind")
        require_iterator(loader, "--dataloader-type external")
        if loader is None:
            return None
        return KeptBatches(loader, limit_bytes=self._keep_bytes, moves_generators=moves_generators)

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
