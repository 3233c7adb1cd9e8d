"""Agents of torchrun are known by the keys that torch's own code writes.

The agents' side is torch's: the two kinds of rendezvous, and the barrier at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
    StaticTCPRendezvous,
)
from torch.distributed.elastic.utils.store import barrier

from moe_ckpt.elastic.job_store import answer_exit_barrier, has_static_agents
from tests.harness.gloo.workers import wait_until
from tests.waits import WAIT_S

JOB, NUM_AGENTS = "job", 3


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """Return the store of torchrun's agents, of which this process is a worker."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": JOB,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return store


def meet_statically(store: dist.TCPStore) -> dist.Store:
    """Return the store of an agent with a static rendezvous."""
    agent = StaticTCPRendezvous("127.0.0.1", store.port, 1, NUM_AGENTS, JOB, 60)
    return agent.next_rendezvous().store


def meet_by_c10d(store: dist.TCPStore) -> C10dRendezvousBackend:
    return C10dRendezvousBackend(store, JOB)


@pytest.mark.parametrize(
    ("meet", "is_shared", "is_static"),
    [
        (meet_statically, "True", True),
        (meet_by_c10d, "True", False),
        (meet_statically, "False", False),
    ],
    ids=["static", "c10d", "static, with a store of their own"],
)
def test_only_agents_of_a_static_rendezvous_are_static(
    store: dist.TCPStore,
    monkeypatch: pytest.MonkeyPatch,
    meet: Callable[[dist.TCPStore], object],
    is_shared: str,
    is_static: bool,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", is_shared)
    meet(store)
    assert has_static_agents() is is_static


def end_agent(store: dist.TCPStore, timeout_s: float = WAIT_S) -> None:
    """Wait as an agent does once its workers have ended."""
    barrier(meet_statically(store), NUM_AGENTS, _TERMINAL_STATE_SYNC_ID, timeout_s)


@pytest.mark.parametrize("comes_first", [True, False])
def test_an_agent_does_not_wait_for_agents_that_are_gone(
    store: dist.TCPStore, comes_first: bool
) -> None:
    with ThreadPoolExecutor(1) as thread:
        if comes_first:
            num_keys = store.num_keys()
            agent = thread.submit(end_agent, store)
            assert wait_until(lambda: store.num_keys() > num_keys)
            answer_exit_barrier(2, NUM_AGENTS)
        else:
            answer_exit_barrier(2, NUM_AGENTS)
            agent = thread.submit(end_agent, store)
        agent.result(WAIT_S)


def test_an_agent_waits_for_agents_that_are_there(store: dist.TCPStore) -> None:
    answer_exit_barrier(1, NUM_AGENTS)
    with pytest.raises(dist.DistStoreError):
        end_agent(store, 0.2)
    # the third agent comes
    end_agent(store)
