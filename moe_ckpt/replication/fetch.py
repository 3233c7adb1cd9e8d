"""Fetches blobs from a peer's daemon.

A replacement worker whose node has lost its memory fetches the blobs of its rank. Owns:
the exchange with one daemon, within a deadline. Must not: choose the peer or the blobs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.replication.connection import Connection, RefusedError
from moe_ckpt.replication.messages import (
    Address,
    Clear,
    Done,
    Found,
    Get,
    Keys,
    ListKeys,
    Ticket,
)
from moe_ckpt.replication.retrying_client import RetryingClient
from moe_ckpt.replication.transfer import receive_blob
from moe_ckpt.snapshot.blobs import BlobFolder

_log = logging.getLogger(__name__)


def list_held(
    address: Address, ticket: Ticket, owner_rank: int, *, timeout_s: float
) -> list[str]:
    """Return the sorted keys of all blobs of a rank that a daemon has.

    Args:
        address: Address of the daemon's server.
        ticket: The run, and the run's secret.
        owner_rank: The rank.
        timeout_s: Time for the exchange, in seconds.

    Raises:
        CheckpointLoadError: The daemon does not answer in time.
    """
    with _calling(address, ticket) as caller:
        return list(_keys(caller, owner_rank, time.monotonic() + timeout_s))


def fetch_blobs(
    address: Address,
    ticket: Ticket,
    owner_rank: int,
    folder: BlobFolder,
    keys: Sequence[str] | None = None,
    *,
    is_needed: Callable[[str], bool] = lambda _: True,
    timeout_s: float,
) -> int:
    """Copy a rank's blobs from a daemon into a folder, and publish them there.

    Args:
        address: Address of the daemon's server.
        ticket: The run, and the run's secret.
        owner_rank: The rank.
        folder: The folder.
        keys: Keys of the blobs. None: all needed blobs that the daemon can read. The
            caller must then check that the blobs suffice.
        is_needed: Returns whether a key is that of a needed blob; for `keys` None.
        timeout_s: Time for the exchange, in seconds.

    Returns:
        The size of all fetched blobs, in bytes.

    Raises:
        CheckpointLoadError: One of `keys` cannot be fetched, or the daemon does not
            answer in time. Blobs fetched before are published by then.
    """
    until_s = time.monotonic() + timeout_s
    with _calling(address, ticket) as caller:
        if keys is not None:
            return sum(
                _fetch(caller, Get(owner_rank=owner_rank, key=key), folder, until_s)
                for key in keys
            )
        there = _keys(caller, owner_rank, until_s)
        return sum(
            _fetch_if_given(
                caller, Get(owner_rank=owner_rank, key=key), folder, until_s
            )
            for key in there
            if is_needed(key)
        )


def clear_held(
    address: Address, ticket: Ticket, owner_rank: int, *, timeout_s: float
) -> None:
    """Make a daemon delete all blobs that it holds for a rank.

    Args:
        address: Address of the daemon's server.
        ticket: The run, and the run's secret.
        owner_rank: The rank.
        timeout_s: Time for the exchange, in seconds.

    Raises:
        CheckpointLoadError: The daemon does not confirm in time.
    """
    request = Clear(owner_rank=owner_rank)
    with _calling(address, ticket) as caller:
        what = f"clearing the copies of rank {owner_rank}"
        caller.call(
            what, lambda link: link.ask(request, Done), time.monotonic() + timeout_s
        )


def _calling(
    address: Address, ticket: Ticket
) -> AbstractContextManager[RetryingClient]:
    return contextlib.closing(RetryingClient(address, ticket, CheckpointLoadError))


def _keys(caller: RetryingClient, owner_rank: int, until_s: float) -> Sequence[str]:
    request = ListKeys(owner_rank=owner_rank)
    return caller.call(
        f"listing rank {owner_rank}'s blobs",
        lambda link: link.ask(request, Keys),
        until_s,
    ).keys


def _fetch(
    caller: RetryingClient, request: Get, folder: BlobFolder, until_s: float
) -> int:
    def act(link: Connection) -> int:
        found = link.ask(request, Found)
        return receive_blob(link, found, folder, request.key, _at_once)

    return caller.call(
        f"fetching {request.key} of rank {request.owner_rank}", act, until_s
    )


def _fetch_if_given(
    caller: RetryingClient, request: Get, folder: BlobFolder, until_s: float
) -> int:
    try:
        return _fetch(caller, request, folder, until_s)
    except CheckpointLoadError as error:
        # a refusal concerns this blob, which may be damaged on the daemon's side; any
        # other failure concerns all blobs
        if not isinstance(error.__cause__, RefusedError):
            raise
        _log.warning("done without: %s", error)
        return 0


def _at_once(_: int) -> None:
    """Do not wait: a recovery has priority over all other traffic."""
