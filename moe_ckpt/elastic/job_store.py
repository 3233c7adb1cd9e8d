"""The store of a job: on an etcd cluster, torchrun's, or started by global rank 0.

A store on etcd outlives every node of the job. torchrun's store outlives restarts of
all processes, and a store of global rank 0 outlives restarts of workers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import NoReturn, TypeVar

import torch.distributed as dist

from moe_ckpt.config import parse_endpoints, require
from moe_ckpt.elastic.etcd_client import EtcdClient
from moe_ckpt.elastic.etcd_store import EtcdStore
from moe_ckpt.elastic.torchrun_variables import Launch, has_agent_store, job_name
from moe_ckpt.errors import ConfigError
from moe_ckpt.private_files import write_private

T = TypeVar("T")

_HOSTED = "MOE_CKPT_HOSTED_STORE"
_ETCD = "MOE_CKPT_ETCD"
_ANY_JOB = ("", "none")  # torchrun's names of a job without --rdzv-id
_CONNECT_S = 60.0
# torch's own default, long enough for ranks that import or build for long
_OPERATION_S = 300.0
_SAY_S = 10.0

STORE_FILE = "store"
"""The file in a run folder with the address of the store, for checkpoint servers
outside of the job.
"""


def write_store_address(run: Path) -> None:
    """Write the address of this job's store into the run folder."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # replaced as a whole: servers outside of the job may read the file at any time
    temporary = run / f"{STORE_FILE}.{os.getpid()}"
    write_private(temporary, f"{where}\n")
    temporary.replace(run / STORE_FILE)


def use_etcd(members: str) -> None:
    """Use a store on an etcd cluster, in this process and in processes that it forks.

    Args:
        members: The members of the cluster, as `HOST:PORT,...`.

    Raises:
        ConfigError: The cluster does not answer, or the job has no name of its own and
            would find another job's keys.
    """
    wanted = (
        "a name that no other start of a job has: it names the keys of this one in etcd"
        " (runtime.etcd)"
    )
    require(job_name() not in _ANY_JOB, "torchrun --rdzv-id", job_name(), wanted)
    os.environ[_ETCD] = members
    try:
        open_store("lease").check(["any"])
    except RuntimeError as error:
        del os.environ[_ETCD]
        raise ConfigError(
            f"runtime.etcd: got {members!r}, wanted a cluster that answers ({error})"
        ) from error


def use_hosted_store(
    launch: Launch, host: Callable[[Callable[[], NoReturn]], object]
) -> None:
    """Use a store of the job's own, at the address that torchrun has chosen.

    Args:
        launch: This process's position in the job.
        host: Called on global rank 0. Must start a process that ends with the calling
            process, and that only runs the function that `host` receives.
    """
    os.environ[_HOSTED] = "True"
    if launch.global_rank == 0:
        host(_keep_store)


def hosts_store(global_rank: int) -> bool:
    """Return whether the job's store ends with this rank's supervisor."""
    return global_rank == 0 and _HOSTED in os.environ


def _keep_store() -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        # torchrun signals all processes of a node, but last saves need the store
        signal.signal(number, signal.SIG_IGN)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    while store:
        signal.pause()
    raise AssertionError("a store that is not there")


def agent_store(part: str, *, own_connection: bool = False) -> dist.Store | None:
    """Return a part of the job's store.

    Args:
        part: The name of the part.
        own_connection: Whether to open a new connection. By default all parts share one
            connection, which serves one thread at a time.

    Returns:
        The part; None if torchrun keeps no store across restarts of its workers, and
        the job uses no other store.
    """
    if _ETCD in os.environ:
        return EtcdStore(
            _etcd_client(os.getpid()), f"{_keys_of_job()}/{part}/", _OPERATION_S
        )
    if not has_agent_store() and _HOSTED not in os.environ:
        return None
    return part_of(_connect() if own_connection else _shared_client(os.getpid()), part)


def part_of(store: dist.Store, part: str) -> dist.Store:
    """Return a part of a job's store."""
    return dist.PrefixStore(f"moe_ckpt/{part}", store)


# by pid: a forked process must not use its parent's client
@functools.cache
def _etcd_client(pid: int) -> EtcdClient:  # noqa: ARG001
    return EtcdClient(
        parse_endpoints("runtime.etcd", os.environ[_ETCD]), f"{_keys_of_job()}/lease"
    )


