"""The papers' claims about partial checkpoints, beside measurements. Pure.

A nudged run repeats the run without faults: same model, seed and batches. Only the
epsilon of Adam is slightly larger, which should not matter. Two losses of an iteration
are alike if the losses are no further apart than the runs of `ALIKE` in the same
iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.lossy.measured import Measured
from benchmarks.lossy.variants import (
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
    PLT_LIMIT,
)

HIGHEST_SPIKE = 0.5
Runs = Mapping[str, Measured]

ALIKE = (NONE, NUDGED, NUDGED_MORE)
_DYNAMIC = ((MOC_FOURTH, MOC_FOURTH_DYNAMIC), (MOC_SELDOM, MOC_SELDOM_DYNAMIC))
_OF_MOC = (MOC, MOC_LOAD, *(name for pair in _DYNAMIC for name in pair))


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict of the measurements on a claim."""

    claim: str
    """The claim, as text."""

    source: str
    """Paper and section, or page, that makes the claim."""

    holds: bool | None
    """Whether the claim holds here.

    None: runs that the claim needs are missing, or no run puts the claim to the test.
    """

    measured: str
    """The numbers behind the verdict, as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claim:
    """A claim, and how to judge the claim."""

    text: str
    """The claim, as text."""

    source: str
    """Paper and section, or page, that makes the claim."""

    needs: tuple[str, ...]
    """Names of runs without which the claim is not judged."""

    judge: Callable[[Runs], tuple[bool | None, str]]
    """Return value: whether the claim holds, and the numbers.

    All runs of `needs` are in the argument.
    """


def judge(runs: Runs) -> list[Verdict]:
    """Return the verdict on each claim.

    Args:
        runs: The measured runs, by their names in `variants`.
    """
    found = []
    for claim in _CLAIMS:
        missing = [name for name in claim.needs if name not in runs]
        holds, measured = (
            (None, f"not run: {'; '.join(missing)}") if missing else claim.judge(runs)
        )
        found.append(
            Verdict(
                claim=claim.text, source=claim.source, holds=holds, measured=measured
            )
        )
    return found


def above(run: Measured, reference: Measured) -> dict[int, float]:
    """Return how far each evaluation lies above the reference, by iteration, in nats.

    Args:
        run: The run.
        reference: The run of the same model without faults.
    """
    return {at: loss - reference.evaluated[at] for at, loss in run.evaluated.items()}


def jumps(run: Measured, reference: Measured) -> list[float]:
    """Return how far training lies above the reference after each fault, in nats.

    The loss is the loss of the first iteration after the rollback. Both runs have the
    same batch and dropout in this iteration, so a difference comes from the training
    that experts lost by this fault and by earlier faults.
    """
    return [
        run.losses[fault.back_to + 1] - reference.losses[fault.back_to + 1]
        for fault in run.faults
    ]


def peaks(run: Measured, reference: Measured) -> list[float]:
    """Return the highest lift of a loss from each fault until the next one, in nats.

    Evaluations count, and the training loss of the first iteration after the rollback.
    """
    higher = above(run, reference)
    evaluated = [
        max((higher[at] for at in span if at in higher), default=0.0)
        for span in _spans(run)
    ]
    return [max(both) for both in zip(evaluated, jumps(run, reference), strict=True)]


def remains(run: Measured, reference: Measured) -> dict[int, float]:
    """Return the lift that remains of each fault, by iteration, in nats.

    The lift is measured by the last evaluation before the next fault, or before the
    end.
    """
    higher = above(run, reference)
    return {
        at: higher[at]
        for at in (max(at for at in span if at in higher) for span in _spans(run))
    }


def spread(runs: Runs, iteration: int) -> float:
    """Return how far the runs of `ALIKE` are apart in an evaluation, in nats.

    The largest loss less the smallest.
    """
    losses = [runs[name].evaluated[iteration] for name in ALIKE]
    return max(losses) - min(losses)


def _spans(run: Measured) -> Iterator[range]:
    """Yield the iterations of each fault.

    A range begins with the iteration that the fault struck, and ends where the next
    fault strikes, or with the run.
    """
    end = max(run.evaluated) + 1
    yield from (
        range(*both)
        for both in pairwise([*(fault.struck for fault in run.faults), end])
    )


def _at_end(run: Measured, reference: Measured) -> float:
    return run.last_evaluation - reference.last_evaluation


def _lossless(runs: Runs) -> tuple[bool, str]:
    reference = runs[NONE]
    said = []
    for name in (GEMINI, MOEVEMENT):
        run = runs[name]
        same = (run.evaluated, run.losses, run.digests) == (
            reference.evaluated,
            reference.losses,
            reference.digests,
        )
        said.append(
            (
                same,
                (
                    f"{name}: {'the same' if same else 'NOT the same'},"
                    f" {len(run.faults)} faults"
                ),
            )
        )
    count = (
        f"{len(reference.evaluated)} evaluations, {len(reference.losses)} training"
        " losses, digests of all ranks"
    )
    return all(
        same for same, _ in said
    ), f"{count}: {'; '.join(text for _, text in said)}"


def _unharmed_below(runs: Runs) -> tuple[bool | None, str]:
    return _by_limit(
        runs,
        [name for name in _OF_MOC if name in runs and runs[name].plt < PLT_LIMIT],
        harmed=False,
    )


def _harmed_above(runs: Runs) -> tuple[bool | None, str]:
    return _by_limit(
        runs,
        [name for name in _OF_MOC if name in runs and runs[name].plt >= PLT_LIMIT],
        harmed=True,
    )


def _by_limit(runs: Runs, names: list[str], *, harmed: bool) -> tuple[bool | None, str]:
    allowed = spread(runs, max(runs[NONE].evaluated))
    ends = {name: _at_end(runs[name], runs[NONE]) for name in names}
    said = [
        f"{name}: PLT {runs[name].plt:.2%}, {end:+.4f} at the end"
        for name, end in ends.items()
    ]
    holds = all((end > allowed) == harmed for end in ends.values()) if ends else None
    return holds, "; ".join(
        [*(said or ["no run on this side"]), f"nudged runs are {allowed:.4f} apart"]
    )


def _dynamic_k(runs: Runs) -> tuple[bool | None, str]:
    there = [pair for pair in _DYNAMIC if runs.keys() >= set(pair)]
    tested = [
        (fixed, dynamic) for fixed, dynamic in there if runs[fixed].plt >= PLT_LIMIT
    ]
    said = [
        _of_dynamic_k(runs[dynamic], runs[fixed], fixed) for fixed, dynamic in there
    ] or ["no pair was run"]
    return (
        all(runs[dynamic].plt < PLT_LIMIT for _, dynamic in tested) if tested else None
    ), "; ".join(said)


def _of_dynamic_k(dynamic: Measured, fixed: Measured, name: str) -> str:
    first = f"the first fault alone costs {dynamic.plt_of_first:.2%}"
    return (
        f"{name}: PLT {dynamic.plt:.2%}, {fixed.plt:.2%} without; {first},"
        f" {dynamic.experts} experts at the end"
    )


def _load_aware(runs: Runs) -> tuple[bool, str]:
    load, turns = runs[MOC_LOAD], runs[MOC]
    allowed = spread(runs, max(turns.evaluated))
    gain = turns.last_evaluation - load.last_evaluation
    shares = f"PLT {load.plt:.2%} against {turns.plt:.2%}"
    said = (
        f"{gain:+.4f} better at the end (nudged runs are {allowed:.4f} apart), {shares}"
    )
    return gain <= allowed, said


def _spikes(runs: Runs) -> tuple[bool, str]:
    found = {
        name: peaks(runs[name], runs[LIMITED]) for name in (MOETION, MOETION_BOOST)
    }
    said = "; ".join(f"{name}: {_listed(highest)}" for name, highest in found.items())
    return all(
        peak <= HIGHEST_SPIKE for highest in found.values() for peak in highest
    ), said


def _pass(runs: Runs) -> tuple[bool, str]:
    holds, said = True, []
    for name in (MOETION, MOETION_BOOST):
        left = remains(runs[name], runs[LIMITED])
        holds &= all(above <= spread(runs, at) for at, above in left.items())
        told = [
            f"{above:+.4f} of {spread(runs, at):.4f} in {at}"
            for at, above in left.items()
        ]
        said.append(f"{name}: {', '.join(told)}")
    return holds, "; ".join(said)


def _boost(runs: Runs) -> tuple[bool | None, str]:
    run = runs[MOETION_BOOST]
    gain = runs[MOETION].last_evaluation - run.last_evaluation
    said = (
        f"{run.boost_left} of {run.lost_tokens} lost tokens are left; {gain:+.4f}"
        " better at the end than without"
    )
    return (None if run.boost_left is None else run.boost_left == 0), said


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:+.4f}" for value in values)


_CLAIMS = (
    _Claim(
        text=(
            "Gemini and MoEvement lose nothing: every loss and the final state are"
            " those without faults, bit for bit"
        ),
        source="All policies with supervisors, in guarantees.md",
        needs=(NONE, GEMINI, MOEVEMENT),
        judge=_lossless,
    ),
    _Claim(
        text=(
            f"MoC: with PLT below {PLT_LIMIT:.2%} the loss at the end is as without"
            " faults"
        ),
        source="MoC, section 3.1.2, figure 5",
        needs=ALIKE,
        judge=_unharmed_below,
    ),
    _Claim(
        text=(
            f"MoC: with PLT above {PLT_LIMIT:.2%} it is harmed (what the limit implies)"
        ),
        source="MoC, section 3.1.2, figure 5",
        needs=ALIKE,
        judge=_harmed_above,
    ),
    _Claim(
        text=f"MoC: Dynamic-K keeps PLT below {PLT_LIMIT:.2%}",
        source="MoC, sections 5.3 and 6.3.3",
        needs=(),
        judge=_dynamic_k,
    ),
    _Claim(
        text="MoC: load-aware selection is no better than sequential",
        source="MoC, sections 3.2 and 6.3.2",
        needs=(*ALIKE, MOC, MOC_LOAD),
        judge=_load_aware,
    ),
    _Claim(
        text=f"MoEtion: a fault lifts the loss by {HIGHEST_SPIKE:g} at most",
        source="MoEtion, figure 8",
        needs=(LIMITED, MOETION, MOETION_BOOST),
        judge=_spikes,
    ),
    _Claim(
        text="MoEtion: the lift passes within 200 iterations (here: by the next fault)",
        source="MoEtion, figure 8",
        needs=(*ALIKE, LIMITED, MOETION, MOETION_BOOST),
        judge=_pass,
    ),
    _Claim(
        text="MoEtion: 10 % more capacity makes up for the lost tokens",
        source="MoEtion, section 6",
        needs=(LIMITED, MOETION, MOETION_BOOST),
        judge=_boost,
    ),
)
