"""Jobs of examples/megatron_lm.sh, in processes with the wheel of Megatron-LM.

The wheel replaces the installed megatron-core. `run_jobs` starts this module as a
process, which imports all slow modules once and forks the jobs one after another.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from moe_ckpt.agent import die_with_parent
from moe_ckpt.events import (
    StageRecovered,
    StateAudited,
    StateDigest,
    WorkerStarted,
    read_events,
)
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.observation import Order
from moe_ckpt.observed_start import enter
from scripts.fetch_megatron_lm import BRIDGE_TAG, FOLDER, SWIFT_TAG, sources_of
from tests.harness.gloo.processes import Watch
from tests.harness.jobs.run_files import kinds_of_events
from tests.integrations import bridge_stubs, swift_stubs
from tests.scenarios import ROOT
from tests.waits import JOB_S

T = TypeVar("T")
EXAMPLE = ROOT / "examples" / "megatron_lm.py"
NUM_RANKS, NUM_ITERS = 4, 6
BRIDGE, SWIFT = ("--loop", "megatron-bridge"), ("--loop", "ms-swift")
_, _, _WORDS = (
    (ROOT / "examples" / "megatron_lm.sh")
    .read_text()
    .partition(f"-- examples/{EXAMPLE.name} ")
)
ARGUMENTS = (
    *_WORDS.replace("\\\n", " ").split(),
    # these override the example's: the last value of an argument counts
    *("--train-iters", str(NUM_ITERS), "--eval-interval", "3"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of moe_ckpt.run."""

    name: str
    """Name of the job and of the job's folder."""

    options: tuple[str, ...]
    """Options of moe_ckpt.run."""

    kills: tuple[Kill, ...] = ()
    """Kills of the job's workers."""

    arguments: tuple[str, ...] = ()
    """Arguments of the script after those of the example, which they may override."""

    script: str = str(EXAMPLE)
    """Path of the training script."""

    is_noisy: bool = False
    """Whether noise makes each pass of the model differ from all earlier passes."""

    is_observed: bool = False
    """Whether the job is observed as in a run of `moe-ckpt prove`.

    The digests of the observation are in the folder `observed` beside the run folder.
    """


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that has ended."""

    status: int
    """Exit status of the job; -1 if a kill was not carried out."""

    run: Path
    """Run folder."""

    log: str
    """Output of the supervisors and their workers, by rank."""

    @property
    def digests(self) -> dict[tuple[int, int], set[str]]:
        """Digests that all workers of a rank logged, by rank and done iteration."""
        found: dict[tuple[int, int], set[str]] = {}
        for rank in range(NUM_RANKS):
            for event in self._events(rank, StateDigest):
                found.setdefault((rank, event.iteration), set()).add(event.digest)
        return found

    @property
    def kinds_of_events(self) -> set[str]:
        """Kinds of the events that the ranks have written."""
        return kinds_of_events(self.run, NUM_RANKS)

    @property
    def num_processes(self) -> list[int]:
        """Number of workers that each rank has had, by rank."""
        return [
            sum(1 for _ in self._events(rank, WorkerStarted))
            for rank in range(NUM_RANKS)
        ]

    @property
    def steps_again(self) -> dict[int, int]:
        """Steps that each rebuilt rank took again by logged gradients, by rank."""
        return {
            rank: sum(event.gradient_steps for event in events)
            for rank in range(NUM_RANKS)
            if (events := list(self._events(rank, StageRecovered)))
        }

    @property
    def audited(self) -> set[int]:
        """Iterations after which all ranks have audited their states."""
        of_each = (
            {
                event.iteration
                for event in self._events(rank, StateAudited)
                if event.window_start is not None
            }
            for rank in range(NUM_RANKS)
        )
        return set.intersection(*of_each)

    def _events(self, rank: int, kind: type[T]) -> Iterator[T]:
        for logged in read_events(self.run / "events" / f"rank{rank:04d}.jsonl"):
            if isinstance(logged.event, kind):
                yield logged.event


def run_jobs(folder: Path, *jobs: Job, sources: Path | None = None) -> dict[str, Ended]:
    """Run jobs to their ends, and return the ended jobs by name.

    Args:
        folder: Folder for the files of the jobs.
        jobs: The jobs. A job may fail.
        sources: Sources of another Megatron-LM, which replace those of the wheel. The
            other packages that the sources import are in the wheel's folder.
    """
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    path = os.pathsep.join(map(str, (ROOT, *([sources] if sources else []), FOLDER)))
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(folder)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # avoids the import of a compiler
    with (folder / "log").open("w") as log:
        subprocess.run(
            command,
            env=environment,
            stdout=log,
            stderr=log,
            timeout=JOB_S,
            check=True,
            cwd=folder,
        )
    _require_no_process(folder)
    statuses = json.loads((folder / "statuses.json").read_text())
    return {job.name: _ended(folder, job.name, statuses[job.name]) for job in jobs}


def _require_no_process(folder: Path) -> None:
    """Require that all processes with this working directory end by themselves.

    All jobs in the folder have ended before the call.
    """
    with ExitStack() as stack:
        for path in Path("/proc").glob("[0-9]*"):
            # another user's process, or one that has just ended
            with contextlib.suppress(OSError):
                if (path / "cwd").readlink() == folder:
                    Watch(stack, int(path.name)).wait_for_end()


def _ended(folder: Path, name: str, status: int) -> Ended:
    log = "".join(
        path.read_text() for path in sorted((folder / name).glob("supervisor*.log"))
    )
    return Ended(status=status, run=folder / name / "run", log=log)


def main(folder: Path) -> int:
    """Run the jobs of FOLDER/jobs.json, and write FOLDER/statuses.json."""
    # imported here: only this process has the wheel in PYTHONPATH
    from moe_ckpt.integrations.loops import LOOP_IMPORTS  # noqa: PLC0415

    described = json.loads((folder / "jobs.json").read_text())
    jobs = [
        Job(**{**job, "kills": tuple(Kill(**kill) for kill in job["kills"])})
        for job in described
    ]
    loop = next(
        (
            name
            for _, name in (BRIDGE, SWIFT)
            if any(name in job.options for job in jobs)
        ),
        "megatron-lm",
    )
    if loop == BRIDGE[1]:
        bridge_stubs.install(sources_of(BRIDGE_TAG) / "src" / "megatron" / "bridge")
    if loop == SWIFT[1]:
        swift_stubs.install(sources_of(SWIFT_TAG) / "swift")
    LOOP_IMPORTS[loop]().import_attachment()
    statuses = {job.name: _run(folder / job.name, job) for job in jobs}
    (folder / "statuses.json").write_text(json.dumps(statuses))
    return 0


def _run(folder: Path, job: Job) -> int:
    from launcher.faults.carry_out import carry_out  # noqa: PLC0415
    from tests.harness.jobs.agent import run_job  # noqa: PLC0415

    folder.mkdir()
    memory = tempfile.mkdtemp(prefix="moe_ckpt-test-", dir="/dev/shm")
    run, parent = folder / "run", os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL, parent=parent)
        run_job(lambda: _supervise(job, run, memory), NUM_RANKS, folder, None)
        os._exit(1)
    try:
        done = not job.kills or carry_out(
            job.kills, run, ranks_per_node=1, say=print, patience_s=30.0
        )
        _, status = os.waitpid(pid, 0)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    return os.waitstatus_to_exitcode(status) if done else -1


def _supervise(job: Job, run: Path, memory: str) -> int:
    from moe_ckpt.run import main as run_main  # noqa: PLC0415

    if job.is_noisy:
        from tests.harness.jobs.noise import add_noise  # noqa: PLC0415

        add_noise()
    if job.is_observed:
        os.environ |= Order(run=str(run.with_name("observed"))).environment()
        enter(str(run / "sitecustomize.py"))
    settings = (
        f"run.dir={run}",
        f"runtime.shared_memory={memory}",
        "run.digest_every_iters=1",
    )
    options = [word for setting in settings for word in ("--set", setting)]
    return run_main(
        [*options, *job.options, "--", job.script, *ARGUMENTS, *job.arguments]
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
