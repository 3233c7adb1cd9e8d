"""Test one set of releases in a clean environment; write its row of docs/releases.md.

    python scripts/test_releases.py --torch 2.15.0
    python scripts/test_releases.py --torch 2.15.0 --megatron 0.19.2 --python python3.12
    python scripts/test_releases.py --torch 2.14.1 --tests default
    python scripts/test_releases.py --torch 2.15.0 --python python3.13 --tests wheel

The script makes a virtual environment and a checkout of the newest commit in a
temporary folder, installs the checkout with these releases, and runs the tests there.
Uncommitted changes are not tested. `--folder` keeps environment and checkout for the
next call. PyPI's torch has CUDA and takes 5 GB; even on a machine without a GPU, this
torch behaves unlike a CPU build.

`--tests groups`: process groups, engine, exactness and ends of jobs. `default`: the
tests of plain `pytest`. `wheel`: the wheel without extras, and the README's first
commands.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "releases.md"
MARKS = (
    "<!-- releases: written by scripts/test_releases.py -->",
    "<!-- end of releases -->",
)
GROUPS = (
    "tests/elastic",
    "tests/engine",
    "tests/megatron",
    "tests/launcher/test_golden.py",
    "tests/launcher/test_exact.py",
    "tests/launcher/test_elastic_ends.py",
    "tests/launcher/test_formats.py",
    "tests/launcher/test_reshard.py",
)
SELECTIONS: dict[str, tuple[str, ...]] = {"groups": GROUPS, "default": ()}
WHEEL = "wheel"
_IMPORTS = (
    "import moe_ckpt.run, moe_ckpt.own_loop, moe_ckpt; print(moe_ckpt.MoevementConfig)"
)
_TRAINED = re.compile(r"done: .* digest \w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: the releases that were tested, and the result."""

    torch: str
    """Version of torch, with the CUDA of the build."""

    megatron: str
    """Version of megatron-core."""

    python: str
    """Version of Python."""

    tests: str
    """`groups`, `default` or `wheel`."""

    day: str
    """Date in ISO format."""

    commit: str
    """Short hash of the tested commit."""

    passed: int
    """Number of tests that passed."""

    failed: int
    """Number of failures and errors."""

    skipped: int
    """Number of skipped tests."""

    @property
    def key(self) -> tuple[str, ...]:
        """Values by which the row of a later run replaces this row."""
        return (self.torch, self.megatron, self.python, self.tests)


HEAD = (
    "torch",
    "megatron-core",
    "Python",
    "tests",
    "date",
    "commit",
    "passed",
    "failed",
    "skipped",
)


def with_row(page: str, row: Row) -> str:
    """Return a page with a row in its table.

    The row replaces an older row of the same releases and tests.
    """
    begin, end = MARKS
    before, _, rest = page.partition(begin)
    table, _, after = rest.partition(end)
    rows = {each.key: each for each in _rows_of(table)} | {row.key: row}
    ordered = sorted(
        rows.values(),
        key=lambda each: ([_numbers(part) for part in each.key[:3]], each.tests),
    )
    lines = [HEAD, ("---",) * len(HEAD), *map(astuple, ordered)]
    written = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    return f"{before}{begin}\n{written}{end}{after}"


def _rows_of(table: str) -> list[Row]:
    names = [field.name for field in fields(Row)]
    rows = []
    for line in table.strip().splitlines()[2:]:
        cells = dict(
            zip(
                names,
                (cell.strip() for cell in line.strip("|").split("|")),
                strict=True,
            )
        )
        counts = {
            name: int(cells.pop(name)) for name in ("passed", "failed", "skipped")
        }
        # the fields that are integers are in `counts`
        rows.append(Row(**cells, **counts))  # pyright: ignore[reportArgumentType]
    return rows


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def counts_of(report: str) -> tuple[int, int, int]:
    """Return the numbers of tests that passed, failed and were skipped.

    Args:
        report: pytest's report, in JUnit's XML.
    """
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return total - failed - skipped, failed, skipped


