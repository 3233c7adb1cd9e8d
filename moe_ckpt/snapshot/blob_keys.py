"""Keys of the blobs that a rank publishes: what each key says. Pure.

Owns: the form of the keys. A key is the name of a file, and of a copy on peers and
disks, so each key is plain text; other modules ask this module what a text means.

    snapshot-START-SLOT-ID   a snapshot of a window that starts at iteration START
    local-START-SLOT-ID      a unit of a partial checkpoint that peers do not keep
    start-ITERATION          the state that an iteration starts from, without a record
    step-ITERATION           the record of an iteration, with the start
    record-ITERATION         the record of an iteration, in windows of older versions
    gradients-ITERATION      the gradients with which an iteration took its step
    update-KEY               what makes the copy KEY out of the copy before
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from moe_ckpt.errors import CheckpointLoadError


class BlobKind(StrEnum):
    """The kind of a blob: the first word of the key."""

    SNAPSHOT = "snapshot"
    LOCAL = "local"
    START = "start"
    STEP = "step"
    OLDER_STEP = "record"
    GRADIENTS = "gradients"
    UPDATE = "update"


_SNAPSHOTS = (BlobKind.SNAPSHOT, BlobKind.LOCAL)
_STEPS = (BlobKind.START, BlobKind.STEP)
_RECORDS = (BlobKind.STEP, BlobKind.OLDER_STEP)
_KINDS = {str(kind): kind for kind in BlobKind}
_FORM = re.compile(
    r"(?P<kind>snapshot|local)-(?P<start>[0-9]+)-(?P<slot>[0-9]+)-[^-]+"
    r"|(?P<kind_of_step>start|step|record|gradients)-(?P<iteration>[0-9]+)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobKey:
    """The meaning of a key of a snapshot, a step or gradients.

    Example:
        >>> BlobKey.parse("snapshot-8-2-1f03a7c2").newest_iteration
        10
    """

    kind: BlobKind
    """Kind of the blob."""

    iteration: int
    """Start of a snapshot's window; the iteration of any other blob."""

    slot: int = 0
    """Slot of a snapshot, from 0; 0 for any other blob."""

    @classmethod
    def parse(cls, text: str) -> BlobKey:
        """Return the meaning of a key.

        Raises:
            CheckpointLoadError: The key is none of a snapshot, a step or gradients.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            wanted = (
                "snapshot-START-SLOT-ID, local-START-SLOT-ID, start-ITERATION,"
                " step-ITERATION or gradients-ITERATION"
            )
            raise CheckpointLoadError(f"key of a blob: got {text!r}, wanted {wanted}")
        if found["kind"]:
            return cls(
                kind=BlobKind(found["kind"]),
                iteration=int(found["start"]),
                slot=int(found["slot"]),
            )
        return cls(
            kind=BlobKind(found["kind_of_step"]), iteration=int(found["iteration"])
        )

    @property
    def newest_iteration(self) -> int:
        """The iteration after which the blob was taken."""
        return self.iteration + self.slot

    def belongs_to(self, window_start: int) -> bool:
        """Return whether the blob belongs to a window, or follows the window's start.

        Args:
            window_start: Start of the window.
        """
        if self.kind is BlobKind.SNAPSHOT:
            return self.iteration == window_start
        return self.iteration > window_start


def new_snapshot_key(window_start: int, slot: int, *, is_local: bool = False) -> str:
    """Return a key that no other snapshot has.

    After a rollback a rank takes the same slot again, and peers may still hold the
    earlier snapshot: the last part of the key is random.

    Args:
        window_start: Start of the window.
        slot: Slot within the window.
        is_local: Whether peers do not keep the snapshot.
    """
    kind = BlobKind.LOCAL if is_local else BlobKind.SNAPSHOT
    return f"{kind}-{window_start}-{slot}-{secrets.token_hex(4)}"


def start_key(iteration: int) -> str:
    """Return the key of the state that an iteration starts from, without a record."""
    return f"{BlobKind.START}-{iteration}"


def step_key(iteration: int) -> str:
    """Return the key of the record of an iteration."""
    return f"{BlobKind.STEP}-{iteration}"


def older_step_key(iteration: int) -> str:
    """Return the key of the record of an iteration, in windows of older versions."""
    return f"{BlobKind.OLDER_STEP}-{iteration}"


def gradients_key(iteration: int) -> str:
    """Return the key of the gradients of an iteration."""
    return f"{BlobKind.GRADIENTS}-{iteration}"


def update_key(target: str) -> str:
    """Return the key of the update that makes the copy with key `target`."""
    return f"{BlobKind.UPDATE}-{target}"


def kind_of(key: str) -> BlobKind | None:
    """Return the kind of a key by its first word; None for a key of another kind."""
    return _KINDS.get(key.partition("-")[0])


def is_snapshot(key: str) -> bool:
    """Return whether a key is that of a snapshot, copied to peers or not."""
    return kind_of(key) in _SNAPSHOTS


def is_local(key: str) -> bool:
    """Return whether a key is that of a unit that peers do not keep."""
    return kind_of(key) is BlobKind.LOCAL


def is_start(key: str) -> bool:
    """Return whether a key is that of a start without a record."""
    return kind_of(key) is BlobKind.START


def is_step(key: str) -> bool:
    """Return whether a key is that of the start or the step of an iteration."""
    return kind_of(key) in _STEPS


def is_record(key: str) -> bool:
    """Return whether a key is that of the record of an iteration."""
    return kind_of(key) in _RECORDS


def is_gradients(key: str) -> bool:
    """Return whether a key is that of the gradients of an iteration."""
    return kind_of(key) is BlobKind.GRADIENTS


def is_update(key: str) -> bool:
    """Return whether a key is that of an update."""
    return kind_of(key) is BlobKind.UPDATE


def belongs_to(key: str, window_start: int) -> bool:
    """Return `BlobKey.belongs_to` of a key.

    Raises:
        CheckpointLoadError: The key is none of a snapshot, a step or gradients.
    """
    return BlobKey.parse(key).belongs_to(window_start)


def newest_snapshot(keys: Iterable[str]) -> int | None:
    """Return the newest iteration of any snapshot; None without a snapshot.

    Snapshots of incomplete windows count, too.

    Raises:
        CheckpointLoadError: A key begins as a snapshot's key does, and has no
            iteration.
    """
    snapshots = (BlobKey.parse(key) for key in keys if is_snapshot(key))
    return max((key.newest_iteration for key in snapshots), default=None)
