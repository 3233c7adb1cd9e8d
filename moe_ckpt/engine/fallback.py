"""The level below host memory: states on local disks and whole checkpoints.

Owns: the order of the sources, newest first; the quarantine of sources that led to a
bad loss, which `Suspects` finds; the event and log line that name the loaded source and
the reasons against newer sources. Every method is collective. Must not: read a source.

    host memory ---> local disks and checkpoints, the newer first;
                     at the same iteration the local disk first
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.durable.tier import DurableTier
from moe_ckpt.engine.job_recovery import JobRecovery, OnDisks
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.events import CheckpointSkipped, EventLog, StateResumed
from moe_ckpt.types import CheckpointRef

_log = logging.getLogger(__name__)

HOST_MEMORY, LOCAL_DISK = "host memory", "local disk"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A state of the whole job."""

    location: str
    """Name of a tier (`HOST_MEMORY`, `LOCAL_DISK`), or directory of a checkpoint."""

    iteration: int
    """Number of optimizer steps in the state."""

    def __str__(self) -> str:
        return f"{self.location} at iteration {self.iteration}"


@dataclass(frozen=True, kw_only=True, slots=True)
class UsableState:
    """The usable states on disks."""

    sources: Sequence[Source]
    """Usable sources, the best first."""

    passed_over: Sequence[str]
    """Reasons against sources that would have been better."""


class Suspects:
    """Finds a source that is intact but bad: a loss soon after the load is not finite.

    Args:
        ranks: All ranks of the job.
        num_iters: Iterations after a load in which a bad loss counts against the
            source. 0: no loss does.
    """

    def __init__(self, ranks: Ranks, num_iters: int) -> None:
        self._ranks = ranks
        self._num_iters = num_iters
        self._loaded: Source | None = None
        # by the iteration of the loss: the first source that led to the loss
        self._suspected: dict[int, Source] = {}

    def loaded(self, source: Source) -> None:
        """Note that all ranks continue from this source."""
        self._loaded = source

    def source_of(self, iteration: int, loss: float) -> Source | None:
        """Return the source that a loss counts against, or None.

        Collective unless the loss is finite: a rank that was cut off in a recovery may
        not know the source.

        Args:
            iteration: The iteration of the loss.
            loss: The loss, equal on all ranks.
        """
        if math.isfinite(loss):
            return None
        known = filter(
            None, gather_results(self._ranks, lambda: self._loaded, CheckpointLoadError)
        )
        self._loaded = loaded = max(
            known, key=lambda source: source.iteration, default=None
        )
        if loaded is None or iteration > loaded.iteration + self._num_iters:
            return None
        return loaded

    def is_first_at(self, iteration: int, source: Source) -> bool:
        """Return whether no source of another iteration has led to this bad loss.

        Otherwise training itself diverges. Collective: a replacement rank does not know
        the earlier sources.

        Args:
            iteration: The iteration of the loss.
            source: The source that the loss counts against.
        """
        for theirs in gather_results(
            self._ranks, lambda: self._suspected, CheckpointLoadError
        ):
            self._suspected = theirs | self._suspected
        return (
            self._suspected.setdefault(iteration, source).iteration == source.iteration
        )

    def clear(self) -> None:
        """Note that no source loaded so far is responsible for later losses."""
        self._loaded = None