class Environment:
    """A virtual environment in a folder, beside a checkout of the newest commit.

    Args:
        folder: The folder, which is made if missing. An environment in the folder is
            used again.
        interpreter: The Python of the environment.
        empty: Whether to make the environment anew, without packages of earlier calls.
    """

    def __init__(self, folder: Path, interpreter: str, *, empty: bool) -> None:
        self.python = folder / "venv" / "bin" / "python"
        self.checkout = folder / "checkout"
        folder.mkdir(parents=True, exist_ok=True)
        if empty or not self.python.exists():
            _run(interpreter, "-m", "venv", "--clear", str(folder / "venv"))
        if not self.checkout.exists():
            _run("git", "clone", "-q", "--no-checkout", str(ROOT), str(self.checkout))
        _run("git", "fetch", "-q", str(ROOT), "HEAD", cwd=self.checkout)
        _run("git", "checkout", "-q", "--detach", "FETCH_HEAD", cwd=self.checkout)

    @property
    def commit(self) -> str:
        return _run("git", "rev-parse", "--short", "HEAD", cwd=self.checkout).strip()

    def install(self, *requirements: str) -> None:
        self.run(
            "-m", "pip", "-qq", "--disable-pip-version-check", "install", *requirements
        )

    def run(self, *arguments: str) -> str:
        """Run the environment's Python in the checkout, and return standard output."""
        return _run(str(self.python), *arguments, cwd=self.checkout)

    def version_of(self, package: str) -> str:
        return self.run(
            "-c", f"from importlib.metadata import version; print(version({package!r}))"
        ).strip()

    def torch_version(self) -> str:
        """Return torch's version with the CUDA of the build, which pip leaves out."""
        return self.run(
            "-W", "ignore", "-c", "import torch; print(torch.__version__)"
        ).strip()

    def python_version(self) -> str:
        return self.run(
            "-c", "import platform; print(platform.python_version())"
        ).strip()


def require_whole_run(status: int) -> None:
    """Check that pytest ran all selected tests; an interrupted run has a report, too.

    Args:
        status: The exit status of pytest.

    Raises:
        RuntimeError: pytest did not run all selected tests.
    """
    if status not in (0, 1):  # 1: tests failed
        raise RuntimeError(
            f"pytest: got exit status {status}, wanted 0 or 1: no row is written"
        )


def run_tests(
    environment: Environment, tests: str, arguments: Sequence[str]
) -> tuple[int, int, int]:
    """Run a selection of tests; return the numbers of passed, failed and skipped tests.

    Raises:
        RuntimeError: pytest did not run all selected tests.
    """
    # like `make dev`; without these scripts, tests of attached loops and of pages are
    # skipped
    if tests == "default":
        for script in ("install_browser.py", "fetch_megatron_lm.py"):
            environment.run(f"scripts/{script}")
    report = environment.checkout.parent / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        str(environment.python),
        "-m",
        "pytest",
        f"--junitxml={report}",
        *SELECTIONS[tests],
        *arguments,
    ]
    # like an activated environment, because scripts call `python`
    path = f"{environment.python.parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PATH": path}
    status = subprocess.run(
        command, cwd=environment.checkout, check=False, env=variables
    ).returncode
    require_whole_run(status)
    return counts_of(report.read_text())


