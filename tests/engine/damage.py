"""Damage to snapshots in memory or on disk, and copies and writes that fail.

The damage is a flipped bit, a missing snapshot, or a header such as another run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.local_disk import LocalDisk
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.codec import SnapshotHeader, header_from_json, header_to_json
from moe_ckpt.snapshot.index_entry import entry_from_bytes, entry_to_bytes
from moe_ckpt.types import CORE
from tests.harness.threads.model import Model

Choice = Callable[[SnapshotHeader], bool]


def flip_a_bit(folder: Path) -> None:
    """Flip a bit in the first byte of every buffer of a blob folder."""
    buffers = list((folder / "buffers").iterdir())
    assert buffers, folder
    for buffer in buffers:
        with buffer.open("r+b") as file:
            first = file.read(1)[0]
            file.seek(0)
            file.write(bytes([first ^ 1]))


def rewrite_headers(
    folder: Path, change: Callable[[SnapshotHeader], SnapshotHeader]
) -> None:
    """Change the headers of all snapshots in a blob folder.

    Entries and headers get checksums that match.
    """
    paths = list((folder / "index").glob("snapshot*.blob"))
    assert paths, folder
    for path in paths:
        entry = entry_from_bytes(path.stem, path.read_bytes())
        header = header_to_json(change(header_from_json(entry.header)))
        path.write_bytes(entry_to_bytes(replace(entry, header=header)))


def is_unit(name: str, iteration: int | None = None) -> Choice:
    return lambda header: (
        header.unit is not None
        and header.unit.name == name
        and iteration in (None, header.iteration)
    )


def is_expert_at(iteration: int) -> Choice:
    """Choose the experts that a partial snapshot of this iteration took."""
    return lambda header: (
        header.unit is not None
        and header.unit.name != CORE
        and header.iteration == iteration
    )


def snapshots_in(
    path: Path, is_chosen: Choice = lambda _: True
) -> dict[str, SnapshotHeader]:
    folder = BlobFolder(path)
    # not a mapping
    blobs = {key: folder.get(key) for key in folder.keys()}  # noqa: SIM118
    headers = {
        key: header_from_json(blob.header)
        for key, blob in blobs.items()
        if blob.payload is not None
    }
    return {key: header for key, header in headers.items() if is_chosen(header)}


def drop_snapshots(path: Path, is_chosen: Choice) -> None:
    """Remove the chosen snapshots from a blob folder.

    At least one snapshot must be chosen.
    """
    chosen = snapshots_in(path, is_chosen)
    assert chosen, f"nothing to drop in {path}"
    for key in chosen:
        BlobFolder(path).discard(key)


def flip_a_bit_of(path: Path, is_chosen: Choice) -> None:
    """Flip a bit in the payload of each chosen snapshot of a blob folder.

    At least one snapshot must be chosen.
    """
    chosen = snapshots_in(path, is_chosen)
    assert chosen, f"nothing to damage in {path}"
    for key in chosen:
        payload = BlobFolder(path).get(key).payload
        assert payload is not None
        payload[0] ^= 1


def let_copies_fail(model: Model, first: int, last: int) -> None:
    """Let the copies of snapshots `first` to `last` of a model fail.

    Snapshots are counted from 1. Snapshot 1 is the initial snapshot of everything.
    """
    take, num_taken = model.pieces, 0

    def pieces(*arguments: Any) -> Any:
        nonlocal num_taken
        num_taken += 1
        if first <= num_taken <= last:
            raise RuntimeError("out of memory")
        return take(*arguments)

    model.pieces = pieces  # type: ignore[method-assign]


def answer_copies(
    client: DaemonClient | None,
    is_chosen: Callable[[str], bool],
    answer: Callable[[], Future[Any]],
) -> None:
    """Let `answer` stand in for the daemon's copies of a worker's chosen blobs.

    The daemon copies all other blobs.

    Args:
        client: The worker's client of the daemon.
        is_chosen: Chooses blobs by their keys. One chosen key chooses the whole copy.
        answer: Returns the future of a chosen copy.
    """
    assert client is not None
    copy = client.copy

    def copy_others(keys: Sequence[str]) -> Future[Any]:
        return answer() if any(map(is_chosen, keys)) else copy(keys)

    client.copy = copy_others  # type: ignore[method-assign]


def let_writes_fail(disk: LocalDisk, fails: Callable[[int], bool]) -> None:
    """Let chosen writes to a local disk fail.

    Args:
        disk: The local disk.
        fails: Whether a write fails, by the number of the write, from 1. Calls without
            keys are not counted.
    """
    write, num_writes = disk.persist, 0

    def persist(keys: Sequence[str], stale: Sequence[str]) -> Future[None]:
        nonlocal num_writes
        num_writes += bool(keys)
        if not keys or not fails(num_writes):
            return write(keys, stale)
        failed = Future[None]()
        failed.set_exception(CheckpointSaveError("no room"))
        return failed

    disk.persist = persist  # type: ignore[method-assign]
