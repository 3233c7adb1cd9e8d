"""`ckpt.recovery=gradients`: lost ranks take steps again, and no pass is repeated.

The jobs are real: what a dead process has left in shared memory decides.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.prove.compare import first_changed, read_digests
from moe_ckpt.events import StageRecovered
from moe_ckpt.types import Phase
from tests.harness.jobs.campaign import Fault, Point, survive
from tests.harness.jobs.noise import add_noise
from tests.harness.jobs.training import events_of

GRADIENTS = ("ckpt.recovery=gradients", "ckpt.window=3")


def alone(name: str, *at: Point, back_to: int, **more: Any) -> Fault:
    """Return a fault after which only the dead ranks are rebuilt."""
    described = Fault(
        name=name, at=at, back_to=back_to, replaying=None, executed=0, **more
    )
    return replace(described, replaying=sorted(set(described.dead)))


FAULTS = [
    alone("before the first window", Point(3, Phase.STEP, 2), back_to=2),
    alone("in forward", Point(3, Phase.FORWARD, 6, skip=2), back_to=5),
    alone("in backward", Point(2, Phase.BACKWARD, 9), back_to=8),
    alone("as gradients are reduced", Point(1, Phase.REDUCE, 12), back_to=11),
    alone("after the vote", Point(0, Phase.STEP, 15), back_to=15),
    alone("between update and gather", Point(3, Phase.STEP, 18, skip=1), back_to=18),
    alone("before a snapshot", Point(2, Phase.SNAPSHOT, 21), back_to=21),
    alone("between iterations", Point(1, Phase.BETWEEN, 24), back_to=24),
    alone(
        "both ranks of a stage", Point(3, Phase.REDUCE, 27), kills=[2, 3], back_to=26
    ),
]


def test_a_dead_rank_is_rebuilt_alone(tmp_path: Path) -> None:
    job = survive(tmp_path, FAULTS, "train.iterations=30", settings=GRADIENTS)
    recovered = [
        event for rank in range(4) for event in events_of(job.run, StageRecovered, rank)
    ]
    assert sum(event.gradient_steps for event in recovered) > len(FAULTS)
    assert not any(event.replayed_iters for event in recovered)


def test_every_state_is_one_from_before_whatever_kernels_do(tmp_path: Path) -> None:
    # ckpt.recovery=auto means gradients under this promise
    settings = ("ckpt.window=3", "run.exactness=state", "run.digest_tensors=true")
    job = survive(
        tmp_path,
        FAULTS,
        "train.iterations=30",
        settings=settings,
        setup=add_noise,
        is_exact=False,
    )
    digests = read_digests(job.run)
    assert digests.exactness == "state"
    assert first_changed(digests, may_be_older=False) is None
