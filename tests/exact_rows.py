"""The jobs that exactness tests run: rows that cover every pair of settings, in place of the settings' product.

An axis is a setting with its values. A row chooses a value on every axis. For any two axes, each pair of their values
that is possible is in one of `rows()`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from allpairspy import AllPairs

from tests.made_once import made_once
from tests.scenarios import BIAS, DENSE_TP2, FP16_SKIPPING_AT_FIRST, GPT_STYLE, LINEAR_BIAS, TIED, UNSHARDED

Row = Mapping[str, str]
"""A value for each axis, or for some of them."""

Pair = frozenset[tuple[str, str]]
"""Two axes with a value each."""

Loss = tuple[int, int, str] | tuple[int, int, str, int]
"""Iteration, stage, phase and, where one rank of the stage loses its state, its data-parallel rank."""

ITERATIONS_AFTER_THE_LAST_LOSS = 3
_SEQUENCES_OF_A_MICRO_BATCH = 2
_NUM_EXPERTS = 4
_ROUNDS = 100


PHASES = ("forward", "backward", "step", "between")

LOST = {
    "first": lambda pp: [(0,)],
    "last": lambda pp: [(pp - 1,)],
    "middle": lambda pp: [(stage,) for stage in range(1, pp - 1)],
    "ends": lambda pp: [(0,), (pp - 1,)],
    "one rank": lambda pp: [(pp - 1, 1)],
}
"""Which stages lose their state at once, each with the data-parallel rank where it is one rank only."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, a model with as many layers as they divide, and the stages lost in each of `PHASES`."""

    pp: int
    dp: int = 1
    tp: int = 1
    num_layers: int
    overrides: tuple[str, ...] = ()
    lost: tuple[str, str, str, str]

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp


_EP2 = ("parallel.ep=2",)

LAYOUTS = {
    "PP1": Layout(pp=1, num_layers=2, lost=("first", "first", "first", "first")),
    "PP2": Layout(pp=2, dp=2, num_layers=2, overrides=_EP2, lost=("one rank", "first", "last", "ends")),
    "PP3": Layout(pp=3, num_layers=3, lost=("last", "ends", "first", "middle")),
    "PP4": Layout(pp=4, num_layers=4, lost=("middle", "last", "ends", "first")),
    "DP4": Layout(pp=1, dp=4, num_layers=2, overrides=_EP2, lost=("first", "one rank", "one rank", "first")),
    "TP2": Layout(pp=2, tp=2, num_layers=2, overrides=DENSE_TP2, lost=("ends", "last", "first", "last")),
}

TRAINING: dict[str, dict[str, tuple[str, ...]]] = {
    "layout": {name: layout.overrides for name, layout in LAYOUTS.items()},
    "experts": {
        "routed": (),
        "shared": ("model.shared_expert_ffn_hidden_size=32",),
        "capacity": ("model.moe_capacity_factor=1.0", "model.moe_pad_to_capacity=true"),
        "none": (),
    },
    "balancing": {"loss": (), "bias": BIAS, "global loss": ("model.moe_balancing=global_aux_loss",)},
    "first layer": {"experts": (), "dense": ("model.num_dense_layers=1", "model.dense_ffn_hidden_size=64")},
    "precision": {"bf16": (), "fp32": ("precision=fp32",), "fp16 skipping": FP16_SKIPPING_AT_FIRST},
    "recompute": {mode: (f"train.recompute={mode}",) for mode in ("none", "selective", "full")},
    "clipping": {"some": (), "none": ("train.clip_grad=0",), "always": ("train.clip_grad=0.1",)},
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
        "decayed": ("ckpt.popularity=decayed", "ckpt.reorder_share=0", "ckpt.paper_exact=true"),
    },
    "windows kept": {"one": (), "two": ("ckpt.keep_windows=2",)},
    "boundary log": {"on": (), "off": ("ckpt.boundary_log=false",)},
}

AXES = {name: tuple(values) for name, values in {**RECOVERY, **TRAINING}.items()}

