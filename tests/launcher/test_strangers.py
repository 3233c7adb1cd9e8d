"""Another user of the machine gains nothing from a job, and harms no part of the job.

The other user sees /proc and reaches every port. The attacks need real users, processes
and files, because the kernel refuses the attacks. torchrun's store has no
authentication: the stranger reads the whole store here, but writes nothing there,
because writes would end the job.
"""

from __future__ import annotations

import contextlib

# imported now: another user may not be able to read, and so to import, modules that
# sockets need
import encodings.idna  # noqa: F401
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_ckpt.elastic.job_store import connect
from moe_ckpt.replication.admission import open_connection
from moe_ckpt.replication.connection import RefusedError
from moe_ckpt.replication.messages import Ticket, parse_address
from moe_ckpt.run_secret import SECRET_FILE, read_secret, ticket_of
from moe_ckpt.types import Phase
from tests.harness.gloo.processes import Child
from tests.harness.jobs.elastic_job import ElasticJob
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.scenarios import PP2
from tests.waits import WAIT_S

STRANGER = 54321
"""User ID of another user."""

SILENT = 200
"""Silent connections to each daemon, more than may wait for admission there."""

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user"
)


def be_stranger(
    connection: Connection, port: int, paths: list[Path], pids: list[int]
) -> None:
    """Attack a job, send the gains to the test, then hold silent connections.

    The connections stay open until the test sends a message.

    Args:
        connection: The connection to the test.
        port: The port of torchrun's store.
        paths: The files and folders of the job.
        pids: The processes of the job.
    """
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    in_store = read_all(connect("127.0.0.1", port))
    connection.send(in_store)
    addresses = [key for key in in_store if key.startswith("moe_ckpt/daemons/")]
    gained = [gain for path in paths for gain in open_all(path)]
    gained += [f"process {pid} was sent a signal" for pid in pids if can_signal(pid)]
    gained += [
        f"admitted at {in_store[key]}"
        for key in addresses
        if is_admitted(in_store[key], in_store)
    ]
    connection.send((len(addresses), gained))
    with contextlib.ExitStack() as stack:
        for key in addresses:
            for _ in range(SILENT):
                address = parse_address(in_store[key])
                stack.enter_context(
                    socket.create_connection((address.host, address.port), WAIT_S)
                )
        connection.send("silent")
        connection.recv()


def read_all(store: dist.Store) -> dict[str, str]:
    return {key: store.get(key).decode(errors="replace") for key in store.list_keys()}


def open_all(path: Path) -> list[str]:
    """Return the kinds of access to a path that the calling user has."""
    return [
        f"{path}: {act.__name__}"
        for act in (read, write, os.listdir, dial)
        if succeeds(act, path)
    ]


def read(path: Path) -> None:
    path.read_bytes()


def write(path: Path) -> None:
    path.open("r+b").close()


def dial(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))


def succeeds(act: Callable[[Path], Any], path: Path) -> bool:
    try:
        act(path)
    except OSError:
        return False
    return True


def can_signal(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGCONT)
    except PermissionError:
        return False
    return True


def is_admitted(address: str, in_store: dict[str, str]) -> bool:
    """Return whether a daemon accepts a text of the store as the run's token."""
    job = in_store["moe_ckpt/job/id"]
    for guess in {"", *in_store, *in_store.values()}:
        for ticket in (
            Ticket(run_id=job[:8], token=guess),
            ticket_of(guess, job, None),
        ):
            try:
                open_connection(parse_address(address), ticket, WAIT_S).close()
            except RefusedError:
                continue
            return True
    return False


def paths_of(job: ElasticJob) -> list[Path]:
    """Return the paths of the job's files and folders."""
    return [
        path
        for root in (job.run, job.shared)
        for path in (root, *root.rglob("*"))
        if path != job.shared
    ]


def port_of(pid: int) -> int:
    """Return the port on which a process listens: for an agent, the store's port."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                return int(fields[1].rpartition(":")[2], 16)
    raise AssertionError(f"process {pid} does not listen")


@needs_root
def test_another_user_gains_nothing_and_no_recovery_fails(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    training = (*PP2, "train.iterations=9")
    with ElasticJob(
        2, tmp_path, *training, "ckpt.window=2", "run.digest_every_iters=3"
    ) as job:
        job.shared.chmod(0o1777)  # as /dev/shm is
        held = job.hold(0, Phase.FORWARD, iteration=5)
        port = port_of(job.agent_pid)
        stranger = start(be_stranger, port, paths_of(job), job.processes())
        in_store = stranger.hear()
        secret = read_secret(job.run / SECRET_FILE)
        token = ticket_of(secret, in_store["moe_ckpt/job/id"], None).token
        assert not [
            key for key, value in in_store.items() if secret in value or token in value
        ]
        assert stranger.hear() == (2, []), "an attack has gained something"
        assert stranger.hear() == "silent"
        os.kill(held, signal.SIGCONT)
        job.lose_nodes(1)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(2, *training)
