"""Ranks that read different inputs fail before training, and name the input."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.collectives import TorchRanks
from moe_ckpt.engine.inputs import Inputs, require_equal
from moe_ckpt.errors import DataError
from moe_ckpt.standins import gpu
from tests.harness.gloo.ranks import rank_store, run_ranks

ALIKE = {"data.path": "20000 bytes, aa", "data.tokenizer": "8 bytes, bb"}


def _error_of(of_each: list[Inputs]) -> str | None:
    gpu.enable()
    dist.init_process_group(
        "gloo",
        store=rank_store(),
        rank=int(os.environ["RANK"]),
        world_size=len(of_each),
    )
    ranks = TorchRanks()
    try:
        require_equal(ranks, of_each[ranks.rank])
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (ALIKE, None),
        (
            {**ALIKE, "data.path": "20014 bytes, cc"},
            (
                "data.path: got 20000 bytes, aa on ranks 0, 1 and 20014 bytes, cc on"
                " ranks 2, wanted the same content on all ranks for as long as the job"
                " runs"
            ),
        ),
        ({"data.path": ALIKE["data.path"]}, None),
        ({}, None),
    ],
    ids=["alike", "another text", "a stage without tokenizer", "a stage without data"],
)
def test_all_ranks_name_the_input_that_differs(last: Inputs, says: str | None) -> None:
    assert run_ranks(3, _error_of, [ALIKE, ALIKE, last]) == [says] * 3
