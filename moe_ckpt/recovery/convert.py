"""Converts one window's sparse snapshots into a dense state. Pure.

A conversion is a plan of names and numbers: operators to load, iterations to run.
`engine.stage_recovery` loads, replays with the logged inputs and norms, and compares
digests. MoEvement, section 3.3, Figures 7 and 8:

    load 10: E1 E2 active    run 11    load 11: E3 E4 too    run 12
    load 12: all active      run 13
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.errors import CheckpointLoadError


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotContents:
    """Contents of one sparse snapshot: the state after `iteration` steps."""

    iteration: int
    """Number of steps in the state."""

    window_start: int
    """Iteration of the window's slot 0."""

    slot: int
    """Slot of the snapshot, from 0."""

    num_slots: int
    """Number of slots of the window."""

    full: tuple[str, ...]
    """Names of the operators with whole state."""

    compute: tuple[str, ...]
    """Names of the operators with compute weights only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStep:
    """Load a snapshot, then train one iteration."""

    load_iteration: int | None
    """Iteration of the snapshot to load; None once all snapshots are loaded."""

    frozen: tuple[str, ...]
    """Names of the operators of which only compute weights are loaded so far. All
    others are active.
    """

    run_iteration: int | None
    """Iteration to train; None in a last step that only loads."""


def plan_conversion(
    snapshots: Sequence[SnapshotContents],
    target_iteration: int,
    *,
    by_gradients: bool = False,
) -> tuple[ReplayStep, ...]:
    """Return the steps after which every operator is active, at the target iteration.

    Iterations count from 1. Snapshot s is loaded, then iteration s + 1 runs. Snapshots
    10, 11, 12 and target 14 make (10, 11), (11, 12), (12, 13), (None, 14). Target 12
    makes (10, 11), (11, 12), (12, None). MoEvement, section 3.3.

    Args:
        snapshots: Snapshots of one window, in any order.
        target_iteration: Iteration after which the state is wanted.
        by_gradients: Whether iterations are steps with logged gradients. Without a
            forward pass nothing needs compute weights, which may be missing.

    Raises:
        CheckpointLoadError: The snapshots do not make a complete window that ends at or
            before the target.
    """
    window = sorted(snapshots, key=lambda snapshot: snapshot.slot)
    _check_window(window)
    _check_operators(window, wants_compute=not by_gradients)
    last = window[-1].iteration
    if target_iteration < last:
        raise CheckpointLoadError(
            f"conversion: got target iteration {target_iteration}, wanted at least"
            f" {last}, the window's last snapshot"
        )
    replay = [
        ReplayStep(
            load_iteration=snapshot.iteration,
            frozen=snapshot.compute,
            run_iteration=snapshot.iteration + 1
            if snapshot.iteration < target_iteration
            else None,
        )
        for snapshot in window
    ]
    # iteration last + 1 already follows the load of the window's last snapshot
    beyond = range(last + 2, target_iteration + 1)
    return (
        *replay,
        *(
            ReplayStep(load_iteration=None, frozen=(), run_iteration=iteration)
            for iteration in beyond
        ),
    )


def _check_window(window: Sequence[SnapshotContents]) -> None:
    """Check that every slot of one window is there once, at consecutive iterations.

    Raises:
        CheckpointLoadError: A slot is missing or superfluous, or iterations are not
            consecutive.
    """
    if not window:
        raise CheckpointLoadError(
            "conversion: got no snapshots, wanted those of one window"
        )
    windows = sorted(
        {(snapshot.window_start, snapshot.num_slots) for snapshot in window}
    )
    if len(windows) > 1:
        raise CheckpointLoadError(
            f"conversion: got snapshots of windows (start, slots) {windows}, wanted one"
            " window"
        )
    slots, wanted = [snapshot.slot for snapshot in window], range(window[0].num_slots)
    if slots != list(wanted):
        missing = sorted(set(wanted) - set(slots))
        raise CheckpointLoadError(
            f"conversion: got slots {slots} of {len(wanted)}, wanted each once; no slot"
            f" {missing}"
        )
    iterations = [snapshot.iteration for snapshot in window]
    if iterations != list(range(iterations[0], iterations[0] + len(wanted))):
        raise CheckpointLoadError(
            f"conversion: got snapshots of iterations {iterations}, wanted consecutive"
            " ones"
        )


def _check_operators(
    window: Sequence[SnapshotContents], *, wants_compute: bool
) -> None:
    """Check that every operator is whole in one slot.

    Args:
        window: The snapshots, by slot.
        wants_compute: Whether all slots before that slot must hold the operator's
            compute weights.

    Raises:
        CheckpointLoadError: An operator is missing in one of these slots, or is there
            twice.
    """
    times = Counter(name for snapshot in window for name in snapshot.full)
    for name, count in times.items():
        if count > 1:
            raise CheckpointLoadError(
                f"conversion: got operator {name!r} whole {count} times, wanted once in"
                " a window"
            )
    still_to_come = set(times)
    for snapshot in window:
        still_to_come -= set(snapshot.full)
        if never := sorted(set(snapshot.compute) - set(times)):
            raise CheckpointLoadError(
                f"conversion: got operators {never} whole in no slot, wanted each whole"
                " in one"
            )
        # frozen operators take part in forward, and without these weights would use
        # compute weights of another iteration
        if wants_compute and sorted(snapshot.compute) != sorted(still_to_come):
            raise CheckpointLoadError(
                f"conversion: got compute weights of {sorted(snapshot.compute)} in the"
                f" snapshot of iteration {snapshot.iteration}, wanted those of the"
                f" operators still to come, {sorted(still_to_come)}"
            )
