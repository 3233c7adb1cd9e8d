"""The exit status of a supervisor decides whether memory stays for the next start."""

from __future__ import annotations

import signal

import pytest

from moe_ckpt.elastic.generations import FENCED, STORE_LOST
from moe_ckpt.elastic.shared_memory import Ended
from moe_ckpt.elastic.supervisor import REQUEUE
from moe_ckpt.elastic.torchrun import read_launch
from moe_ckpt.supervised_rank import how_ended

W, F, G = Ended.WELL, Ended.FOR_GOOD, Ended.TO_GO_ON


@pytest.mark.parametrize(
    ("restarts", "most", "status", "how"),
    [
        (0, 0, 0, W),
        (0, 3, 0, W),
        (0, 0, 1, F),
        (2, 3, 1, G),
        (3, 3, 1, F),
        (3, 3, STORE_LOST, F),
        (3, 3, FENCED, F),
        (
            0,
            None,
            1,
            G,
        ),  # another starter than torchrun, which may start the rank again
        (0, 3, 128 + signal.SIGINT, F),  # a user ends the job
        (0, 0, REQUEUE, G),  # torchrun sends SIGTERM also where nodes come and go
        (0, 0, 128 + signal.SIGTERM, G),
    ],
)
def test_memory_stays_for_a_start_that_can_use_it(
    monkeypatch: pytest.MonkeyPatch,
    restarts: int,
    most: int | None,
    status: int,
    how: Ended,
) -> None:
    torchruns = {
        "RANK": 5,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 8,
        "LOCAL_WORLD_SIZE": 4,
        "MASTER_ADDR": "a",
    }
    torchruns |= {"MASTER_PORT": 1, "TORCHELASTIC_RESTART_COUNT": restarts}
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    if most is not None:
        torchruns |= {"TORCHELASTIC_MAX_RESTARTS": most}
    for name, value in torchruns.items():
        monkeypatch.setenv(name, str(value))
    launch = read_launch()
    assert how_ended(launch, status) is how
    assert launch.local_ranks == range(4, 8)
