"""Finished runs for pages about them: trained once, with the commit that they were
trained at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.overrides import last_values

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
_LIMIT_S = 3600.0


def finished_run(
    name: str, folder: Path, arguments: Sequence[str], more: Sequence[str] = ()
) -> Path:
    """Train to the end, unless that is done already, and return the run folder; end
    this process if that fails.

    `more` are arguments that come after `run.dir`.
    """
    path = folder / name.replace(",", "").replace(" ", "-")
    given = last_values([*arguments, f"run.dir={path}", *more])
    if _is_done(path, given):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # one that was cut off would go on, with faults of its own
    shutil.rmtree(path, ignore_errors=True)
    path.with_suffix(".commit").write_text(current_commit())
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        f"--nproc-per-node={RANKS}",
    ]
    log = path.with_suffix(".log")
    with log.open("w") as said:
        ended = subprocess.run(
            [*command, "launcher/train.py", *given],
            cwd=ROOT,
            # as torchrun would, without saying so
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
    if ended.returncode != 0:
        sys.exit(f"{name}: status {ended.returncode}\n{log.read_text()[-4000:]}")
    print(f"{name}: {_json(path / 'result.json')['wall_s']:.0f} s", flush=True)
    return path


def default_model(overrides: Iterable[str]) -> list[str]:
    """Return the override of the benchmarks' model, unless another one is given."""
    return (
        []
        if any(override.startswith("model=") for override in overrides)
        else ["model=small"]
    )


def commit_of(paths: Iterable[Path]) -> str:
    """Return the commits that runs were trained at."""
    return ", ".join(
        sorted({path.with_suffix(".commit").read_text() for path in paths})
    )


def _is_done(path: Path, arguments: Sequence[str]) -> bool:
    """Return whether this very run has been run to its end."""
    return (path / "result.json").exists() and _json(path / "run.json")["command"][
        1:
    ] == list(arguments)


def current_commit() -> str:
    """Return the last commit that changed what runs are made of, marked where files
    differ from it.
    """
    what = ("moe_ckpt", "launcher", "conf")
    said = [
        _git("log", "-1", "--format=%h", "--", *what),
        _git("status", "--porcelain", "--", *what),
    ]
    return f"{said[0] or 'unknown'}{' with changes' if said[1] else ''}"


def hardware() -> str:
    """Return this machine's processor and how many cores of it there are."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (
            line.partition(":")[2].strip()
            for line in lines
            if line.startswith("model name")
        ),
        "a CPU",
    )
    return f"{os.cpu_count()} cores of {model}"


def packages(run: Path) -> str:
    described = _json(run / "run.json")
    named = [
        f"{name} {described['packages'][name]}" for name in ("torch", "megatron-core")
    ]
    return ", ".join([*named, f"Python {described['python']}"])


def _json(path: Path) -> dict:
    return json.loads(path.read_text())


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
