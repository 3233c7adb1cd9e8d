"""Deaths in words, for logs and events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.elastic.process_failure import Death, FaultClass, classes_of

KILLED = Death(
    fault=FaultClass.SIGNAL,
    global_rank=3,
    pid=4711,
    signal="SIGKILL",
    why="died of SIGKILL",
    iteration=7,
    phase="backward",
    last_seen_unix_s=10.0,
    found_unix_s=10.25,
)
LOST = Death(
    fault=FaultClass.NODE,
    global_rank=4,
    pid=0,
    signal="",
    why="node 1 (ranks 4 to 7) is lost: its processes on 10.0.0.2 have ended",
    iteration=0,
    phase="build",
    last_seen_unix_s=10.0,
    found_unix_s=10.5,
)
KILLED_TEXT = (
    "rank 3 (pid 4711) died of SIGKILL in backward of iteration 7, found 250 ms after"
    " its last sign of life"
)
LOST_TEXT = (
    "node 1 (ranks 4 to 7) is lost: its processes on 10.0.0.2 have ended, found 500 ms"
    " after its last sign of life"
)


@pytest.mark.parametrize(
    ("death", "text"),
    [
        (KILLED, KILLED_TEXT),
        (
            replace(KILLED, iteration=0, phase="join"),
            KILLED_TEXT.replace("backward of iteration 7", "join"),
        ),
        (LOST, LOST_TEXT),
    ],
    ids=["a worker", "a worker before the first iteration", "a rank of a lost node"],
)
def test_a_death_is_a_sentence(death: Death, text: str) -> None:
    assert str(death) == text


def test_a_lost_node_is_one_fault_of_all_its_ranks() -> None:
    of_node = [replace(LOST, global_rank=rank) for rank in range(4, 8)]
    assert classes_of([of_node[0], KILLED, *of_node[1:]]) == {
        LOST_TEXT: FaultClass.NODE,
        KILLED_TEXT: FaultClass.SIGNAL,
    }
