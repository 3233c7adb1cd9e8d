"""A run folder as values: tables, typed events, and a list of problems.

Owns: reading folders at hundreds of megabytes a second. Files may be half-written,
damaged, incomplete or of another version. Must not: change the run, or judge the
content. Only a missing folder raises an error; no content of a folder does.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from launcher.faults.log import InjectedFault
from launcher.report.digest import RankDigest, digest_file
from moe_ckpt.elastic.live_workers import is_running, read_written
from moe_ckpt.errors import ConfigError

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
_POLICY = re.compile(r"^ckpt:\n(?:[ ]+.*\n)*?[ ]+policy: *(\w+)", re.MULTILINE)
_OF_RUNS = ("run.json", "events")
_PARALLEL_FROM_BYTES = 64 << 20
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunLog:
    """The content of a run folder."""

    name: str
    """Name of the run, unique among the runs of a report."""

    path: Path
    """Run folder."""

    policy: str
    """Name of the checkpoint policy, or `unknown`."""

    state: str
    """`finished`, `running`, or `ended` (without a result)."""

    world_size: int
    """Number of ranks."""

    ranks: tuple[RankDigest, ...]
    """Digests of the ranks that have an event file, by rank."""

    faults: tuple[tuple[float, InjectedFault], ...]
    """Inflicted faults, each with its time in seconds since the run's origin."""

    result: dict[str, Any]
    """Content of result.json; empty if there is none."""

    problems: tuple[str, ...]
    """Defects of the files, for people."""


def read_runs(paths: Sequence[Path]) -> list[RunLog]:
    """Return the runs, each with a name of its own.

    Args:
        paths: Run folders. A folder of run folders stands for all of these runs.

    Raises:
        ConfigError: A path is not a folder.
    """
    folders = [folder for path in paths for folder in _runs_in(path)]
    names = _names([folder.resolve() for folder in folders])
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(path: Path, name: str | None = None) -> RunLog:
    """Return the content of a run folder.

    Args:
        path: The run folder.
        name: The name of the run. None: the name of the folder.

    Raises:
        ConfigError: The folder does not exist.
    """
    if not path.is_dir():
        raise ConfigError(f"run: got {str(path)!r}, wanted the folder of a run")
    described, result = _json_of(path / "run.json"), _json_of(path / "result.json")
    ranks = tuple(map_ranks(path, digest_file))
    size = described.get("world_size")
    world_size = (
        size
        if isinstance(size, int)
        else max((log.rank + 1 for log in ranks), default=0)
    )
    return RunLog(
        name=name or path.resolve().name,
        path=path,
        policy=_policy_of(path, described),
        state=_state_of(path, ranks, result),
        world_size=world_size,
        ranks=ranks,
        faults=_faults_of(path, described),
        result=result,
        problems=(
            *_problems(path, described, ranks, world_size),
            *(p for log in ranks for p in log.problems),
        ),
    )


def map_ranks(path: Path, work: Callable[[int, Path], T]) -> list[T]:
    """Return the results of `work` for each rank's event file, by rank.

    Large logs are read in several processes.

    Args:
        path: The run folder.
        work: A function of the global rank and the event file. Other processes must be
            able to import the function.
    """
    named = (
        (match, file)
        for file in (path / "events").glob("*")
        if (match := _RANK_FILE.fullmatch(file.name))
    )
    files = sorted((int(match[1]), file) for match, file in named)
    workers = min(len(files), os.cpu_count() or 1)
    # spawned processes begin with imports, which take longer than to read a small log
    if (
        workers < 2
        or sum(file.stat().st_size for _, file in files) < _PARALLEL_FROM_BYTES
    ):
        return [work(rank, file) for rank, file in files]
    # spawn, because a fork of a process with threads (of BLAS, of a caller) may inherit
    # locks that nothing releases
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, *zip(*files, strict=True)))


def _runs_in(path: Path) -> list[Path]:
    is_run = any((path / name).exists() for name in _OF_RUNS)
    found = (
        []
        if is_run
        else sorted(
            {each.parent for name in _OF_RUNS for each in path.glob(f"*/{name}")}
        )
    )
    return found or [path]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that distinguish the paths."""
    for length in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def _json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file or object."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _policy_of(path: Path, described: dict[str, Any]) -> str:
    try:
        composed = (path / "config.yaml").read_text()
    except (OSError, ValueError):
        composed = ""
    found = _POLICY.search(composed)
    return found[1] if found else str(described.get("policy", "unknown"))


def _state_of(path: Path, ranks: Sequence[RankDigest], result: dict[str, Any]) -> str:
    if result or (ranks and all(log.has_finished for log in ranks)):
        return "finished"
    try:
        return "running" if is_running(read_written(path)) else "ended"
    except (OSError, ValueError, TypeError):  # files of another version
        return "ended"


def _faults_of(
    path: Path, described: dict[str, Any]
) -> tuple[tuple[float, InjectedFault], ...]:
    """Return the inflicted faults, each with seconds since the run's origin."""
    origin = described.get("clock_origin_unix_s")
    try:
        lines = (path / "faults.jsonl").read_text().splitlines()
    except (OSError, ValueError):
        return ()
    found: list[tuple[float, InjectedFault]] = []
    for line in lines:
        try:
            fault = InjectedFault(**json.loads(line))
            found.append((fault.unix_s - float(origin or fault.unix_s), fault))
        except (ValueError, TypeError):
            continue
    return tuple(found)


def _problems(
    path: Path, described: dict[str, Any], ranks: Sequence[RankDigest], world_size: int
) -> list[str]:
    said = (
        []
        if described
        else [
            "no readable run.json: how many ranks it had is taken from its event files"
        ]
    )
    if not ranks:
        return [
            *said,
            f"no events in {path / 'events'}: nothing is known of what happened",
        ]
    missing = sorted(set(range(world_size)) - {log.rank for log in ranks})
    if missing:
        said.append(
            f"no events of {_ranks(missing)}, of {world_size} ranks: sums and means are"
            " of the others"
        )
    silent = [log.rank for log in ranks if not log.num_events]
    if silent:
        said.append(f"no readable event of {_ranks(silent)}")
    unknown = Counter[str]()
    for log in ranks:
        unknown.update(log.unknown)
    said += [
        f"left out, of another version: {count} x {what}"
        for what, count in sorted(unknown.items())
    ]
    return said


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:12])) + (
        f" and {len(ranks) - 12} more" if len(ranks) > 12 else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
