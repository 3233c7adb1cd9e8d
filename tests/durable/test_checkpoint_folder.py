"""Checkpoint directories: committed checkpoints, removal, and detection of damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ckpt.durable.checkpoint_folder import (
    MARKER,
    CheckpointFolder,
    Manifest,
    commit,
    file_names,
    is_committed,
    read_manifest,
    remove_checkpoint,
    seal_files,
    verify_files,
)
from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.types import FileRecord
from tests.replication.blobs import largest_file
from tests.snapshot.samples import IDENTITY

CHUNK_BYTES = 1 << 20  # files are read in pieces of this size


def save(
    folder: CheckpointFolder, iteration: int, files: dict[str, bytes] | None = None
) -> Path:
    directory = write(folder, iteration, files)
    commit(directory, manifest_of(directory, iteration))
    return directory


def write(
    folder: CheckpointFolder, iteration: int, files: dict[str, bytes] | None = None
) -> Path:
    directory = folder.prepare(iteration)
    for name, content in (
        files or {"a.distcp": b"weights", "sub/b.distcp": b"moments"}
    ).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def manifest_of(directory: Path, iteration: int) -> Manifest:
    files = seal_files(directory, file_names(directory))
    return Manifest(iteration=iteration, identity=IDENTITY, files=tuple(files))


def iterations_of(folder: CheckpointFolder) -> tuple[list[int], list[int]]:
    return [ref.iteration for ref in folder.committed()], [
        ref.iteration for ref in folder.torn()
    ]


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path)


@pytest.fixture
def saved(folder: CheckpointFolder) -> Path:
    """Return the directory of a committed checkpoint of iteration 1."""
    return save(folder, 1)


def test_a_checkpoint_counts_from_its_marker_on(folder: CheckpointFolder) -> None:
    directory = write(folder, 5)
    manifest = manifest_of(directory, 5)
    assert (is_committed(directory), iterations_of(folder)) == (False, ([], [5]))
    with pytest.raises(
        CheckpointLoadError, match=rf"{directory}: no readable {MARKER} \(No such file"
    ):
        read_manifest(directory)
    with largest_file(10), pytest.raises(OSError, match="File too large"):
        commit(directory, manifest)
    assert iterations_of(folder) == ([], [5])
    commit(directory, manifest)
    assert (is_committed(directory), iterations_of(folder)) == (True, ([5], []))
    assert read_manifest(directory) == manifest
    assert manifest.size_bytes == len(b"weights") + len(b"moments")
    present = {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file()
    }
    assert present == {"a.distcp", "sub/b.distcp", MARKER}
    assert (
        file_names(directory)
        == [file.name for file in manifest.files]
        == ["a.distcp", "sub/b.distcp"]
    )


def test_the_checksum_is_crc32(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"123456789")
    # the check value of CRC-32
    assert seal_files(tmp_path, ["f"]) == [
        FileRecord(name="f", size_bytes=9, crc32=0xCBF43926)
    ]


def test_all_is_on_the_disk_before_the_marker_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(fd: int) -> None:
        steps.append(
            f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).relative_to(tmp_path)}"
        )
        fsync(fd)

    def noting_rename(source: Path, target: Path) -> None:
        steps.append(f"marker {target.relative_to(tmp_path)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    directory = save(CheckpointFolder(tmp_path), 1).relative_to(tmp_path)
    at = steps.index(f"marker {directory / MARKER}")
    before = {
        f"sync {directory / name}"
        for name in ("a.distcp", "sub/b.distcp", "COMMITTED.tmp")
    }
    assert set(steps[:at]) == before | {f"sync {directory}"}
    assert steps[at - 1] == f"sync {directory}", "the names, after what they stand for"
    assert steps[at + 1 :] == [f"sync {directory}", "sync ."]


def test_checkpoints_are_listed_newest_first(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    for iteration in (9, 12345678, 100):
        save(folder, iteration)
    for iteration in (8, 99999999, 200):
        write(folder, iteration)
    (tmp_path / "iter_0000007").write_text("not a directory")
    assert iterations_of(folder) == ([12345678, 100, 9], [99999999, 200, 8])
    assert folder.committed()[-1].directory == str(tmp_path / "iter_0000009")
    assert iterations_of(CheckpointFolder(tmp_path / "missing")) == ([], [])


def test_prepare_leaves_an_empty_torn_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    for make in (lambda _: None, lambda iteration: write(folder, iteration)):
        make(3)
        directory = folder.prepare(3)
        assert directory == tmp_path / "run" / "checkpoints" / "iter_0000003"
        assert (list(directory.iterdir()), iterations_of(folder)) == ([], ([], [3]))
    remove_checkpoint(save(folder, 3))
    assert not directory.exists()


def test_an_iteration_keeps_its_checkpoint_until_it_is_saved_again(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    save(folder, 2)
    save(folder, 3)
    for _ in range(2):  # the second time after a torn save
        folder.prepare(3)
        assert iterations_of(folder) == ([3, 2], [3])
        assert folder.committed()[0].directory == str(tmp_path / "iter_0000003.before")
        write(folder, 3)
    folder.keep_newest(1, up_to=3)
    assert iterations_of(folder) == ([3], [3]), "the only one of iteration 3"
    save(folder, 3)
    assert [ref.directory for ref in folder.committed()] == [
        str(tmp_path / name) for name in ("iter_0000003", "iter_0000003.before")
    ]
    folder.prepare(3)
    save(folder, 3)
    folder.keep_newest(2, up_to=3)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000003"]


def test_foreign_files_are_ignored_and_survive(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for iteration in (1, 2, 3):
        save(folder, iteration)
    theirs = ["iter_12", "iter_0000001.bak", "my_iter_0000001", "iter_latest"]
    for name in theirs:
        (tmp_path / name).mkdir()
        (tmp_path / name / MARKER).write_text("{}")
    (tmp_path / "notes.txt").touch()

    assert iterations_of(folder) == ([3, 2, 1], [])
    folder.keep_newest(1, up_to=10_000_000)
    folder.prepare(2)
    assert {path.name for path in tmp_path.iterdir()} == {
        *theirs,
        "notes.txt",
        "iter_0000002",
        "iter_0000003",
    }
    assert all((tmp_path / name / MARKER).read_text() == "{}" for name in theirs)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "No such file": lambda path: path.unlink(),
    "got 6 bytes .* wanted 7 bytes": lambda path: path.write_bytes(
        path.read_bytes()[:-1]
    ),
    "got 8 bytes .* wanted 7 bytes": lambda path: path.write_bytes(
        path.read_bytes() + b"\0"
    ),
    "Is a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_a_damaged_file_is_named(saved: Path, says: str) -> None:
    path = saved / "sub" / "b.distcp"
    DAMAGES[says](path)
    with pytest.raises(CheckpointLoadError, match=rf"{path}: .*{says}"):
        verify_files(saved, read_manifest(saved).files)


@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_one_flipped_bit_at_any_position_is_found(
    tmp_path: Path, position: int
) -> None:
    size_bytes = 2 * CHUNK_BYTES + 1
    directory = save(
        CheckpointFolder(tmp_path), 1, {"good": b"good", "bad": b"x" * size_bytes}
    )
    content = bytearray((directory / "bad").read_bytes())
    content[position] ^= 1 << position % 8
    (directory / "bad").write_bytes(content)
    with pytest.raises(
        CheckpointLoadError,
        match=rf"{directory}/bad: got {size_bytes} bytes with CRC-32",
    ):
        verify_files(directory, read_manifest(directory).files)


def assert_refused(directory: Path, marker: bytes, reason: str = "") -> None:
    (directory / MARKER).write_bytes(marker)
    with pytest.raises(
        CheckpointLoadError,
        match=f"{directory}/{MARKER}: not a commit marker.*{reason}",
    ):
        read_manifest(directory)


def test_a_marker_truncated_anywhere_is_refused(saved: Path) -> None:
    content = (saved / MARKER).read_bytes()
    for length in range(len(content)):
        assert_refused(saved, content[:length])


@pytest.mark.parametrize(
    "content",
    [b"COMMITTED", b"\xff\xfe", b"\0" * 100, b"[]", b"null", b"3", b'"x"', b"{}"],
)
def test_a_marker_that_is_something_else_is_refused(
    saved: Path, content: bytes
) -> None:
    assert_refused(saved, content)


RECORD = {"name": "a.distcp", "size_bytes": 7, "crc32": 1}
RUN = {"run_id": "r", "model": "m"}
LAYOUT = {"pp": 1, "dp": 1, "ep": 1, "tp": 1}
WRONG: dict[str, list[object]] = {
    "iteration": ["fifty", 1.5, float("inf")],
    "identity": [
        None,
        RUN,
        {**RUN, "layout": {"pp": 1}},
        {**RUN, "layout": {**LAYOUT, "cp": 1}},
    ],
    "files": [
        None,
        {},
        "a.distcp",
        ["a.distcp"],
        [{"name": "a.distcp", "size_bytes": 7}],
        [{**RECORD, "mode": 644}],
    ],
}
WRONG["files"] += [
    [{**RECORD, **wrong}]
    for wrong in ({"name": 3}, {"size_bytes": "7"}, {"crc32": "cbf43926"})
]


@pytest.mark.parametrize("field", WRONG)
def test_a_marker_with_a_wrong_field_is_refused(saved: Path, field: str) -> None:
    content = json.loads((saved / MARKER).read_text())
    for value in WRONG[field]:
        assert_refused(saved, json.dumps({**content, field: value}).encode())
    del content[field]
    assert_refused(saved, json.dumps(content).encode(), field)
