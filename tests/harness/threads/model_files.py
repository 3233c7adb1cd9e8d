"""Whole checkpoints of a model whose ranks are threads, with one file for each rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.durable.checkpoint_folder import seal_files
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.types import FileRecord, ParallelLayout
from tests.harness.threads.model import Model


class ModelFiles:
    """Implements `ports.DurableState`. Layouts cannot change.

    Args:
        model: The model of the rank.
        ranks: All ranks of the job.
        is_slow: Whether a save is complete only once `finish_save` waits. Files are
            written at once in any case.
    """

    def __init__(self, model: Model, ranks: Ranks, *, is_slow: bool = False) -> None:
        self._is_slow = is_slow
        self._model = model
        self._ranks = ranks
        self._written: list[FileRecord] | None = None

    @property
    def _name(self) -> str:
        return f"rank{self._ranks.rank}"

    def start_save(self, directory: Path, iteration: int) -> None:
        self._written = gather_results(
            self._ranks, lambda: self._write(directory, iteration), CheckpointSaveError
        )[self._ranks.rank]

    def finish_save(self, *, wait: bool) -> Sequence[FileRecord] | None:
        if self._is_slow and not wait:
            return None
        written, self._written = self._written, None
        return written

    def abandon_save(self) -> None:
        self._written = None

    def is_writing(self) -> bool:
        return False

    def load(
        self, directory: Path, resharded_from: ParallelLayout | None = None
    ) -> int:
        assert resharded_from is None, "the layout of thread ranks is fixed"
        return gather_results(
            self._ranks, lambda: self._read(directory), CheckpointLoadError
        )[0]

    def _write(self, directory: Path, iteration: int) -> list[FileRecord]:
        data = self._model.data.saved() if self._model.data else None
        state = (
            iteration,
            self._model.all_tensors(),
            self._model.generator.get_state(),
            data,
        )
        (directory / self._name).write_bytes(pickle.dumps(state))
        return seal_files(directory, [self._name])

    def _read(self, directory: Path) -> int:
        iteration, tensors, generator, data = pickle.loads(
            (directory / self._name).read_bytes()
        )
        for mine, saved in zip(self._model.all_tensors(), tensors, strict=True):
            mine.data.copy_(saved)
        self._model.generator.set_state(generator)
        if self._model.data:
            self._model.data.restore(data)
        return iteration