def _keys_of_job() -> str:
    return f"moe_ckpt/{job_name()}"


# by pid: a forked process must not use its parent's client
@functools.cache
def _shared_client(pid: int) -> dist.Store:  # noqa: ARG001
    """Return this process's client of the store.

    Every new client costs the store a look-up of the client's name, which can take
    seconds.
    """
    return _connect()


def _connect() -> dist.Store:
    return connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def connect(host: str, port: int) -> dist.Store:
    """Open a new connection to a job's store, from inside or outside of the job."""
    store = dist.TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S)
    )
    store.set_timeout(timedelta(seconds=_OPERATION_S))
    return store


def has_static_agents() -> bool:
    """Return whether torchrun's agents do not watch each other.

    With a rendezvous that is not static, agents start all their ranks again when a node
    comes back.
    """
    # c10d's key, in the store that its agents share with their workers
    key = f"torch.rendezvous.{job_name()}"
    return has_agent_store() and not _connect().check([key])


def answer_exit_barrier(num_agents: int, num_all: int) -> None:
    """Arrive at the barrier in which torchrun's agents meet at the end, for others.

    Agents wait up to 300 s for an agent that is gone. The keys are those of
    `torch.distributed.elastic.utils.store.barrier` in torch 2.13.

    Args:
        num_agents: The number of agents that are gone.
        num_all: The number of agents that torchrun waits for.
    """
    # torch's error for a store that is gone: no agent waits then
    with contextlib.suppress(RuntimeError):
        store = _connect()
        barrier = f"{job_name()}/torchelastic/agent/terminal_state/"
        if store.add(f"{barrier}num_members", num_agents) >= num_all:
            store.set(f"{barrier}last_member", "")


def open_store(part: str, *, own_connection: bool = False) -> dist.Store:
    """Return a part of the job's store, which all incarnations of the ranks share.

    Args:
        part: The name of the part.
        own_connection: Whether to open a new connection, as in `agent_store`.

    Raises:
        ConfigError: torchrun keeps no store for its workers, and the job uses no other
            store; or torchrun's store does not answer.
    """
    try:
        store = agent_store(part, own_connection=own_connection)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"torchrun's store at {where}: got no answer ({error}), wanted one"
        ) from error
    if store is None:
        raise ConfigError(
            "runtime.guard: got a launcher that keeps no store for its workers, wanted"
            " torchrun"
        )
    return store


def say_once(message: str) -> None:
    """Print an error that every rank meets, on one rank only.

    The rank that arrives first prints: the store counts arrivals. Without a store,
    global rank 0 prints. The other ranks return once that rank has printed. The other
    ranks wait because torchrun ends all ranks as soon as one rank has ended, even while
    another rank prints.

    If the store does not answer, or the rank that arrived first does not print, every
    rank prints the error, which may be about the store itself.

    Args:
        message: The error, the same on all ranks.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # with the attempt: the store outlives a restart by torchrun, after which the same
    # error must be printed again
    key = hashlib.sha256(
        f"{attempt} {message}".encode(errors="backslashreplace")
    ).hexdigest()
    printed = f"{key}/printed"

    def is_first(store: dist.Store | None) -> bool:
        return (
            store.add(f"{key}/ranks", 1) == 1
            if store
            else os.environ.get("RANK", "0") == "0"
        )

    def wait_until_printed(store: dist.Store | None) -> bool:
        if store:
            store.wait([printed], timedelta(seconds=_SAY_S))
        return True

    # True: this rank prints; False: another rank does; None: the store does not answer
    prints_here = _ask_store(is_first)
    if prints_here is False and _ask_store(wait_until_printed):
        return
    print(f"error: {message}", file=sys.stderr, flush=True)
    # None: do not wait for the store again
    if prints_here:
        _ask_store(lambda store: store.set(printed, "") if store else None)


def _ask_store(question: Callable[[dist.Store | None], T]) -> T | None:
    """Return the answer of the job's store.

    Returns:
        None if the store does not answer within `_SAY_S` seconds.
    """
    answers: list[T] = []

    def ask() -> None:
        # torch's error for a store that is gone
        with contextlib.suppress(RuntimeError):
            answers.append(question(agent_store("said")))

    asking = Thread(target=ask, name="say_once", daemon=True)
    asking.start()
    asking.join(_SAY_S)  # operations of the store have no deadline of their own
    return answers[0] if answers else None
