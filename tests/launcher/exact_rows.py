"""The jobs of exactness tests: rows that cover every pair of settings.

The product of all settings would be too large. An axis is a setting with its values. A
row chooses a value on every axis. For any two axes, each possible pair of values is in
one of `rows()`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from tests.made_once import made_once
from tests.scenarios import (
    BIAS,
    DENSE_TP2,
    FP16_SKIPPING_AT_FIRST,
    GPT_STYLE,
    LINEAR_BIAS,
    TIED,
    UNSHARDED,
)

Row = Mapping[str, str]
"""A value for each axis, or for some of them."""

Pair = frozenset[tuple[str, str]]
"""Two axes with a value each."""

Loss = tuple[int, int, str] | tuple[int, int, str, int]
"""Iteration, stage and phase in which state is lost.

A fourth number is the data-parallel rank if only one rank of the stage loses its state.
"""

ITERATIONS_AFTER_THE_LAST_LOSS = 2
_SEQUENCES_OF_A_MICRO_BATCH = 2
_NUM_EXPERTS = 4
_SEED = 25


PHASES = ("forward", "backward", "step", "between")

LOST = {
    "first": lambda pp: [(0,)],
    "last": lambda pp: [(pp - 1,)],
    "middle": lambda pp: [(stage,) for stage in range(1, pp - 1)],
    "ends": lambda pp: [(0,), (pp - 1,)],
    "one rank": lambda pp: [(pp - 1, 1)],
}
"""Stages that lose their state at once, by kind of loss and for a number of stages.

Each with the data-parallel rank if only one rank of the stage loses its state.
"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, with a fitting model and the losses of state."""

    pp: int
    dp: int = 1
    tp: int = 1
    num_layers: int
    """Number of layers, a multiple of `pp`."""

    overrides: tuple[str, ...] = ()
    """Further settings of the launcher."""

    lost: tuple[str, str, str, str]
    """Kind of loss (key of `LOST`) in each of `PHASES`."""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp


_EP2 = ("parallel.ep=2",)

LAYOUTS = {
    "PP1": Layout(pp=1, num_layers=2, lost=("first", "first", "first", "first")),
    "PP2": Layout(
        pp=2,
        dp=2,
        num_layers=2,
        overrides=_EP2,
        lost=("one rank", "first", "last", "ends"),
    ),
    "PP3": Layout(pp=3, num_layers=3, lost=("last", "ends", "first", "middle")),
    "PP4": Layout(pp=4, num_layers=4, lost=("middle", "last", "ends", "first")),
    "DP4": Layout(
        pp=1,
        dp=4,
        num_layers=2,
        overrides=_EP2,
        lost=("first", "one rank", "one rank", "first"),
    ),
    "TP2": Layout(
        pp=2,
        tp=2,
        num_layers=2,
        overrides=DENSE_TP2,
        lost=("ends", "last", "first", "last"),
    ),
}

TRAINING: dict[str, dict[str, tuple[str, ...]]] = {
    "layout": {name: layout.overrides for name, layout in LAYOUTS.items()},
    "experts": {
        "routed": (),
        "shared": ("model.shared_expert_ffn_hidden_size=32",),
        "capacity": ("model.moe_capacity_factor=1.0", "model.moe_pad_to_capacity=true"),
        "none": (),
    },
    "balancing": {
        "loss": (),
        "bias": BIAS,
        "global loss": ("model.moe_balancing=global_aux_loss",),
    },
    "first layer": {
        "experts": (),
        "dense": ("model.num_dense_layers=1", "model.dense_ffn_hidden_size=64"),
    },
    "precision": {
        "bf16": (),
        "fp32": ("precision=fp32",),
        "fp16 skipping": FP16_SKIPPING_AT_FIRST,
    },
    "recompute": {
        mode: (f"train.recompute={mode}",) for mode in ("none", "selective", "full")
    },
    "clipping": {
        "some": (),
        "none": ("train.clip_grad=0",),
        "always": ("train.clip_grad=0.1",),
    },
    "micro-batches": {"2": (), "1": (), "4": ()},
    "embeddings": {"untied": (), "tied": TIED},
    "style": {"Llama": (), "GPT": GPT_STYLE, "GPT biased": (*GPT_STYLE, *LINEAR_BIAS)},
    "optimizer": {"sharded": (), "whole": UNSHARDED},
    "evaluated": {"at the end": (), "always": ("train.eval_every_iters=1",)},
}

RECOVERY: dict[str, dict[str, tuple[str, ...]]] = {
    "window": {"1": (), "3": (), "auto": ("ckpt.profile_iters=2",)},
    "order": {
        "hard": (),
        "soft": ("ckpt.popularity=soft",),
        "decayed": (
            "ckpt.popularity=decayed",
            "ckpt.reorder_share=0",
            "ckpt.paper_exact=true",
        ),
    },
    "windows kept": {"one": (), "two": ("ckpt.keep_windows=2",)},
    "boundary log": {"on": (), "off": ("ckpt.boundary_log=false",)},
    "recovery": {"replay": (), "gradients": ("ckpt.recovery=gradients",)},
}

AXES = {name: tuple(values) for name, values in {**RECOVERY, **TRAINING}.items()}

RULES: list[tuple[Row, dict[str, set[str]]]] = [
    ({"layout": "TP2"}, {"experts": {"none"}}),
    (
        {"experts": "none"},
        {"layout": {"TP2"}, "balancing": {"loss"}, "first layer": {"experts"}},
    ),
    # Megatron has no biases in shared experts, and has biases in other experts only if
    # each rank has some of the experts
    ({"experts": "shared"}, {"style": {"Llama", "GPT"}}),
    ({"style": "GPT biased"}, {"layout": {"PP2", "DP4", "TP2"}}),
    # Algorithm 1 as printed counts compute weights, which only a replay needs
    ({"order": "decayed"}, {"recovery": {"replay"}}),
]
"""Rules: a row with the values on the left has the values on the right.

On each axis on the right, the row has one of the values.
"""


