"""Fetches blobs from a peer's daemon, for a replacement worker whose node has lost its
memory.

Owns: the exchange with one daemon, within a deadline. Must not: choose the peer or the
blobs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
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

    Raises CheckpointLoadError if the daemon does not answer in time.
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
    timeout_s: float,
) -> int:
    """Copy a rank's blobs from a daemon into `folder` and publish them there; return
    their bytes.

    Raises CheckpointLoadError for the first of `keys` that cannot be fetched; those
    before it are published by then. Without `keys`, all blobs that the daemon can read
    are fetched: the caller must check that they suffice.
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
        )


def clear_held(
    address: Address, ticket: Ticket, owner_rank: int, *, timeout_s: float
) -> None:
    """Let a daemon drop all blobs that it holds for a rank.

    Raises CheckpointLoadError if the daemon does not confirm that in time.
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
        # a refusal is about this blob, which may be damaged there; any other failure is
        # about all of them
        if not isinstance(error.__cause__, RefusedError):
            raise
        _log.warning("done without: %s", error)
        return 0


def _at_once(_: int) -> None:
    """A recovery has priority over all other traffic."""
