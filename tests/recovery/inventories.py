"""What ranks have, for tables: windows of 3 slots with steps to 14, and boundary logs of iterations 6 to 14."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_ckpt.recovery.inventory import Inventory, ReplayedState, WindowRef

TARGET = 14


def window(start: int, *, num_slots: int = 3, steps_to: int = TARGET, cut: str = "a") -> WindowRef:
    return WindowRef(start=start, num_slots=num_slots, steps_to=steps_to, cut=cut)


def replayed(window: WindowRef, iteration: int) -> ReplayedState:
    return ReplayedState(states=window.states, cut=window.cut, iteration=iteration)


def inventory(
    global_rank: int,
    stage: int = 0,
    windows: Sequence[WindowRef] = (),
    *,
    held: Mapping[int, Sequence[WindowRef]] | None = None,
    logged: tuple[int, int] = (6, TARGET),
    replayed_to: int | None = None,
) -> Inventory:
    return Inventory(
        global_rank=global_rank,
        stage=stage,
        windows=tuple(windows),
        held={owner: tuple(copies) for owner, copies in (held or {}).items()},
        logged_from=logged[0],
        logged_to=logged[1],
        replayed=None if replayed_to is None else replayed(windows[0], replayed_to),
    )
