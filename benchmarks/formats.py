"""Number formats of training state: loss curves, and bytes of snapshots.

    python benchmarks/formats.py [--to docs] [--runs DIR]
        [OVERRIDES]      # model=tiny, 4 ranks, six runs

Compares the bytes with the formulas and with the paper's numbers. Writes formats.svg
and formats.md. Runs that are finished in DIR are not run again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import grouped  # noqa: E402
from benchmarks.lossy.figure import Line, Panel, draw  # noqa: E402
from benchmarks.runs import commit_of, finished_run, hardware, packages  # noqa: E402
from launcher.config import ModelConfig, compose_settings, read_settings  # noqa: E402
from launcher.parameters import count_parameters, operator_parameters  # noqa: E402
from launcher.report.facts import gather  # noqa: E402
from launcher.report.read import read_run  # noqa: E402
from moe_ckpt.events import SnapshotTaken, read_events  # noqa: E402
from moe_ckpt.state_format import StateFormat  # noqa: E402
from moe_ckpt.types import OperatorKind  # noqa: E402

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
    "fp16_fp16_fp16": (
        "as BF16: 11 bits of a master are enough for updates of this size"
    ),
    "fp8_fp32_fp32": "as BF16: masters keep every update, and forward passes round",
    "fp8_fp16_fp32": "as BF16, with half the bytes of a master",
    "fp8_fp16_fp8": (
        "as BF16: the first moment is an average that the next gradients renew"
    ),
    "fp8_fp8_fp8": (
        "worse: an update of less than half a step of FP8 is lost, as nothing rounds at"
        " random. It shows bytes, and is no recipe"
    ),
}
_PAGE = """\
# Number formats: what they cost the model, and what they save

This page answers: how each number format changes the loss, and how many bytes its snapshots take.
Next: [design.md](design.md#number-formats) says how formats are stored; [gpu.md](gpu.md) has the runs of formats on a GPU.

Written by `{command}`; do not edit.

Each format of MoEvement's Table 7, and BF16, trains `tiny` for {iterations} iterations on 4 ranks, under
`ckpt=moevement ckpt.window={window}`. FP8 layers and FusedAdam are the CPU references of this project
(`moe_ckpt/standins/fp8_linear.py`, `moe_ckpt/standins/precision_adam.py`), not Transformer Engine's kernels.

![Evaluation loss against iterations](formats.svg)

| `precision=` | compute / master / moments | evaluation loss at the end | above BF16 | |
| --- | --- | --- | --- | --- |
{losses}

Runs that differ by rounding alone end up to 0.1 apart ([partial.md](partial.md): nudged runs, and another seed). All
rows but the last lie within that range.

## Bytes

All numbers are bytes a parameter, except C and the two ratios. "Computed" means from the format; "measured" means from the
run, with scales and buffers, over all parameters.

| column | meaning |
| --- | --- |
| C | bytes of a compute weight |
| state, paper | master and moments: a snapshot in full, as the paper counts it |
| exact | a snapshot in full, as it is |
| whole | computed: `exact`, averaged over all parameters of the model |
| measured | the first whole snapshot of all ranks |
| window of {window} | computed, averaged: a window of W snapshots has every operator once in full, and with compute weights in each snapshot before that one. With operators of one size that is `exact` + C * (W - 1) / 2 |
| measured | the last window of all ranks; its operators are not of one size |
| against BF16 | the measured window, divided by that of BF16 |
| paper | the window by the paper's count, divided by the computed window of BF16 |

The averages are over two kinds of parameters. In FP8 formats the linear layers of the decoder compute in FP8, {share:.0%}
of the parameters of this `tiny`. Embeddings, norms, routers and the output layer stay in 16 bits.

`tests/launcher/test_formats.py` compares each slot of a window with the formula element by element.

| `precision=` | C | state, paper | exact | whole | measured | window of {window} | measured | against BF16 | paper |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{bytes}

`exact` is more than the paper counts if the compute weight is not the rounding of the stored master weight:
an FP16 master is itself rounded, so a snapshot in full holds the compute weight as well.

FP8 parameters (`precision=fp8_fp32_fp32 precision.fp8_param_gather=true`) take the same bytes: a payload of one byte, and
scales. With delayed scaling a snapshot in full has the payload beside the master, 13 bytes. On a GPU, layers that
multiply in FP8 keep BF16 parameters otherwise: C is 2 there.

## Frozen experts of a grouped layer

In a replay some experts of a layer are frozen, while others are trained again. If each expert is a module of its own,
frozen weights skip their gradients. Transformer Engine's `GroupedLinear` asks its first weight alone, so a layer
computes all weight gradients, unless all of its experts are frozen.

The table has the processor seconds of a forward and a backward pass of one layer on a CPU. The layer:
{grouped}.

| frozen | without their weight gradients | with all weight gradients | price |
| --- | --- | --- | --- |
{grouped_rows}

## Measured on

{hardware}; {packages}; commit {commit}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT / "docs",
        help="folder of the page and the figure",
    )
    parser.add_argument(
        "--runs", type=Path, help="folder of the runs (default: a temporary one)"
    )
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.runs or Path(temporary)).resolve()
        arguments = [*COMMON, f"train.iterations={options.iterations}", *overrides]
        runs = {
            name: finished_run(name, folder, [*arguments, f"precision={name}"])
            for name in STYLES
        }
        command = " ".join(["python benchmarks/formats.py", *overrides])
        write(options.to, runs, options.iterations, command)
    return 0


