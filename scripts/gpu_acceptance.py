"""Accept a machine with a GPU, by stages that prove more than tests on a CPU can.

    python scripts/gpu_acceptance.py                   all stages that the number of
                                                       GPUs allows, one after another
    python scripts/gpu_acceptance.py facts unit        some of them: no stage takes more
                                                       than ten minutes
    python scripts/gpu_acceptance.py --small           with a small model: finds
                                                       failures that do not come from
                                                       the size of the model
    python scripts/gpu_acceptance.py --cpu             the same stages on a machine
                                                       without a GPU, with a small model
    python scripts/gpu_acceptance.py --at-once 4       four stages at a time, after the
                                                       stages that measure
    python scripts/gpu_acceptance.py --list            each stage, its time limit, and
                                                       the facts that the stage proves

The stages also measure the machine. Each stage is a process with a separate time limit,
prints one line of result and writes a log. A failed stage stops no other stage. The
exit status is 1 if a stage has failed. No network is used. The logs, and a table of all
results, are in a folder of --out: `full`, `small` or `cpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_running: set[subprocess.Popen[bytes]] = set()
_starting = threading.Lock()
sys.path.insert(0, str(ROOT))

from scripts.acceptance.stages import STAGES, Scale, Stage  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a stage."""

    stage: str
    """Name of the stage."""

    passed: bool
    """Whether the stage ended with status 0 within its time limit."""

    seconds: float
    """Run time of the stage."""

    said: str
    """Line of figures of the stage, or the last line of an error."""

    def line(self) -> str:
        return (
            f"{self.stage:<12} {'ok' if self.passed else 'FAILED':<7}"
            f" {self.seconds:6.1f} s  {self.said}"
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--cpu", action="store_true", help="in small, without a GPU")
    parser.add_argument("--small", action="store_true", help="with a small model")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="stages that run at the same time",
    )
    parser.add_argument("--list", action="store_true", help="list the stages")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_acceptance")
    # run as the process of this stage
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(
            f"STAGE: got {', '.join(unknown)}, wanted some of {', '.join(STAGES)}"
        )
    kind = "cpu" if options.cpu else "small" if options.small else "full"
    scale = Scale(
        on_gpu=kind != "cpu", is_small=kind != "full", out=options.out.resolve() / kind
    )
    if options.list:
        for name, stage in STAGES.items():
            print(f"{name:<12} at most {stage.limit_s:.0f} s  {stage.proves}")
        return 0
    if options.inside:
        return _be(STAGES[options.inside], scale)
    names = list(
        options.stages
        or [
            name
            for name, stage in STAGES.items()
            if options.cpu or _has_gpus(stage.num_gpus)
        ]
    )
    alone = [name for name in names if STAGES[name].is_alone]
    beside = [name for name in names if not STAGES[name].is_alone]
    results = [
        *_run_all(alone, scale, at_once=1),
        *_run_all(beside, scale, at_once=options.at_once),
    ]
    _write_table(scale, results)
    return int(not all(result.passed for result in results))


def _has_gpus(wanted: int) -> bool:
    """Return whether the machine has this number of GPUs.

    True for one GPU in any case: a stage that runs without a GPU gives the best reason
    for its failure.
    """
    return (
        wanted <= 1 or len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) >= wanted
    )


def _run_all(names: Sequence[str], scale: Scale, *, at_once: int) -> list[Result]:
    with ThreadPoolExecutor(max_workers=max(1, at_once)) as pool:
        return list(pool.map(lambda name: _run(name, STAGES[name], scale), names))


def _run(name: str, stage: Stage, scale: Scale) -> Result:
    """Run a stage in a separate process group, and end all processes of the group."""
    scale.out.mkdir(parents=True, exist_ok=True)
    log, begun_s = scale.out / f"{name}.log", time.monotonic()
    command = [
        sys.executable,
        __file__,
        "--inside",
        name,
        "--out",
        str(scale.out.parent),
        *([] if scale.out.name == "full" else [f"--{scale.out.name}"]),
    ]
    with log.open("w") as said:
        # `_end_with_stages` keeps this lock, so that no stage begins afterwards
        with _starting:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _running.add(process)
        try:
            status = process.wait(stage.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
            _running.discard(process)
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if line.strip()
    ]
    said_last = lines[-1] if lines else "nothing was said"
    if status is None:
        said_last = f"more than {stage.limit_s:.0f} s; the last line: {said_last}"
    result = Result(
        stage=name,
        passed=status == 0,
        seconds=time.monotonic() - begun_s,
        said=said_last,
    )
    print(result.line(), flush=True)
    return result


def _end_with_stages(*_: object) -> None:
    """End this process with all stages, whose jobs must not outlive this process.

    A signal handler, so called in the main thread, which starts and awaits no stage.
    """
    # the handler of a second signal would wait for the lock of this one
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _starting.acquire()
    for process in list(_running):
        _kill(process)
    os._exit(1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all remaining processes of a stage, including jobs of torchrun."""
    _kill(process)
    process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _be(stage: Stage, scale: Scale) -> int:
    print(stage.run(scale), flush=True)
    return 0


def _write_table(scale: Scale, results: Sequence[Result]) -> None:
    """Write results.json and results.md, including results of earlier calls.

    A new result of a stage replaces the earlier result of that stage.
    """
    path = scale.out / "results.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {result.stage: asdict(result) for result in results}
    path.write_text(json.dumps(known, indent=2))
    rows = [known[name] for name in STAGES if name in known]
    lines = [
        "| stage | proves | result | seconds | figures |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        verdict = "ok" if row["passed"] else "FAILED"
        proves = STAGES[row["stage"]].proves
        lines.append(
            f"| {row['stage']} | {proves} | {verdict} | {row['seconds']:.0f} |"
            f" {row['said']} |"
        )
    (scale.out / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_with_stages)
    sys.exit(main(sys.argv[1:]))
