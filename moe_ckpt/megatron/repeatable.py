"""Checks before the first iteration that an iterator repeats itself in a new process.

Owns: two forked processes, which open the iterator anew with other generators each, and
comparing the checksums of both. Must not: read the iterator of this process, or move
the generators of this process.

    this process   fork, fork                                                    compare
    each fork      close sockets | seed | open | read | checksums --> pipe --> exit
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import stat
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from moe_ckpt.config import require
from moe_ckpt.megatron.kept_batches import checked

_log = logging.getLogger(__name__)
_NUM_BATCHES = 8
_DEADLINE_S = 30.0
_SEEDS = (1, 2)


def require_repeatable_reads(
    open_iterator: Callable[[], Any],
    setting: str,
    *,
    num_batches: int = _NUM_BATCHES,
    deadline_s: float = _DEADLINE_S,
) -> None:
    """Check that an iterator, opened in new processes, gives the same micro-batches.

    A forked process has no communication and no GPU. An iterator that fails without
    them is accepted with a warning.

    Args:
        open_iterator: Opens the iterator anew.
        setting: The name of the setting in errors.
        num_batches: The number of micro-batches to compare.
        deadline_s: Seconds that each process may take.

    Raises:
        ConfigError: Two processes get different micro-batches.
    """
    found: list[list[int]] = []
    for seed in _SEEDS:
        outcome = _in_new_process(
            lambda: _read(open_iterator, num_batches, seed),  # noqa: B023
            deadline_s,
        )
        if isinstance(outcome, str):
            _log.warning(
                "%s: whether a new process gets the same micro-batches was not"
                " tried: %s",
                setting,
                outcome,
            )
            return
        found.append(outcome)
    wanted = (
        "the same micro-batches in each new process, which a recovery reads again: an"
        " order from a generator with a seed of its own"
        " (DataLoader(generator=torch.Generator().manual_seed(...))), or an iterator"
        " with state_dict"
    )
    require(
        found[0] == found[1], setting, "other micro-batches in another process", wanted
    )


def _read(open_iterator: Callable[[], Any], num_batches: int, seed: int) -> list[int]:
    # the pool of threads of the forked process does not exist here: a wait for the pool
    # would not end
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    loader = open_iterator()
    checksums: list[int] = []
    for _ in range(num_batches):
        try:
            batch = next(loader)
        except StopIteration:
            break
        checksums.append(checked(batch, 0)[0])
    return checksums


def _in_new_process(
    compute: Callable[[], list[int]], deadline_s: float
) -> list[int] | str:
    """Return the result of a forked process, or the reason for its absence."""
    # a fork, because no pickle can hold the open iterator
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(compute, sender))
    child.start()
    sender.close()
    try:
        return (
            receiver.recv()
            if receiver.poll(deadline_s)
            else f"no answer in {deadline_s:g} s"
        )
    except EOFError:
        return "its process died"
    finally:
        receiver.close()
        child.kill()
        child.join()


def _answer(compute: Callable[[], list[int]], sender: Connection) -> None:
    """Send the result, or the reason for its absence."""
    _close_sockets()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (1, 2):  # user code has printed once already
        os.dup2(null, standard)
    try:
        sender.send(compute())
    except Exception as error:  # the iterator is user code
        sender.send(f"{type(error).__name__}: {error}")


def _close_sockets() -> None:
    """Close inherited connections.

    Bytes that this process sent would appear to come from its parent.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