RULES: list[tuple[Row, dict[str, set[str]]]] = [
    ({"layout": "TP2"}, {"experts": {"none"}}),
    ({"experts": "none"}, {"layout": {"TP2"}, "balancing": {"loss"}, "first layer": {"experts"}}),
    # Megatron has no biases in shared experts, and in others only where each rank has some of them
    ({"experts": "shared"}, {"style": {"Llama", "GPT"}}),
    ({"style": "GPT biased"}, {"layout": {"PP2", "DP4", "TP2"}}),
]
"""A row that holds the values on the left holds, on these axes, one of the values on the right."""


def is_possible(row: Row) -> bool:
    """Return whether the values of a row, or of a part of one, go together."""
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
    return open_axis is None or any(can_be_completed({**row, open_axis: value}) for value in AXES[open_axis])


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
    """Return some of the rows, which hold every value of the axes that a training without recovery has."""
    left, found = {(axis, value) for axis, values in TRAINING.items() for value in values}, list[Row]()
    while left:
        found.append(max(filter(_can_be_saved, rows()), key=lambda row: len(left & row.items())))
        left -= found[-1].items()
    return found


def _can_be_saved(row: Row) -> bool:
    """Megatron saves no whole optimizer with a bias that took fewer steps: that of an expert without any token."""
    return not {"style": "GPT biased", "optimizer": "whole"}.items() <= row.items()


def _choose_rows() -> Sequence[Row]:
    """Let AllPairs choose, then find fewer: it leaves out pairs, and its last rows are there for a few pairs each."""
    values, required = list(AXES.values()), dict[str, str]()

    def is_wanted(chosen: list[str]) -> bool:
        row = _as_row(chosen)
        return is_possible(row) and required.items() <= {**required, **row}.items()

    found = list(AllPairs(values, filter_func=is_wanted))
    missing = possible_pairs().difference(*(pairs_of(_as_row(chosen)) for chosen in found))
    while missing:
        more = AllPairs(values, filter_func=is_wanted, previously_tested=found)
        required |= min(sorted(pair) for pair in missing)
        found.append(next(more))
        missing -= pairs_of(_as_row(found[-1]))
        required.clear()

    generator = random.Random(0)
    fewest = _fewer([_as_row(chosen) for chosen in found])
    for _ in range(_ROUNDS):
        again = _fewer([_completed(row, generator) for row in generator.sample(fewest, len(fewest))])
        fewest = min(again, fewest, key=len)
    return [_completed(row) for row in fewest]


def name_of(row: Row) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in row.items())


def _as_row(chosen: Sequence[str]) -> Row:
    return dict(zip(AXES, chosen, strict=False))


def _fewer(found: Iterable[Row]) -> list[Row]:
    """Leave out of each row all values but those of pairs that no row before it holds, then put rows together."""
    held, parts = set[Pair](), list[Row]()
    for row in found:
        parts.append({axis: value for pair in pairs_of(row) - held for axis, value in pair})
        held |= pairs_of(row)
    together = list[Row]()
    for part in sorted(parts, key=len, reverse=True):
        fitting = (i for i, row in enumerate(together) if row.items() <= {**row, **part}.items())
        place = next((i for i in fitting if can_be_completed({**together[i], **part})), None)
        if place is None:
            together.append(part)
        else:
            together[place] = {**together[place], **part}
    return together


