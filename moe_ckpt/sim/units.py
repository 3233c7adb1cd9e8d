"""The partial checkpoint to which all ranks go back after a fault, and the loss.

The plan is that of a real run. Ranks that lost their memory take units from peers'
memory or from disk, as old as the units are there. Ranks with equal sources are listed
once. Experts are listed once too: the plan chooses the core, and the level of the core
decides the levels of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from moe_ckpt.policies.lost_tokens import IntArray
from moe_ckpt.recovery.units import UnitInventory, plan_units
from moe_ckpt.sim.generation import Kept
from moe_ckpt.sim.hardware import JOB
from moe_ckpt.sim.partial import Account, Epoch, Lost
from moe_ckpt.sim.recovering import Losses, RollbackPath
from moe_ckpt.sim.saving import Saving, Setup
from moe_ckpt.sim.snapshot_pattern import Where
from moe_ckpt.sim.timeline import HOST_MEMORY
from moe_ckpt.types import CORE, Version

Levels = Mapping[Where, Sequence[Kept]]
"""Checkpoints with a part of a rank, by level, the nearest checkpoint first."""


def go_back(
    setup: Setup,
    saving: Saving,
    kept: Sequence[Kept],
    on_disk: Kept | None,
    losses: Losses,
) -> RollbackPath | None:
    """Return the way of all ranks back to a partial checkpoint.

    Args:
        setup: The job on a cluster.
        saving: The policy's saves.
        kept: The checkpoints that all ranks had in memory.
        on_disk: The newest checkpoint on disk. None: there is none.
        losses: The losses.

    Returns:
        The way, or None if ranks have no checkpoint in common.
    """
    written = [on_disk] if on_disk and not on_disk.is_whole else []
    bare = {
        rank: _bare_levels(setup, saving, rank, kept, written, losses)
        for rank in sorted(losses.unreplicated)
    }
    # one rank stands for all ranks with whole memory: a plan depends on sources, not on
    # their number
    witness = next(rank for rank in range(len(bare) + 1) if rank not in bare)
    others = (
        {witness: {Where.MEMORY: [*kept, *written]}}
        if witness < setup.job.layout.world_size
        else {}
    )
    plan = plan_units(
        [_inventory(rank, levels) for rank, levels in (bare | others).items()]
    )
    if plan is None:
        return None
    found = next(each for each in (*kept, *written) if _version(each) == plan.version)
    epoch = found.epoch
    assert epoch is not None
    assert saving.partial is not None
    lost = _lost(setup, saving, found, epoch, bare)
    total = epoch.account.lost + np.concatenate(
        [of_stage.sum(axis=1) for of_stage in lost]
    )
    plt, mlt = saving.partial.tokens.shares(total, found.end)
    return RollbackPath(
        iteration=found.end,
        fetch_s=_fetch_s(setup, saving, [plan.sources[rank][CORE] for rank in bare]),
        replay_s=saving.whole_bytes / saving.reload_bytes_per_s
        + setup.cluster.resume_s,
        source=HOST_MEMORY,
        account=Account(lost=total, facts=epoch.account.facts),
        lost=Lost(by_stage=lost, plt=plt, mlt=mlt),
    )


def _bare_levels(
    setup: Setup,
    saving: Saving,
    rank: int,
    kept: Sequence[Kept],
    written: Sequence[Kept],
    losses: Losses,
) -> Levels:
    """Return the remaining levels of the units of a rank that has lost its memory."""
    holders = setup.holders(
        rank, saving.replicas, peers=setup.job.layout.ranks_per_stage
    )
    is_held = any(holder not in losses.unreplicated for holder in holders)
    return ({Where.PEERS: kept} if is_held else {}) | (
        {Where.DISK: written} if written else {}
    )


def _inventory(rank: int, levels: Levels) -> UnitInventory:
    versions = {
        where: frozenset(map(_version, checkpoints))
        for where, checkpoints in levels.items()
    }
    return UnitInventory(
        global_rank=rank,
        levels={where.name: {CORE: of_core} for where, of_core in versions.items()},
        needed={
            version: frozenset({CORE})
            for of_core in versions.values()
            for version in of_core
        },
    )


def _version(kept: Kept) -> Version:
    assert kept.epoch is not None, kept
    return Version(epoch=kept.epoch.number, iteration=kept.end)


def _lost(
    setup: Setup, saving: Saving, found: Kept, epoch: Epoch, bare: Mapping[int, Levels]
) -> list[IntArray]:
    """Return the losses of each stage; an expert is as old as its oldest part."""
    assert saving.partial is not None
    tokens, job = saving.partial.tokens, setup.job
    versions = cache(epoch.versions)  # ranks of a node mostly have equal versions
    whole = versions(found.end, Where.MEMORY)
    homes = np.arange(job.shape.num_experts) * job.layout.ep // job.shape.num_experts
    rows = [tokens.rows_of_stage(stage, len(whole)) for stage in range(job.layout.pp)]
    of_stages = [whole[of_stage] for of_stage in rows]
    for rank, levels in bare.items():
        ends = {
            where: [kept.end for kept in theirs if kept.epoch is epoch]
            for where, theirs in levels.items()
        }
        # copies may be newer than the core to which all ranks go back
        newest = [
            versions(min(max(each), found.end), where)
            for where, each in ends.items()
            if each
        ]
        stage, own = job.stage_of_rank(rank), homes == job.ep_rank_of(rank)
        of_stages[stage][:, own] = np.minimum(
            of_stages[stage], np.maximum.reduce(newest)[rows[stage]]
        )[:, own]
    return [(found.end - of_stage) * tokens.by_expert for of_stage in of_stages]


def _fetch_s(setup: Setup, saving: Saving, sources: Sequence[str]) -> float:
    """Return the seconds that ranks without memory wait for their state.

    Peers serve all ranks at once.
    """
    own_bytes = saving.whole_bytes / (
        setup.job.layout.world_size if setup.cluster.copies_share == JOB else 1
    )
    from_peers_s = (
        own_bytes / setup.cluster.peer_bytes_per_s
        if Where.PEERS.name in sources
        else 0.0
    )
    return max(
        from_peers_s,
        sources.count(Where.DISK.name)
        * own_bytes
        / setup.cluster.disk_read_bytes_per_s,
    )
