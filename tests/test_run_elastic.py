"""The exit status of a supervisor decides whether memory stays for the next start.

Also, settings of spare nodes that cannot work are refused before any worker starts.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)

from moe_ckpt.elastic.generations import FENCED, STORE_LOST
from moe_ckpt.elastic.shared_memory import Ended
from moe_ckpt.elastic.supervisor import REQUEUE
from moe_ckpt.elastic.torchrun_variables import read_launch
from moe_ckpt.errors import ConfigError
from moe_ckpt.run_elastic import run_elastic
from moe_ckpt.run_settings import runtime_config
from moe_ckpt.supervised_rank import how_ended
from tests.loop_configs import loop_config

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


def start_rank(
    connection: Connection,
    folder: Path,
    port: int,
    spare_nodes: int,
    ranks_per_node: int | str,
) -> None:
    """Act as the agent of node 1 of three; send the error with which its rank ends."""
    os.environ |= {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "job",
    }
    runtime = runtime_config(spare_nodes=spare_nodes, shared_memory=str(folder))
    config = loop_config(
        "moevement",
        runtime=runtime,
        ranks_per_node=ranks_per_node,
        run_dir=str(folder / "run"),
    )
    if os.fork() == 0:
        try:
            run_elastic(config.job, read_launch(), lambda worker: 0)
        except ConfigError as error:
            connection.send(str(error))
        finally:
            os._exit(0)
    os.wait()


def use_c10d(store: dist.Store) -> None:
    C10dRendezvousBackend(store, "job")


@pytest.mark.parametrize(
    ("spare_nodes", "ranks_per_node", "meet", "message"),
    [
        (
            3,
            "auto",
            id,
            "runtime.spare_nodes: got 3, wanted less than torchrun's --nnodes=3",
        ),
        (
            1,
            "auto",
            use_c10d,
            "torchrun --rdzv-backend: got 'another one', wanted static (--node-rank,"
            " --master-addr, --master-port) with runtime.spare_nodes: other agents",
        ),
        (
            1,
            1,
            id,
            "parallel.ranks_per_node: got 1, wanted auto, or 2 as torchrun starts on a"
            " node, with runtime.spare_nodes",
        ),
    ],
    ids=["no node that trains", "rendezvous", "ranks of a node"],
)
def test_spare_nodes_that_cannot_work_are_refused(
    start,
    stack: ExitStack,
    spare_nodes: int,
    ranks_per_node: int | str,
    meet: Callable[[dist.Store], object],
    message: str,
) -> None:
    """A process is an agent, because the watcher of its machine ends with an agent."""
    # not `tmp_path`: the path of a Unix socket must be short
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet(store)
    agent = start(start_rank, folder, store.port, spare_nodes, ranks_per_node)
    assert agent.hear().startswith(message)
    assert not (folder / "run").exists()
