"""Run one job through a thousand random faults of all classes; measure its resources.

    python scripts/endurance.py --faults 1000 --ranks 4
        --write benchmarks/endurance_4.md

Faults: SIGKILL, SIGSEGV and SIGTERM at any time or point, several ranks at once, a
stopped worker, an exception of the hardware, a dead replica daemon, a lost node. The
job must end bit for bit like the same training without faults, and leave no process and
no shared memory. Resources must not grow: the least use in the last quarter of the run
may exceed the most in the first quarter by 1 file, 1 thread, 1 socket and 8 MiB of
private memory of a process of each kind, and not at all by zombies, and by number and
bytes of files in shared memory. The summary has the faults by class and the resources
over time. The exit status is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.runs import current_commit, hardware
from launcher.fault_classes import EXPLAINED, count_faults_in
from tests.harness.jobs.chaos import ENDURING, MIB, Chaos, Sample, take_sample
from tests.harness.jobs.elastic_job import ElasticJob
from tests.harness.jobs.references import Outcome, outcome_of
from tests.harness.jobs.training import train
from tests.made_once import FOLDER

KINDS = ("supervisor", "daemon", "worker")
ROWS = 20
_ITERATIONS_PER_FAULT = 5
_SECONDS_PER_FAULT = 60.0
# caches of libraries grow by at most this after the first quarter
_GROWN_BYTES = 8 * MIB
_REFERENCE_S = 7200.0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A sample of resources, with the number of faults and seconds before it."""

    faults: int
    seconds: float
    sample: Sample


@dataclass(frozen=True, kw_only=True)
class Endured:
    """A finished run with faults."""

    moments: Sequence[Moment]
    """Samples of resources, in order."""

    faults: int
    """Number of faults: deaths in the job's result, and killed daemons."""

    counts: dict[str, int]
    """Number of faults in the job's events, by class."""

    seconds: float
    """Time from the start of the job until enough faults were repaired."""

    outcome: Outcome
    """Outcome of the training."""


def endure(
    ranks: int, faults: int, iterations: int, seed: int, folder: Path
) -> Endured:
    """Run a job, and inject faults until enough of them were repaired.

    Args:
        ranks: The number of ranks.
        faults: The number of faults.
        iterations: The number of iterations. No fault is injected in the last five.
        seed: The seed of the faults.
        folder: The folder of the job.

    Raises:
        JobFailedError: The job failed, hung, or left something behind.
    """
    training = (f"train.iterations={iterations}",)
    started_s, moments = time.monotonic(), list[Moment]()
    patience_s = 600.0 + _SECONDS_PER_FAULT * faults
    with ElasticJob(
        ranks, folder, *training, *ENDURING, timeout_s=patience_s, setup=_cache_little
    ) as job:
        chaos = Chaos(job, seed)
        job.wait_until(0, 3)
        while (so_far := chaos.num_faults) < faults:
            if not moments or so_far >= moments[-1].faults + faults / (2 * ROWS):
                moments.append(
                    Moment(
                        faults=so_far,
                        seconds=time.monotonic() - started_s,
                        sample=take_sample(job),
                    )
                )
                print(_row(moments[-1]), flush=True)
            if job.page(0).iteration >= iterations - 5:
                break
            chaos.inject()
        seconds = time.monotonic() - started_s
        result = job.wait()
        return Endured(
            moments=moments,
            faults=result["faults_survived"] + chaos.daemon_deaths,
            counts=count_faults_in(job.run),
            seconds=seconds,
            outcome=outcome_of(job.run, result),
        )


def _cache_little() -> None:
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "8"


