"""The price of partial checkpoints: evaluation loss under four faults.

    python benchmarks/partial.py [--to docs] [--runs DIR]
        [OVERRIDES]      # model=tiny, 4 ranks, fifteen runs

Lossless and lossy policies stand side by side. Writes partial.svg and partial.md: the
measurements, and whether the measurements support the claims of the papers. Runs that
are finished in DIR are not run again; all other runs begin from the start.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lossy.figure import draw  # noqa: E402
from benchmarks.lossy.measured import read_measured  # noqa: E402
from benchmarks.lossy.page import Circumstances, page_of, panels_of  # noqa: E402
from benchmarks.lossy.variants import COMMON, ITERATIONS, VARIANTS, Variant, faults  # noqa: E402
from benchmarks.runs import commit_of, finished_run, hardware, packages  # noqa: E402


def main() -> int:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="RUN",
        help=f"one of: {'; '.join(names)}",
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT / "docs",
        help="folder of the page and the figure",
    )
    parser.add_argument(
        "--runs", type=Path, help="folder of the runs (default: a temporary one)"
    )
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.runs or Path(temporary)).resolve()
        chosen = [
            variant for variant in VARIANTS if variant.name in (options.only or names)
        ]
        paths = {
            variant.name: run(variant, folder, options.iterations, overrides)
            for variant in chosen
        }
        asked = [f"--only '{name}'" for name in options.only or ()]
        write(options.to, paths, options.iterations, [*asked, *overrides])
    return 0


def run(
    variant: Variant, folder: Path, iterations: int, overrides: Sequence[str]
) -> Path:
    """Train a variant to the end, and return the run folder.

    A finished run is not run again.
    """
    arguments = [
        *COMMON,
        f"train.iterations={iterations}",
        *variant.overrides,
        *overrides,
    ]
    return finished_run(
        variant.name, folder, arguments, faults(iterations) if variant.reference else []
    )


def write(
    folder: Path, paths: dict[str, Path], iterations: int, arguments: Sequence[str]
) -> None:
    """Write the page and the figure about finished runs.

    Args:
        folder: The folder of the page and the figure.
        paths: The run folders, by name of the run.
        iterations: The iterations of each run.
        arguments: The arguments of the command, for the page.
    """
    runs = {name: read_measured(path) for name, path in paths.items()}
    given = Circumstances(
        command=" ".join(["python benchmarks/partial.py", *arguments]),
        iterations=iterations,
        commit=commit_of(paths.values()),
        hardware=hardware(),
        packages=packages(next(iter(paths.values()))),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "partial.svg").write_text(draw(panels_of(runs), "iteration"))
    (folder / "partial.md").write_text(page_of(runs, given))


if __name__ == "__main__":
    sys.exit(main())
