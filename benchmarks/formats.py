"""Number formats of training state: loss curves, and bytes of snapshots beside the formulas and the paper's.

    python benchmarks/formats.py [--to docs] [--runs DIR] [OVERRIDES]      # model=tiny, 4 ranks, six runs

Writes formats.svg and formats.md. Runs that are finished in DIR are not run again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lossy.figure import Line, Panel, draw  # noqa: E402
from benchmarks.runs import commit_of, finished_run, hardware, packages  # noqa: E402
from launcher.config import compose_settings, read_settings  # noqa: E402
from launcher.parameters import count_parameters  # noqa: E402
from launcher.report.facts import gather  # noqa: E402
from launcher.report.read import read_run  # noqa: E402
from moe_ckpt.events import SnapshotTaken, read_events  # noqa: E402
from moe_ckpt.state_format import StateFormat  # noqa: E402

ITERATIONS, WINDOW = 400, 3
_BYTE_TOKENS = 256
COMMON = (
    "ckpt=moevement",
    f"ckpt.window={WINDOW}",
    "model.num_layers=2",
    "train.micro_batch_size=8",
    "train.eval_every_iters=10",
    "run.tensorboard=false",
    "run.progress=none",
)
STYLES = {
    "bf16": "none",
    "fp16_fp16_fp16": "gemini",
    "fp8_fp32_fp32": "first",
    "fp8_fp16_fp32": "second",
    "fp8_fp16_fp8": "third",
    "fp8_fp8_fp8": "moevement",
}
SAID = {
    "bf16": "the reference",
    "fp16_fp16_fp16": "as BF16: 11 bits of a master are enough for updates of this size",
    "fp8_fp32_fp32": "as BF16: masters keep every update, and forward passes round",
    "fp8_fp16_fp32": "as BF16, with half the bytes of a master",
    "fp8_fp16_fp8": "as BF16: the first moment is an average that the next gradients renew",
    "fp8_fp8_fp8": "worse: an update of less than half a step of FP8 is lost, as nothing rounds at random. It shows "
    "bytes, and is no recipe",
}
_PAGE = """\
# Number formats: what they cost the model, and what they save

Written by `{command}`; do not edit.

{iterations} iterations of `tiny` on 4 ranks with each format of MoEvement's Table 7 and with BF16, under
`ckpt=moevement ckpt.window={window}`. FP8 layers and FusedAdam are the CPU references of this project
(`moe_ckpt/megatron/fp8_linear.py`, `moe_ckpt/megatron/precision_adam.py`), not Transformer Engine's kernels.

![Evaluation loss against iterations](formats.svg)

| `precision=` | compute / master / moments | evaluation loss at the end | above BF16 | |
| --- | --- | --- | --- | --- |
{losses}

Runs that differ by rounding alone end up to 0.1 apart ([partial.md](partial.md): nudged runs, and another seed). All
rows but the last lie within that.

## Bytes

A window of W snapshots holds every operator once in full, and with compute weights in each snapshot before that one:
with operators of one size, full + C * (W - 1) / 2 bytes a parameter. Measured are the bytes of a window over all
parameters, with the buffers and scales that belong to it; `tests/launcher/test_formats.py` compares a slot with the
formula element by element. FP8 is what linear layers of the decoder compute with: embeddings, norms, routers and the
output layer stay in 16 bits, which is a larger part of `tiny` than of a real model.

| `precision=` | C | state, paper | state, exact | window of {window} | measured | against BF16 | measured | paper |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{bytes}

`state, exact` is more than the paper counts where the compute weight is not the rounding of the stored master weight:
an FP16 master is itself rounded, so a snapshot in full holds the compute weight as well.

## Measured on

{hardware}; {packages}; commit {commit}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--to", type=Path, default=ROOT / "docs", help="folder of the page and the figure")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: a temporary one)")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.runs or Path(temporary)).resolve()
        arguments = [*COMMON, f"train.iterations={options.iterations}", *overrides]
        runs = {name: finished_run(name, folder, [*arguments, f"precision={name}"]) for name in STYLES}
        command = " ".join(["python benchmarks/formats.py", *overrides])
        write(options.to, runs, options.iterations, command)
    return 0


def write(folder: Path, runs: Mapping[str, Path], iterations: int, command: str) -> None:
    """Write the page and the figure about finished runs, by the name of their `precision`."""
    curves = {name: evaluations(path) for name, path in runs.items()}
    lines = [Line(name=name, style=STYLES[name], points=curve) for name, curve in curves.items()]
    settings = read_settings(runs["bf16"] / "config.yaml")
    num_parameters, _ = count_parameters(settings.model, _BYTE_TOKENS, settings.train.sequence_length)
    taken = {name: (format_of(path), window_bytes(path)) for name, path in runs.items()}
    panel = Panel(title="", y="evaluation loss, nats per token", lines=lines, marks=(), has_legend=True)
    page = _PAGE.format(
        command=command,
        iterations=iterations,
        window=WINDOW,
        losses="\n".join(_loss_rows(curves)),
        bytes="\n".join(_byte_rows(taken, num_parameters)),
        hardware=hardware(),
        packages=packages(runs["bf16"]),
        commit=commit_of(runs.values()),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "formats.svg").write_text(draw([[panel]], "iteration"))
    (folder / "formats.md").write_text(page)


def format_of(run: Path) -> StateFormat:
    return read_settings(run / "config.yaml").precision.state_format


def evaluations(run: Path) -> Sequence[tuple[float, float]]:
    """Return the evaluation losses, by iteration."""
    return [(float(event.iteration), event.loss) for event in gather(read_run(run)).evaluated]


def window_bytes(run: Path) -> int:
    """Return the bytes of the last whole window of all ranks."""
    total = 0
    for path in sorted((run / "events").glob("*.jsonl")):
        taken = [logged.event for logged in read_events(path) if isinstance(logged.event, SnapshotTaken)]
        last = max(event.window_start for event in taken if event.slot == WINDOW - 1)
        total += sum(event.size_bytes for event in taken if event.window_start == last)
    return total


def window_by_formula(stored: StateFormat, full_bytes: int) -> float:
    """Return the bytes a parameter of a window with operators of one size."""
    return full_bytes + stored.compute_bytes * (WINDOW - 1) / 2


def _loss_rows(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    reference = curves["bf16"][-1][1]
    for name, curve in curves.items():
        last = curve[-1][1]
        stored = compose_settings([f"precision={name}"]).precision.state_format
        yield f"| `{name}` | {stored} | {last:.4f} | {last - reference:+.4f} | {SAID[name]} |"


def _byte_rows(runs: Mapping[str, tuple[StateFormat, int]], num_parameters: int) -> Iterator[str]:
    reference, measured_reference = runs["bf16"]
    for name, (stored, measured) in runs.items():
        exact = window_by_formula(stored, stored.full_bytes)
        paper = window_by_formula(stored, stored.state_bytes)
        base = window_by_formula(reference, reference.full_bytes)
        cells = [
            str(stored.compute_bytes),
            str(stored.state_bytes),
            str(stored.full_bytes),
            f"{exact:.1f}",
            f"{measured / num_parameters:.1f}",
            f"{exact / base:.2f}",
            f"{measured / measured_reference:.2f}",
            f"{paper / base:.2f}",
        ]
        yield f"| `{name}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