def is_possible(row: Row) -> bool:
    """Return whether the values of a row, or of a part of a row, go together."""
    return all(
        row.get(axis) in {None, *allowed}
        for condition, then in RULES
        if condition.items() <= row.items()
        for axis, allowed in then.items()
    )


def can_be_completed(row: Row) -> bool:
    """Return whether values for all other axes can be found."""
    if not is_possible(row):
        return False
    open_axis = next((axis for axis in AXES if axis not in row), None)
    return open_axis is None or any(
        can_be_completed({**row, open_axis: value}) for value in AXES[open_axis]
    )


def possible_pairs() -> set[Pair]:
    """Return the pairs of values that at least one row may hold."""
    pairs = (
        {one: value, other: other_value}
        for one, other in combinations(AXES, 2)
        for value, other_value in product(AXES[one], AXES[other])
    )
    return {frozenset(pair.items()) for pair in pairs if can_be_completed(pair)}


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


@functools.cache
def rows() -> Sequence[Row]:
    """Return rows that hold every possible pair of values."""
    return made_once(_choose_rows)


def resumed_rows() -> Sequence[Row]:
    """Return some of the rows, which have every value of the axes of `TRAINING`."""
    left, found = (
        {(axis, value) for axis, values in TRAINING.items() for value in values},
        list[Row](),
    )
    while left:
        found.append(
            max(filter(_can_be_saved, rows()), key=lambda row: len(left & row.items()))
        )
        left -= found[-1].items()
    return found


def _can_be_saved(row: Row) -> bool:
    """Return whether Megatron can save the optimizer of a row's job.

    Megatron cannot save a whole optimizer in which a bias took fewer steps than other
    parameters, such as the bias of an expert that got no token.
    """
    return not {"style": "GPT biased", "optimizer": "whole"}.items() <= row.items()


def _choose_rows() -> Sequence[Row]:
    """Choose rows until every possible pair is in a row.

    Each row gets all missing pairs that go together. The order of the pairs (`_SEED`)
    leads to few rows.
    """
    missing, found = possible_pairs(), list[Row]()
    order = sorted(sorted(pair) for pair in missing)
    random.Random(_SEED).shuffle(order)
    while missing:
        row: Row = {}
        for pair in order:
            both = {**row, **dict(pair)}
            if (
                frozenset(pair) in missing
                and row.items() <= both.items()
                and can_be_completed(both)
            ):
                row = both
        found.append(_completed(row))
        missing -= pairs_of(found[-1])
    return found


def _completed(row: Row) -> Row:
    """Return the row with the first possible value on each missing axis."""
    for axis, values in AXES.items():
        if axis not in row:
            row = {
                **row,
                axis: next(
                    value for value in values if can_be_completed({**row, axis: value})
                ),
            }
    return {axis: row[axis] for axis in AXES}


def name_of(row: Row) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in row.items())


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, its snapshots, and its losses of state."""

    world_size: int
    """Number of ranks."""

    training: tuple[str, ...]
    """Settings of the training."""

    snapshots: tuple[str, ...]
    """Settings of snapshots and recovery."""

    lost: tuple[Loss, ...]
    """Losses of state."""


def job_of(row: Row) -> Job:
    """Return the job that a row describes.

    The job loses state in each of `PHASES`, and ends a few iterations later.
    """
    layout, window = LAYOUTS[row["layout"]], row["window"]
    # the newest complete window is one iteration old
    first = 6 if window == "auto" else int(window) + 2
    if window == "3" and row["windows kept"] == "two":
        first += 3
    iterations = (first, first, first + 1, first + 1)
    lost: list[Loss] = [
        (iteration, stage, phase, *dp_rank)
        for iteration, phase, kind in zip(iterations, PHASES, layout.lost, strict=True)
        for stage, *dp_rank in LOST[kind](layout.pp)
    ]
    recovery = (f"ckpt.window={window}", *_overrides(RECOVERY, row))
    return _job(
        layout, lost, _overrides(TRAINING, row), recovery, int(row["micro-batches"])
    )


def _job(
    layout: Layout,
    lost: Sequence[Loss],
    training: tuple[str, ...],
    snapshots: tuple[str, ...],
    micro_batches: int = 2,
) -> Job:
    num_sequences = _SEQUENCES_OF_A_MICRO_BATCH * layout.dp * micro_batches
    size = (
        f"parallel.pp={layout.pp}",
        f"model.num_layers={layout.num_layers}",
        f"train.global_batch_size={num_sequences}",
        f"train.iterations={lost[-1][0] + ITERATIONS_AFTER_THE_LAST_LOSS}",
    )
    return Job(
        world_size=layout.world_size,
        training=(*size, *training),
        snapshots=snapshots,
        lost=tuple(lost),
    )


def _overrides(
    axes: Mapping[str, Mapping[str, tuple[str, ...]]], row: Row
) -> tuple[str, ...]:
    return tuple(
        override for axis, values in axes.items() for override in values[row[axis]]
    )


_PP2 = LAYOUTS["PP2"]

_OPERATORS_OF_A_STAGE = 2 + _NUM_EXPERTS + 2
"""Number of operators of the last stage.

A layer with its gate and experts, the final norm, and the output.
"""

WINDOW_OF_ALL_OPERATORS = _job(
    _PP2, [(10, 1, "step")], _PP2.overrides, (f"ckpt.window={_OPERATORS_OF_A_STAGE}",)
)
