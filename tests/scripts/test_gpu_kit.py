"""Parts of scripts/gpu that can be shown without a GPU.

Covers the arithmetic, the files, and that no step stops another step.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.turns import Block, iteration_s_of
from scripts.gpu.fetch_source import fetch_source
from scripts.gpu.thin_fatbin import describe, thin

ROOT = Path(__file__).resolve().parents[2]
PTX, ELF = 1, 2


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Return a fatbin, in the layout of CUDA's compilers.

    Args:
        entries: Kind, architecture and payload of each entry.
    """
    body = b""
    for kind, architecture, payload in entries:
        head = bytearray(64)
        struct.pack_into("<HHI", head, 0, kind, 0, len(head))
        struct.pack_into("<Q", head, 8, len(payload))
        struct.pack_into("<I", head, 28, architecture)
        body += bytes(head) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_thinned_library_keeps_the_code_of_its_gpu_and_its_length(
    tmp_path: Path,
) -> None:
    library = tmp_path / "lib.so"
    kept, dropped, text = b"K" * 100, b"D" * 300, b"P" * 50
    content = (
        b"before"
        + fatbin((ELF, 80, dropped), (ELF, 90, kept), (PTX, 90, text))
        + b"after"
    )
    not_a_header = struct.pack("<I", 0xBA55ED50) + b"\xff" * 12
    library.write_bytes(content + not_a_header)
    assert thin(library, [90]) == len(dropped) + len(text)
    wanted = content.replace(dropped, bytes(len(dropped))).replace(
        text, bytes(len(text))
    )
    assert library.read_bytes() == wanted + not_a_header
    lines = [
        "ptx sm_90: 1 entries, 0.0 MiB",
        "elf sm_80: 1 entries, 0.0 MiB",
        "elf sm_90: 1 entries, 0.0 MiB",
    ]
    assert describe(library) == lines
    with pytest.raises(
        ValueError, match=r"architectures: got \[100\], wanted some of \[80, 90\]"
    ):
        thin(library, [100])


