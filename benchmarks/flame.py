"""A flame graph of rank 0's training thread, and the share of the library's hooks.

    python benchmarks/flame.py [--seconds 60] [--py-spy PATH]
        [--write benchmarks/README.md] [OVERRIDES]

Unless overridden: model=small, 4 ranks, ckpt=moevement with ckpt.window=12, so that
each iteration has a slot, and no copies on peers. py-spy (`pip install py-spy`; needs
the right to trace a process) samples the stacks of a running worker from outside.
Shares are shares of samples, so they hold for slow iterations, too. Threads beside the
training thread are left out, and so are frames of torch.nn that only call the next
frame. `--write` puts the shares between the marks of a page, and the graph beside the
page as flame.svg.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.marks import rewrite  # noqa: E402
from benchmarks.recovery import WARM_ITERATIONS, Job  # noqa: E402
from benchmarks.runs import current_commit, default_model, hardware  # noqa: E402
from launcher.overrides import last_values  # noqa: E402
from moe_ckpt.elastic.live_workers import read_live  # noqa: E402

DEFAULTS = ("ckpt=moevement", "ckpt.window=12", "ckpt.replicas=0")
QUIET = (
    "train.iterations=100000",
    "train.eval_every_iters=0",
    "train.eval_batches=1",
    "run.tensorboard=false",
)
MARKS = ("<!-- flame: written by benchmarks/flame.py -->", "<!-- end of flame -->")
RATE_HZ = 50
_ROOT_FRAME = "GenerationLoop.run (moe_ckpt/engine/worker_loop.py"
_PASSES_ON = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py")
_HOOKS = ("iteration_started", "gradients_ready", "update_applied", "step_committed")
# pixels; last, the share of samples below which a frame is not drawn
_WIDTH, _HEIGHT, _ROW, _SMALLEST = 1200.0, 13.0, 14.0, 0.004

Stack = tuple[str, ...]


@dataclass
class Frame:
    """A function in the tree of calls."""

    samples: int = 0
    """Samples in the function and in the functions that the function called."""

    called: dict[str, Frame] = field(default_factory=dict)
    """Functions that the function called, by name."""


def read_stacks(raw: str) -> Counter[Stack]:
    """Return the stacks of the training thread, with the number of samples.

    A stack begins with the loop's function; a called function follows its caller.

    Args:
        raw: py-spy's raw output.
    """
    stacks: Counter[Stack] = Counter()
    for line in raw.splitlines():
        text, _, count = line.rpartition(" ")
        frames = [
            frame.rpartition(":")[0] + ")" if ":" in frame else frame
            for frame in text.split(";")
        ]
        begin = next(
            (i for i, frame in enumerate(frames) if frame.startswith(_ROOT_FRAME)), None
        )
        if begin is not None:
            stacks[
                tuple(
                    frame
                    for frame in frames[begin:]
                    if not any(p in frame for p in _PASSES_ON)
                )
            ] += int(count)
    return stacks


def tree_of(stacks: Counter[Stack]) -> Frame:
    """Return the stacks as a tree of calls."""
    root = Frame()
    for stack, count in stacks.items():
        frame = root
        frame.samples += count
        for name in stack:
            frame = frame.called.setdefault(name, Frame())
            frame.samples += count
    return root


def share_of(stacks: Counter[Stack], function: str) -> float:
    """Return the share of samples with a function anywhere in the stack.

    Args:
        stacks: The stacks, with the number of samples.
        function: The qualified name of the function.
    """
    within = sum(
        count
        for stack, count in stacks.items()
        if any(f.startswith(f"{function} (") for f in stack)
    )
    return within / sum(stacks.values())


def draw(root: Frame) -> str:
    """Return the tree as SVG.

    Each depth has a row, callers above. A frame is as wide as its share of the samples.
    """
    boxes = list(_boxes(root, 0, 0.0, root.samples))
    height = _ROW * (1 + max(depth for depth, *_ in boxes))
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}"'
        ' font-family="monospace"'
        ' font-size="9"><style>rect{fill:#c9d6e4;stroke:#fff;stroke-width:.5}.ours'
        " rect{fill:#e0a36b}</style>"
    ]
    for depth, left, share, name in boxes:
        x, width = left * _WIDTH, share * _WIDTH
        text = escape(name[: int(width / 5.5)]) if width > 20 else ""
        kind = (
            ' class="ours"'
            if "moe_ckpt/engine" in name or "moe_ckpt/snapshot" in name
            else ""
        )
        rows.append(
            f"<g{kind}><title>{escape(name)}: {share:.1%}</title>"
            f'<rect x="{x:.1f}" y="{depth * _ROW:g}" width="{width:.1f}"'
            f' height="{_HEIGHT:g}"/>'
            f'<text x="{x + 2:.1f}" y="{depth * _ROW + 10:g}">{text}</text></g>'
        )
    return "\n".join([*rows, "</svg>\n"])


def _boxes(
    frame: Frame, depth: int, left: float, total: int
) -> Iterator[tuple[int, float, float, str]]:
    for name, called in sorted(frame.called.items()):
        share = called.samples / total
        if share >= _SMALLEST:
            yield depth, left, share, name
            yield from _boxes(called, depth + 1, left, total)
        left += share


def lines(stacks: Counter[Stack]) -> list[str]:
    """Return the shares of the hooks as a table."""
    total = sum(stacks.values())
    rows = ["| hook of the session | share of the training thread |", "| --- | --- |"]
    rows += [
        f"| `{hook}` | {share_of(stacks, f'Session.{hook}'):.2%} |" for hook in _HOOKS
    ]
    rows.append(
        "| of these, waiting for other ranks to vote |"
        f" {share_of(stacks, 'Session._vote'):.2%} |"
    )
    return [
        *rows,
        "",
        f"{total} samples at {RATE_HZ} Hz. {hardware()}; commit {current_commit()}.",
    ]


def sample(folder: Path, arguments: Sequence[str], py_spy: str, seconds: int) -> str:
    """Train, and return py-spy's raw output on rank 0's worker.

    Sampling begins after the first iterations.

    Args:
        folder: The folder for the run and for py-spy's output.
        arguments: Settings of the launcher.
        py_spy: The program.
        seconds: The duration of the sampling.
    """
    job = Job(folder / "run", ["launcher/train.py", *arguments])
    raw = folder / "raw"
    try:
        job.wait_for(
            lambda: len(job.committed()) >= WARM_ITERATIONS, "first iterations"
        )
        pid = next(
            worker.pid for worker in read_live(job.folder) if worker.global_rank == 0
        )
        spy = [
            py_spy,
            "record",
            "--idle",
            f"--duration={seconds}",
            f"--rate={RATE_HZ}",
            "--format=raw",
            f"--output={raw}",
        ]
        subprocess.run([*spy, f"--pid={pid}"], check=True, stdout=subprocess.DEVNULL)
    finally:
        job.stop()
    return raw.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--py-spy", default="py-spy")
    parser.add_argument(
        "--write",
        type=Path,
        help="page with marks around the table; the figure is put beside it",
    )
    options, overrides = parser.parse_known_args()
    if shutil.which(options.py_spy) is None:
        sys.exit(
            f"--py-spy: got {options.py_spy}, wanted the program of `pip install"
            " py-spy`"
        )
    arguments = last_values([*default_model(overrides), *DEFAULTS, *QUIET, *overrides])
    with tempfile.TemporaryDirectory() as folder:
        stacks = read_stacks(
            sample(Path(folder), arguments, options.py_spy, options.seconds)
        )
    if not stacks:
        sys.exit("flame: got no sample of the training thread")
    print("\n".join(lines(stacks)))
    if options.write:
        rewrite(options.write, MARKS, lambda _: "\n".join(lines(stacks)))
        (options.write.parent / "flame.svg").write_text(draw(tree_of(stacks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