def _completed(row: Row, generator: random.Random | None = None) -> Row:
    """Return the row with values for all axes: the first ones that are possible, or random ones."""
    for axis in AXES if generator is None else generator.sample(list(AXES), len(AXES)):
        values = AXES[axis] if generator is None else generator.sample(AXES[axis], len(AXES[axis]))
        if axis not in row:
            row = {**row, axis: next(value for value in values if can_be_completed({**row, axis: value}))}
    return {axis: row[axis] for axis in AXES}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, the snapshots that it takes, and the state that it loses."""

    world_size: int
    training: tuple[str, ...]
    snapshots: tuple[str, ...]
    lost: tuple[Loss, ...]


def job_of(row: Row) -> Job:
    """Return the job that a row describes: it loses state in each phase, and ends a few iterations after that."""
    layout, window = LAYOUTS[row["layout"]], row["window"]
    first = 6 if window == "auto" else int(window) + 2  # the newest complete window is one iteration old
    if window == "3" and row["windows kept"] == "two":
        first += 3
    iterations = (first, first, first + 1, first + 1)
    lost = [
        loss
        for it, phase, kind in zip(iterations, PHASES, layout.lost, strict=True)
        for loss in _losses(it, phase, kind, layout)
    ]
    return _job(
        layout,
        lost,
        training=_overrides(TRAINING, row),
        snapshots=(f"ckpt.window={window}", *_overrides(RECOVERY, row)),
        micro_batches=int(row["micro-batches"]),
    )


def _losses(iteration: int, phase: str, kind: str, layout: Layout) -> Iterable[Loss]:
    for stage, *dp_rank in LOST[kind](layout.pp):
        yield (iteration, stage, phase, *dp_rank)


def _job(
    layout: Layout,
    lost: Sequence[Loss],
    *,
    training: tuple[str, ...],
    snapshots: tuple[str, ...],
    micro_batches: int = 2,
) -> Job:
    return Job(
        world_size=layout.world_size,
        training=(
            f"parallel.pp={layout.pp}",
            f"model.num_layers={layout.num_layers}",
            f"train.global_batch_size={_SEQUENCES_OF_A_MICRO_BATCH * layout.dp * micro_batches}",
            f"train.iterations={lost[-1][0] + ITERATIONS_AFTER_THE_LAST_LOSS}",
            *training,
        ),
        snapshots=snapshots,
        lost=tuple(lost),
    )


def _overrides(axes: Mapping[str, Mapping[str, tuple[str, ...]]], row: Row) -> tuple[str, ...]:
    return tuple(override for axis, values in axes.items() for override in values[row[axis]])


def _long_job(layout: Layout, *lost: Loss, window: int = 3) -> Job:
    return _job(layout, lost, training=layout.overrides, snapshots=(f"ckpt.window={window}",))


_PP2, _PP4 = LAYOUTS["PP2"], LAYOUTS["PP4"]

_EIGHT_RANKS = Layout(pp=4, dp=2, num_layers=4, lost=_PP4.lost)

_OPERATORS_OF_A_STAGE = 2 + _NUM_EXPERTS + 2
"""A layer with its gate and experts, and the final norm and the output of the last stage."""

LONG_JOBS = {
    "window of all operators": _long_job(_PP2, (10, 1, "step"), window=_OPERATORS_OF_A_STAGE),
    "eight ranks": _long_job(_EIGHT_RANKS, (5, 2, "backward")),
    "each stage in turn": _long_job(_PP4, (5, 0, "forward"), (6, 1, "backward"), (8, 2, "step"), (9, 3, "between")),
    "one stage again": _long_job(_PP2, (5, 1, "step"), (5, 1, "between"), (6, 1, "forward"), (6, 1, "step")),
    "neighbours in a row": _long_job(_PP2, (5, 1, "step"), (5, 0, "between"), (6, 1, "backward")),
    "single ranks": _long_job(_PP2, (5, 1, "forward", 0), (6, 0, "step", 1), (6, 1, "between", 1)),
    "window of 5": _long_job(_PP2, (12, 1, "forward"), (14, 0, "step"), window=5),
}
"""Jobs that lose state in another order than those of the rows, or have another window."""


def single_losses() -> dict[str, Job]:
    """Return a job for each layout, phase and choice of stages that go together."""
    found: dict[str, Job] = {}
    for (name, layout), phase, kind in product(LAYOUTS.items(), PHASES, LOST):
        lost = list(_losses(5, phase, kind, layout))
        if lost and (layout.dp > 1 or kind != "one rank") and (layout.pp > 1 or kind in ("first", "one rank")):
            found[f"{name}, {kind}, {phase}"] = _long_job(layout, *lost)
    return found
