"""The survey of each rank's memory and of peers' copies, as a generation starts.

Copies do not change until the survey ends. Owns: one survey with all ranks. Must not:
decide which copies a recovery uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_ckpt.collectives import gather_results
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.computed_snapshots import SnapshotSource
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.step_state import StepState
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.target import Standing, Target, plan_target
from moe_ckpt.snapshot.blob_keys import is_record, newest_snapshot
from moe_ckpt.snapshot.blobs import BlobFolder, held_paths
from moe_ckpt.types import ReadyGradients

_Found = tuple[
    tuple[int, int | None, bool, bool, int],
    bool,
    dict[int, frozenset[str]],
    dict[int, ReadyGradients],
]
"""The report of a rank: the rank's standing, whether the rank has progress, the keys of
copies in the rank's memory by owner, and the rank's gradients.

The report has no class names, which would be most of the bytes of a small report.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProgress:
    """The progress of all ranks as a generation starts."""

    target: Target | None
    """The iteration to recover. None: no rank has state."""

    has_left_start: bool
    """Whether the memory or the state of any rank is beyond the start of the run."""

    gradients: Mapping[int, ReadyGradients]
    """Facts of the step that all ranks share, by iteration, for each iteration that any
    rank has logged.
    """


class CopySurvey:
    """One rank's view of the snapshots of all ranks."""

    def __init__(
        self, parts: RankParts, elastic: ElasticContext, computed: SnapshotSource
    ) -> None:
        self._position = parts.adapter.position
        self._memory = parts.memory
        self._elastic = elastic
        self._computed = computed
        self._held: Mapping[int, frozenset[str]] = {}
        self._has_dropped_all = False
        self.listed: Mapping[int, frozenset[str]] = {}
        """Keys of this rank's computed snapshots on other machines, by holder."""

    def stop_copying(self, state: StepState) -> JobProgress:
        """Stop changes of copies, and list the copies of this rank's blobs. Collective.

        Copies in all ranks' memory stay as they are until `resume_copying`.

        Args:
            state: The progress of this rank's training state.

        Returns:
            The progress of all ranks.

        Raises:
            CheckpointLoadError: The memory of a rank cannot be read. Raised on all
                ranks.
        """
        if self._memory.publisher:
            # first: a new blob could replace a copy that is the last source
            self._memory.publisher.stop_copying()
        self.listed = self._computed.list()
        found = gather_results(
            self._position.ranks, lambda: self._find(state), CheckpointLoadError
        )
        mine = self._position.shard.global_rank
        in_ranks = {
            rank: held.get(mine, frozenset())
            for rank, (_, _, held, _) in enumerate(found)
        }
        self._held = {**in_ranks, **self.listed}
        standings = [
            Standing(
                stage=stage,
                reached=reached,
                prepared=prepared,
                whole=whole,
                branch=branch,
            )
            for (stage, reached, prepared, whole, branch), *_ in found
        ]
        return JobProgress(
            target=plan_target(standings),
            has_left_start=any(has_progress for _, has_progress, _, _ in found),
            gradients={
                iteration: facts
                for *_, gradients in found
                for iteration, facts in gradients.items()
            },
        )

    def resume_copying(self) -> None:
        """Send this rank's blobs to peers again.

        After `drop_all`, holders drop the blobs that they have: a survey would mistake
        abandoned states for the newest.
        """
        publisher, dropped = self._memory.publisher, self._has_dropped_all
        self._has_dropped_all = False
        self._computed.drop_strays()
        if publisher:
            # a rank without windows lets peers keep the rank's blobs, which may be the
            # last source
            publisher.begin_copying(
                self.held_for_me(),
                drop_stale=dropped or bool(self._memory.snapshots.windows()),
            )
        if dropped:
            # a load may bring the same blobs back before the next survey
            self._held = {}

    def drop_all(self) -> None:
        """Empty the memory. Peers keep their copies until `resume_copying`."""
        self._has_dropped_all = True
        publisher = self._memory.publisher
        if publisher is None:
            self._memory.clear()
            return
        # first: a fault before copying resumes then still finds the copies of peers
        publisher.stop_copying()
        publisher.replace(lambda _: 0, self._memory.clear)

    def held_for_me(self) -> list[frozenset[str]]:
        """Return the keys of this rank's blobs that each peer reported."""
        return [
            self._held.get(holder, frozenset())
            for holder in self._elastic.holders.numbers
        ]

    def _find(self, state: StepState) -> _Found:
        paths = held_paths(self._elastic.memory)
        held = {
            owner: frozenset(BlobFolder(path).keys()) for owner, path in paths.items()
        }
        windows, gradients = (
            self._memory.snapshots.windows(),
            dict(self._memory.steps.gradients),
        )
        # a snapshot of iteration 0 is no progress: each run takes this base before
        # training
        has_progress = (
            state.torn
            or bool(gradients)
            or any(window.start for window in windows)
            or any(
                any(map(is_record, keys)) or newest_snapshot(keys)
                for keys in (*held.values(), *self.listed.values())
            )
        )
        standing = (
            self._position.stage,
            state.reached,
            state.gradients is not None,
            state.whole,
            state.branch or 0,
        )
        return standing, has_progress, held, gradients
