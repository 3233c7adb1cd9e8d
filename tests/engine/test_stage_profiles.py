"""All ranks get the profiles of all stages, each equal to the stage's own profile.

Each kind of stage is described once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from moe_ckpt.engine.stage_profiles import share_profiles
from moe_ckpt.packed import pack_rows, unpack_rows
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable, RunIdentity
from tests.harness.threads.job import position_of
from tests.harness.threads.model import Shape, operators_of
from tests.harness.threads.ranks import ThreadGroup, ThreadRanks, run_threads


def profile(shape: Shape, stage: int, rank: int, *, has_moments: bool) -> StageProfile:
    ids = operators_of(shape, stage)
    if stage == shape.pp - 1:
        ids.append(OperatorId(kind=OperatorKind.BLOCK, layer=0, mtp_depth=1))
    full = np.arange(shape.dp * len(ids), dtype=np.int64).reshape(shape.dp, -1) + 7
    table = OperatorTable(
        operators=ids,
        full_bytes=6 * full,
        compute_bytes=full,
        moment_bytes=4 * full if has_moments else None,
    )
    return StageProfile(
        table=table, boundary_log_bytes=100, step_log_bytes=10 * (rank % shape.dp)
    )


def share(shape: Shape, *, has_moments: bool) -> list[Sequence[StageProfile]]:
    groups = [ThreadGroup(shape.dp) for _ in range(shape.pp)]
    identity = RunIdentity(run_id="run", layout=shape.layout, model="m")

    def main(ranks: ThreadRanks) -> Sequence[StageProfile]:
        stage = shape.stage_of(ranks.rank)
        of_stage = ThreadRanks(ranks.rank % shape.dp)
        of_stage.use(groups[stage])
        mine = profile(shape, stage, ranks.rank, has_moments=has_moments)
        position = position_of(identity, shape, ranks, of_stage, ranks)
        shared = share_profiles(position, mine)
        assert share_profiles(position, mine, shared) is shared
        longer = replace(mine, boundary_log_bytes=mine.boundary_log_bytes + 1)
        assert share_profiles(position, longer, shared) is not shared
        return shared.stages

    return run_threads(shape.world_size, main)


@pytest.mark.parametrize("has_moments", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_every_rank_gets_the_profiles_of_all_stages(
    num_stages: int, has_moments: bool
) -> None:
    shape = Shape(pp=num_stages, experts=16)
    for profiles in share(shape, has_moments=has_moments):
        assert len(profiles) == num_stages
        middle = [each.table.owned for each in profiles[1:-1]]
        assert all(each is middle[0] for each in middle), "of one kind"
        for stage, got in enumerate(profiles):
            wanted = profile(shape, stage, 0, has_moments=has_moments)
            assert list(got.table.operators) == wanted.table.operators
            for name in ("full_bytes", "compute_bytes", "moment_bytes"):
                np.testing.assert_array_equal(
                    getattr(got.table, name), getattr(wanted.table, name)
                )
            assert (got.boundary_log_bytes, got.step_log_bytes) == (100, 10), (
                "of the rank that logs most"
            )


def test_rows_without_operators_are_packed_too() -> None:
    held, columns = unpack_rows(pack_rows([], np.zeros((3, 0), np.int64)))
    assert (held, columns.shape) == ((), (3, 0))
