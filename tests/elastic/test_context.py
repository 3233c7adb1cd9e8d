"""A rank's status page shows no wait after an operation, even after a failed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.generations import Member
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.holders import PeerHolders
from moe_ckpt.replication.messages import Address
from tests.replication.peers import TICKET


def test_a_rank_without_a_daemon_does_not_count_as_waiting_for_ever(
    tmp_path: Path,
) -> None:
    page = StatusPage(tmp_path / "page")
    context = ElasticContext(
        member=Member(global_rank=0, world_size=2, incarnation=0),
        page=page,
        memory=tmp_path,
        daemon=DaemonClient(tmp_path, timeout_s=0.0),
        holders=PeerHolders(
            global_rank=0,
            world_size=2,
            ranks_per_node=1,
            num_peers=1,
            address_of=lambda rank: Address(host="127.0.0.1", port=rank),
        ),
        ticket=TICKET,
        copy_s=0.0,
    )
    with pytest.raises(CheckpointSaveError, match="got no daemon"):
        context.use_peers()
    assert not page.waiting
