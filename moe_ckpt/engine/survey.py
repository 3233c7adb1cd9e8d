"""The survey of each rank's memory and of peers' copies, as a generation starts.

Copies do not change until the survey ends. Owns: one survey with all ranks. Must not:
decide which copies a recovery uses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from moe_ckpt.collectives import gather_results
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.engine.step_state import StepState
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.recovery.target import Standing, Target, plan_target
from moe_ckpt.replication.fetch import clear_held, list_held
from moe_ckpt.snapshot.blob_keys import is_record, newest_snapshot
from moe_ckpt.snapshot.blobs import BlobFolder, held_paths
from moe_ckpt.types import ReadyGradients

_log = logging.getLogger(__name__)
_Found = tuple[
    tuple[int, int | None, bool, bool],
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

    def __init__(self, parts: RankParts, elastic: ElasticContext) -> None:
        self._place = parts.adapter.place
        self._memory = parts.memory
        self._elastic = elastic
        self._held: Mapping[int, frozenset[str]] = {}
        self._has_dropped_all = False
        self.on_hosts: Mapping[int, frozenset[str]] = {}
        """Keys of this rank's blobs on servers of other hosts, by the number of the
        server among holders.
        """

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
        self._flush()
        self.on_hosts = self._list_hosts()
        found = gather_results(
            self._place.ranks, lambda: self._find(state), CheckpointLoadError
        )
        mine = self._place.shard.global_rank
        in_ranks = {
            rank: held.get(mine, frozenset())
            for rank, (_, _, held, _) in enumerate(found)
        }
        self._held = {**in_ranks, **self.on_hosts}
        standings = [
            Standing(stage=stage, reached=reached, prepared=prepared, whole=whole)
            for (stage, reached, prepared, whole), *_ in found
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

        After `drop_all`, peers and servers drop the blobs that they hold: a survey
        would mistake abandoned states for the newest.
        """
        publisher, dropped = self._memory.publisher, self._has_dropped_all
        self._has_dropped_all = False
        self._clear_other_hosts()
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
        return [self._held.get(holder, frozenset()) for holder in self._elastic.holders]

    def _list_hosts(self) -> dict[int, frozenset[str]]:
        """Return this rank's keys on all servers of other hosts.

        The result includes servers that no longer hold this rank's states.
        """
        found: dict[int, frozenset[str]] = {}
        elastic, mine = self._elastic, self._place.shard.global_rank
        for holder in elastic.servers_on_hosts:
            try:
                keys = list_held(
                    elastic.address(holder),
                    elastic.ticket,
                    mine,
                    timeout_s=elastic.copy_s,
                )
                found[holder] = frozenset(keys)
            except CheckpointLoadError as error:
                _log.warning("a server has no states for this recovery: %s", error)
        return found

    def _clear_other_hosts(self) -> None:
        """Let servers that are not holders of this rank drop the rank's older states.

        All ranks may abandon these states later.
        """
        elastic, mine = self._elastic, self._place.shard.global_rank
        for holder in [
            holder
            for holder, keys in self.on_hosts.items()
            if keys and holder not in elastic.holders
        ]:
            try:
                clear_held(
                    elastic.address(holder),
                    elastic.ticket,
                    mine,
                    timeout_s=elastic.copy_s,
                )
            except CheckpointLoadError as error:
                # an unreachable server is not used any more after the next fault
                _log.warning("older states stay: %s", error)

    def _flush(self) -> None:
        """Wait until servers have computed all states.

        A state that is computed later would miss the survey and never be dropped.
        """
        daemon = self._elastic.daemon
        if daemon is None or not self._elastic.serves_itself:
            return
        self._elastic.page.wait_for_copies(True)
        try:
            # a request without keys is done once all earlier requests are done
            daemon.copy([]).result(self._elastic.copy_s)
        except (CheckpointSaveError, TimeoutError) as error:
            _log.warning(
                "servers may make further states during the survey: %s",
                error or "no answer in time",
            )
        finally:
            self._elastic.page.wait_for_copies(False)

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
                for keys in (*held.values(), *self.on_hosts.values())
            )
        )
        standing = (
            self._place.stage,
            state.reached,
            state.gradients is not None,
            state.whole,
        )
        return standing, has_progress, held, gradients
