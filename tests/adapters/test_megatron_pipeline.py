"""The stage communicator counts exactly what a stage hands to its neighbours."""

from __future__ import annotations

from megatron.core import parallel_state

from tests.adapters.stage import build_stage
from tests.ranks import run_ranks


def _sent_in_an_iteration() -> tuple[int, int, int]:
    _, trainer = build_stage("parallel.pp=2")
    committed = trainer.run_iteration(1)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return stage, committed.sent_activation_bytes, committed.sent_gradient_bytes


def test_bytes_sent_are_those_of_the_boundary_tensors() -> None:
    # 2 micro-batches (batch 8, micro 2, dp 2), each 16 tokens x 2 sequences x 32 wide, 2 bytes (bf16)
    boundary_bytes = 2 * (16 * 2 * 32 * 2)
    for stage, activation_bytes, gradient_bytes in run_ranks(4, _sent_in_an_iteration):
        assert activation_bytes == (boundary_bytes if stage == 0 else 0)
        assert gradient_bytes == (boundary_bytes if stage == 1 else 0)