class _Index(http.server.BaseHTTPRequestHandler):
    """An index of packages with one project of two releases.

    The digest of the second release is wrong.
    """

    def do_GET(self) -> None:
        content = b"source"
        if self.path == "/simple/some-project/":
            assert self.headers["Accept"] == "application/vnd.pypi.simple.v1+json"
            files = [
                {
                    "filename": f"some_project-{version}.tar.gz",
                    "url": "/file",
                    "hashes": {"sha256": digest},
                }
                for version, digest in (
                    ("1.0", hashlib.sha256(content).hexdigest()),
                    ("2.0", "0" * 64),
                )
            ]
            content = json.dumps({"files": files}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def test_a_source_release_is_fetched_as_its_index_describes_it(
    index: str, tmp_path: Path
) -> None:
    fetched = fetch_source("some-project", "1.0", tmp_path, index)
    assert (fetched.name, fetched.read_bytes()) == (
        "some_project-1.0.tar.gz",
        b"source",
    )
    with pytest.raises(
        ValueError,
        match=r"some_project-2\.0\.tar\.gz: got a file of SHA-256 41cf6794ba4200b8",
    ):
        fetch_source("some-project", "2.0", tmp_path, index)
    with pytest.raises(
        ValueError, match=r"got 2 files, wanted some_project-3\.0\.tar\.gz among them"
    ):
        fetch_source("some-project", "3.0", tmp_path, index)
    assert [path.name for path in tmp_path.iterdir()] == ["some_project-1.0.tar.gz"]


def test_iterations_count_where_they_lie_wholly_in_a_block() -> None:
    blocks = [
        Block(round_number=number, from_unix_s=from_s, to_unix_s=to_s)
        for number, from_s, to_s in ((0, 10.0, 20.0), (1, 30.0, 33.0), (2, 40.0, 50.0))
    ]
    commits = [9.0, 11.0, 13.0, 16.0, 31.0, 32.5, 41.0, 42.0, 43.0, 51.0]
    assert iteration_s_of(commits, blocks) == {0: 2.5, 2: 1.0}, (
        "neither 9 to 11, nor 16 to 31, nor one of a block alone"
    )


@pytest.mark.full
def test_ranks_of_the_probe_meet_measure_and_lose_one() -> None:
    # processes: the probe shows how the death of one process reaches the others
    facts = _json_lines("scripts/gpu/nccl_probe.py", "--cpu", "--ranks", "2")
    statuses = [fact for fact in facts if fact["step"].endswith("statuses")]
    assert [fact["got"] for fact in statuses] == [[0, -9], [0, -9], [0, 0]]
    assert all(
        fact["sum_is_right"] for fact in facts if fact["step"].endswith("milliseconds")
    )


@pytest.mark.full
def test_a_price_is_measured_by_jobs_in_turns(tmp_path: Path) -> None:
    # processes: only stopped jobs show that their supervisors do not take a stop for a
    # fault
    options = [
        "--cpu",
        "--rounds",
        "2",
        "--block-s",
        "4",
        "--warm-s",
        "0",
        "--policy",
        "moevement,ckpt.window=2",
    ]
    small = [
        "model=tiny",
        "train.sequence_length=16",
        "train.micro_batch_size=2",
        "train.global_batch_size=4",
    ]
    [found] = _json_lines(
        "scripts/gpu/price.py", "--out", str(tmp_path), *options, *small
    )
    assert (found["policy"], found["rounds"]) == ("moevement,ckpt.window=2", 2)
    assert found["snapshot_gb"] > 0.0
    assert found["to_peers_gb"] == 0.0, "one rank has no peer"
    assert 0.0 < found["low"] <= found["ratio"] <= found["high"]
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert not any("died" in log or "hung" in log for log in logs)


def _json_lines(*command: str) -> list[dict[str, Any]]:
    """Return the lines that a script prints. The script must succeed."""
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [json.loads(line) for line in ended.stdout.splitlines()]


def call(
    tmp_path: Path, steps: list[str], *, python: str, total: int = 540
) -> tuple[list[str], Path]:
    """Rehearse a device call.

    A `timeout` in front of the real one writes the limit of each step into the file
    `limits`, and ends each step after a second.

    Args:
        tmp_path: The folder of all files.
        steps: The steps of the call.
        python: A shell script in place of the interpreter.
        total: The limit of all steps, in seconds.

    Returns:
        The lines of the summary, and the folder that comes back.
    """
    out, path = tmp_path / "out", tmp_path / "bin"
    path.mkdir()
    real = subprocess.run(
        ["which", "timeout"], capture_output=True, text=True, check=True
    ).stdout.strip()
    files = {
        "python": f"#!/bin/bash\n{python}\n",
        "timeout": (
            f'#!/bin/bash\necho "$6" >> {tmp_path}/limits\nexec {real} "${{@:1:3}}" -k'
            ' 1 1 "${@:7}"\n'
        ),
    }
    for name, text in files.items():
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    environment = {
        **os.environ,
        **{
            "CPU": "1",
            "OUT": str(out),
            "TOTAL": str(total),
            "PYTHON": str(path / "python"),
        },
        "PATH": f"{path}:{os.environ['PATH']}",
    }
    command = ["bash", "scripts/gpu/device_call.sh", *steps]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return [
        line.partition("] ")[2]
        for line in (out / "summary.txt").read_text().splitlines()
    ], out


def test_a_step_that_fails_or_hangs_stops_no_other(tmp_path: Path) -> None:
    python = (
        'case "$*" in *nccl_probe*) echo lost; exit 3;; *register*) exec tail -f'
        ' /dev/null;; esac; echo "${@: -1}"'
    )
    said, out = call(tmp_path, ["facts", "probe", "register", "ranks4"], python=python)
    assert said == [
        "facts: status 0: facts",
        "probe: status 3: lost",
        "register: status 124: ",
        "ranks4: status 0: ranks4kill",  # through host memory, because NCCL fails
    ]
    assert (tmp_path / "limits").read_text().split() == ["60", "100", "45", "240"]
    with tarfile.open(out / "logs.tar.gz") as logs:
        names = {Path(name).name for name in logs.getnames()}
    assert names >= {"facts.log", "probe.log", "register.log", "ranks4.log"}


def test_the_limit_of_all_steps_holds(tmp_path: Path) -> None:
    said, _ = call(
        tmp_path, ["price_others", "ranks4", "facts"], python='echo "$*"', total=115
    )
    limits = [int(limit) for limit in (tmp_path / "limits").read_text().split()]
    assert len(limits) == 2
    assert limits[0] <= 115, "where less is left than a step's own limit, that counts"
    assert f"--limit-s {limits[0] - 20} " in said[0], "jobs end before they are killed"
    assert said[1].startswith("ranks4: not begun, ")
    assert said[2].startswith("facts: status 0: ")


def test_an_unknown_step_is_named(tmp_path: Path) -> None:
    said, _ = call(tmp_path, ["fact", "probe", "ranks4"], python='echo "${@: -1}"')
    assert said[0].startswith("fact: got no such step, wanted some of: facts probe")
    assert said[1:] == ["probe: status 0: --cpu", "ranks4: status 0: onegpu4kill"]
