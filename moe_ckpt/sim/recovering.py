"""The costs of a fault: the remaining sources, the plan of a real run, its seconds.

Pure. Ranks of a stage with equal sources are listed once: a plan depends on the sources
of ranks, not on their number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_ckpt.recovery.inventory import Inventory, ReplayedState, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, Rollback, plan_recovery
from moe_ckpt.recovery.target import Standing, plan_target
from moe_ckpt.sim.generation import Kept
from moe_ckpt.sim.hardware import JOB
from moe_ckpt.sim.partial import Account, Lost
from moe_ckpt.sim.saving import Recovery, Saving, Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """The losses of a recovery in progress."""

    dead: frozenset[int]
    """Workers that are dead."""

    bare: frozenset[int]
    """Dead workers that have also lost their host memory."""

    unreplicated: frozenset[int]
    """Ranks whose memories hold no copies for other ranks."""

    rolling: Mapping[int, ReplayedState | None]
    """Stages that a cut-off recovery was already taking back, with the state that their
    replay has reached. None: no state.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A recovery plan with its seconds."""

    plan: RecoveryPlan
    """The plan of the real run."""

    fetch_s: float
    """Seconds until all windows are in place."""

    replay_s: tuple[float, ...]
    """Seconds of each rollback's replay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RollbackPath:
    """A way of all ranks back to the state after `iteration`."""

    iteration: int
    """Iteration of the state to which all ranks go back."""

    fetch_s: float
    """Seconds for fetching."""

    replay_s: float
    """Seconds for replaying or loading."""

    source: str
    """Source of the state: host memory, disk, or the beginning."""

    estimate: Estimate | None = None
    """The plan with its seconds. None: ranks went back without a plan."""

    account: Account | None = None
    """The account of the partial checkpoint. None: no partial checkpoint."""

    lost: Lost | None = None
    """Tokens that the recovery loses. None: no partial checkpoint."""


def plan_after(
    setup: Setup,
    saving: Saving,
    kept: Sequence[Kept],
    losses: Losses,
    reached: int,
    at_s: float = math.inf,
) -> RecoveryPlan:
    """Return the plan of the real run after some losses.

    Args:
        setup: The job on a cluster.
        saving: The policy's saves.
        kept: The windows that all ranks had.
        losses: The losses.
        reached: The iteration of ranks that have lost nothing.
        at_s: The time of the plan. Peers hold only windows that were copied by then.

    Raises:
        NothingLeftError: The remaining memory leads to no state.
    """
    num_stages = setup.job.layout.pp
    standings = _standings(setup, losses, reached)
    target = plan_target(standings) if saving.recovery is Recovery.LOCAL else None
    inventories = _inventories(setup, saving, kept, losses, reached, at_s)
    return plan_recovery(
        target.lost_stages if target else range(num_stages),
        inventories,
        target_iteration=target.iteration if target else None,
        boundary_log=saving.logs and num_stages > 1,
    )


def estimate(setup: Setup, saving: Saving, plan: RecoveryPlan) -> Estimate:
    """Return the seconds of a plan."""
    sources = Counter(fetch.source_rank for fetch in plan.fetches)
    rate = setup.cluster.peer_bytes_per_s
    # sources send at the same time, but each source sends its windows one by one
    fetch_s = max(sources.values(), default=0) * _window_bytes(setup, saving) / rate
    return Estimate(
        plan=plan,
        fetch_s=fetch_s,
        replay_s=tuple(
            _rollback_s(setup, saving, rollback, plan.target_iteration)
            for rollback in plan.rollbacks
        ),
    )


def replay_s(
    setup: Setup,
    saving: Saving,
    stages: range,
    window: Kept,
    target: int,
    done: int = 0,
) -> float:
    """Return the seconds in which stages run iterations from a window's start again.

    Args:
        setup: The job on a cluster.
        saving: The policy's saves.
        stages: The stages that run together.
        window: The window from whose start the iterations run.
        target: The last iteration to run.
        done: The number of these iterations, from the first, that a cut-off replay
            already ran.
    """
    active = saving.active(window.num_slots)

    def seconds(number: int) -> float:
        mean_s = setup.costs.replay_s(stages, active[min(number, len(active) - 1)])
        # collectives and logs, a small part, are assumed to scale with the iteration
        return mean_s * setup.pace.length(window.start + number + 1)

    return sum(seconds(number) for number in range(done, target - window.start))


