"""Text, tables and panels of docs/partial.md: what partial checkpoints cost the model.

A recovery from a partial checkpoint loses tokens of experts, hence the name of this
package. `benchmarks/partial.py` trains the runs and writes the page. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.lossy.claims import ALIKE, Runs, above, judge, jumps, peaks, spread
from benchmarks.lossy.figure import Line, Panel
from benchmarks.lossy.measured import Fault, Measured
from benchmarks.lossy.variants import (
    COMMON,
    GEMINI,
    LIMITED,
    MOC,
    MOC_FOURTH,
    MOC_FOURTH_DYNAMIC,
    MOC_LOAD,
    MOC_SELDOM,
    MOC_SELDOM_DYNAMIC,
    MOETION,
    MOETION_BOOST,
    MOEVEMENT,
    NONE,
    NUDGED,
    NUDGED_MORE,
    OTHER_SEED,
    VARIANTS,
)
from benchmarks.runs import RANKS

_MIB = 1 << 20
_STYLES = {
    NONE: "none",
    GEMINI: "gemini",
    MOEVEMENT: "moevement",
    MOC: "first",
    MOC_LOAD: "first dashed",
    MOC_FOURTH: "second",
    MOC_FOURTH_DYNAMIC: "second dashed",
    MOC_SELDOM: "third",
    MOC_SELDOM_DYNAMIC: "third dashed",
    LIMITED: "none",
    MOETION: "second",
    MOETION_BOOST: "second dashed",
}
_OF_LIMITED = (LIMITED, MOETION, MOETION_BOOST)
_ANY = tuple(name for name in _STYLES if name not in _OF_LIMITED)
_COLUMNS = (
    "run",
    "settings",
    "PLT",
    "MLT",
    "MiB a snapshot",
    "evaluation loss at the end",
    "above no faults",
    "highest lift by each fault",
    "jump where training goes on",
)
_VERDICTS = {True: "holds", False: "**does not hold**", None: "not put to the test"}
_TEXT = """\
# Partial checkpoints: what they cost the model

