"""Finished runs for pages about these runs.

Each run is trained once. The commit of the training is written beside the run folder.
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
    """Train to the end, and return the run folder.

    A run that has already ended with the same arguments is not run again. A failure
    ends this process.

    Args:
        name: The name of the run, which gives the folder its name.
        folder: The folder of all runs.
        arguments: Arguments of launcher/train.py.
        more: Arguments that come after `run.dir`.
    """
    path = folder / name.replace(",", "").replace(" ", "-")
    given = last_values([*arguments, f"run.dir={path}", *more])
    if _is_done(path, given):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # a run that was cut off would continue, with its own faults
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
            # as torchrun would set it, without the message
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
    """Return the override of the benchmarks' model; none if `overrides` have one."""
    return (
        []
        if any(override.startswith("model=") for override in overrides)
        else ["model=small"]
    )


def commit_of(paths: Iterable[Path]) -> str:
    """Return the commits at which runs were trained, as text."""
    return ", ".join(
        sorted({path.with_suffix(".commit").read_text() for path in paths})
    )


def _is_done(path: Path, arguments: Sequence[str]) -> bool:
    """Return whether a run with exactly these arguments has ended."""
    return (path / "result.json").exists() and _json(path / "run.json")["command"][
        1:
    ] == list(arguments)


def current_commit() -> str:
    """Return the last commit that changed the code or the settings of runs.

    The text is marked `with changes` if files differ from the commit.
    """
    what = ("moe_ckpt", "launcher", "conf")
    said = [
        _git("log", "-1", "--format=%h", "--", *what),
        _git("status", "--porcelain", "--", *what),
    ]
    return f"{said[0] or 'unknown'}{' with changes' if said[1] else ''}"


def hardware() -> str:
    """Return this machine's processor and the number of its cores, as text."""
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
    """Return the releases of torch, Megatron-Core and Python of a run, as text."""
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
