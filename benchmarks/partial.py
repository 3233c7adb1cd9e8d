"""What partial checkpoints cost a model: evaluation loss under four faults, lossless and lossy policies side by side.

    python benchmarks/partial.py [--to docs] [--runs DIR] [OVERRIDES]      # model=tiny, 4 ranks, fifteen runs

Writes partial.svg and partial.md: what was measured, and whether it bears out what the papers claim. Runs that are
finished in DIR are not run again, others from the start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lossy.figure import draw  # noqa: E402
from benchmarks.lossy.measured import read_measured  # noqa: E402
from benchmarks.lossy.page import Circumstances, page_of, panels_of  # noqa: E402
from benchmarks.lossy.variants import COMMON, ITERATIONS, RANKS, VARIANTS, Variant, faults  # noqa: E402

_LIMIT_S = 3600.0


def main() -> int:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--only", action="append", choices=names, metavar="RUN", help=f"one of: {'; '.join(names)}")
    parser.add_argument("--to", type=Path, default=ROOT / "docs", help="folder of the page and the figure")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: a temporary one)")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.runs or Path(temporary)).resolve()
        chosen = [variant for variant in VARIANTS if variant.name in (options.only or names)]
        paths = {variant.name: run(variant, folder, options.iterations, overrides) for variant in chosen}
        asked = [f"--only '{name}'" for name in options.only or ()]
        write(options.to, paths, options.iterations, [*asked, *overrides])
    return 0


def run(variant: Variant, folder: Path, iterations: int, overrides: Sequence[str]) -> Path:
    """Train to the end, unless that is done already, and return the run folder."""
    path = folder / variant.name.replace(",", "").replace(" ", "-")
    arguments = [*COMMON, f"train.iterations={iterations}", *variant.overrides, *overrides, f"run.dir={path}"]
    arguments += faults(iterations) if variant.reference else []
    if is_done(path, arguments):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)  # one that was cut off would go on, with faults of its own
    path.with_suffix(".commit").write_text(commit())
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={RANKS}"]
    log = path.with_suffix(".log")
    with log.open("w") as said:
        ended = subprocess.run(
            [*command, "launcher/train.py", *arguments],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # as torchrun would, without saying so
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
    if ended.returncode != 0:
        sys.exit(f"{variant.name}: status {ended.returncode}\n{log.read_text()[-4000:]}")
    print(f"{variant.name}: {_json(path / 'result.json')['wall_s']:.0f} s", flush=True)
    return path


def is_done(path: Path, arguments: Sequence[str]) -> bool:
    """Return whether this very run has been run to its end."""
    return (path / "result.json").exists() and _json(path / "run.json")["command"][1:] == list(arguments)


def write(folder: Path, paths: dict[str, Path], iterations: int, arguments: Sequence[str]) -> None:
    """Write the page and the figure about finished runs, by name; `arguments` are the command's."""
    runs = {name: read_measured(path) for name, path in paths.items()}
    given = Circumstances(
        command=" ".join(["python benchmarks/partial.py", *arguments]),
        iterations=iterations,
        commit=", ".join(sorted({path.with_suffix(".commit").read_text() for path in paths.values()})),
        hardware=hardware(),
        packages=packages(next(iter(paths.values()))),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "partial.svg").write_text(draw(panels_of(runs), "iteration"))
    (folder / "partial.md").write_text(page_of(runs, given))


def commit() -> str:
    """Return the last commit that changed what runs are made of, marked where files differ from it."""
    what = ("moe_ckpt", "launcher", "conf")
    said = [_git("log", "-1", "--format=%h", "--", *what), _git("status", "--porcelain", "--", *what)]
    return f"{said[0] or 'unknown'}{' with changes' if said[1] else ''}"


def hardware() -> str:
    """Return this machine's processor and how many cores of it there are."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")
    return f"{os.cpu_count()} cores of {model}"


def packages(run: Path) -> str:
    described = _json(run / "run.json")
    named = [f"{name} {described['packages'][name]}" for name in ("torch", "megatron-core")]
    return ", ".join([*named, f"Python {described['python']}"])


def _json(path: Path) -> dict:
    return json.loads(path.read_text())


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