class Fallback:
    """Finds states on disks and loads the best one.

    Attributes:
        changed: Settings that differ from the settings with which the last loaded state
            was saved.
    """

    def __init__(
        self,
        durable: DurableTier,
        ranks: Ranks,
        events: EventLog,
        course: RunCourse | None = None,
    ) -> None:
        self._ranks = ranks
        self._course = course
        self._durable = durable
        self._events = events
        self._quarantined: frozenset[Source] = frozenset()
        self.changed: Sequence[str] = ()

    def quarantine(self, source: Source) -> None:
        """Put a source into quarantine: the source is not loaded again."""
        self._quarantined |= {source}

    def look(
        self, job_recovery: JobRecovery | None, tainted: range = range(0)
    ) -> UsableState:
        """Return the usable states on disks.

        Args:
            job_recovery: Reads the local disks. None: there are no local disks.
            tainted: Iterations whose states are left out.
        """
        # a replacement does not know the sources that other ranks already quarantine
        quarantined = gather_results(
            self._ranks, lambda: self._quarantined, CheckpointLoadError
        )
        self._quarantined = frozenset().union(*quarantined)
        sources = [
            Source(location=ref.directory, iteration=ref.iteration)
            for ref in self._durable.committed()
        ]
        passed_over: list[str] = []
        if job_recovery is not None:
            disks = job_recovery.look_at_disks()
            if disks.newest is not None:
                sources.append(Source(location=LOCAL_DISK, iteration=disks.newest))
            # snapshots that the ranks cannot use together are an error, not a silent
            # new start
            elif any(disks.of_each) and not disks.new_ranks:
                passed_over.append(_nothing_common(disks))
            # unless a disk is marked as one that never held a state: then no state was
            # ever on all disks
            elif any(disks.of_each) and self._ranks.rank == 0:
                ranks = ", ".join(map(str, disks.new_ranks))
                _log.warning(
                    "%s; no state was ever on all disks: rank %s never saved",
                    _nothing_common(disks),
                    ranks,
                )
        best_first = sorted(
            sources,
            key=lambda source: (source.iteration, source.location == LOCAL_DISK),
            reverse=True,
        )
        bad = self._quarantined | {
            source for source in best_first if source.iteration in tainted
        }
        return UsableState(
            sources=[source for source in best_first if source not in bad],
            passed_over=passed_over
            + [f"{source}: in quarantine" for source in best_first if source in bad],
        )

    def load(
        self,
        found: UsableState,
        job_recovery: JobRecovery | None,
        passed_over: Sequence[str] = (),
    ) -> Source | None:
        """Load the best usable state and return its source.

        After the load, host memory holds only snapshots from local disks, and peers
        have not received these snapshots yet.

        Args:
            found: The usable states.
            job_recovery: Loads from local disks. None: there are no local disks.
            passed_over: Reasons against better sources so far, for the log.

        Returns:
            The source that was loaded. None: there is no source.

        Raises:
            CheckpointLoadError: Sources exist, and none can be loaded. Raised on all
                ranks, with the reason for each source.
            ConfigError: This run has saved its states with other settings.
        """
        reasons = [*passed_over, *found.passed_over]
        for source in found.sources:
            started_s = time.monotonic()
            if self._course:
                self.changed = self._course.require_kept(
                    for_replays=source.location == LOCAL_DISK
                )
            try:
                self._load(source, job_recovery)
            except CheckpointLoadError as error:
                self._events.append(
                    CheckpointSkipped(source=source.location, reason=str(error))
                )
                names_source = str(error).startswith(source.location)
                reasons.append(str(error) if names_source else f"{source}: {error}")
                continue
            seconds = time.monotonic() - started_s
            self._events.append(
                StateResumed(
                    iteration=source.iteration,
                    source=source.location,
                    seconds=seconds,
                    passed_over=reasons,
                )
            )
            if reasons and self._ranks.rank == 0:
                _log.warning(
                    "all ranks go on from %s; passed over: %s",
                    source,
                    "; ".join(reasons),
                )
            return source
        if len(reasons) > len(passed_over):  # otherwise no source existed at all
            tried = "\n  ".join(reasons)
            raise CheckpointLoadError(
                "no usable checkpoint or snapshot on disk (for a new start take"
                f" another run.dir), tried:\n  {tried}"
            )
        return None

    def _load(self, source: Source, job_recovery: JobRecovery | None) -> None:
        if source.location != LOCAL_DISK:
            self._durable.resume(
                CheckpointRef(iteration=source.iteration, directory=source.location)
            )
            if job_recovery is not None:
                # only after the load: while the checkpoint is read, memory stays a
                # source for the next recovery
                job_recovery.drop_memory()
            return
        assert job_recovery is not None
        iteration = job_recovery.load_from_disk()
        if iteration != source.iteration:
            raise CheckpointLoadError(
                f"got the state after iteration {iteration}, wanted {source.iteration}"
            )


def _nothing_common(disks: OnDisks) -> str:
    found = ", ".join(
        f"rank {rank}: {newest}" for rank, newest in enumerate(disks.of_each)
    )
    wanted = "whole ones, of this run and layout, that lead all ranks to one iteration"
    return f"{LOCAL_DISK}: got snapshots up to iteration ({found}), wanted {wanted}"
