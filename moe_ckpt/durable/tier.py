"""The durable tier: whole checkpoints on the file system that all ranks share.

Owns: one save from empty directory to commit marker, removing old checkpoints, and
loading a verified checkpoint. Every method is collective. Must not: decide when to save
or which checkpoint to load (`engine.fallback` does), or know the format inside a
directory (`ports.DurableState` does).

    save      prepare directory -> start writing, with checksums
              -> (async: training continues) -> marker -> remove old checkpoints
    resume    marker fits this run? -> checksums -> load
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.collectives import Ranks, broadcast_result, gather_results
from moe_ckpt.durable.checkpoint_folder import (
    MARKER,
    CheckpointFolder,
    Manifest,
    commit,
    file_names,
    read_manifest,
    require_listed,
    seal_files,
    verify_files,
)
from moe_ckpt.durable.course import RunCourse, write_course
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    EventLog,
    StateResharded,
    StateResumed,
)
from moe_ckpt.ports import DurableState
from moe_ckpt.types import CheckpointRef, FileRecord, RunIdentity

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SaveInFlight:
    """A save without a marker yet."""

    iteration: int
    """Iteration of the saved state."""

    directory: Path
    """Directory of the checkpoint."""

    started_s: float
    """Start of the save, on `time.monotonic`."""

    stall_s: float
    """Time that starting the save took, in seconds."""


class DurableTier:
    """Saves and loads whole checkpoints of one run."""

    def __init__(
        self,
        state: DurableState,
        folder: CheckpointFolder,
        identity: RunIdentity,
        ranks: Ranks,
        events: EventLog,
        *,
        keep: int,
        course: RunCourse | None = None,
    ) -> None:
        """Begin without a save in flight.

        Args:
            state: Writes and reads the training state.
            folder: The run's checkpoints.
            identity: The run.
            ranks: All ranks of the job.
            events: This rank's event log.
            keep: Number of newest checkpoints that stay after a commit.
            course: The run's course. Each checkpoint contains the course, which names
                the settings that differ where the checkpoint is loaded. None: no
                course.
        """
        self._state = state
        self._folder = folder
        self._identity = identity
        self._ranks = ranks
        self._events = events
        self._keep = keep
        self._course = course
        self._in_flight: _SaveInFlight | None = None

    def save(self, iteration: int) -> None:
        """Start saving the state after `iteration` steps.

        A synchronous state is committed on return. No older save may be in flight. The
        save fails while any rank still writes an abandoned save.

        Raises:
            CheckpointSaveError: The save failed; on all ranks. The event log then has
                the failure.
        """
        assert self._in_flight is None, self._in_flight
        started_s = time.monotonic()
        directory = self._folder.directory(iteration)
        with _reporting(self._events, iteration):
            # training may reach the same iteration again, and an abandoned save may
            # still write into the iteration's directory
            gather_results(self._ranks, self._require_idle, CheckpointSaveError)
            broadcast_result(
                self._ranks,
                lambda: self._folder.prepare(iteration),
                CheckpointSaveError,
            )
            self._state.start_save(directory, iteration)
        stall_s = time.monotonic() - started_s
        self._in_flight = _SaveInFlight(
            iteration=iteration,
            directory=directory,
            started_s=started_s,
            stall_s=stall_s,
        )
        self.poll(wait=False)

    def abandon(self) -> None:
        """Give up a save that was cut off, so that it never gets a marker.

        Not collective; does not wait.
        """
        self._in_flight = None
        self._state.abandon_save()

    def poll(self, *, wait: bool) -> None:
        """Commit the save in flight if all ranks have written their files.

        Args:
            wait: Whether to block until all ranks have written their files.

        Raises:
            CheckpointSaveError: The save failed; on all ranks. The event log then has
                the failure.
        """
        flight = self._in_flight
        if flight is None:
            return
        started_s = time.monotonic()
        with _reporting(self._events, flight.iteration):
            try:
                files = self._state.finish_save(wait=wait)
                if files is None:
                    return
                self._in_flight = None
                manifest = self._commit(flight, files)
            # a failed save is over: otherwise every step would poll the save again
            except CheckpointSaveError:
                self._in_flight = None
                raise
        now_s = time.monotonic()
        self._events.append(
            CheckpointSaved(
                iteration=flight.iteration,
                directory=str(flight.directory),
                size_bytes=manifest.size_bytes,
                seconds=now_s - flight.started_s,
                stall_s=flight.stall_s + now_s - started_s,
            )
        )

    def committed(self) -> Sequence[CheckpointRef]:
        """Return the committed checkpoints in the folder, and report torn ones.

        The newest checkpoint comes first. The list includes checkpoints that this run
        cannot use.

        Raises:
            CheckpointLoadError: Rank 0 cannot read the folder; on all ranks.
        """
        # rank 0 lists for all ranks: on a network file system ranks may see different
        # lists, and would choose different sources
        for ref in broadcast_result(
            self._ranks, self._folder.torn, CheckpointLoadError
        ):
            reason = f"no {MARKER}: the save was not finished"
            self._events.append(CheckpointSkipped(source=ref.directory, reason=reason))
            if self._ranks.rank == 0:
                _log.warning("skipped %s: %s", ref.directory, reason)
        return broadcast_result(
            self._ranks, self._folder.committed, CheckpointLoadError
        )

    def resume(self, ref: CheckpointRef) -> None:
        """Load a committed checkpoint of this run.

        Raises:
            CheckpointLoadError: The checkpoint cannot be used; on all ranks.
        """
        self._resume(ref, run_id=self._identity.run_id)

    def resume_from(self, path: Path) -> int:
        """Load one checkpoint, of any run with the same model.

        Args:
            path: Directory of the checkpoint.

        Returns:
            The iteration of the checkpoint.

        Raises:
            CheckpointLoadError: The checkpoint cannot be used; on all ranks.
        """
        started_s = time.monotonic()
        iteration = broadcast_result(
            self._ranks, lambda: read_manifest(path), CheckpointLoadError
        ).iteration
        self._resume(
            CheckpointRef(iteration=iteration, directory=str(path)), run_id=None
        )
        if self._course:
            self._course.begin_from(path, iteration)
        seconds = time.monotonic() - started_s
        self._events.append(
            StateResumed(
                iteration=iteration, source=str(path), seconds=seconds, passed_over=[]
            )
        )
        return iteration

    def _require_idle(self) -> None:
        """Check that no abandoned save can write into another save's directory.

        Raises:
            CheckpointSaveError: This rank still writes an abandoned save.
        """
        if self._state.is_writing():
            raise CheckpointSaveError(
                f"rank {self._ranks.rank} still writes a checkpoint that was abandoned"
            )

    def _commit(self, flight: _SaveInFlight, mine: Sequence[FileRecord]) -> Manifest:
        of_each = gather_results(self._ranks, lambda: mine, CheckpointSaveError)
        files = [file for files in of_each for file in files]
        return broadcast_result(
            self._ranks, lambda: self._commit_alone(flight, files), CheckpointSaveError
        )

    def _commit_alone(
        self, flight: _SaveInFlight, sealed: Sequence[FileRecord]
    ) -> Manifest:
        """Commit a checkpoint whose large files are sealed.

        Rank 0 seals the other files, which are small and which rank 0 wrote.
        """
        if self._course:
            try:
                write_course(flight.directory, self._course.course)
            except OSError as error:
                raise CheckpointSaveError(str(error)) from error
        present, named = (
            set(file_names(flight.directory)),
            {file.name for file in sealed},
        )
        # a rank whose folder is on another file system wrote files that rank 0 cannot
        # see
        if gone := sorted(named - present):
            raise CheckpointSaveError(
                f"{flight.directory}: {', '.join(gone)}: written, and not there"
            )
        files = sorted(
            (*sealed, *seal_files(flight.directory, present - named)),
            key=lambda file: file.name,
        )
        manifest = Manifest(
            iteration=flight.iteration, identity=self._identity, files=tuple(files)
        )
        commit(flight.directory, manifest)
        try:
            # after the commit: before, an old checkpoint may be the only one
            self._folder.keep_newest(self._keep, up_to=flight.iteration)
        except OSError as error:  # the new checkpoint is committed in any case
            _log.warning("an old checkpoint could not be dropped: %s", error)
        return manifest

    def _resume(self, ref: CheckpointRef, *, run_id: str | None) -> None:
        directory = Path(ref.directory)
        manifest = broadcast_result(
            self._ranks, lambda: read_manifest(directory), CheckpointLoadError
        )
        # no collective needed: all ranks compare the same manifest
        self._require_fit(directory, manifest, run_id)
        if manifest.iteration != ref.iteration:
            got = (
                f"got the marker of iteration {manifest.iteration}, wanted that of"
                f" {ref.iteration}"
            )
            raise CheckpointLoadError(f"{directory}: {got}")
        broadcast_result(
            self._ranks,
            lambda: require_listed(directory, manifest),
            CheckpointLoadError,
        )
        # one rank hashes each file, so that all ranks together read the checkpoint once
        mine = manifest.files[self._ranks.rank :: self._ranks.size]
        gather_results(
            self._ranks, lambda: verify_files(directory, mine), CheckpointLoadError
        )
        saved_at = manifest.identity.layout
        is_resharded = saved_at != self._identity.layout
        iteration = self._state.load(directory, saved_at if is_resharded else None)
        # the state's own count: a marker may be beside the files of another save
        if iteration != ref.iteration:
            raise CheckpointLoadError(
                f"{directory}: got the state after iteration {iteration}, wanted"
                f" {ref.iteration}"
            )
        if is_resharded:
            ours = self._identity.layout
            self._events.append(
                StateResharded(
                    iteration=iteration, saved_at=str(saved_at), loaded_at=str(ours)
                )
            )
            if self._ranks.rank == 0:
                _log.warning(
                    "%s: saved at %s, goes on at %s: the same state, but generators are"
                    " seeded anew, and sums run in another order, so not bit for bit as"
                    " the run that saved it",
                    *(directory, saved_at, ours),
                )

    def _require_fit(
        self, directory: Path, manifest: Manifest, run_id: str | None
    ) -> None:
        """Check that a checkpoint fits this run and model; the layout may differ.

        Args:
            directory: Directory of the checkpoint.
            manifest: Content of the checkpoint's marker.
            run_id: The run that must have saved the checkpoint. None: any run.

        Raises:
            CheckpointLoadError: The checkpoint belongs to another run or model.
        """
        theirs, mine = manifest.identity, self._identity
        if run_id is not None and theirs.run_id != run_id:
            raise CheckpointLoadError(
                f"{directory}: saved by run {theirs.run_id}, wanted run {run_id}"
            )
        if theirs.model != mine.model:
            changes = self._course.changes_since(directory) if self._course else ()
            named = "".join(f"\n    {change.as_error()}" for change in changes)
            raise CheckpointLoadError(
                f"{directory}: saved by model {theirs.model}, wanted model"
                f" {mine.model}{named}"
            )


@contextlib.contextmanager
def _reporting(events: EventLog, iteration: int) -> Iterator[None]:
    """Write a failed save to the event log before the error propagates."""
    try:
        yield
    except CheckpointSaveError as error:
        events.append(CheckpointFailed(iteration=iteration, reason=str(error)))
        raise
