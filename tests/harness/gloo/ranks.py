"""Run a function on N gloo ranks, each a real process, in a fraction of a second.

The ranks are forked from a process that has imported torch and Megatron once
(multiprocessing's fork server, which stays single-threaded). A rank that raises or dies
fails the test, with the tracebacks of all ranks. No rank outlives the deadline.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.waits import JOB_S

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preload"])


class RankFailedError(AssertionError):
    """At least one rank raised, died or did not finish in time."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = JOB_S,
) -> list[Any]:
    """Call a function on each rank.

    Args:
        world_size: The number of ranks.
        function: An importable function, defined at the top of a test module. Rank and
            world size are in the environment of the call.
        arguments: Arguments of the function.
        timeout_s: Time limit of all ranks together, in seconds.

    Returns:
        The results, by global rank.

    Raises:
        RankFailedError: A rank raised, died, or did not finish in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            CONTEXT.Process(
                target=_rank_main,
                args=(rank, world_size, folder, pipes[rank][1], function, arguments),
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            outcomes = _collect(
                [receiver for receiver, _ in pipes], time.monotonic() + timeout_s
            )
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
    failures = [
        text
        for text in (_failure(rank, outcome) for rank, outcome in enumerate(outcomes))
        if text
    ]
    if failures:
        raise RankFailedError("\n".join(failures))
    return [outcome[1] for outcome in outcomes]


def rank_store() -> dist.Store:
    """Return the store of the ranks of one `run_ranks`; to be called in a rank.

    The store is a file, so that ranks of several tests do not race for a port.
    """
    return dist.FileStore(os.environ["TEST_STORE"], int(os.environ["WORLD_SIZE"]))


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    sender: Connection,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    # so one thread for each rank: with a thread for each core, threads that wait for
    # each other stand still while other processes run
    os.environ |= {"LOCAL_WORLD_SIZE": str(max(world_size, os.cpu_count() or 1))}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ["TEST_STORE"] = str(Path(folder) / "store")
    warnings.simplefilter("ignore")
    try:
        sender.send(("returned", function(*arguments)))
    except BaseException:  # the top of a process: everything goes to the test
        sender.send(("raised", traceback.format_exc()))
    finally:
        sender.close()
        # gloo's threads may wait for a dead peer, and would keep the process alive
        os._exit(0)


def _collect(receivers: list[Connection], deadline_s: float) -> list[tuple[str, Any]]:
    """Wait for the outcomes of all ranks, at most until a deadline.

    After a first failure, the wait ends after 3 seconds at the latest, in which other
    ranks can still report theirs.

    Returns:
        Kind and detail of each outcome, by rank.
    """
    outcomes: dict[int, tuple[str, Any]] = {}
    pending = dict(enumerate(receivers))
    while pending and time.monotonic() < deadline_s:
        for ready in wait(
            list(pending.values()), timeout=max(0.0, deadline_s - time.monotonic())
        ):
            rank = next(rank for rank, receiver in pending.items() if receiver is ready)
            outcomes[rank] = _receive(pending.pop(rank))
            if outcomes[rank][0] != "returned":
                deadline_s = min(deadline_s, time.monotonic() + 3.0)
    return [outcomes.get(rank, ("unfinished", None)) for rank in range(len(receivers))]


def _receive(receiver: Connection) -> tuple[str, Any]:
    try:
        return receiver.recv()
    except EOFError:
        return ("died", None)


def _failure(rank: int, outcome: tuple[str, Any]) -> str | None:
    kind, detail = outcome
    return None if kind == "returned" else f"--- rank {rank} {kind}\n{detail or ''}"
