"""The stage communicator counts exactly what a stage hands to its neighbours."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from moe_ckpt.adapters.megatron_pipeline import StageCommunicator
from moe_ckpt.store.bubbles import PipelineBubbles
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


def _bubbles_of_an_iteration() -> tuple[list[tuple[bool, bool]], float]:
    """Return of each transfer whether this rank waits for it, and whether a bubble is open; and the seconds of all."""
    seen: list[tuple[bool, bool]] = []
    bubbles, communicate = PipelineBubbles(), P2PCommunicator._communicate

    def noting(self: StageCommunicator, **transfer: Any) -> Any:
        seen.append((transfer["recv_prev"] or transfer["recv_next"], bubbles.is_open))
        return communicate(self, **transfer)

    _, trainer = build_stage("parallel.pp=2")
    trainer._runner.communicator.bubbles = bubbles
    P2PCommunicator._communicate = noting  # type: ignore[method-assign]
    trainer.run_iteration(1)
    return seen, bubbles.take_seconds()


def test_a_bubble_is_what_a_stage_waits_for() -> None:
    for seen, seconds in run_ranks(4, _bubbles_of_an_iteration):
        assert {waits for waits, _ in seen} == {True, False}
        assert all(waits == is_open for waits, is_open in seen)
        assert seconds > 0
