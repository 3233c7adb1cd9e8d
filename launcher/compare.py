"""Runs policies one after the other, under the same faults, and compares them.

    python -m launcher.compare [POLICY[:SETTING=VALUE,...] ...] [SETTING=VALUE ...]
                               [--ranks 4] [-o DIR]

Policies with supervisors carry the faults out themselves. For the other policies this
process inflicts the faults from outside, and torchrun starts all ranks again.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config import CONF_DIR, Settings, compose_settings
from launcher.faults.outside import inject_from_outside
from launcher.job_checks import check_job
from launcher.memory import require_host_memory
from launcher.output_folder import log_of, make_output_folder
from launcher.overrides import require_one_value_each
from launcher.proc import end_job
from launcher.report.__main__ import main as report
from launcher.report.facts import gather
from launcher.report.markdown import to_markdown
from launcher.report.read import read_runs
from launcher.report.summary import headline
from moe_ckpt.arguments import Parser
from moe_ckpt.config import require, wants_supervisor
from moe_ckpt.errors import ConfigError
from moe_ckpt.faults.schedule import Kill, TimedFault

_FAILED = 1
_TRAIN = Path(__file__).with_name("train.py")
_ALL = ("none", "dense", "checkfreq", "gemini", "moevement")
_LOOK_EVERY_S = 0.2
_FROM_OUTSIDE = ("KILL", "SEGV", "TERM")
_EXAMPLES = (
    "examples:\n"
    "  python -m launcher.compare dense gemini moevement train.iterations=60"
    " fault=poisson fault.mtbf_s=20 fault.count=3\n"
    "  python -m launcher.compare gemini:ckpt.every_iters=5 gemini fault=at"
    " 'fault.at=[{iteration: 12}]'"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A policy with its settings."""

    name: str
    """The name of the run folder: a number and the policy."""

    overrides: tuple[str, ...]
    """The settings of the run, as Hydra overrides."""

    kills: tuple[Kill, ...]
    """The kills that this process inflicts from outside; empty for a policy with
    supervisors.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """The end of a job."""

    status: int
    """The exit status of torchrun."""

    was_stopped: bool
    """Whether the job was stopped before its end."""

    left: Sequence[TimedFault]
    """The kills from outside that had not been inflicted at the end of the job."""


def main(arguments: Sequence[str]) -> int:
    """Run the policies and report on them.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status of the report. A run that fails is part of the report.
    """
    try:
        # `parse_args` refuses policies, settings and options in mixed order
        options = _parser().parse_intermixed_args(arguments)
        variants = plan_variants(options.what, options.ranks)
        folder = make_output_folder(options.output, "compare")
        there = sorted(path.parent.name for path in folder.glob("*/run.json"))
        require(
            not there,
            "-o",
            f"{folder} with {', '.join(there)}",
            "a folder without runs",
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    runs = [
        _run(variant, folder, options.ranks, options.limit_s) for variant in variants
    ]
    found = [run for run in runs if run.is_dir()]
    if not found:
        print(
            "error: no run has begun; their logs are beside where they would be",
            file=sys.stderr,
        )
        return _FAILED
    print(to_markdown([gather(run) for run in read_runs(found)]))
    return report([*map(str, found), "-o", str(folder / "report.html")])


def plan_variants(words: Sequence[str], world_size: int) -> list[Variant]:
    """Return the runs that a command line describes. Runs nothing.

    Args:
        words: Settings of all runs, which have a `=` before any `:`, and policies.
        world_size: The number of ranks of each run.

    Raises:
        ConfigError: A policy is unknown, or a setting is wrong.
    """
    common = [word for word in words if "=" in word.partition(":")[0]]
    policies = [word for word in words if word not in common] or list(_ALL)
    choices = sorted(path.stem for path in (CONF_DIR / "ckpt").glob("*.yaml"))
    variants: list[Variant] = []
    for number, word in enumerate(policies, start=1):
        policy, _, own = word.partition(":")
        require(
            policy in choices,
            "POLICY",
            policy,
            f"one of {', '.join(choices)}, or SETTING=VALUE",
        )
        overrides = [f"ckpt={policy}", *common, *filter(None, own.split(","))]
        variants.append(_variant(f"{number}-{policy}", overrides, world_size))
    return variants


def _variant(name: str, overrides: Sequence[str], world_size: int) -> Variant:
    require_one_value_each(overrides)
    settings = compose_settings(overrides)
    require(
        settings.run.dir is None,
        "run.dir",
        settings.run.dir,
        "none: each run has a folder below that of -o",
    )
    wanted = "at, poisson, trace or none: kills, which every policy can be put to"
    require(not settings.fault.losses, "fault.kind", settings.fault.kind, wanted)
    if wants_supervisor(settings.ckpt, settings.runtime):
        _check(settings, world_size)
        return Variant(name=name, overrides=tuple(overrides), kills=())
    kills = settings.fault.kills(world_size)
    for kill in kills:
        wanted = (
            f"one of {', '.join(_FROM_OUTSIDE)} under ckpt={settings.ckpt.policy}:"
            " nobody there finds a hang"
        )
        require(kill.signal in _FROM_OUTSIDE, "fault: signal", kill.signal, wanted)
    # this process inflicts the faults: a job without supervisors would refuse them
    others = [
        each
        for each in overrides
        if not each.startswith(("fault=", "fault.", "+fault="))
    ]
    without = (*others, "fault=none")
    _check(compose_settings(without), world_size)
    return Variant(name=name, overrides=without, kills=kills)


def _check(settings: Settings, world_size: int) -> None:
    """Raise ConfigError for a job that cannot run on this machine."""
    layout = check_job(settings, world_size)
    require_host_memory(settings, layout, range(world_size), is_idle=True)


def _run(variant: Variant, folder: Path, num_ranks: int, limit_s: float) -> Path:
    """Run one variant until it ends or fails, and return the run folder."""
    run = folder / variant.name
    log = log_of(run)
    print(f"{variant.name}: {' '.join(variant.overrides)}; log: {log}", flush=True)
    until_s = time.monotonic() + limit_s
    outcome = run_job(variant, run, num_ranks, lambda: time.monotonic() < until_s)
    for fault in outcome.left:
        print(f"  the run ended before: {fault}", flush=True)
    if outcome.was_stopped:
        print(f"  stopped: not done within {limit_s:g} s", flush=True)
    if run.is_dir():
        print(f"  {headline(gather(read_runs([run])[0]))}", flush=True)
    if outcome.status != 0:
        print(f"  ended with status {outcome.status}; {log} says why", flush=True)
    return run


def run_job(
    variant: Variant, run: Path, num_ranks: int, goes_on: Callable[[], bool]
) -> JobOutcome:
    """Run a job under its faults until the job ends, or stop the job.

    Workers without supervisors are killed from this process.

    Args:
        variant: The policy, its settings and the kills from outside.
        run: The run folder; the output of the job goes to a log file beside it.
        num_ranks: The number of ranks.
        goes_on: Returns False once the job is to be stopped.
    """
    # the torchrun of this environment: another one may come first on the path
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    # each kill from outside ends all ranks, and torchrun starts the ranks again
    command += [
        f"--max-restarts={len(variant.kills)}",
        str(_TRAIN),
        *variant.overrides,
        f"run.dir={run}",
    ]
    with log_of(run).open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            left = inject_from_outside(
                variant.kills,
                run,
                world_size=num_ranks,
                parent_pid=process.pid,
                goes_on=lambda: process.poll() is None and goes_on(),
            )
            while process.poll() is None and goes_on():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
        finally:
            was_stopped = process.poll() is None
            end_job(process)
    return JobOutcome(status=process.returncode, was_stopped=was_stopped, left=left)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m launcher.compare",
        description=(
            "Run policies one after the other, under the same faults, and report on"
            " them side by side."
        ),
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="POLICY|SETTING=VALUE",
        help=f"default: {' '.join(_ALL)}, without faults",
    )
    add("--ranks", type=int, default=4, help="processes on this machine (default: 4)")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="where runs and report.html go (default: outputs/DATE/TIME-compare)",
    )
    add(
        "--limit-s",
        type=float,
        default=3600.0,
        help="seconds after which a run is stopped (default: 3600)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
