"""The process of a checkpoint server, which holds one number after the other.

Each number of a job's servers gets a memory of its own. Owns: the memory of the states
that the server holds. Must not: train. FlowCheck, section 4.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.config import require
from moe_ckpt.elastic.job_store import STORE_FILE, connect, part_of
from moe_ckpt.elastic.network import address_on, route_to
from moe_ckpt.elastic.shared_memory import open_memory_root
from moe_ckpt.errors import ConfigError
from moe_ckpt.exact_json import ExactDecoder
from moe_ckpt.flowcheck.mirror.settings import observe_gradients
from moe_ckpt.flowcheck.server_hosts import (
    PART,
    SETTINGS,
    ServerNumbers,
    ServerSettings,
)
from moe_ckpt.replication.copy_server import CopyServer, HoldingRules
from moe_ckpt.replication.messages import Address, parse_address
from moe_ckpt.replication.tls import open_tls
from moe_ckpt.run_folder import JOB, JOB_ID
from moe_ckpt.run_secret import SECRET_FILE, read_secret, ticket_of

NO_RANK = -1
"""Rank of a server that trains nothing."""

_COPY = "--secret"
_LOOK_EVERY_S = 0.5


def serve(
    job: str, interface: str | None, memory: Path, secret: Path | None = None
) -> None:
    """Serve a job until the job ends.

    Args:
        job: The job's run folder, or HOST:PORT of its store.
        interface: Interface on which gradients arrive; None: the one that leads to the
            store.
        memory: Folder in memory for states.
        secret: A copy of the run's secret; None: the file in the run folder.

    Raises:
        ConfigError: The job, the interface, the folder or the secret does not exist.
    """
    where, known = find_job(job, secret)
    # before the store is connected: the store's client may have threads, and the
    # janitor is forked
    root = open_memory_root(memory, os.getpid(), "--memory")
    try:
        _serve(connect(where.host, where.port), where, known, interface, root)
    # the store ends with the job
    except dist.DistError:
        print(f"the job at {where} has ended", flush=True)


def _serve(
    store: dist.Store, where: Address, secret: str, interface: str | None, memory: Path
) -> None:
    of_servers = part_of(store, PART)
    settings = ExactDecoder(ServerSettings).decode(of_servers.get(SETTINGS))
    job_id = part_of(store, JOB).get(JOB_ID).decode()
    setting = "--interface"
    host = (
        address_on(interface, setting)
        if interface
        else route_to(where.host, where.port, setting)
    )
    ticket = ticket_of(secret, job_id, open_tls(settings.tls))
    numbers = ServerNumbers(of_servers, settings.num_servers)
    open_gradients = observe_gradients(settings.mirror, os.getpid())
    while True:
        # a new memory each time: states in the old one may belong to a history that the
        # ranks have abandoned
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            server = CopyServer(
                Path(folder),
                NO_RANK,
                ticket,
                host=host,
                timeout_s=settings.timeout_s,
                rules=HoldingRules(
                    keeps_own=True,
                    open_gradients=open_gradients,
                    most_bytes_per_owner=settings.most_bytes_per_owner,
                ),
            )
            try:
                _hold_a_number(numbers, server.address)
            finally:
                server.close()
        print(
            "the job has left this server, which begins anew with an empty memory",
            flush=True,
        )


def _hold_a_number(numbers: ServerNumbers, address: Address) -> None:
    """Take a number once one is free, and return once the job has left this server."""
    is_spare = False
    while (claimed := numbers.claim(address)) is None:
        if not is_spare:
            print(f"a spare checkpoint server is at {address}", flush=True)
        is_spare = True
        # the store does not report a change of several keys
        time.sleep(_LOOK_EVERY_S)
    number, losses = claimed
    print(f"checkpoint server {number} is at {address}", flush=True)
    while numbers.losses(number) == losses:
        time.sleep(_LOOK_EVERY_S)


def find_job(job: str, secret: Path | None) -> tuple[Address, str]:
    """Return the address of a job's store, and the run's secret.

    If the run folder does not name a store yet, this function waits for that.

    Args:
        job: The run folder, or HOST:PORT of the store.
        secret: A copy of the run's secret; None: the file in the run folder.

    Raises:
        ConfigError: `job` is neither, or the secret is missing, or other users can read
            it.
    """
    if ":" in job and not Path(job).exists():
        try:
            where = parse_address(job)
        except ValueError:
            raise ConfigError(
                f"JOB: got {job!r}, wanted a run folder, or HOST:PORT"
            ) from None
        wanted = (
            f"a copy of the run folder's file {SECRET_FILE!r}, which is not in the"
            " job's store"
        )
        require(secret is not None, _COPY, None, wanted)
        assert secret is not None
        return where, read_secret(secret, _COPY)
    path = Path(job) / STORE_FILE
    while not path.exists():
        # another machine writes the file, so no event of the file system arrives here
        time.sleep(_LOOK_EVERY_S)
    known = (
        read_secret(secret, _COPY) if secret else read_secret(Path(job) / SECRET_FILE)
    )
    return parse_address(path.read_text().strip()), known