def broken_promises(endured: Endured, reference: Outcome, faults: int) -> list[str]:
    """Return the promises that the run broke, in words."""
    broken = (
        []
        if endured.outcome == reference
        else ["the end differs from that of the run without faults"]
    )
    if endured.faults < faults:
        broken.append(
            f"got {endured.faults} faults, wanted {faults}: the job has too few"
            " iterations"
        )
    quarter = max(1, len(endured.moments) // 4)
    early, late = endured.moments[1 : 1 + quarter], endured.moments[-quarter:]
    for name, allowed in (
        ("files", 1),
        ("threads", 1),
        ("sockets", 1),
        ("private_bytes", _GROWN_BYTES),
    ):
        for kind in KINDS:
            most = max(
                getattr(moment.sample.by_kind[kind], name) for moment in early or late
            )
            least = min(getattr(moment.sample.by_kind[kind], name) for moment in late)
            if least > most + allowed:
                broken.append(
                    f"{name} of a {kind} grew from at most {most} to at least {least}"
                )
    for name in ("zombies", "memory_files", "memory_bytes"):
        most = max(getattr(moment.sample, name) for moment in early or late)
        least = min(getattr(moment.sample, name) for moment in late)
        if least > most:
            broken.append(f"{name} grew from at most {most} to at least {least}")
    return broken


HEAD = (
    "| faults | s | files: supervisor, daemon, worker | threads | sockets | private MiB"
    " | zombies | files in shared memory | MiB |"
)


def _row(moment: Moment) -> str:
    sample = moment.sample
    parts = [
        ", ".join(str(getattr(sample.by_kind[kind], name)) for kind in KINDS)
        for name in ("files", "threads", "sockets")
    ]
    private = ", ".join(
        f"{sample.by_kind[kind].private_bytes / MIB:.0f}" for kind in KINDS
    )
    memory = (
        f"{sample.zombies} | {sample.memory_files} | {sample.memory_bytes / MIB:.1f}"
    )
    return (
        f"| {moment.faults} | {moment.seconds:.0f} | {' | '.join(parts)} | {private} |"
        f" {memory} |"
    )


def summary(
    options: argparse.Namespace, endured: Endured, broken: Sequence[str]
) -> str:
    """Return the summary of a run, in Markdown."""
    step = max(1, len(endured.moments) // ROWS)
    unseen = endured.faults - sum(endured.counts.values())
    command = (
        f"python scripts/endurance.py --faults {options.faults} --ranks {options.ranks}"
        f" --seed {options.seed}"
    )
    verdict = "\n".join(f"- Broken: {each}." for each in broken) or (
        "The end is that of the run without faults, bit for bit. No process and no"
        " shared memory was left, and no resource grew beyond its bound."
    )
    return "\n".join(
        (
            f"# {endured.faults} faults on {options.ranks} ranks",
            "",
            (
                f"`{command}`: {endured.seconds:.0f} s,"
                f" {endured.seconds / max(endured.faults, 1):.2f} s a fault,"
                f" {options.iterations} iterations. {hardware()}; commit"
                f" {current_commit()}."
            ),
            "",
            verdict,
            "",
            "| class | faults | meaning |",
            "| --- | --- | --- |",
            *(
                f"| {name} | {count} | {EXPLAINED.get(name, '')} |"
                for name, count in endured.counts.items()
            ),
            (
                f"| in no event | {unseen} | it came with others, before ranks went on"
                " from an earlier one |"
            ),
            "",
            "The most that any process of a kind uses, at a moment between faults:",
            "",
            HEAD,
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *map(_row, endured.moments[::step]),
            "",
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--iterations",
        type=int,
        help=f"of training; {_ITERATIONS_PER_FAULT} a fault by default",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="file for the summary")
    options = parser.parse_args(arguments)
    options.iterations = (
        options.iterations or _ITERATIONS_PER_FAULT * options.faults + 20
    )
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder  # where settings are composed once
        endured = endure(
            options.ranks,
            options.faults,
            options.iterations,
            options.seed,
            Path(folder) / "job",
        )
        training = (f"train.iterations={options.iterations}",)
        result = train(
            options.ranks, Path(folder) / "reference", *training, timeout_s=_REFERENCE_S
        )
        reference = outcome_of(Path(folder) / "reference", result)
    broken = broken_promises(endured, reference, options.faults)
    text = summary(options, endured, broken)
    print(text)
    if options.write:
        options.write.write_text(text)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
