"""What the blobs of a rank's folder contain: snapshots, logged steps and gradients.

Owns: reading a folder of the own rank, or of another rank, whose process may change the
folder meanwhile. A blob that is damaged is left out. Must not: publish.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot.blob_keys import (
    BlobKey,
    is_gradients,
    is_record,
    is_snapshot,
    is_start,
)
from moe_ckpt.snapshot.blobs import Blob, BlobFolder
from moe_ckpt.snapshot.codec import Snapshot, header_from_json
from moe_ckpt.snapshot.step_codec import start_from_bytes, step_from_bytes
from moe_ckpt.snapshot.step_log import StepRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FolderContents:
    """The contents of a folder of blobs."""

    snapshots: tuple[Snapshot, ...]
    """Snapshots, in any order."""

    starts: Mapping[int, Mapping[str, torch.Tensor]]
    """Starts of iterations, by iteration; each maps names to tensors."""

    records: Mapping[int, StepRecord]
    """Records of iterations, by iteration."""

    gradients: tuple[Snapshot, ...] = ()
    """Entries of the gradient log, in any order."""


def read_snapshots(folder: BlobFolder) -> dict[str, Snapshot]:
    """Return a rank's snapshots with intact headers, by key.

    Another process may change the folder during the call.
    """
    found: dict[str, Snapshot] = {}
    for key in filter(is_snapshot, folder.keys()):
        with contextlib.suppress(CheckpointLoadError):
            blob = folder.get(key)
            if blob.payload is not None:
                found[key] = Snapshot(
                    header=header_from_json(blob.header), payload=blob.payload
                )
    return found


def read_units(folder: BlobFolder) -> dict[str, Snapshot]:
    """Return a rank's units of partial checkpoints by key, as `read_snapshots` does."""
    return {
        key: unit
        for key, unit in read_snapshots(folder).items()
        if unit.header.unit is not None
    }


def read_kept(folder: BlobFolder) -> FolderContents:
    """Return the intact contents of another rank's folder.

    Another process may change the folder during the call.
    """
    blobs: dict[str, Blob] = {}
    for key in folder.keys():  # noqa: SIM118 - not a mapping
        with contextlib.suppress(CheckpointLoadError):
            blobs[key] = folder.get(key)
    return contents_of(blobs)


def contents_of(blobs: Mapping[str, Blob]) -> FolderContents:
    """Return the intact contents of blobs, by key; damaged blobs are logged."""
    snapshots: list[Snapshot] = []
    starts: dict[int, Mapping[str, torch.Tensor]] = {}
    records: dict[int, StepRecord] = {}
    gradients: list[Snapshot] = []
    for key, blob in blobs.items():
        try:
            if is_snapshot(key) and blob.payload is not None:
                snapshots.append(
                    Snapshot(header=header_from_json(blob.header), payload=blob.payload)
                )
            elif is_gradients(key) and blob.payload is not None:
                gradients.append(
                    Snapshot(header=header_from_json(blob.header), payload=blob.payload)
                )
            elif is_start(key):
                iteration = BlobKey.parse(key).iteration
                starts[iteration] = start_from_bytes(blob.header)
            elif is_record(key):
                iteration = BlobKey.parse(key).iteration
                records[iteration], start = step_from_bytes(iteration, blob.header)
                if start:
                    # a start that was published alone is as new, or newer
                    starts.setdefault(iteration, start)
        except CheckpointLoadError as error:
            _log.warning("%s cannot be used: %s", key, error)
    return FolderContents(
        snapshots=tuple(snapshots),
        starts=starts,
        records=records,
        gradients=tuple(gradients),
    )
