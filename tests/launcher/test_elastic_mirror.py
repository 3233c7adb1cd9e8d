"""ckpt.capture=mirror in whole jobs: servers make every state from the frames of gloo's own connections, bit for bit.

No engine test has gloo, TCP and Megatron's buffers together. On one machine the loopback interface is the mirror port.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.events import GradientsLost, GradientsSent, SnapshotTaken
from moe_ckpt.mirror.port import MirrorPort
from moe_ckpt.types import Phase
from tests.campaign import Point, all_go_back, lose_nodes, survive
from tests.captured_states import UNSHARDED, compare_states, mirror_of, note_states
from tests.scenarios import TIED
from tests.training import events_of


def require_port(interface: str) -> None:
    try:
        MirrorPort(interface).close()
    except ConfigError as error:
        pytest.skip(str(error))


def test_servers_make_every_state_from_frames(tmp_path: Path) -> None:
    require_port("lo")
    training = ("train.iterations=5", "parallel.ep=1", UNSHARDED)
    faults = [all_go_back("in backward", range(2, 4), Point(1, Phase.BACKWARD, 4), world_size=2)]
    noted = functools.partial(note_states, tmp_path)
    job = survive(tmp_path, faults, *training, world_size=2, ckpt="flowcheck", settings=mirror_of("lo"), setup=noted)
    compare_states(tmp_path, range(1, 3), world_size=2, num_servers=2)
    for rank in range(2):
        assert not events_of(job.run, GradientsLost, rank)
        assert {event.iteration for event in events_of(job.run, SnapshotTaken, rank)} == {0}
        assert all(event.size_bytes < 10_000 for event in events_of(job.run, GradientsSent, rank)), "buffers only"


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.pp=1", "parallel.ep=1"),
        ("parallel.pp=1", "parallel.ep=2"),
        ("parallel.pp=2", "parallel.ep=1", *TIED),
        ("parallel.pp=2", "parallel.ep=2"),
    ],
    ids=["DP4", "DP4 EP2", "PP2 DP2 tied", "PP2 DP2 EP2"],
)
def test_servers_follow_every_layout_through_faults(layout: tuple[str, ...], tmp_path: Path) -> None:
    """With EP=2 and DP=2 experts have no traffic: their gradients are tapped."""
    require_port("lo")
    training = ("train.iterations=10", UNSHARDED, *layout)
    faults = [
        all_go_back("while gradients are reduced", range(2, 5), Point(2, Phase.REDUCE, 4)),
        all_go_back("a node", range(5, 8), Point(0, Phase.STEP, 7), kills=[3], then=lose_nodes, fetched=True),
    ]
    noted = functools.partial(note_states, tmp_path)
    job = survive(tmp_path, faults, *training, ckpt="flowcheck", settings=mirror_of("lo"), setup=noted)
    compare_states(tmp_path, range(1, 3), world_size=4, num_servers=2)
    assert not events_of(job.run, GradientsLost)
