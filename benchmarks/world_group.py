"""Store requests and connections of a group of all ranks on the host.

    python benchmarks/world_group.py [--ranks 16 64 256 1024] [--most-all-to-all 64]
        [--write]

Ranks are threads of processes on this machine. Each rank has a gloo group, over the
job's one store, torch's TCPStore. `as needed` is this project's way (`GlooBackend`):
two ranks connect when an operation first needs both. `all to all` is the way of gloo by
itself: a rank reads the addresses of all others, and connects to all others.

The table has the requests of the rank with the most, to form the group, and then for an
all-reduce, a barrier and an exchange with the next rank; and the mean of sockets per
rank. The store's seconds are computed: requests of all ranks at 17 us each
(benchmarks/README.md). The measured seconds are those of all ranks on the cores of this
machine.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.counted_store import CountedStore, Traffic  # noqa: E402
from benchmarks.marks import rewrite  # noqa: E402
from benchmarks.runs import current_commit, hardware  # noqa: E402
from moe_ckpt.elastic.backends import GlooBackend  # noqa: E402
from moe_ckpt.elastic.rendezvous_store import PollingStore  # noqa: E402
from moe_ckpt.linux import own_files  # noqa: E402

AS_NEEDED, ALL_TO_ALL = "as needed", "all to all"
# a fork of this process, which has imported torch, takes milliseconds
FORKS = multiprocessing.get_context("fork")
RANKS_A_PROCESS = 32
# groups of this process stay alive: other processes still communicate with them
_GROUPS: list[Any] = []
_STORE_S = 17e-6
_LIMIT_S = 600.0
_MARKS = (
    "<!-- world group: written by benchmarks/world_group.py -->",
    "<!-- end of world group -->",
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The counts of one rank."""

    to_form: int
    """Requests to form the group."""

    to_work: int
    """Further requests, for the first operations."""

    num_sockets: float
    """Sockets that the first operations and the group added.

    The mean over the ranks of a process.
    """

    formed_s: float
    """Time at which the group was formed, in seconds on the monotonic clock."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The counts of one group."""

    num_ranks: int
    """Ranks of the group."""

    way: str
    """How ranks connect: `AS_NEEDED` or `ALL_TO_ALL`."""

    to_form: int
    """Requests to form the group, of the rank with the most."""

    to_work: int
    """Further requests for the first operations, of the rank with the most."""

    num_sockets: float
    """Sockets per rank, mean over all ranks."""

    seconds: float
    """Time until all ranks have formed the group, in seconds."""

    def __str__(self) -> str:
        store_s = self.num_ranks * (self.to_form + self.to_work) * _STORE_S
        cells = [f"{self.num_ranks:,}", self.way, self.to_form, self.to_work]
        cells += [f"{store_s:.2f}", f"{self.num_sockets:.1f}", f"{self.seconds:.2f}"]
        return f"| {' | '.join(map(str, cells))} |"


def measure(num_ranks: int, way: str) -> Row:
    """Form a group of all ranks, run the first operations, and return the counts.

    Args:
        num_ranks: The ranks of the group.
        way: `AS_NEEDED` or `ALL_TO_ALL`.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    num_processes = math.ceil(num_ranks / RANKS_A_PROCESS)
    pipes = [FORKS.Pipe() for _ in range(num_processes)]
    processes = []
    for number, (_, there) in enumerate(pipes):
        ranks = range(number, num_ranks, num_processes)
        arguments = ranks, num_ranks, way, server.port, there
        processes.append(FORKS.Process(target=_be_ranks, args=arguments, daemon=True))
        processes[-1].start()
    for here, _ in pipes:
        here.recv()  # all ranks have a client of the store
    began_s = time.monotonic()
    for here, _ in pipes:
        here.send("begin")
    try:
        found = [each for here, _ in pipes for each in here.recv()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Row(
        num_ranks=num_ranks,
        way=way,
        to_form=max(each.to_form for each in found),
        to_work=max(each.to_work for each in found),
        num_sockets=sum(each.num_sockets for each in found) / num_ranks,
        seconds=max(each.formed_s for each in found) - began_s,
    )


def _be_ranks(
    ranks: Sequence[int], num_ranks: int, way: str, port: int, pipe: Connection
) -> None:
    """Run ranks of the group, a thread each, until this process is killed.

    The process must stay alive, because other processes still communicate with its
    groups.
    """
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    pipe.send("connected")
    pipe.recv()
    before = _num_sockets()
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(
            threads.map(lambda rank: _be_rank(rank, num_ranks, way, client), ranks)
        )
    num_sockets = (_num_sockets() - before) / len(ranks)
    pipe.send([replace(each, num_sockets=num_sockets) for each in found])
    time.sleep(_LIMIT_S)


def _be_rank(rank: int, num_ranks: int, way: str, client: dist.Store) -> Found:
    traffic, lock = Traffic(), threading.Lock()
    polling = PollingStore(
        CountedStore(client, traffic),
        lock,
        "1/groups/",
        lambda: False,
        _LIMIT_S,
        num_ranks=num_ranks,
    )
    group = (_form_as_needed if way == AS_NEEDED else _form_all_to_all)(
        polling, rank, num_ranks
    )
    formed_s, to_form = time.monotonic(), traffic.operations
    _communicate(group, rank, num_ranks)
    _GROUPS.append((group, polling))
    return Found(
        to_form=to_form,
        to_work=traffic.operations - to_form,
        num_sockets=0.0,
        formed_s=formed_s,
    )


def _form_as_needed(store: PollingStore, rank: int, num_ranks: int) -> Any:
    return GlooBackend(most_connected=1).make(
        store, rank, num_ranks, form_s=_LIMIT_S, operation_s=_LIMIT_S
    )


def _form_all_to_all(store: PollingStore, rank: int, num_ranks: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=_LIMIT_S))


def _communicate(group: Any, rank: int, num_ranks: int) -> None:
    total = torch.ones(1)
    group.allreduce([total]).wait()
    assert total.item() == num_ranks, total
    group.barrier().wait()
    received = torch.zeros(1)
    works = [
        group.send([torch.full((1,), float(rank))], (rank + 1) % num_ranks, 0),
        group.recv([received], (rank - 1) % num_ranks, 0),
    ]
    for work in works:
        work.wait()
    assert received.item() == (rank - 1) % num_ranks, received


def _num_sockets() -> int:
    return sum(name.startswith("socket:") for _, name in own_files())


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the measurements as a table."""
    head = ["ranks", "connections", "requests to form", "for first operations"]
    head += ["the store's seconds", "sockets a rank", "seconds"]
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *map(str, rows)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument(
        "--most-all-to-all", type=int, default=64, help="ranks that all connect"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table into benchmarks/README.md"
    )
    options = parser.parse_args()
    rows = []
    for num_ranks in options.ranks:
        for way in (AS_NEEDED, ALL_TO_ALL):
            if way == AS_NEEDED or num_ranks <= options.most_all_to_all:
                rows.append(measure(num_ranks, way))
                print(rows[-1], flush=True)
    text = [
        *lines(rows),
        "",
        f"{hardware()}; torch {torch.__version__}; commit {current_commit()}.",
    ]
    if options.write:
        rewrite(
            Path(__file__).with_name("README.md"), _MARKS, lambda _: "\n".join(text)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
