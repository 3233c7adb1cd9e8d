"""A rank that is alone in its groups has one contribution to every collective.

Exchanges that need data of other ranks fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.elastic.process_groups import ELASTIC_CPU
from moe_ckpt.elastic.solo_group import SoloGroup
from tests.harness.gloo.collectives import COLLECTIVES, plain
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.gloo.workers import open_groups, open_store

SIZE = 3
ALONE: dict[str, Any] = {
    "all_reduce": [1.0, 2.0, 3.0],
    "all_reduce_later": [[1.0, 2.0, 3.0], True],
    "all_reduce_coalesced": [[1.0, 2.0], [1.0, 2.0, 3.0]],
    "broadcast": [1.0, 2.0, 3.0],
    "broadcast_object": ["of rank 0"],
    "reduce": [1.0, 2.0, 3.0],
    "barrier": None,
    "all_gather": [[1.0, 2.0]] * SIZE,
    "all_gather_into_tensor": [1.0, 2.0] * SIZE,
    "all_gather_coalesced": [[1.0, 2.0] * SIZE, [1.0] * SIZE],
    "all_gather_object": [{"rank": 0}] * SIZE,
    "gather": [[1.0, 2.0]] * SIZE,
    "gather_object": [{"rank": 0}] * SIZE,
}
"""Results of collectives on rank 0 of three ranks. Rank 0 is the root of collectives
that have a root. All other collectives need other ranks.
"""


def use(group: Any, ranks: Sequence[int], *, sends: bool = True) -> dict[str, Any]:
    """Return each collective's result, or the type of its error."""
    results = {}
    for call in COLLECTIVES:
        if sends or "send" not in call.__name__:
            try:
                results[call.__name__] = plain(call(group, list(ranks)))
            except (RuntimeError, AttributeError) as error:
                results[call.__name__] = type(error)
    return results


def before_forming() -> dict[str, Any]:
    open_groups(0, SIZE)
    return use(dist.group.WORLD, [2, 1, 0])  # the last one is the root


def test_until_groups_are_formed_everything_has_one_contribution() -> None:
    [results] = run_ranks(1, before_forming)
    errors = {name for name, result in results.items() if isinstance(result, type)}
    assert errors == {call.__name__ for call in COLLECTIVES} - ALONE.keys()
    assert {name: results[name] for name in ALONE} == ALONE


def one_with_gloo() -> dict[str, Any]:
    dist.init_process_group("gloo", store=rank_store(), rank=0, world_size=1)
    return use(dist.group.WORLD, [0], sends=False)


def one_over_a_generation(folder: str) -> list[dict[str, Any]]:
    """Return the results of a group of one rank before, in and after a generation."""
    groups = open_groups(0, 1)
    group = dist.new_group([0], backend=ELASTIC_CPU)
    results = [use(group, [0], sends=False)]
    groups.form(open_store(folder), 1)
    results.append(use(group, [0], sends=False))
    groups.leave()
    return [*results, use(group, [0], sends=False)]


def test_a_group_of_one_needs_no_generation_and_is_as_with_gloo(tmp_path: Path) -> None:
    [wanted] = run_ranks(1, one_with_gloo)
    assert not any(isinstance(result, type) for result in wanted.values())
    assert run_ranks(1, one_over_a_generation, str(tmp_path)) == [[wanted] * 3]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.int64), ((0,), torch.float32), ((2, 3), torch.bfloat16)],
)
def test_a_gather_repeats_a_tensor_of_any_shape(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    own = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) + 1
    gathered = torch.zeros((SIZE * own.numel(),), dtype=dtype)
    assert SoloGroup(SIZE)._allgather_base(gathered, own).wait()
    assert torch.equal(gathered, own.reshape(-1).repeat(SIZE))


@pytest.mark.parametrize(
    "name",
    [
        "scatter",
        "reduce_scatter",
        "alltoall",
        "alltoall_base",
        "_reduce_scatter_base",
        "all_to_all_single",
    ],
)
def test_an_exchange_says_why_it_cannot_be(name: str) -> None:
    with pytest.raises(
        RuntimeError, match="not formed yet: got an exchange among 3 ranks"
    ):
        getattr(SoloGroup(SIZE), name)([], [])
