"""The stage communicator counts the bytes that a stage sends, and the waiting time.

The stage sends tensors to neighbour stages, and waits for tensors of these stages.
"""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from moe_ckpt.events import IterationCommitted
from moe_ckpt.megatron.pipeline import StageCommunicator
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import build_stage, stage_number


def _run_an_iteration() -> tuple[
    int, IterationCommitted, list[tuple[bool, bool]], float
]:
    """Run one iteration, and observe each transfer.

    Returns:
        The stage; the event of the iteration; for each transfer, whether this rank
        waits for the transfer and whether a bubble is open; the seconds of all bubbles.
    """
    seen: list[tuple[bool, bool]] = []
    bubbles, communicate = PipelineBubbles(), P2PCommunicator._communicate

    def noting(self: StageCommunicator, **transfer: Any) -> Any:
        seen.append((transfer["recv_prev"] or transfer["recv_next"], bubbles.is_open))
        return communicate(self, **transfer)

    _, worker = build_stage()
    worker.iteration.communicator.bubbles = bubbles
    P2PCommunicator._communicate = noting  # type: ignore[method-assign]
    return stage_number(), worker.run_iteration(1), seen, bubbles.take_seconds()


def test_an_iteration_of_two_stages_of_two_ranks() -> None:
    # 2 micro-batches (batch 8, micro 2, dp 2) of 16 tokens x 2 sequences x hidden size
    # 32 x 2 bytes (bf16)
    boundary_bytes = 2 * (16 * 2 * 32 * 2)
    ranks = run_ranks(4, _run_an_iteration)
    for stage, committed, seen, seconds in ranks:
        sent = committed.sent_activation_bytes, committed.sent_gradient_bytes
        assert sent == ((boundary_bytes, 0) if stage == 0 else (0, boundary_bytes))
        assert {waits for waits, _ in seen} == {True, False}
        assert all(waits == is_open for waits, is_open in seen), (
            "a bubble is what a stage waits for"
        )
        assert seconds > 0
    (loss,) = {committed.loss for _, committed, *_ in ranks}
    assert 5.0 < loss < 6.5, "about ln(256) nats for 256 equally likely bytes"