def write(
    folder: Path, runs: Mapping[str, Path], iterations: int, command: str
) -> None:
    """Write the page and the figure about finished runs.

    Args:
        folder: The folder of the page and the figure.
        runs: The run folders, by the name of `precision`.
        iterations: The iterations of each run.
        command: The command, for the page.
    """
    curves = {name: evaluations(path) for name, path in runs.items()}
    lines = [
        Line(name=name, style=STYLES[name], points=curve)
        for name, curve in curves.items()
    ]
    settings = read_settings(runs["bf16"] / "config.yaml")
    num_parameters, _ = count_parameters(
        settings.model, _BYTE_TOKENS, settings.train.sequence_length
    )
    share = fp8_share(settings.model)
    panel = Panel(
        title="",
        y="evaluation loss, nats per token",
        lines=lines,
        marks=(),
        has_legend=True,
    )
    page = _PAGE.format(
        command=command,
        iterations=iterations,
        window=WINDOW,
        losses="\n".join(_loss_rows(curves)),
        share=share,
        bytes="\n".join(_byte_rows(runs, share, num_parameters)),
        grouped=grouped.SAID,
        grouped_rows="\n".join(grouped.rows()),
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
    return [
        (float(event.iteration), event.loss)
        for event in gather(read_run(run)).evaluated
    ]


def window_bytes(run: Path) -> int:
    """Return the bytes of the last whole window of all ranks."""
    taken = list(_snapshots(run))
    last = max(event.window_start for event in taken if event.slot == WINDOW - 1)
    return sum(event.size_bytes for event in taken if event.window_start == last)


def _snapshots(run: Path) -> Iterator[SnapshotTaken]:
    for path in sorted((run / "events").glob("*.jsonl")):
        yield from (
            logged.event
            for logged in read_events(path)
            if isinstance(logged.event, SnapshotTaken)
        )


def whole_bytes(run: Path) -> int:
    """Return the bytes of the first snapshot of all ranks.

    The first snapshot has the whole state.
    """
    return sum(event.size_bytes for event in _snapshots(run) if event.iteration == 0)


def fp8_share(model: ModelConfig) -> float:
    """Return the share of the decoder's linear weights among all parameters."""
    counts = list(operator_parameters(model, _BYTE_TOKENS))
    norms = 2 * model.hidden_size  # RMSNorm weights of a block
    blocks = sum(
        count - norms
        for operator, count in counts
        if operator.kind is OperatorKind.BLOCK
    )
    experts = sum(
        count for operator, count in counts if operator.kind is OperatorKind.EXPERT
    )
    return (blocks + experts) / sum(count for _, count in counts)


def window_by_formula(stored: StateFormat, full_bytes: float) -> float:
    """Return the bytes per parameter of a window with operators of one size.

    Args:
        stored: The format.
        full_bytes: The bytes per parameter of an operator in full.
    """
    return full_bytes + stored.compute_bytes * (WINDOW - 1) / 2


def mean_bytes(
    stored: StateFormat, share: float, bytes_of: Callable[[StateFormat], float]
) -> float:
    """Return the mean bytes per parameter.

    Beside FP8, some parameters stay in 16 bits.

    Args:
        stored: The format.
        share: The share of parameters that compute in the format.
        bytes_of: Returns the bytes per parameter of a format.
    """
    other = replace(stored, compute="bf16") if stored.compute == "fp8" else stored
    return share * bytes_of(stored) + (1 - share) * bytes_of(other)


def exact_window(stored: StateFormat) -> float:
    return window_by_formula(stored, stored.full_bytes)


def _loss_rows(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    reference = curves["bf16"][-1][1]
    for name, curve in curves.items():
        last = curve[-1][1]
        stored = compose_settings([f"precision={name}"]).precision.state_format
        yield (
            f"| `{name}` | {stored} | {last:.4f} | {last - reference:+.4f} |"
            f" {SAID[name]} |"
        )


def _byte_rows(
    runs: Mapping[str, Path], share: float, num_parameters: int
) -> Iterator[str]:
    reference = format_of(runs["bf16"])
    for name, run in runs.items():
        stored = format_of(run)
        whole = mean_bytes(stored, share, lambda each: each.full_bytes)
        paper = window_by_formula(stored, stored.state_bytes)
        cells = [
            str(stored.compute_bytes),
            str(stored.state_bytes),
            str(stored.full_bytes),
            f"{whole:.2f}",
            f"{whole_bytes(run) / num_parameters:.2f}",
            f"{mean_bytes(stored, share, exact_window):.2f}",
            f"{window_bytes(run) / num_parameters:.2f}",
            f"{window_bytes(run) / window_bytes(runs['bf16']):.2f}",
            f"{paper / exact_window(reference):.2f}",
        ]
        yield f"| `{name}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
