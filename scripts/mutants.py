"""Apply faults to the source, one at a time, and run the tests that have to catch each: `make mutants`.

The list is scripts/mutants.toml. A fault that no test catches shows a missing test, and the exit status is 1.

This process imports torch, Megatron and pytest once, and nothing of the project. It forks a child for each mutant; the
child imports the project from a scratch copy of the tracked files. A new process would spend 8 s on these imports.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
LIST = "scripts/mutants.toml"
LIMIT_S = 300.0  # a mutant may wait for ever where the source does not; pytest's own limit ends most of these
_CHUNKS_PER_WORKER = 4  # of the tests that run without a fault
_OPTIONS = (
    *("-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=short", "--durations=0", "--timeout=60"),
    "-Wignore::pytest.PytestAssertRewriteWarning",
)
_LIBRARIES = (
    *("filelock", "hydra", "hypothesis", "omegaconf", "orjson", "plotly.graph_objects", "rich.progress"),
    *("safetensors.torch", "tokenizers", "torch.distributed.checkpoint", "torch.utils.tensorboard", "xxhash"),
    *("megatron.core.datasets.gpt_dataset", "megatron.core.models.gpt.gpt_model"),
    *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.dist_checkpointing.strategies.torch"),
)
CAUGHT, SURVIVED, BROKEN = "caught", "survived", "broken"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: `old`, which occurs once in `file`, becomes `new`. `tests` are pytest's names of files or tests."""

    name: str
    file: str
    old: str
    new: str
    fault: str
    tests: tuple[str, ...]

    def applied_to(self, source: str) -> str:
        """Return the source with the fault. Raises ValueError unless `old` occurs exactly once in it."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: got {count} times {self.old!r} in {self.file}, wanted once")
        return source.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run of tests ended: `by` names the test that failed first, or says what is wrong with the run."""

    verdict: str
    by: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of `tests`, with a mutant or without."""

    label: str
    tests: tuple[str, ...]
    mutant: Mutant | None = None


def read_mutants(root: Path = ROOT) -> list[Mutant]:
    """Return the committed list."""
    entries = tomllib.loads((root / LIST).read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def main(arguments: Sequence[str]) -> int:
    """Run the mutants that the arguments select; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that finds names or files of mutants")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path, help="file for the table of all mutants")
    options = parser.parse_args(arguments)
    mutants = [each for each in read_mutants() if re.search(options.only, f"{each.name} {each.file}")]
    started_s = time.monotonic()
    _import_libraries()
    outcomes = try_mutants(ROOT, mutants, options.workers)
    if outcomes is None:
        return 1
    num_caught = sum(outcome.verdict == CAUGHT for outcome in outcomes.values())
    print(f"{len(mutants)} mutants, {num_caught} caught, {(time.monotonic() - started_s) / 60:.1f} min", flush=True)
    if options.write:
        options.write.write_text(_page(mutants, outcomes))
    return 0 if num_caught == len(mutants) else 1


def try_mutants(root: Path, mutants: Sequence[Mutant], num_workers: int) -> dict[str, Outcome] | None:
    """Return the outcomes by the mutants' names; None where their tests fail without a fault. Prints as it goes."""
    with Workers(root, num_workers) as workers:
        return _try_each(workers, mutants) if _pass_without_faults(workers, mutants) else None


def _pass_without_faults(workers: Workers, mutants: Sequence[Mutant]) -> bool:
    """Return whether the tests of all these mutants pass as the source is."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = sorted({test.partition("::")[0] for test in tests})
    number = min(len(files), _CHUNKS_PER_WORKER * workers.number)
    chunks = [set(files[start::number]) for start in range(number)]
    jobs = [
        Job(label="without a fault", tests=tuple(test for test in tests if test.partition("::")[0] in chunk))
        for chunk in chunks
    ]
    failed = [outcome for _, outcome in workers.run(jobs) if outcome.verdict != SURVIVED]
    for outcome in failed:
        print(f"without a fault: {outcome.by}", flush=True)
    return not failed


def _try_each(workers: Workers, mutants: Sequence[Mutant]) -> dict[str, Outcome]:
    """Return the outcomes by the mutants' names, and print a line for each as it comes."""
    outcomes: dict[str, Outcome] = {}
    for job, outcome in workers.run([Job(label=each.name, tests=each.tests, mutant=each) for each in mutants]):
        outcomes[job.label] = outcome
        print(f"{outcome.verdict:<8} {outcome.seconds:5.1f} s  {job.label}  {outcome.by}", flush=True)
    return outcomes


