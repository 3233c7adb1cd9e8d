"""Durable tiers of ranks that are threads, with one small file as each rank's state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.durable.checkpoint_folder import (
    CheckpointFolder,
    is_committed,
    seal_files,
)
from moe_ckpt.durable.tier import DurableTier
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.events import EventLog
from moe_ckpt.types import FileRecord, ParallelLayout, RunIdentity

LAYOUT = ParallelLayout(pp=1, dp=2, ep=1, tp=1)
IDENTITY = RunIdentity(run_id="run-1", model="0123abcd", layout=LAYOUT)


class OneFileEach:
    """Implements `ports.DurableState` with one file for each rank.

    Each rank writes the iteration to its file. Rank 0 writes one more file, which
    `finish_save` does not name.

    Attributes:
        is_slow: Whether a save finishes only once `finish_save` waits. Until then the
            rank `is_writing`, even after the save was abandoned.
        spoils: Whether the rank changes its file after the file was sealed.
        loaded: Directory name and earlier layout of each load.
    """

    def __init__(self, ranks: Ranks, *, is_slow: bool = False) -> None:
        self.ranks = ranks
        self.is_slow = is_slow
        self.spoils = False
        self.loaded: list[tuple[str, ParallelLayout | None]] = []
        self._files: Sequence[FileRecord] = ()
        self._is_writing = False

    @property
    def name(self) -> str:
        return f"rank{self.ranks.rank}"

    def start_save(self, directory: Path, iteration: int) -> None:
        (directory / self.name).write_text(str(iteration))
        if self.ranks.rank == 0:
            (directory / "metadata").write_bytes(b"names")
        self._files = seal_files(directory, [self.name])
        self._is_writing = self.is_slow
        assert not is_committed(directory)
        if self.spoils:
            (directory / self.name).write_text("9")

    def finish_save(self, *, wait: bool) -> Sequence[FileRecord] | None:
        if self.is_slow and not wait:
            return None
        self._is_writing = False
        return self._files

    def abandon_save(self) -> None:
        """Do nothing: a write in progress continues."""

    def is_writing(self) -> bool:
        return self._is_writing

    def load(
        self, directory: Path, resharded_from: ParallelLayout | None = None
    ) -> int:
        self.loaded.append((directory.name, resharded_from))
        read = lambda: int((directory / self.name).read_text())  # noqa: E731
        return gather_results(self.ranks, read, CheckpointLoadError)[0]


def open_tier(
    folder: Path, state: OneFileEach, identity: RunIdentity = IDENTITY, *, keep: int = 1
) -> DurableTier:
    rank = state.ranks.rank
    events = EventLog(
        folder / "events" / f"rank{rank:04d}.jsonl",
        global_rank=rank,
        clock_origin_unix_s=0.0,
    )
    return DurableTier(
        state, CheckpointFolder(folder), identity, state.ranks, events, keep=keep
    )
