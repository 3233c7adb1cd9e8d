"""The store of a job: torchrun's, which outlives restarts of its processes, or one that global rank 0 starts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import NoReturn

import torch.distributed as dist

from moe_ckpt.elastic.torchrun import Launch, has_agent_store
from moe_ckpt.errors import ConfigError

_HOSTED = "MOE_CKPT_HOSTED_STORE"
_CONNECT_S = 60.0
_OPERATION_S = 300.0  # torch's own default; ranks that import or build for long are waited for
_SAY_S = 10.0


def use_hosted_store(launch: Launch, host: Callable[[Callable[[], NoReturn]], object]) -> None:
    """Use a store of this job's own, at the address that torchrun has chosen for one.

    On global rank 0, `host` must start a process that ends with this one and does nothing but run the store.
    """
    os.environ[_HOSTED] = "True"
    if launch.global_rank == 0:
        host(_keep_store)


def _keep_store() -> NoReturn:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    while store:
        signal.pause()
    raise AssertionError("a store that is not there")


def agent_store(part: str, *, own_connection: bool = False) -> dist.Store | None:
    """Return a part of the store that torchrun keeps over restarts of its workers, or None if it keeps none.

    All parts share one connection, which serves one thread at a time, unless `own_connection` is set.
    """
    if not has_agent_store() and _HOSTED not in os.environ:
        return None
    return dist.PrefixStore(f"moe_ckpt/{part}", _connect() if own_connection else _shared_client(os.getpid()))


@functools.cache
def _shared_client(pid: int) -> dist.Store:  # noqa: ARG001 - a forked process is not to use its parent's
    """Return this process's client: every new one costs the store a look-up of its name, which can take seconds."""
    return _connect()


def _connect() -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set_timeout(timedelta(seconds=_OPERATION_S))
    return store


def open_store(part: str, *, own_connection: bool = False) -> dist.Store:
    """Return a part of torchrun's store, which all incarnations of the job share.

    Raises ConfigError if torchrun keeps no store for its workers, or the store does not answer.
    """
    try:
        store = agent_store(part, own_connection=own_connection)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(f"torchrun's store at {where}: got no answer ({error}), wanted one") from error
    if store is None:
        raise ConfigError("runtime.guard: got a launcher that keeps no store for its workers, wanted torchrun")
    return store


def say_once(message: str) -> None:
    """Print an error that every rank meets, only on the first rank: torchrun ends the others before they could.

    If the store does not answer, every rank prints it: the error may be just that.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    answers: list[bool] = []
    key = hashlib.sha256(f"{attempt} {message}".encode()).hexdigest()
    asking = Thread(target=_ask_if_first, args=(key, answers), name="say_once", daemon=True)
    asking.start()
    asking.join(_SAY_S)  # an operation of the store has no deadline of its own
    if answers[:1] != [False]:
        print(f"error: {message}", file=sys.stderr, flush=True)


def _ask_if_first(key: str, answers: list[bool]) -> None:
    with contextlib.suppress(RuntimeError):  # what torch raises for a store that is gone
        store = agent_store("said")
        answers.append(store.add(key, 1) == 1 if store else os.environ.get("RANK", "0") == "0")
