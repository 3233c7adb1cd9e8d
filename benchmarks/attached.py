"""Megatron-LM's own loop with an attachment, beside the same loop without one.

    python benchmarks/attached.py [--rounds 3] [--iterations 40] [--skip 10]
        [--kills 6] [--restarts 3] [--ckpt moevement] [--set KEY=VALUE]
        [-- ARGUMENTS]

Jobs are the job of examples/megatron_lm.sh on 4 ranks. ARGUMENTS come after the
example's arguments, and replace them. Each round trains once without and once with the
attachment; the order changes from round to round. Megatron-LM logs the iteration times.

Then the benchmark kills random workers of an attached job, and random processes of a
job that torchrun starts again. The restarted job loads its newest checkpoint; a
checkpoint is written every 10 iterations. Printed: the ratio of iteration times with
its 95 % interval, and median seconds from `kill -9` to the next new iteration. Absolute
times mean little on a laptop; ratios are meaningful.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.overhead import ratio  # noqa: E402
from benchmarks.recovery import summary  # noqa: E402
from benchmarks.runs import current_commit, hardware  # noqa: E402
from moe_ckpt.elastic.live_workers import read_live  # noqa: E402
from scripts.fetch_megatron_lm import FOLDER  # noqa: E402

RANKS = 4
WARM_ITERATIONS = 12  # by then the job to restart has a checkpoint
NEW_ITERATIONS_BETWEEN_KILLS = 5
PATIENCE_S = 240.0
_, _, _WORDS = (
    (ROOT / "examples" / "megatron_lm.sh")
    .read_text()
    .partition("-- examples/megatron_lm.py ")
)
ARGUMENTS = _WORDS.replace("\\\n", " ").split()
_LINE = re.compile(
    r"\[(\S+ \S+)\] iteration +(\d+)/ *\d+ .*elapsed time per iteration \(ms\):"
    r" ([\d.]+)"
)


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A line of Megatron-LM's log about an iteration."""

    iteration: int
    """Number of the iteration."""

    ended_unix_s: float
    """End of the iteration, in Unix seconds."""

    seconds: float
    """Time of the iteration, in seconds."""


def read_log(text: str) -> list[Logged]:
    """Return the logged iterations, in the order of their ends.

    An iteration may occur twice.
    """
    return [
        Logged(
            iteration=int(number),
            ended_unix_s=datetime.fromisoformat(ended).timestamp(),
            seconds=float(taken_ms) / 1e3,
        )
        for ended, number, taken_ms in _LINE.findall(text)
    ]


