"""Real runs beside the simulator's predictions of these runs.

    python benchmarks/predicted.py [-o DIR] [--write docs/simulator.md]
        [OVERRIDES]        # model=small, 4 ranks

All policies run under the same faults on this machine. Constants are measured in runs
of their own (launcher/cluster_profile.py): another run of the same policy, with other
settings and other faults. A constant that this other run did not measure is the
constant of all measured runs. From a predicted run a prediction takes the settings, the
points of the faults, and the time of an iteration; the published predictions have that
time from a profile. Nothing else is taken from a predicted run.

The machine's speed changes from one quarter of an hour to the next, so both kinds of
runs alternate. Runs that are already in the folder of `-o` are only read. A folder in
memory (/dev/shm) is best if the speed of the disk varies. Takes about half an hour on
two quiet cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.marks import rewrite  # noqa: E402
from benchmarks.runs import default_model  # noqa: E402
from launcher.cluster_profile import constants_of  # noqa: E402
from launcher.simulator.comparison import predict_run  # noqa: E402
from launcher.simulator.published_page import OWN_RUNS  # noqa: E402
from launcher.simulator.real_run import RealRun, facts_of, read_run, recoveries_of  # noqa: E402
from moe_ckpt.sim.hardware import ClusterConfig  # noqa: E402

RUNS = (  # pairs: predicted run, and the run before it that measures constants
    ("none", None),
    ("dense:ckpt.every_iters=5", "dense:ckpt.every_iters=4"),
    ("checkfreq:ckpt.every_iters=5", None),
    ("gemini:ckpt.every_iters=5", "gemini:ckpt.every_iters=3"),
    ("moevement:ckpt.window=3", "moevement:ckpt.window=2"),
    ("moc", "moc:ckpt.every_iters=2"),
    ("moetion", "moetion:ckpt.experts=4"),
    ("moetion:ckpt.send_gradients=false", None),
)
COMMON = (
    "train.eval_every_iters=0",
    "train.eval_batches=1",
    "run.tensorboard=false",
    "fault=at",
)
FAULTS = (
    "train.iterations=40",
    (
        "fault.at=[{iteration: 8, rank: 2}, {iteration: 14, rank: 1}, {iteration: 19,"
        " rank: 0}, {iteration: 27, rank: 3},{iteration: 33, rank: 2}]"
    ),
)
OTHER_FAULTS = (
    "train.iterations=26",
    (
        "fault.at=[{iteration: 6, rank: 1}, {iteration: 11, rank: 3}, {iteration: 15,"
        " rank: 0}, {iteration: 18, rank: 2},{iteration: 22, rank: 1}]"
    ),
)
COLUMNS = (
    "policy",
    "an iteration, s",
    "ETTR: predicted",
    "true",
    "deviation",
    "a fault, s: predicted",
    "true (least to most)",
    "deviation",
    "iterations again",
)

CONSTANTS = (
    "detect_s",
    "rebuild_s",
    "resume_s",
    "rerun_ratio",
    "restart_s",
    "take_s",
    "copy_bytes_per_s",
    "disk_bytes_per_s",
    "disk_read_bytes_per_s",
)

HOW = """\
Faults hit at the start of an iteration.

- *An iteration, s*: the run's own mean, of iterations as they ran first and without stalls of snapshots. This column
  alone has the slowdown by copies that share the cores with training.
- *ETTR*: the time of new iterations, at the seconds of that column, as a share of all the time of a run but its first
  iteration.
- *A fault, s*: means. On a CPU an iteration that runs again is faster (`rerun_ratio`), because oneDNN builds code for
  each new shape of a BF16 product, and an expert gets a new number of tokens in almost every iteration.
