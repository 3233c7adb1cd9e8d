"""Damage to what ranks keep in memory or on disk: bits that flip, and headers of other runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moe_ckpt.store.codec import SnapshotHeader, header_from_json, header_to_json
from moe_ckpt.store.entry import entry_from_bytes, entry_to_bytes


def flip_a_bit(folder: Path) -> None:
    """Flip the first bit of every buffer of a blob folder."""
    buffers = list((folder / "buffers").iterdir())
    assert buffers, folder
    for buffer in buffers:
        with buffer.open("r+b") as file:
            first = file.read(1)[0]
            file.seek(0)
            file.write(bytes([first ^ 1]))


def rewrite_headers(folder: Path, change: Callable[[SnapshotHeader], SnapshotHeader]) -> None:
    """Change the headers of all snapshots in a blob folder; entries and headers keep checksums that match."""
    paths = list((folder / "index").glob("snapshot*.blob"))
    assert paths, folder
    for path in paths:
        entry = entry_from_bytes(path.stem, path.read_bytes())
        header = header_to_json(change(header_from_json(entry.header)))
        path.write_bytes(entry_to_bytes(replace(entry, header=header)))
