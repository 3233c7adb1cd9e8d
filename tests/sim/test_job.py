"""The placement of a model on ranks: every byte once, layers in order.

Errors name sizes that do not divide.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.sim.job import BatchConfig
from moe_ckpt.types import OperatorKind
from tests.sim.setups import job, shape

BATCH = BatchConfig(micro_batch_size=1, global_batch_size=64, sequence_length=8)


@given(num_layers=st.integers(1, 20), pp=st.integers(1, 23))
def test_every_operator_is_on_one_stage_and_none_is_left_empty(
    num_layers: int, pp: int
) -> None:
    if pp > num_layers + 3:
        return
    of = job(pp=pp, shape=shape(num_layers))
    stages = list(of.stage_of)
    assert stages == sorted(stages)
    assert set(stages) == set(range(pp))
    spans = [of.positions(stage) for stage in range(pp)]
    assert spans[0].start == 0
    assert all(before.stop == after.start for before, after in pairwise(spans))
    assert spans[-1].stop == len(of.shape.operators)


def test_layers_are_spread_evenly_even_where_stages_do_not_divide_them() -> None:
    of = job(pp=3, shape=shape(8))
    blocks = [op for op in of.shape.operators if op.kind is OperatorKind.BLOCK]
    counts = [
        sum(op in of.shape.operators[of.positions(stage)] for op in blocks)
        for stage in range(3)
    ]
    assert counts == [3, 3, 2]


def test_all_ranks_together_have_every_byte_once() -> None:
    of = job(pp=2, dp=4, ep=2, batch=BATCH)
    total = 0
    for profile in of.profiles:
        # a row stands for dp / ep = 2 equal ranks
        assert profile.table.full_bytes.shape[0] == 2
        total += int(profile.table.full_bytes.sum()) * 4 // 2
    # rel: bytes are rounded up, rank by rank
    assert total == pytest.approx(12 * int(of.shape.parameters.sum()), rel=1e-3)
    assert int(of.whole_profile().table.full_bytes.sum()) == 12 * int(
        of.shape.parameters.sum()
    )


def test_an_expert_lies_on_the_rank_that_megatron_puts_it_on() -> None:
    table = job(pp=1, dp=2, ep=2, batch=BATCH).profiles[0].table
    experts = [
        (op.expert, column)
        for column, op in enumerate(table.operators)
        if op.expert is not None
    ]
    assert all(
        (table.full_bytes[0, column] > 0) == (expert < 2) for expert, column in experts
    )
    assert all(
        (table.full_bytes[1, column] > 0) == (expert >= 2) for expert, column in experts
    )


def test_an_expert_works_as_much_as_it_is_popular() -> None:
    of = job(shape=shape(popularity=(0.1, 0.2, 0.3, 0.4)))
    experts = [
        of.work[position]
        for position, op in enumerate(of.shape.operators)
        if op.layer == 0 and op.expert is not None
    ]
    assert experts == pytest.approx(
        [2 * 1000 * share for share in (0.1, 0.2, 0.3, 0.4)]
    )


def test_stages_log_what_they_send_to_each_neighbour() -> None:
    of = job(pp=3, batch=BATCH)
    one_way = 32 * 8 * 16 * 2  # micro-batches, tokens, width, bytes
    assert [of.boundary_log_bytes(stage) for stage in range(3)] == [
        one_way,
        2 * one_way,
        one_way,
    ]


def test_the_pipeline_is_the_slowest_axis() -> None:
    assert [job(pp=4, dp=2).stage_of_rank(rank) for rank in range(8)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"pp": 12},
            (
                "parallel.pp: got 12, wanted at most 11: 8 layers, embedding, final"
                " norm and output"
            ),
        ),
        ({"dp": 3, "ep": 2}, "parallel.ep: got 2, wanted a divisor of parallel.dp=3"),
        (
            {"dp": 3, "ep": 3},
            "parallel.ep: got 3, wanted a divisor of model.num_experts=4",
        ),
        (
            {
                "dp": 2,
                "batch": BatchConfig(
                    micro_batch_size=3, global_batch_size=8, sequence_length=1
                ),
            },
            (
                "batch.global_batch_size: got 8, wanted a multiple of"
                " batch.micro_batch_size=3 * parallel.dp=2"
            ),
        ),
    ],
)
def test_what_does_not_divide_is_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(**changes)  # type: ignore[arg-type]
    assert str(caught.value) == says
