"""Which pipeline stages roll back after a loss. Pure. MoEvement, section 3.4 and Appendix A."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moe_ckpt.errors import CheckpointLoadError


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Neighbouring pipeline stages that recover together, from `first_stage` to `last_stage` inclusive."""

    first_stage: int
    last_stage: int

    @property
    def stages(self) -> range:
        return range(self.first_stage, self.last_stage + 1)


def plan_segments(lost_stages: Collection[int], num_stages: int, *, boundary_log: bool) -> tuple[Segment, ...]:
    """Return the segments that roll back, each on its own, from the first stage to the last.

    A segment is a run of lost neighbours: its healthy neighbours replay their logs into it. Lost stages 1, 2 and 5 of 8
    make 1-2 and 5-5. Without a boundary log the whole model rolls back as one. After a further loss during recovery,
    plan again with all stages that are lost by then: a segment that it touches grows, the others stay as they are.
    MoEvement, Appendix A.
    """
    assert all(0 <= stage < num_stages for stage in lost_stages), (sorted(lost_stages), num_stages)
    if lost_stages and not boundary_log:
        return (Segment(first_stage=0, last_stage=num_stages - 1),)
    lost = set(lost_stages)
    firsts = sorted(stage for stage in lost if stage - 1 not in lost)
    lasts = sorted(stage for stage in lost if stage + 1 not in lost)
    return tuple(Segment(first_stage=first, last_stage=last) for first, last in zip(firsts, lasts, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What one rank has to recover with, up to the target of a recovery.

    `windows`: the starts of the windows from which it can run to the target, all snapshots valid and all steps logged.
    Its boundary log holds iterations `logged_from` to the target; `logged_from` is past the target where it has none.
    """

    stage: int
    windows: tuple[int, ...]
    logged_from: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """A segment and the start of the window that it rolls back to."""

    segment: Segment
    window_start: int


def plan_recovery(
    lost_stages: Collection[int], inventories: Sequence[Inventory], *, target_iteration: int, boundary_log: bool
) -> tuple[Rollback, ...]:
    """Return who rolls back to where: the newest windows with which as few stages as possible reach the target.

    `inventories` are those of all ranks. Where logs do not cover what a lost segment needs, the whole model rolls back.
    Raises CheckpointLoadError, with what there was, if nothing that is left leads to the target.
    """
    num_stages = 1 + max(inventory.stage for inventory in inventories)
    whole = plan_segments(range(num_stages), num_stages, boundary_log=boundary_log)
    for segments in (plan_segments(lost_stages, num_stages, boundary_log=boundary_log), whole):
        starts = [_newest_start(segment, inventories, target_iteration) for segment in segments]
        found = [start for start in starts if start is not None]
        if len(found) == len(segments):
            pairs = zip(segments, found, strict=True)
            return tuple(Rollback(segment=segment, window_start=start) for segment, start in pairs)
    raise CheckpointLoadError(
        f"stages {sorted(lost_stages)} cannot be rebuilt at iteration {target_iteration}: looked for a complete sparse "
        f"window that all ranks concerned share, or that all ranks share; got windows from "
        f"{[inventory.windows for inventory in inventories]} and boundary logs from iterations "
        f"{[inventory.logged_from for inventory in inventories]}, by global rank"
    )


def _newest_start(segment: Segment, inventories: Sequence[Inventory], target_iteration: int) -> int | None:
    inside = [set(i.windows) for i in inventories if i.stage in segment.stages]
    neighbours = [i for i in inventories if i.stage in (segment.first_stage - 1, segment.last_stage + 1)]
    first_logged = max((neighbour.logged_from for neighbour in neighbours), default=0)
    usable = [start for start in set.intersection(*inside) if start + 1 >= first_logged or start == target_iteration]
    return max(usable, default=None)
