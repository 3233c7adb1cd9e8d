"""Batches from iterators: recoveries end as if batches were read by their numbers.

The iterators have no random access.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.kept_batches import KeptBatches
from moe_ckpt.types import Phase
from tests.harness.threads.job import Fault, ThreadJob, exact
from tests.harness.threads.model import (
    HIDDEN,
    MICRO_BATCHES,
    PAIR,
    TOKENS,
    Model,
    Shape,
    inputs_of,
)
from tests.policies.profiles import config

ITERATION_BYTES = MICRO_BATCHES * TOKENS * HIDDEN * 4
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "moevement": {"window": 2},
    "gemini": {"every_iters": 2},
    "flowcheck": {},
    "moc": {"k_snapshot": 3, "k_persist": 3},
}


class Stream:
    """The inputs of all iterations, in order."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank, self.number = dp_rank, 0

    def __next__(self) -> torch.Tensor:
        number, self.number = self.number, self.number + 1
        return inputs_of(
            1 + number // MICRO_BATCHES, number % MICRO_BATCHES, self.dp_rank
        )


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def made(
    folder: Path,
    policy: str,
    *faults: Fault,
    stream: type[Stream] = Stream,
    kept_iters: int = 8,
    **options: Any,
) -> ThreadJob:
    settings = {**POLICIES[policy], **options.pop("settings", {})}
    job = ThreadJob(
        folder, config(policy, **settings), faults=faults, lossless=True, **options
    )

    def data_of(model: Model) -> KeptBatches:
        return KeptBatches(
            stream(model.dp_rank), limit_bytes=kept_iters * ITERATION_BYTES
        )

    job.data_of = data_of
    return job


@pytest.mark.parametrize(
    ("policy", "stream"),
    [
        *((policy, Stream) for policy in POLICIES),
        ("moevement", StatefulStream),
        ("gemini", StatefulStream),
    ],
)
def test_a_job_on_an_iterator_ends_as_without_faults(
    policy: str, stream: type[Stream], tmp_path: Path
) -> None:
    """Batches of 14 iterations exceed the bound.

    Older batches are dropped as windows replace each other.
    """
    faults = (
        Fault(rank=1, phase=Phase.BACKWARD, iteration=4),
        Fault(rank=2, phase=Phase.STEP, iteration=7, loses_memory=True),
        Fault(rank=2, phase=Phase.FORWARD, iteration=9),
        Fault(rank=0, phase=Phase.SNAPSHOT, iteration=11, also=(1,)),
    )
    exact(made(tmp_path, policy, *faults, stream=stream, iterations=14))


@pytest.mark.parametrize("iteration", [1, 2])
def test_a_job_on_an_iterator_recovers_from_its_first_iterations(
    iteration: int, tmp_path: Path
) -> None:
    exact(
        made(
            tmp_path,
            "moevement",
            Fault(rank=1, phase=Phase.REDUCE, iteration=iteration),
        )
    )


def test_a_stream_with_state_continues_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """Both ranks die with their memory, and new workers continue from disk."""
    everything = Fault(
        rank=0, also=(1,), phase=Phase.FORWARD, iteration=7, loses_memory=True
    )
    settings = {"durable_every_iters": 3, "async_save": False}
    exact(
        made(
            tmp_path,
            "moevement",
            everything,
            stream=StatefulStream,
            shape=PAIR,
            settings=settings,
        )
    )


def test_a_bound_below_a_window_ends_the_job_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^run\.keep_batches_bytes: got 288, wanted at least \d+, the bytes of"
            r" micro"
        ),
    ):
        made(tmp_path, "moevement", kept_iters=2, shape=Shape(dp=1)).run()


def test_a_bound_below_a_window_is_no_error_with_state(tmp_path: Path) -> None:
    fault = Fault(rank=1, phase=Phase.STEP, iteration=6)
    exact(made(tmp_path, "gemini", fault, kept_iters=1, stream=StatefulStream))
