"""The host waits for the device once for all buffers and once for all token counts.

An iteration and a recovery wait once for each group of tensors, not for each tensor.
"""

from __future__ import annotations

from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.router import RouterCounts, routers_of
from moe_ckpt.megatron.state import buffers
from moe_ckpt.snapshot.host_transfers import TRANSFERS
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import build_stage
from tests.scenarios import BIAS


def count_transfers() -> tuple[int, int, int, int]:
    """Count the transfers to the host for buffers and for token counts.

    Returns:
        The number of buffers, of transfers for the buffers, of token counts of routers,
        and of transfers for the token counts.
    """
    state, loop = build_stage(*BIAS)
    operators = RankOperators(state)
    counts = RouterCounts(state, operators.table, soft=True)
    before = TRANSFERS.num_transfers
    found = buffers(state)
    of_buffers = TRANSFERS.num_transfers - before
    counts.begin()
    loop.passes.train_on(1)
    before = TRANSFERS.num_transfers
    counted = counts.end()
    assert counted.hard.sum() > 0
    assert counted.soft.sum() > 0
    return (
        len(found),
        of_buffers,
        2 * len(list(routers_of(state))),  # hard and soft
        TRANSFERS.num_transfers - before,
    )


def test_buffers_and_counts_of_tokens_take_one_transfer_each() -> None:
    ((num_buffers, of_buffers, num_counts, of_counts),) = run_ranks(1, count_transfers)
    assert num_buffers > 1
    assert num_counts > 1
    assert (of_buffers, of_counts) == (1, 1)