def replayed_by(
    setup: Setup, saving: Saving, rollback: Rollback, target: int, spent_s: float
) -> ReplayedState | None:
    """Return the state that a rollback has reached after some seconds, without fetches.

    Returns None if the rollback has reached no new state.
    """
    window = Kept(start=rollback.span[0], end=rollback.span[-1])
    whole_s = _rollback_s(setup, saving, rollback, target)
    for iteration in range(target, rollback.starts_from, -1):
        rest_s = replay_s(
            setup,
            saving,
            rollback.stages,
            window,
            target,
            done=iteration - window.start,
        )
        if whole_s - rest_s <= spent_s:
            return ReplayedState(span=rollback.span, assignment="", iteration=iteration)
    if rollback.resumed_at is None:
        return None
    return ReplayedState(
        span=rollback.span, assignment="", iteration=rollback.resumed_at
    )


def _rollback_s(setup: Setup, saving: Saving, rollback: Rollback, target: int) -> float:
    stages = rollback.stages
    window = Kept(start=rollback.span[0], end=rollback.span[-1])
    done = rollback.starts_from - window.start
    load_bytes = saving.whole_bytes if rollback.resumed_at is None else 0.0
    if setup.cluster.copies_share == JOB:
        # `whole_bytes` are those of the job here, on one link: these stages load their
        # share
        load_bytes *= len(stages) / setup.job.layout.pp
    return load_bytes / saving.reload_bytes_per_s + replay_s(
        setup, saving, stages, window, target, done
    )


def _window_bytes(setup: Setup, saving: Saving) -> float:
    """Return the bytes of a window on a rank."""
    world_size = setup.job.layout.world_size
    return (
        saving.kept_bytes / world_size
        if setup.cluster.copies_share == JOB
        else saving.kept_bytes
    )


def _standings(setup: Setup, losses: Losses, reached: int) -> list[Standing]:
    gone = {
        setup.job.stage_of_rank(rank) for rank in losses.dead
    } | losses.rolling.keys()
    standings = [
        Standing(stage=stage, reached=None, prepared=False, whole=False)
        for stage in sorted(gone)
    ]
    num_dead = Counter(setup.job.stage_of_rank(rank) for rank in losses.dead)
    survived = (
        stage for stage in range(setup.job.layout.pp) if stage not in losses.rolling
    )
    return standings + [
        Standing(stage=stage, reached=reached, prepared=False, whole=True)
        for stage in survived
        if num_dead[stage] < setup.job.layout.ranks_per_stage
    ]


def _inventories(
    setup: Setup,
    saving: Saving,
    kept: Sequence[Kept],
    losses: Losses,
    reached: int,
    at_s: float,
) -> list[Inventory]:
    """Return the inventories that a plan needs.

    The inventories are those of dead ranks, of ranks that hold their copies, and of one
    other rank of each stage.
    """
    # with step logs a window leads to the iteration of the other ranks, otherwise only
    # to its own end
    least = reached if saving.recovery is Recovery.LOCAL else 0
    refs = {
        # one assignment: simulated ranks of a stage always have the same order of
        # operators
        each.start: WindowRef(
            start=each.start,
            num_slots=each.num_slots,
            replayable_to=max(each.end, least),
            assignment="",
        )
        for each in kept
    }
    windows = tuple(refs.values())
    copies = tuple(refs[each.start] for each in kept if each.copied_at_s <= at_s)
    logged_from = min((window.start + 1 for window in kept), default=1)
    held: dict[int, dict[int, tuple[WindowRef, ...]]] = {}
    for owner in sorted(losses.bare):
        for holder in setup.holders(owner, saving.replicas):
            # a replaced node holds no copies until the next window has arrived there
            if holder not in losses.unreplicated:
                held.setdefault(holder, {})[owner] = copies
    told = losses.dead | held.keys() | _witnesses(setup, losses)
    return [
        Inventory(
            global_rank=rank,
            stage=setup.job.stage_of_rank(rank),
            windows=() if rank in losses.bare else windows,
            held=held.get(rank, {}),
            logged_from=logged_from,
            logged_to=logged_from - 1 if rank in losses.dead else reached,
            replayed=losses.rolling.get(setup.job.stage_of_rank(rank)),
        )
        for rank in sorted(told)
    ]


def _witnesses(setup: Setup, losses: Losses) -> set[int]:
    """Return a rank of each stage that stands for all ranks without losses.

    A stage without such a rank has none.
    """
    per_stage = setup.job.layout.ranks_per_stage
    ranks = (
        next(
            (
                rank
                for rank in range(stage * per_stage, (stage + 1) * per_stage)
                if rank not in losses.dead
            ),
            None,
        )
        for stage in range(setup.job.layout.pp)
    )
    return {rank for rank in ranks if rank is not None}