This page answers: what a recovery from a partial checkpoint (`moc`, `moetion`) does to the loss, and which claims of the
papers hold here. Next: [guarantees.md](guarantees.md#ckptmoc-and-ckptmoetion); [policies.md](policies.md) chooses a policy.

Written by `{command}`; do not edit.

Each policy trains `tiny` for {iterations} iterations on {ranks} ranks, under the same faults.

- Model and training: {common}.
- Faults: {faults}.
- A rank that dies leaves its snapshots in memory. A lost node takes its snapshots along; units come back from storage (moc) or
  from peers (gemini, moevement, moetion).
- `none` would start again from the beginning at each fault, and runs without faults, as the reference of the others.
- `{nudged}` and `{nudged_more}` differ from `none` in an epsilon of Adam that is 10 % and 20 % larger, so by no more
  than rounding that grows. Two losses that are no further apart than these three runs count as alike.
- `{other_seed}` has other initial weights and dropout, which make another loss.
- Runs of moetion limit the capacity of experts, because a boost adds to this capacity. Their reference has the same limit.

![Evaluation loss against iterations](partial.svg)

Upper row: evaluation loss; gemini and moevement have that of `none`, one line on the other. Lower row: the distance above
the loss without faults; the band is the distance between nudged runs. Dotted lines: faults.

## Measured

{measured}

- PLT and MLT: lost tokens of all of the run, mean and sum over MoE layers (MoC, equation 7; MoEtion, equation 6).
- MiB a snapshot: all ranks together, mean over all snapshots of the run.
- Highest lift: the most that the loss lies above the loss without faults, from a fault until the next one. The lift counts
  evaluations, and the training loss where training goes on. Nats per token.
- Jump: that training loss alone. Nats per token.

## Claimed

{claimed}

"As without faults" and "no better" mean: by no more than nudged runs are apart. Nudged runs are of the model whose capacity
is not limited. Each variant was run once.

## How

Commit {commit}, {hardware}, {packages}.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """Circumstances of the runs."""

    command: str
    """Command that made the page."""

    iterations: int
    """Iterations of each run."""

    commit: str
    """Commits at which the runs were trained."""

    hardware: str
    """Processor of the machine, with the number of cores."""

    packages: str
    """Releases of torch, Megatron-Core and Python."""


def page_of(runs: Runs, given: Circumstances) -> str:
    """Return the page in Markdown."""
    return _TEXT.format(
        command=given.command,
        iterations=given.iterations,
        ranks=RANKS,
        nudged=NUDGED,
        nudged_more=NUDGED_MORE,
        other_seed=OTHER_SEED,
        common=", ".join(
            f"`{setting}`"
            for setting in COMMON
            if setting.startswith(("model.", "train."))
        ),
        faults=", ".join(
            f"{fault.who} in iteration {fault.struck}" for fault in _faults(runs)
        ),
        measured=_table(_COLUMNS, list(_rows(runs))),
        claimed=_table(
            ("claim", "source", "here", "measured"),
            [
                (each.claim, each.source, _VERDICTS[each.holds], each.measured)
                for each in judge(runs)
            ],
        ),
        commit=given.commit,
        hardware=given.hardware,
        packages=given.packages,
    )


def panels_of(runs: Runs) -> list[list[Panel]]:
    """Return the figure's panels, row by row.

    The first row has losses, the second row differences to the run without faults. Each
    model that was run has a column: with and without a limit to the capacity of
    experts.
    """
    sides = [
        ("experts take any number of tokens", _ANY),
        ("limited capacity", _OF_LIMITED),
    ]
    there = [
        (title, [name for name in names if name in runs]) for title, names in sides
    ]
    columns = [_column(runs, title, names) for title, names in there if names]
    return [list(row) for row in zip(*columns, strict=True)]


def _column(runs: Runs, title: str, names: Sequence[str]) -> tuple[Panel, Panel]:
    reference, marks = (
        runs[names[0]],
        [(fault.struck, fault.who) for fault in _faults(runs)],
    )
    lines = [
        Line(
            name=name, style=_STYLES[name], points=sorted(runs[name].evaluated.items())
        )
        for name in names
    ]
    higher = [
        Line(
            name=name,
            style=_STYLES[name],
            points=sorted(above(runs[name], reference).items()),
        )
        for name in names
    ]
    are_there = runs.keys() >= set(ALIKE)
    band = (
        [(at, spread(runs, at)) for at in sorted(reference.evaluated)]
        if are_there
        else []
    )
    below = f"above the run without faults{' (grey: nudged runs)' if band else ''}"
    return (
        Panel(
            title=title,
            y="evaluation loss, nats per token",
            lines=lines,
            marks=marks,
            has_legend=True,
        ),
        Panel(
            title=below,
            y="difference, nats per token",
            lines=higher,
            marks=marks,
            band=band,
        ),
    )


def _faults(runs: Runs) -> Sequence[Fault]:
    return next((run.faults for run in runs.values() if run.faults), ())


def _rows(runs: Runs) -> Iterator[tuple[str, ...]]:
    for variant in VARIANTS:
        if variant.name in runs:
            run = runs[variant.name]
            # the last override of a setting counts
            settings = dict(override.split("=") for override in variant.overrides)
            reference = runs.get(variant.reference or "")
            said = " ".join(f"`{name}={value}`" for name, value in settings.items())
            yield (
                variant.name,
                said,
                *_costs(run),
                f"{run.last_evaluation:.4f}",
                *_lifts(run, reference),
            )


def _costs(run: Measured) -> Iterator[str]:
    if run.snapshot_bytes is None:
        yield from ("", "", "")
        return
    yield from (f"{share:.2%}" if share else "0" for share in (run.plt, run.mlt))
    yield f"{run.snapshot_bytes / _MIB:.2f}"


def _lifts(run: Measured, reference: Measured | None) -> Iterator[str]:
    if reference is None:
        yield from ("", "", "")
        return
    yield f"{run.last_evaluation - reference.last_evaluation:+.4f}"
    yield ", ".join(f"{value:+.3f}" for value in peaks(run, reference))
    yield ", ".join(f"{value:+.3f}" for value in jumps(run, reference))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows]
    )
