"""The store that ranks share may be slow, silent or gone.

Ranks print errors nevertheless, and soon.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_ckpt.elastic import etcd_client, job_store
from moe_ckpt.elastic.job_store import (
    agent_store,
    open_store,
    say_once,
    use_etcd,
    use_hosted_store,
)
from moe_ckpt.elastic.supervisor import start_beside
from moe_ckpt.elastic.torchrun_variables import Launch
from tests.elastic.etcd_server import EtcdServer
from tests.harness.gloo.ranks import run_ranks
from tests.launcher.errors import error_of
from tests.ports import held_port


@contextlib.contextmanager
def port_of(*, listens: bool) -> Iterator[int]:
    """Yield the port of a silent server, or a port without a server.

    The silent server accepts connections and never answers.
    """
    with ExitStack() as stack:
        port = held_port(stack)
        if listens:
            stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=8))
        yield port


def use_store(port: int) -> None:
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def say(count: int) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(count):
            say_once("it is broken")
    return said.getvalue()


def say_without_an_answer(port: int, limit: str, limit_s: float) -> tuple[str, float]:
    setattr(job_store, limit, limit_s)
    use_store(port)
    began_s = time.monotonic()
    return say(1), time.monotonic() - began_s


def say_to_a_store(count: int) -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    use_store(store.port)
    return say(count)


class Closed(io.StringIO):
    """The stderr of a rank that ends before printing."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def say_after_a_first_that_does_not() -> str:
    job_store._SAY_S = 0.3
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    use_store(store.port)
    with contextlib.redirect_stderr(Closed()), contextlib.suppress(BrokenPipeError):
        say_once("it is broken")
    return say(1)


def connect(port: int) -> tuple[str, float]:
    job_store._CONNECT_S = 0.5
    use_store(port)
    began_s = time.monotonic()
    return error_of(open_store, "part"), time.monotonic() - began_s


def test_an_error_is_said_once_by_all_that_share_a_store() -> None:
    assert run_ranks(1, say_to_a_store, 3) == ["error: it is broken\n"]


def test_an_error_is_said_by_another_rank_if_the_first_dies_before_it_has() -> None:
    assert run_ranks(1, say_after_a_first_that_does_not) == ["error: it is broken\n"]


@pytest.mark.parametrize(
    ("listens", "limit", "limit_s"),
    [(True, "_SAY_S", 0.3), (False, "_CONNECT_S", 0.5)],
    ids=["silent", "gone"],
)
def test_an_error_is_said_where_no_store_answers(
    listens: bool, limit: str, limit_s: float
) -> None:
    with port_of(listens=listens) as port:
        [(said, took_s)] = run_ranks(1, say_without_an_answer, port, limit, limit_s)
    assert said == "error: it is broken\n"
    assert took_s < 5.0


def test_a_store_that_does_not_answer_is_an_error_in_time() -> None:
    with port_of(listens=False) as port:
        [(message, took_s)] = run_ranks(1, connect, port)
    assert message.startswith(f"torchrun's store at 127.0.0.1:{port}: got no answer (")
    assert took_s < 10.0


def use_etcd_for(job: str, members: str) -> str:
    """Return the error of using an etcd cluster for a job with this name."""
    etcd_client._PATIENCE_S = 0.2
    os.environ["TORCHELASTIC_RUN_ID"] = job
    message = error_of(use_etcd, members)
    assert agent_store("part") is None, "the error is to be said without etcd"
    return message


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        (
            "none",
            (
                "torchrun --rdzv-id: got 'none', wanted a name that no other start of a"
                " job has"
            ),
        ),
        (
            "",
            (
                "torchrun --rdzv-id: got '', wanted a name that no other start of a"
                " job has"
            ),
        ),
        (
            "7",
            (
                "runtime.etcd: got '127.0.0.1:1', wanted a cluster that answers (etcd"
                " at 127.0.0.1:1: got no answer in"
            ),
        ),
    ],
)
def test_an_etcd_that_cannot_be_used_is_an_error(job: str, wanted: str) -> None:
    [message] = run_ranks(1, use_etcd_for, job, "127.0.0.1:1")
    assert message.startswith(wanted)


def meet_on_etcd(members: str) -> list[object]:
    os.environ["TORCHELASTIC_RUN_ID"] = "job 7"
    use_etcd(members)
    number = open_store("part").add("ranks", 1)
    open_store("part").set(str(number), os.environ["RANK"])
    open_store("part", own_connection=True).wait(["1", "2"])
    return [open_store("part").check(["1"]), open_store("other").check(["1"]), say(3)]


def test_ranks_meet_on_etcd(tmp_path: Path, stack: ExitStack) -> None:
    found = run_ranks(2, meet_on_etcd, EtcdServer(stack, tmp_path).endpoint)
    assert [parts for *parts, _ in found] == [[True, False]] * 2
    assert sorted(said for *_, said in found) == ["", "error: it is broken\n"]


def signal_hosted_store(port: int) -> int:
    """Host a store on rank 0, and send its process the signals of a scheduler.

    Returns:
        The result of an addition in the store after the signals.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pids: list[int] = []
    launch = Launch(
        global_rank=0, local_rank=0, world_size=1, local_world_size=1, attempt=0
    )
    use_hosted_store(launch, lambda keep: pids.append(start_beside(keep)))
    store = open_store("part")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        os.kill(pids[0], number)
    store.set("a", "1")
    return store.add("a", 1)


def test_a_hosted_store_serves_after_notice_of_an_end(stack: ExitStack) -> None:
    """torchrun signals the process of the store, too.

    Meanwhile ranks save and report their last iterations.
    """
    assert run_ranks(1, signal_hosted_store, held_port(stack)) == [2]
