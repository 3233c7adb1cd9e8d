"""The interfaces to processes that compute a rank's snapshots from its gradients.

`moe_ckpt.flowcheck` implements the interfaces with checkpoint servers. Owns: the two
Protocols, and their implementations for jobs without such processes. Must not: know how
gradients travel, or where snapshots are computed.

    GradientSink      the in-memory tier gives the sink each iteration's gradients, in
                      place of a snapshot
    SnapshotSource    a recovery lists and fetches the computed snapshots
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.capture import SnapshotRequest
from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.types import ReadyGradients


class GradientSink(Protocol):
    """Receives a rank's gradients. All methods but
    `hand_over` and `ranks_were_lost` are collective."""

    goes_on: bool
    """Whether the sink has all gradients so far, on all ranks. False: the next state is
    a whole snapshot.
    """

    def ready(self, iteration: int, gradients: ReadyGradients) -> None:
        """Receive the complete gradients of an iteration, before the step."""
        ...

    def hand_over(self, wanted: SnapshotRequest, base: Snapshot | None) -> None:
        """Let the state after the step be computed.

        Args:
            wanted: The state after the step.
            base: The whole snapshot with which a series of states begins.
        """
        ...

    def adopt(self, iteration: int) -> bool:
        """Begin with snapshots of `iteration` that all ranks have restored.

        Returns:
            Whether the sink begins with these snapshots, so that none is taken.
        """
        ...

    def begin_with_snapshot(self) -> None:
        """Begin with the whole snapshot that every rank is about to take."""
        ...

    def ranks_were_lost(self) -> None:
        """Forget the progress of the sink after ranks were lost."""
        ...


class SnapshotSource(Protocol):
    """Computed snapshots of one rank, on this machine and on others.

    A recovery reads the snapshots in `near`. Snapshots on other machines are listed
    first; then the snapshot that all ranks need is fetched to `near`.
    """

    @property
    def near(self) -> BlobFolder | None:
        """The folder on this machine. None: no snapshots are computed in this job."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether the snapshots are on other machines. Equal on all ranks."""
        ...

    def list(self) -> Mapping[int, frozenset[str]]:
        """Return the keys of this rank's snapshots on other machines, by holder.

        Called once all ranks have stopped. Waits until no further snapshot appears.
        """
        ...

    def fetch(self, holder: int, keys: Sequence[str]) -> int:
        """Fetch snapshots from a holder to `near`, which is cleared first.

        Returns:
            The fetched bytes.

        Raises:
            CheckpointLoadError: The holder does not answer in time, or lacks a key.
        """
        ...

    def free_fetched(self) -> None:
        """Free the memory of fetched snapshots, which this rank has loaded by now."""
        ...

    def drop_strays(self) -> None:
        """Drop the listed snapshots that no holder of this rank keeps up to date.

        All ranks may abandon these states later.
        """
        ...


class NoSink:
    """Implements `GradientSink` for jobs in which every state is a snapshot."""

    goes_on = False

    def ready(self, iteration: int, gradients: ReadyGradients) -> None:
        """Do nothing."""

    def hand_over(self, wanted: SnapshotRequest, base: Snapshot | None) -> None:
        raise AssertionError(f"{wanted.header}: no process computes it of {base}")

    def adopt(self, iteration: int) -> bool:  # noqa: ARG002
        return False

    def begin_with_snapshot(self) -> None:
        """Do nothing."""

    def ranks_were_lost(self) -> None:
        """Do nothing."""


class NoSource:
    """Implements `SnapshotSource` for jobs in which workers take all snapshots."""

    near = None
    is_remote = False

    def list(self) -> Mapping[int, frozenset[str]]:
        return {}

    def fetch(self, holder: int, keys: Sequence[str]) -> int:
        raise AssertionError(f"holder {holder} has no computed snapshots: {keys}")

    def free_fetched(self) -> None:
        """Do nothing."""

    def drop_strays(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComputedSnapshots:
    """The computed snapshots of a job, behind the two interfaces."""

    sink: Callable[[RankParts, ElasticContext], GradientSink]
    """Makes a rank's sink for one generation."""

    source: Callable[[RankParts, ElasticContext], SnapshotSource]
    """Makes a rank's source for one generation."""

    notes: Sequence[str] = ()
    """Lines for the log at the start."""


NOTHING_COMPUTED = ComputedSnapshots(
    sink=lambda _parts, _elastic: NoSink(), source=lambda _parts, _elastic: NoSource()
)
"""Workers take all snapshots."""
