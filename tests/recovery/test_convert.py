"""From sparse snapshots to a dense state: the paper's example, and random windows.

Snapshots that are not a window are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.recovery.convert import SnapshotContents, plan_conversion


def make_window(
    slots: Sequence[Sequence[str]], first_iteration: int
) -> list[SnapshotContents]:
    """Return snapshots whose slots take the named operators whole."""
    return [
        SnapshotContents(
            iteration=first_iteration + slot,
            window_start=first_iteration,
            slot=slot,
            num_slots=len(slots),
            full=tuple(full),
            compute=tuple(name for later in slots[slot + 1 :] for name in later),
        )
        for slot, full in enumerate(slots)
    ]


WINDOW = make_window([["E1", "E2"], ["E3", "E4"], ["NE", "G"]], 10)


@st.composite
def windows(draw: st.DrawFn) -> list[SnapshotContents]:
    num_slots = draw(st.integers(1, 6))
    slot_of = draw(st.lists(st.integers(0, num_slots - 1), min_size=1, max_size=12))
    slots = [
        [f"op{name}" for name, slot in enumerate(slot_of) if slot == mine]
        for mine in range(num_slots)
    ]
    return draw(st.permutations(make_window(slots, draw(st.integers(0, 100)))))


@given(window=windows(), beyond=st.integers(0, 5))
def test_every_operator_ends_active_at_the_target(
    window: list[SnapshotContents], beyond: int
) -> None:
    target = max(snapshot.iteration for snapshot in window) + beyond
    names = {name for snapshot in window for name in snapshot.full}
    by_iteration = {snapshot.iteration: snapshot for snapshot in window}
    # operator -> iteration of its weights, active
    state: dict[str, tuple[int, bool]] = {}
    for step in plan_conversion(window, target):
        if step.load_iteration is not None:
            state |= dict.fromkeys(
                by_iteration[step.load_iteration].full, (step.load_iteration, True)
            )
            assert not any(state.get(name, (0, False))[1] for name in step.frozen)
            state |= dict.fromkeys(step.frozen, (step.load_iteration, False))
        if step.run_iteration is not None:
            assert set(state) == names
            assert {iteration for iteration, _ in state.values()} == {
                step.run_iteration - 1
            }
            state = {
                name: (at + active, active) for name, (at, active) in state.items()
            }
    assert state == dict.fromkeys(names, (target, True))


def changed(of_slot: int, **changes: Any) -> list[SnapshotContents]:
    return [
        replace(snapshot, **changes) if snapshot.slot == of_slot else snapshot
        for snapshot in WINDOW
    ]


COMPUTE = (
    r"compute weights of \['E3', 'E4', 'NE'\] in the snapshot of iteration 10,"
    r" .*\['E3', 'E4', 'G', 'NE'\]$"
)


@pytest.mark.parametrize(
    ("snapshots", "target_iteration", "message"),
    [
        pytest.param([], 12, "got no snapshots", id="none"),
        pytest.param(
            WINDOW[:2],
            12,
            r"got slots \[0, 1\] of 3, .*no slot \[2\]$",
            id="no last slot",
        ),
        pytest.param(
            [*WINDOW, WINDOW[1]], 12, r"got slots \[0, 1, 1, 2\]", id="a slot twice"
        ),
        pytest.param(
            changed(2, slot=3),
            12,
            r"got slots \[0, 1, 3\] of 3, .*no slot \[2\]$",
            id="a slot too high",
        ),
        pytest.param(
            changed(2, iteration=13),
            14,
            r"got snapshots of iterations \[10, 11, 13\]",
            id="a gap",
        ),
        pytest.param(
            WINDOW,
            11,
            "got target iteration 11, wanted at least 12",
            id="a target inside the window",
        ),
        pytest.param(
            changed(1, window_start=7),
            12,
            r"windows .*\[\(7, 3\), \(10, 3\)\]",
            id="two windows",
        ),
        pytest.param(
            changed(1, num_slots=4),
            12,
            r"windows .*\[\(10, 3\), \(10, 4\)\]",
            id="two lengths",
        ),
        pytest.param(
            changed(1, full=("E3", "E4", "E1")),
            12,
            "operator 'E1' whole 2 times",
            id="whole in two slots",
        ),
        pytest.param(
            changed(0, full=("E1", "E1", "E2")),
            12,
            "operator 'E1' whole 2 times",
            id="whole twice in one",
        ),
        pytest.param(
            changed(2, full=("NE",)),
            12,
            r"operators \['G'\] whole in no slot",
            id="never whole",
        ),
        pytest.param(
            changed(0, compute=("E3", "E4", "NE")),
            12,
            COMPUTE,
            id="compute weights missing",
        ),
        pytest.param(
            changed(1, compute=("NE", "G", "G")),
            12,
            "in the snapshot of iteration 11",
            id="one twice",
        ),
        pytest.param(
            changed(1, compute=("NE", "G", "E3")),
            12,
            "in the snapshot of iteration 11",
            id="its own",
        ),
    ],
)
def test_what_is_no_window_is_refused(
    snapshots: list[SnapshotContents], target_iteration: int, message: str
) -> None:
    with pytest.raises(CheckpointLoadError, match=rf"^conversion: .*{message}"):
        plan_conversion(snapshots, target_iteration)