def try_wheel(
    environment: Environment, releases: Sequence[str]
) -> tuple[int, int, int]:
    """Install the wheel and run commands outside the checkout.

    The wheel is installed without extras first, and then with the launcher's packages.

    Returns:
        The numbers of commands that passed and failed, and 0 for skipped commands.
    """
    dist = environment.checkout.parent / "dist"
    shutil.rmtree(dist, ignore_errors=True)  # left by an earlier call with this folder
    environment.install("build")
    environment.run("-m", "build", "--wheel", "-o", str(dist))
    (wheel,) = dist.glob("*.whl")
    environment.install(f"moe-ckpt @ {wheel.as_uri()}", *releases)
    program = str(environment.python.with_name("moe-ckpt"))
    ends = [
        _ends_well(re.compile(r"\d+\.\d+"), program, "--version"),
        _ends_well(re.compile("usage"), program, "run", "--help"),
        _ends_well(
            re.compile("the launcher's: pip install"),
            program,
            "train",
            "--nproc-per-node=4",
            status=2,
        ),
        _ends_well(
            re.compile("MoevementConfig"), str(environment.python), "-c", _IMPORTS
        ),
    ]
    environment.install(f"moe-ckpt[launcher] @ {wheel.as_uri()}", *releases)
    library = environment.run(
        "-I", "-c", "import moe_ckpt; print(moe_ckpt.__path__[0])"
    ).strip()
    script = Path(library) / "_app" / "launcher" / "train.py"
    torchrun = environment.python.with_name("torchrun")
    settings = ("+ckpt=moevement", "train.iterations=12")
    ends += [
        _ends_well(re.compile("usage"), program, "check", "--help"),
        _ends_well(_TRAINED, program, "train", "--nproc-per-node=4", *settings),
        _ends_well(
            _TRAINED, str(torchrun), "--nproc-per-node=4", str(script), *settings
        ),
    ]
    return sum(ends), len(ends) - sum(ends), 0


def _ends_well(printed: re.Pattern[str], *command: str, status: int = 0) -> bool:
    """Run a command in an empty folder, and return whether the command works.

    Args:
        printed: A pattern that the output must contain.
        command: The command.
        status: The exit status that the command must have.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            command, cwd=folder, check=False, capture_output=True, text=True
        )
    if ended.returncode == status and printed.search(ended.stdout + ended.stderr):
        return True
    print(*command, ended.stdout, ended.stderr, sep="\n", file=sys.stderr)
    return False


def test(environment: Environment, wanted: argparse.Namespace) -> Row:
    """Install the releases that the command line names, and test them."""
    megatron = [f"megatron-core=={wanted.megatron}"] if wanted.megatron else []
    # `==` would also take a build with a local version, such as 2.13.0+cpu
    releases = [f"torch==={wanted.torch}", *megatron]
    if wanted.tests == WHEEL:
        passed, failed, skipped = try_wheel(environment, releases)
    else:
        environment.install("-e", ".[dev]", *releases)
        passed, failed, skipped = run_tests(environment, wanted.tests, wanted.arguments)
    return Row(
        torch=environment.torch_version(),
        megatron=environment.version_of("megatron-core"),
        python=environment.python_version(),
        tests=wanted.tests,
        day=date.today().isoformat(),
        commit=environment.commit,
        passed=passed,
        failed=failed,
        skipped=skipped,
    )


def _run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(
        command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main(arguments: Sequence[str]) -> int:
    """Run the tests of the command line and write their row; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch",
        metavar="VERSION",
        required=True,
        help="a release of torch, such as 2.15.0",
    )
    parser.add_argument(
        "--megatron",
        metavar="VERSION",
        help="of megatron-core (default: the newest for this Python)",
    )
    parser.add_argument(
        "--python",
        metavar="COMMAND",
        default=sys.executable,
        help="the interpreter (default: this)",
    )
    parser.add_argument(
        "--tests",
        choices=(*SELECTIONS, WHEEL),
        default="groups",
        help="(default: groups)",
    )
    parser.add_argument(
        "--folder", type=Path, help="keep environment and checkout here"
    )
    parser.add_argument(
        "arguments", nargs="*", help="of pytest (default: -n 2 --dist worksteal)"
    )
    wanted = parser.parse_args(arguments)
    wanted.arguments = wanted.arguments or ["-n", "2", "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder:
        kept = (wanted.folder or Path(folder)).resolve()
        environment = Environment(kept, wanted.python, empty=wanted.tests == WHEEL)
        row = test(environment, wanted)
    PAGE.write_text(with_row(PAGE.read_text(), row))
    print(
        *(f"{name}: {value}" for name, value in zip(HEAD, astuple(row), strict=True)),
        sep="\n",
    )
    return 1 if row.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