class Job:
    """A job of the example under torchrun.

    Args:
        folder: A new folder for the run folder and the log.
        own: Options of moe_ckpt.run.
        more: Arguments of the script, after the example's.
        max_restarts: How often torchrun may start the job again.
    """

    def __init__(
        self,
        folder: Path,
        own: Sequence[str],
        more: Sequence[str],
        max_restarts: int = 0,
    ) -> None:
        self.run = folder / "run"
        folder.mkdir()
        self._log = folder / "log"
        torchrun = [
            str(Path(sys.executable).with_name("torchrun")),
            "--standalone",
            f"--nproc-per-node={RANKS}",
        ]
        own = [
            "-m",
            "moe_ckpt.run",
            *own,
            "--set",
            f"run.dir={self.run}",
            "--",
            "examples/megatron_lm.py",
        ]
        path = os.pathsep.join(map(str, (FOLDER, ROOT)))
        quiet = {
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        # in a store that outlives its ranks, gloo would find addresses of dead ranks
        if max_restarts:
            quiet["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *torchrun,
                    f"--max-restarts={max_restarts}",
                    *own,
                    *ARGUMENTS,
                    "--eval-interval",
                    "100000",
                    *more,
                ],
                cwd=ROOT,
                env=os.environ | quiet | {"PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def iterations(self) -> list[Logged]:
        return read_log(self._log.read_text())

    def newest(self) -> int:
        """Return the newest iteration that has ended."""
        return max((each.iteration for each in self.iterations()), default=0)

    def finish(self) -> list[Logged]:
        if self._process.wait(PATIENCE_S) != 0:
            sys.exit(self._log.read_text()[-4000:])
        return self.iterations()

    def wait_for(self, is_there: Callable[[], bool], name: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not is_there():
            if self._process.poll() is not None or time.monotonic() > until_s:
                sys.exit(f"no {name}\n{self._log.read_text()[-4000:]}")
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """Return the pids of the processes that train.

        Supervisors write the pids of their workers down. Without supervisors,
        torchrun's children train.
        """
        live = [worker.pid for worker in read_live(self.run)]
        pid = self._process.pid
        return live or [
            int(child)
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def pair(folder: Path, number: int, options: argparse.Namespace) -> tuple[float, float]:
    """Train once with and once without the attachment; the order depends on the round.

    Args:
        folder: The folder of all runs.
        number: The number of the round.
        options: The options of the command.

    Returns:
        Mean seconds of an iteration with and without the attachment.
    """
    kinds = {"attached": options.own, "plain": ["--plain"]}
    found = {}
    for name in sorted(kinds, reverse=number % 2 == 1):
        job = Job(
            folder / f"{name}{number}",
            kinds[name],
            ["--train-iters", str(options.iterations), *options.arguments],
        )
        found[name] = statistics.mean(
            each.seconds for each in job.finish() if each.iteration > options.skip
        )
    print(
        f"round {number}: attached {found['attached']:.3f} s, plain"
        f" {found['plain']:.3f} s",
        flush=True,
    )
    return found["attached"], found["plain"]


def kills(job: Job, count: int, chosen: random.Random) -> list[float]:
    """Kill a random worker again and again, and stop the job.

    Args:
        job: The running job.
        count: The number of kills.
        chosen: Chooses the workers.

    Returns:
        Seconds from each kill to the next new iteration.
    """
    try:
        job.wait_for(lambda: job.newest() >= WARM_ITERATIONS, "first iterations")
        return [kill_once(job, chosen) for _ in range(count)]
    finally:
        job.stop()


def kill_once(job: Job, chosen: random.Random) -> float:
    before, killed_unix_s = job.newest(), time.time()
    os.kill(chosen.choice(job.workers()), signal.SIGKILL)
    job.wait_for(
        lambda: job.newest() >= before + NEW_ITERATIONS_BETWEEN_KILLS, "new iterations"
    )
    later = [
        each
        for each in job.iterations()
        if each.iteration > before + 1 and each.ended_unix_s > killed_unix_s
    ]
    found = min(each.ended_unix_s for each in later) - killed_unix_s
    print(f"killed at iteration {before}: {found:.2f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("rounds", 3),
        ("iterations", 40),
        ("skip", 10),
        ("kills", 6),
        ("restarts", 3),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ckpt", default="moevement")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("arguments", nargs="*", help="of the script, after --")
    options = parser.parse_args()
    settings = [word for setting in options.set for word in ("--set", setting)]
    options.own = ["--ckpt", options.ckpt, "--set", "runtime.heartbeat_s=20", *settings]
    if not FOLDER.exists():
        sys.exit(
            "Megatron-LM is not there: get it by python scripts/fetch_megatron_lm.py"
        )
    chosen, endless = (
        random.Random(options.seed),
        ["--train-iters", "100000", *options.arguments],
    )
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        rounds = [pair(folder, number, options) for number in range(options.rounds)]
        recovered = kills(
            Job(folder / "killed", options.own, endless), options.kills, chosen
        )
        saved = [
            "--save",
            f"{folder}/saved",
            "--load",
            f"{folder}/saved",
            "--save-interval",
            "10",
        ]
        # a CPU has torch's Adam, whose state Megatron-LM cannot load: the restart
        # loads less
        without = [
            "--no-load-optim",
            "--no-load-rng",
            "--override-opt-param-scheduler",
            "--ckpt-format",
            "torch_dist",
        ]
        restarting = Job(
            folder / "restarted",
            ["--plain"],
            [*endless, *saved, *without],
            options.restarts,
        )
        restarted = kills(restarting, options.restarts, chosen)
        show(options, rounds, recovered, restarted)
    return 0


def show(
    options: argparse.Namespace,
    rounds: Sequence[tuple[float, float]],
    recovered: Sequence[float],
    restarted: Sequence[float],
) -> None:
    attached, plain = zip(*rounds, strict=True)
    times = statistics.median(restarted) / statistics.median(recovered)
    print(
        f"commit {current_commit()}, {hardware()}, --ckpt {options.ckpt}"
        f" {' '.join(options.set)}"
    )
    print("| | attached | without |\n| --- | --- | --- |")
    print(
        f"| an iteration, s | {statistics.mean(attached):.3f} |"
        f" {statistics.mean(plain):.3f} |"
    )
    print(
        f"| ratio of iteration times, {len(rounds)} pairs | {ratio(attached, plain)}"
        " | 1 |"
    )
    print(
        f"| kill to the next new iteration, s | {summary(recovered)} |"
        f" {summary(restarted)} |"
    )
    print(
        f"| ratio of the medians, {len(recovered)} kills, {len(restarted)} restarts | 1"
        f" | {times:.1f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
