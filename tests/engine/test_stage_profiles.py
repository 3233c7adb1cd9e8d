"""Profiles of all stages: the same on every rank as each stage has them, described once for each kind of stage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_ckpt.engine.interfaces import StagePlace
from moe_ckpt.engine.stage_profiles import share_profiles
from moe_ckpt.packed import pack_rows, unpack_rows
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.snapshot.codec import ShardIdentity
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable, ParallelLayout, RunIdentity
from tests.engine.thread_ranks import ThreadGroup, ThreadRanks, run_threads

EXPERTS, RANKS_A_STAGE = 16, 2


def operators(stage: int, num_stages: int, layers: int = 2) -> list[OperatorId]:
    found = [OperatorId(kind=OperatorKind.EMBEDDING)] if stage == 0 else []
    for layer in range(stage * layers, (stage + 1) * layers):
        found += [OperatorId(kind=OperatorKind.BLOCK, layer=layer), OperatorId(kind=OperatorKind.GATE, layer=layer)]
        found += [OperatorId(kind=OperatorKind.EXPERT, layer=layer, expert=expert) for expert in range(EXPERTS)]
    if stage == num_stages - 1:
        found += [OperatorId(kind=OperatorKind.BLOCK, layer=0, mtp_depth=1), OperatorId(kind=OperatorKind.OUTPUT)]
    return found


def profile(stage: int, rank: int, num_stages: int, *, has_moments: bool) -> StageProfile:
    ids = operators(stage, num_stages)
    full = np.arange(RANKS_A_STAGE * len(ids), dtype=np.int64).reshape(RANKS_A_STAGE, -1) + 7
    table = OperatorTable(
        operators=ids, full_bytes=6 * full, compute_bytes=full, moment_bytes=4 * full if has_moments else None
    )
    return StageProfile(table=table, boundary_log_bytes=100, step_log_bytes=10 * (rank % RANKS_A_STAGE))


def place(ranks: ThreadRanks, stage_group: ThreadGroup, num_stages: int) -> StagePlace:
    stage, in_stage = divmod(ranks.rank, RANKS_A_STAGE)
    of_stage = ThreadRanks(in_stage)
    of_stage.use(stage_group)
    layout = ParallelLayout(pp=num_stages, dp=RANKS_A_STAGE, ep=1, tp=1)
    return StagePlace(
        identity=RunIdentity(run_id="run", layout=layout, model="m"),
        shard=ShardIdentity(global_rank=ranks.rank, pp_rank=stage, tp_rank=0, ep_rank=0, etp_rank=0, dp_rank=in_stage),
        ranks=ranks,
        stage_ranks=of_stage,
        host_ranks=ranks,
        previous_rank=None,
        next_rank=None,
        device=torch.device("cpu"),
    )


def share(num_stages: int, *, has_moments: bool) -> list[list[StageProfile]]:
    groups = [ThreadGroup(RANKS_A_STAGE) for _ in range(num_stages)]

    def main(ranks: ThreadRanks) -> list[StageProfile]:
        stage = ranks.rank // RANKS_A_STAGE
        mine = profile(stage, ranks.rank, num_stages, has_moments=has_moments)
        return share_profiles(place(ranks, groups[stage], num_stages), mine)

    return run_threads(num_stages * RANKS_A_STAGE, main)


@pytest.mark.parametrize("has_moments", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_every_rank_gets_the_profiles_of_all_stages(num_stages: int, has_moments: bool) -> None:
    for profiles in share(num_stages, has_moments=has_moments):
        assert len(profiles) == num_stages
        for stage, got in enumerate(profiles):
            wanted = profile(stage, 0, num_stages, has_moments=has_moments)
            assert list(got.table.operators) == wanted.table.operators
            for name in ("full_bytes", "compute_bytes", "moment_bytes"):
                np.testing.assert_array_equal(getattr(got.table, name), getattr(wanted.table, name))
            assert (got.boundary_log_bytes, got.step_log_bytes) == (100, 10), "of the rank that logs most"


def test_rows_without_operators_are_packed_too() -> None:
    held, columns = unpack_rows(pack_rows([], np.zeros((3, 0), np.int64)))
    assert (held, columns.shape) == ((), (3, 0))
