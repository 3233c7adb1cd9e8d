"""The start of a process of torchrun: the faults beside a rank.

`start_rank` is replaced: only what the launcher starts beside a supervisor is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import entry
from launcher.config import compose_settings
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.run_folder import RunFolder
from moe_ckpt.supervised_rank import SupervisedRank
from tests.harness.threads.job import TICKET

KILL = ("fault=at", "fault.at=[{rank: 1, iteration: 9}]")


def supervised(folder: Path, global_rank: int) -> SupervisedRank:
    """Return a rank of a job of two nodes with a rank each."""
    return SupervisedRank(
        launch=Launch(
            global_rank=global_rank,
            world_size=2,
            local_rank=0,
            local_world_size=1,
            attempt=0,
        ),
        memory=folder,
        ticket=TICKET,
        folder=RunFolder(path=folder, run_id="run", clock_origin_unix_s=0.0),
        ranks_per_node=1,
        replicas=1,
        has_daemon=True,
        host="127.0.0.1",
    )


@pytest.mark.parametrize(
    ("rank", "settings", "wanted"),
    [
        (0, (*KILL, "runtime.spare_nodes=1"), True),
        (0, KILL, False),
        (0, ("runtime.spare_nodes=1",), False),
        (1, (*KILL, "runtime.spare_nodes=1"), False),
    ],
    ids=["kills", "no spare node", "no kill", "another rank"],
)
def test_one_line_says_that_spare_nodes_carry_out_no_kills(
    rank: int,
    settings: tuple[str, ...],
    wanted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[Callable[[], int]] = []

    def start_rank(*_: Any, beside: Callable[[SupervisedRank], None], **__: Any) -> int:
        beside(supervised(tmp_path, rank))
        return 0

    monkeypatch.setattr(entry, "start_rank", start_rank)
    monkeypatch.setattr(entry, "read_launch", lambda: None)
    monkeypatch.setattr(entry, "start_beside", started.append)
    monkeypatch.setattr(entry.os, "umask", lambda _: 0)
    assert entry.start(compose_settings([*settings, "+ckpt=moevement"])) == 0
    assert len(started) == int(rank == 1)
    said = "fault.kind=at: kills are carried out on the nodes on which the job begins"
    assert (said in capsys.readouterr().err) is wanted
