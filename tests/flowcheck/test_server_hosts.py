"""Servers find a job by its store or its run folder, and each number has one server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from moe_ckpt import server
from moe_ckpt.config import NO_TLS
from moe_ckpt.elastic.job_store import STORE_FILE, part_of
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.errors import ConfigError
from moe_ckpt.exact_json import ExactDecoder
from moe_ckpt.flowcheck.mirror.settings import MirrorSettings
from moe_ckpt.flowcheck.server_hosts import (
    PART,
    SETTINGS,
    ServerHosts,
    ServerNumbers,
    ServerRules,
    ServerSettings,
)
from moe_ckpt.flowcheck.server_process import find_job
from moe_ckpt.replication.messages import Address
from moe_ckpt.run_folder import JOB, JOB_ID
from moe_ckpt.run_secret import SECRET_FILE, make_secret
from tests.harness.gloo.processes import Child
from tests.harness.gloo.workers import NotingStore, wait_until
from tests.replication.peers import TICKET
from tests.waits import WAIT_S


def address(port: int) -> Address:
    return Address(host="10.0.0.1", port=port)


def test_each_number_has_one_server_and_a_lost_one_is_free_again() -> None:
    numbers = ServerNumbers(dist.HashStore(), 2)
    assert [numbers.claim(address(port)) for port in (1, 2, 3)] == [
        (0, 0),
        (1, 0),
        None,
    ], "the third is a spare"
    numbers.lose(0)
    assert numbers.address(0) == ""
    assert numbers.claim(address(3)) == (0, 1)
    assert numbers.claim(address(1)) is None, "the lost one, if it comes back"
    assert [numbers.address(number) for number in (0, 1)] == [
        str(address(3)),
        str(address(2)),
    ]
    assert numbers.wait(1, 0.0) == str(address(2))


@pytest.mark.parametrize(
    "mirror", [None, MirrorSettings(interface="e0", captures=3, loss=0.0, keep_iters=4)]
)
def test_settings_reach_servers_as_they_are(mirror: MirrorSettings | None) -> None:
    settings = ServerSettings(
        num_servers=2,
        timeout_s=60.0,
        most_bytes_per_owner=None,
        mirror=mirror,
        tls=NO_TLS,
    )
    assert (
        ExactDecoder(ServerSettings).decode(msgspec.json.encode(settings)) == settings
    )


def test_a_job_is_found_by_its_store_or_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STORE_FILE).write_text("10.0.0.1:29500\n")
    make_secret(tmp_path)
    secret = tmp_path / SECRET_FILE
    found = (address(29500), secret.read_text())
    assert find_job(str(tmp_path), None) == find_job("10.0.0.1:29500", secret) == found
    assert server.main(["nowhere:x"]) == 1
    assert (
        capsys.readouterr().err
        == "error: JOB: got 'nowhere:x', wanted a run folder, or HOST:PORT\n"
    )
    assert server.main(["10.0.0.1:29500"]) == 1
    wanted = "a copy of the run folder's file 'secret', which is not in the job's store"
    assert capsys.readouterr().err == f"error: --secret: got None, wanted {wanted}\n"


def serve(_: Connection, port: int, memory: Path, secret: Path) -> None:
    server.main([f"127.0.0.1:{port}", "--memory", str(memory), "--secret", str(secret)])


def test_a_killed_server_leaves_no_states_in_memory(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = ServerSettings(
        num_servers=1,
        timeout_s=60.0,
        most_bytes_per_owner=None,
        mirror=None,
        tls=NO_TLS,
    )
    part_of(store, JOB).set(JOB_ID, "5")
    memory = tmp_path / "memory"
    memory.mkdir()
    make_secret(tmp_path)
    part_of(store, PART).set(SETTINGS, msgspec.json.encode(settings).decode())
    host = start(serve, store.port, memory, tmp_path / SECRET_FILE)
    numbers = ServerNumbers(part_of(store, PART), 1)
    assert numbers.wait(0, WAIT_S)
    assert list(memory.iterdir())
    host.kill()
    assert wait_until(lambda: not list(memory.iterdir()))


class LoneRank:
    """The only rank of a job.

    Each operation records the beginning and the end of a wait, like operations of
    `ElasticGroups`.
    """

    rank, size = 0, 1

    def __init__(self, page: StatusPage) -> None:
        self._page = page

    def gather(self, value: Any) -> list[Any]:
        return [self.broadcast(value)]

    def broadcast(self, value: Any) -> Any:
        self._page.wait(True)
        self._page.wait(False)
        return value


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_rank_that_waits_for_servers_counts_as_waiting(
    tmp_path: Path, has_begun: bool
) -> None:
    """Otherwise the rank's supervisor would kill the rank as hung.

    No server comes, neither as the job begins nor in place of a lost server.
    """
    page = StatusPage(tmp_path / "page")
    store = NotingStore(page)
    if has_begun:
        store.set("begun", "1")
    rules = ServerRules(num_servers=1, copies=1, join_s=0.0, wait_s=0.0)
    ranks: Any = LoneRank(page)
    with contextlib.suppress(ConfigError):
        ServerHosts(store, TICKET, rules, page.waits).agree(ranks)
    assert [is_waiting for request, is_waiting in store.seen if request == "wait"] == [
        True
    ]
    assert not page.waiting