""".splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="where runs go (default: nowhere that stays)"
    )
    parser.add_argument("--write", type=Path, help="page with marks around the table")
    options, overrides = parser.parse_known_args()
    settings = [*COMMON, *default_model(overrides), *overrides]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        measured, predicted = carry_out(folder, settings)
        in_all = [read_run(run) for run in measured]
        machine = constants_of(in_all)
        own = {run.settings.ckpt.policy: constants_of([run], machine) for run in in_all}
        runs = [read_run(run) for run in predicted]
        clusters = [own.get(run.settings.ckpt.policy, machine) for run in runs]
        lines = [*table(runs, clusters), "", *notes(machine, own), "", *HOW]
    print("\n".join(lines))
    if options.write:
        rewrite(options.write, OWN_RUNS, lambda _: "\n".join(lines))
    return 0


def carry_out(folder: Path, settings: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Run all policies, alternating with the runs that measure constants.

    Args:
        folder: The folder of all runs.
        settings: Settings of all runs.

    Returns:
        The folders of the runs that measure constants, and of the runs to predict.
    """
    measured: list[Path] = []
    predicted: list[Path] = []
    for number, (policy, other) in enumerate(RUNS, start=1):
        if other:
            measured.append(
                run_once(
                    folder / f"measured-{number}", other, [*OTHER_FAULTS, *settings]
                )
            )
        predicted.append(
            run_once(folder / f"predicted-{number}", policy, [*FAULTS, *settings])
        )
    return measured, predicted


def run_once(folder: Path, policy: str, settings: Sequence[str]) -> Path:
    """Run a policy under faults, and return the run folder.

    A finished run is not run again. A failure ends this program.
    """
    run = folder / f"1-{policy.partition(':')[0]}"
    if not (run / "result.json").exists():
        command = [
            sys.executable,
            "-m",
            "launcher.compare",
            policy,
            *settings,
            "-o",
            str(folder),
        ]
        ended = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False
        )
        if ended.returncode != 0:
            sys.exit(
                f"launcher.compare ended with status {ended.returncode}; logs are in"
                f" {folder}"
            )
    return run


def table(runs: Sequence[RealRun], clusters: Sequence[ClusterConfig]) -> Iterator[str]:
    """Yield the lines of a table, a row for each run.

    Args:
        runs: The runs to predict, in the order of `RUNS`.
        clusters: The constants for each run.
    """
    yield f"| {' | '.join(COLUMNS)} |"
    yield "| --- " * len(COLUMNS) + "|"
    for run, cluster, (policy, _) in zip(runs, clusters, RUNS, strict=True):
        name = policy.replace(":", ", ").replace("ckpt.", "")
        yield f"| {' | '.join([name, *row(run, cluster)])} |"


def row(run: RealRun, cluster: ClusterConfig) -> Iterator[str]:
    """Yield the predicted values of a run, the true values and the deviations."""
    truth = facts_of(run.ranks)
    recovered = recoveries_of(run.ranks, truth.iteration_s)
    predicted = predict_run(run, cluster, truth.iteration_s, truth.iterations)
    costs = [each.cost_s for each in recovered]
    yield f"{truth.iteration_s:.2f}"
    yield f"{predicted.ettr:.4f}"
    yield f"{truth.ettr:.4f}"
    yield f"{predicted.ettr - truth.ettr:+.4f}"
    yield f"{predicted.recovery_s:.2f}"
    yield f"{truth.recovery_s:.2f} ({min(costs):.2f} to {max(costs):.2f})"
    yield f"{predicted.recovery_s / truth.recovery_s - 1:+.0%}"
    yield ", ".join(str(each.again or each.replayed) for each in recovered)


def notes(machine: ClusterConfig, own: Mapping[str, ClusterConfig]) -> Iterator[str]:
    """Yield the measured constants.

    Args:
        machine: The constants of all runs that measure constants.
        own: The constants of one such run, by policy.
    """
    values = ", ".join(f"`{name}` {getattr(machine, name):.3g}" for name in CONSTANTS)
    yield (
        f"Measured on {os.cpu_count()} cores in all other runs, 5 faults in each:"
        f" {values}."
    )
    yield ""
    for policy, cluster in own.items():
        differing = [
            name
            for name in CONSTANTS
            if getattr(cluster, name) != getattr(machine, name)
        ]
        values = (
            ", ".join(f"`{name}` {getattr(cluster, name):.3g}" for name in differing)
            or "the same"
        )
        yield f"- in another run of {policy}: {values}"


if __name__ == "__main__":
    sys.exit(main())
