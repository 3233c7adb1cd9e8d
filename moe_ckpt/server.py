"""A checkpoint server on a machine that trains nothing (`ckpt.servers=hosts`): `moe-ckpt server JOB`.

    moe-ckpt server JOB [--interface NAME] [--memory FOLDER] [--secret FILE]

JOB is the job's run folder, if this machine sees it. Else it is HOST:PORT of the job's store, which the file `store` in
that folder names, with a copy of the file `secret` there. The command waits for the job, takes the first free number
among its ckpt.server_hosts servers, and holds states until the job ends; a server more than that is a spare, which
takes the number of the first one that is lost. It is no rank, and needs no torchrun: the settings come from the job.

Owns: this process and its memory, which is removed at its end, also if it is killed. Must not: train. FlowCheck,
section 4.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.config import require
from moe_ckpt.elastic.job_store import STORE_FILE, connect, part_of
from moe_ckpt.elastic.network import address_on, route_to
from moe_ckpt.elastic.server_hosts import PART, SETTINGS, ServerNumbers, ServerSettings
from moe_ckpt.elastic.shared_memory import open_memory_root
from moe_ckpt.errors import ConfigError, exit_status
from moe_ckpt.exact_json import ExactDecoder
from moe_ckpt.replication.copy_server import CopyServer, HoldingRules
from moe_ckpt.replication.daemon import open_mirror
from moe_ckpt.replication.messages import Address, parse_address
from moe_ckpt.replication.tls import open_tls
from moe_ckpt.run_folder import JOB, JOB_ID
from moe_ckpt.run_secret import SECRET_FILE, read_secret, ticket_of
from moe_ckpt.snapshot.arriving_update import no_capture

NO_RANK = -1
_LOOK_EVERY_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the job ends; return the exit status."""
    kind = argparse.RawDescriptionHelpFormatter  # keeps the lines of the module's text
    parser = argparse.ArgumentParser(prog="moe-ckpt server", description=__doc__, formatter_class=kind)
    parser.add_argument("job", metavar="JOB", help="the job's run folder, or HOST:PORT of its store")
    parser.add_argument("--interface", help="the interface that gradients arrive on; by default the one to the store")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="the folder in memory for states")
    parser.add_argument("--secret", type=Path, help="a copy of the file `secret` in the run folder, for HOST:PORT")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def run() -> None:
        where, secret = find_job(options.job, options.secret)
        # before the store is connected: its client may have threads, and the janitor is forked
        memory = open_memory_root(options.memory, os.getpid(), "--memory")
        serve(where, secret, options.interface, memory)

    return exit_status(run)


def serve(where: Address, secret: str, interface: str | None, memory: Path) -> None:
    """Serve the job with this store until it ends. Raises ConfigError."""
    try:
        store = connect(where.host, where.port)
        _serve(store, where, secret, interface, memory)
    except dist.DistError:  # the store ends with the job
        print(f"the job at {where} has ended", flush=True)


def _serve(store: dist.Store, where: Address, secret: str, interface: str | None, memory: Path) -> None:
    of_servers = part_of(store, PART)
    settings = ExactDecoder(ServerSettings).decode(of_servers.get(SETTINGS))
    job_id = part_of(store, JOB).get(JOB_ID).decode()
    host = address_on(interface, "--interface") if interface else route_to(where.host, where.port)
    ticket = ticket_of(secret, job_id, open_tls(settings.tls))
    numbers = ServerNumbers(of_servers, settings.num_servers)
    capture = open_mirror(settings.mirror, os.getpid()) if settings.mirror else None
    while True:
        # a new one each time: states in the old one may be some that the ranks have left since
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            server = CopyServer(
                Path(folder),
                NO_RANK,
                ticket,
                host=host,
                timeout_s=settings.timeout_s,
                rules=HoldingRules(
                    serves_itself=True,
                    captured=capture.sums if capture else no_capture,
                    most_bytes_per_owner=settings.most_bytes_per_owner,
                ),
            )
            try:
                _hold_a_number(numbers, server.address)
            finally:
                server.close()
        print("the job has left this server, which begins anew with an empty memory", flush=True)


def _hold_a_number(numbers: ServerNumbers, address: Address) -> None:
    """Take a number as soon as one is free, and return once the job has left this server."""
    is_spare = False
    while (claimed := numbers.claim(address)) is None:
        if not is_spare:
            print(f"a spare checkpoint server is at {address}", flush=True)
        is_spare = True
        time.sleep(_LOOK_EVERY_S)  # the store wakes nothing for a change of several keys
    number, losses = claimed
    print(f"checkpoint server {number} is at {address}", flush=True)
    while numbers.losses(number) == losses:
        time.sleep(_LOOK_EVERY_S)


def find_job(job: str, secret: Path | None) -> tuple[Address, str]:
    """Return the address of a job's store, and the run's secret.

    A job whose folder does not name its store yet is waited for.

    Args:
        job: The run folder, or HOST:PORT of the store.
        secret: A copy of the run's secret; None: that in the run folder.

    Raises:
        ConfigError: `job` is neither, or the secret is missing, or open to other users.
    """
    if ":" in job and not Path(job).exists():
        try:
            where = parse_address(job)
        except ValueError:
            raise ConfigError(f"JOB: got {job!r}, wanted a run folder, or HOST:PORT") from None
        wanted = f"a copy of the run folder's file {SECRET_FILE!r}, which is not in the job's store"
        require(secret is not None, "--secret", None, wanted)
        assert secret is not None
        return where, read_secret(secret)
    path = Path(job) / STORE_FILE
    while not path.exists():
        time.sleep(_LOOK_EVERY_S)  # another machine writes it: no event reaches this one
    return parse_address(path.read_text().strip()), read_secret(secret or Path(job) / SECRET_FILE)


if __name__ == "__main__":
    sys.exit(main())