def _page(mutants: Sequence[Mutant], outcomes: dict[str, Outcome]) -> str:
    """Return the table of all mutants, in Markdown."""
    rows = []
    for mutant in mutants:
        outcome = outcomes[mutant.name]
        by = f"`{outcome.by.removeprefix('tests/')}`" if outcome.verdict == CAUGHT else f"**{outcome.verdict}**"
        rows.append(f"| {mutant.fault.rstrip('.')} | `{mutant.file}` | {by} |")
    return "\n".join(
        (
            "# Faults that the tests catch",
            "",
            f"Written by `make mutants` from {LIST}: {len(mutants)} faults of a line each, applied one at a time,",
            "and the first test below `tests/` that failed.",
            "",
            "| fault | file | caught by |",
            "| --- | --- | --- |",
            *rows,
            "",
        )
    )


class Workers:
    """Scratch copies of the tracked files below `root`, each for one forked child at a time."""

    def __init__(self, root: Path, number: int) -> None:
        self.number = number
        self._root = root

    def __enter__(self) -> Workers:
        self._folder = Path(tempfile.mkdtemp(prefix="moe_ckpt-mutants-"))
        self._free = [self._folder / f"worker{index}" for index in range(self.number)]
        for copy in self._free:
            _copy_tracked(self._root, copy)
            # by content: a fault and the source that it replaces may have the same size and the same second
            compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode=checked-hash", "."]
            subprocess.run(compiling, cwd=copy, check=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Run the jobs, as many at a time as there are workers; yield each with its outcome as it ends."""
        pending, running = list(jobs), list[_Running]()
        while pending or running:
            while pending and self._free:
                running.append(_Running(pending.pop(0), self._free.pop()))
            until_s = min(each.until_s for each in running)
            wait([each.process.sentinel for each in running], max(0.0, until_s - time.monotonic()))
            ended = [each for each in running if each.has_ended]
            running = [each for each in running if each not in ended]
            for each in ended:
                self._free.append(each.copy)
                yield each.job, each.finish()


@dataclass(eq=False)
class _Running:
    """A child that runs a job's tests in a copy; the mutant is in the copy for as long as that takes."""

    job: Job
    copy: Path
    process: BaseProcess = field(init=False)

    def __post_init__(self) -> None:
        self._started_s = time.monotonic()
        self.until_s = self._started_s + LIMIT_S
        self._notes = self.copy.with_suffix(".notes")
        self._notes.unlink(missing_ok=True)
        mutant = self.job.mutant
        self._source = (self.copy / mutant.file).read_text() if mutant else ""
        if mutant:
            (self.copy / mutant.file).write_text(mutant.applied_to(self._source))
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_run_tests, args=(self.copy, self.job.tests, self._notes))
        self.process.start()

    @property
    def has_ended(self) -> bool:
        return not self.process.is_alive() or time.monotonic() >= self.until_s

    def finish(self) -> Outcome:
        """End the child and all that it has started, take the mutant out, and return the outcome."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        if self.job.mutant:
            (self.copy / self.job.mutant.file).write_text(self._source)
        verdict, by = _judge(self._notes)
        return Outcome(verdict=verdict, by=by, seconds=time.monotonic() - self._started_s)


def _judge(notes: Path) -> tuple[str, str]:
    """Return a verdict and its reason from the notes of a child that has ended or was ended."""
    lines = [line.partition(" ") for line in (notes.read_text().splitlines() if notes.exists() else [])]
    found: dict[str, list[str]] = {}
    for kind, _, rest in lines:
        found.setdefault(kind, []).append(rest)
    if "failed" in found:
        return CAUGHT, found["failed"][0]
    if "begun" in found and "finished" not in found:
        return CAUGHT, found["begun"][-1]  # the test during which the process ended, or had to be ended
    if "passed" in found:
        return SURVIVED, ""
    return BROKEN, notes.with_suffix(".output").read_text(errors="replace")[-2000:]


def _run_tests(copy: Path, tests: Sequence[str], notes: Path) -> None:
    """Be the child: run pytest in the copy."""
    os.setsid()  # so that what the tests start can be ended with this process
    with notes.with_suffix(".output").open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.chdir(copy)
    sys.path[0] = str(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.modules["__main__"] = types.ModuleType("__main__")  # or processes of tests would import this script
    pytest.main([*_OPTIONS, *tests], plugins=[_Notes(notes)])


class _Notes:
    """A pytest plugin that writes down how each test goes, for a parent that may find its child dead."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Leave out shrinking: which example is the smallest is of no interest here."""
        phases = (Phase.explicit, Phase.reuse, Phase.generate)
        settings.register_profile("mutants", parent=settings(), phases=phases)
        settings.load_profile("mutants")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write(f"begun {nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._file.write(f"failed {report.nodeid}\n")
        elif report.when == "call" and report.passed:
            self._file.write(f"passed {report.nodeid}\n")

    def pytest_sessionfinish(self) -> None:
        self._file.write("finished\n")


def _copy_tracked(root: Path, target: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore, as they are in the work tree."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (root / name).exists():  # else deleted, and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def _import_libraries() -> None:
    """Import what is slow, without the warnings that tests would take for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _LIBRARIES:
            importlib.import_module(name)
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
