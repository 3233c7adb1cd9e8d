"""Batches of Megatron-LM's data sets, read again from any iteration on.

Owns: the data sets that the script's provider built, and the samples of each iteration.
Megatron-LM's samplers have random access by the number of consumed samples. Reading
leaves torch's generator as it was: `iter(DataLoader)` draws a seed, which a plain run
does once. With `--dataloader-type external` the provider returns iterators, and
`KeptBatches` keeps the batches of an iterator that a recovery may need again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator

from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations.consumed_samples import ConsumedSamples, generator_kept
from moe_ckpt.megatron.chunk_batches import ChunkBatches
from moe_ckpt.megatron.kept_batches import KeptBatches, has_state
from moe_ckpt.megatron.repeatable import require_repeatable_reads


class IterationBatches:
    """Iterators over training and validation samples.

    Samples are counted on all ranks together: an iteration takes its samples from all
    ranks. With virtual stages each model chunk has data sets and an iterator of its
    own: all iterators are then lists, by chunk.
    """

    def __init__(
        self, training: ModuleType, keep_bytes: int, *, tries_iterators: bool = False
    ) -> None:
        """Begin without data sets.

        Args:
            training: The module `megatron.training.training`.
            keep_bytes: The most host memory, in bytes, for batches of external training
                iterators. External validation iterators may take as much again.
            tries_iterators: Whether external iterators are first opened in other
                processes, and compared.
        """
        self._tries_iterators = tries_iterators
        self._keep_bytes = keep_bytes
        self.consumed = ConsumedSamples()
        self._training: Any = training
        self._build_datasets = self._training.build_train_valid_test_datasets
        self._train: list[Any] = []
        self._valid: list[Any] = []
        # external iterators that the provider has returned
        self._loaders: list[Any] = []

    def build_datasets(self, *arguments: Any, **options: Any) -> Any:
        """Replace Megatron-LM's `build_train_valid_test_datasets`, and keep the result.

        Megatron-LM calls the function once for each model chunk.

        Raises:
            ConfigError: An external iterator cannot be read again.
        """
        datasets = self._build_datasets(*arguments, **options)
        if self._is_external:
            if self._tries_iterators:
                self._require_repeatable(
                    datasets, lambda: self._build_datasets(*arguments, **options)
                )
            train, valid, *rest = datasets
            # an evaluation comes after the next iteration's start has been saved,
            # together with the generators as they are before the evaluation
            datasets = (
                self._kept(train),
                self._kept(valid, moves_generators=False),
                *rest,
            )
        self._train.append(datasets[0])
        self._valid.append(datasets[1])
        return datasets

    @property
    def data(self) -> KeptBatches | ChunkBatches | None:
        """This rank's kept training batches; None if the data has random access."""
        kept = self._kept_for_training
        return ChunkBatches(kept) if len(kept) > 1 else kept[0] if kept else None

    @property
    def _kept_for_training(self) -> list[KeptBatches]:
        return (
            [kept for kept in self._train if kept is not None]
            if self._is_external
            else []
        )

    def iteration_started(self, iteration: int, oldest: int | None) -> None:
        """Drop external batches that no recovery may need again.

        Args:
            iteration: The iteration that begins, counted from 1.
            oldest: Batches before this iteration are dropped; None: all batches stay.
        """
        for kept in (*self._train, *self._valid) if self._is_external else ():
            if kept is not None:
                kept.iteration_started(iteration, keep_since=oldest)

    def draw_seeds(self, iteration: int) -> None:
        """Draw nothing.

        Reading validation sets draws nothing, and external iterators draw in their own
        reads.
        """

    def forecast(self, iteration: int) -> list[str]:
        """Return a line about the host memory of external batches.

        Args:
            iteration: The iteration whose batches are measured.

        Returns:
            The line; empty without external batches.
        """
        of_one = sum(kept.bytes_since(iteration) for kept in self._kept_for_training)
        if not of_one:
            return []
        fitting = (
            f"{self._keep_bytes // of_one} iterations fit into"
            f" run.keep_batches_bytes={self._keep_bytes}"
        )
        return [
            f"batches are kept since the oldest snapshot: {of_one} bytes an iteration,"
            f" {fitting}"
        ]

    def training_after(self, done: int) -> Any:
        """Return an iterator from the first sample of iteration `done + 1` on.

        The position of an external iterator is part of the state after `done`
        iterations.

        Returns:
            The iterator, or a list by chunk; None on a rank that reads no data.
        """
        if self._is_external:
            return self._as_taken(
                [kept and RerunDataIterator(kept) for kept in self._train]
            )
        return self._as_taken(
            [
                self._iterator(dataset, self.consumed.after(done))
                for dataset in self._train
            ]
        )

    def validation_after(self, done: int) -> Any:
        """Return an iterator over the samples of evaluations after iteration `done`.

        The iterator starts with the first sample of the next evaluation.

        Returns:
            The iterator, or a list by chunk; None on a rank that reads no data.
        """
        args, num_consumed = self._training.get_args(), self.num_validated(done)
        if not self._is_external:
            return self._as_taken(
                [self._iterator(dataset, num_consumed) for dataset in self._valid]
            )
        size = (
            getattr(args, "eval_micro_batch_size", args.micro_batch_size)
            * args.data_parallel_size
        )
        for kept in self._valid:
            if kept is not None:
                kept.go_to(num_consumed // size)
        return self._as_taken(
            [kept and RerunDataIterator(kept) for kept in self._valid]
        )

    def num_validated(self, done: int) -> int:
        """Return the samples that evaluations read in the first `done` iterations."""
        args = self._training.get_args()
        every, first = args.eval_interval, args.start_eval_at_iter or 1
        num_evaluations = max(0, done // every - (first - 1) // every) if every else 0
        return (
            num_evaluations
            * args.eval_iters
            * getattr(args, "eval_global_batch_size", args.global_batch_size)
        )

    @property
    def _is_external(self) -> bool:
        return self._training.get_args().dataloader_type == "external"

    def _require_repeatable(self, datasets: Any, build: Callable[[], Any]) -> None:
        """Refuse an iterator that gives other batches in another process.

        Only iterators without `state_dict` are checked.

        Raises:
            ConfigError: The batches differ.
        """
        for index, loader in enumerate(datasets[:2]):
            if hasattr(loader, "__next__") and not has_state(loader):
                require_repeatable_reads(
                    functools.partial(_opened, build, index),
                    "--dataloader-type external",
                )

    def _kept(
        self, loader: Any, *, moves_generators: bool = True
    ) -> KeptBatches | None:
        require(
            not isinstance(loader, list),
            "--dataloader-type external",
            "several iterators",
            "one of each kind",
        )
        if loader is None:
            return None
        if not hasattr(loader, "__next__"):
            got = type(loader).__name__
            raise ConfigError(
                f"--dataloader-type external: got {got}, wanted an iterator, which has"
                " __next__"
            )
        # two readers of one iterator would each miss the batches that the other reader
        # takes
        is_new = all(loader is not known for known in self._loaders)
        require(
            is_new,
            "--dataloader-type external",
            "one iterator twice",
            "one for each model chunk and purpose",
        )
        self._loaders.append(loader)
        num_chunks = self._training.get_args().virtual_pipeline_model_parallel_size or 1
        limit_bytes = self._keep_bytes // num_chunks
        return KeptBatches(
            loader, limit_bytes=limit_bytes, moves_generators=moves_generators
        )

    def _as_taken(self, iterators: list[Any]) -> Any:
        """Return the iterators of all chunks in the form that the loop takes."""
        is_one = self._training.get_args().virtual_pipeline_model_parallel_size is None
        return next(iter(iterators), None) if is_one else iterators

    def _iterator(self, dataset: Any, num_consumed: int) -> Any:
        with generator_kept():
            loader = self._training.build_pretraining_data_loader(dataset, num_consumed)
            return None if loader is None else RerunDataIterator(iter(loader))


def _opened(build: Callable[[], Any], index: int) -> Any:
    """Build the data sets, or iterators, anew, and return one of the results."""
    return build()[index]


def build_in_turns(
    build: Callable[..., Any],
    turn: Callable[[], contextlib.AbstractContextManager[None]],
) -> Any:
    """Wrap a function that builds data sets, so that ranks build in turns.

    Megatron builds the indices of a data set on rank 0, while a barrier holds the other
    ranks. A rank that builds alone has no barrier.

    Args:
        build: Builds data sets.
        turn: Returns a context that is entered once it is this rank's turn.
    """

    def built(*arguments: Any, **options: Any) -> Any:
        with turn():
            return build(*arguments, **options)

    return built
