"""The price of a handle: CPU time of an operation, beside torch's own group.

    python benchmarks/handles.py [--rounds 200] [--operations 20] [--write]

Two ranks of this machine run the same operation by turns on torch's own group and on a
handle, in one run. Each rank counts the CPU time of its Python threads. On gloo the
tensors are small. The path of a device has a stand-in for NCCL without a GPU, whose
operations are complete at once. So the difference is the Python of the handle alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.marks import rewrite
from benchmarks.runs import current_commit, hardware
from moe_ckpt.elastic.backends import GlooBackend, register_groups
from moe_ckpt.elastic.operations import OPERATIONS
from moe_ckpt.elastic.process_groups import ELASTIC, ElasticGroups, GroupTimeouts
from moe_ckpt.elastic.status_page import StatusPage

_LIMIT_S = 120.0
_AT_ONCE = "at_once"
_MARKS = (
    "<!-- handles: written by benchmarks/handles.py -->",
    "<!-- end of handles -->",
)

Operation = Callable[[Any], object]
"""Runs one operation in a group, and waits for it."""


# The operations, on small tensors.


def all_reduce(group: Any) -> None:
    dist.all_reduce(_ONES, op=dist.ReduceOp.MAX, group=group)


def all_reduce_later(group: Any) -> None:
    work = dist.all_reduce(_ONES, op=dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    work.wait()


def all_gather(group: Any) -> None:
    dist.all_gather_into_tensor(_PAIR, _ONES, group=group)


def reduce_scatter(group: Any) -> None:
    dist.reduce_scatter_tensor(_ONES, _PAIR, op=dist.ReduceOp.MAX, group=group)


def all_to_all(group: Any) -> None:
    dist.all_to_all_single(_PAIR, _PAIR.clone(), group=group)


def broadcast(group: Any) -> None:
    dist.broadcast(_ONES, 0, group=group)


def barrier(group: Any) -> None:
    dist.barrier(group)


def exchange(group: Any) -> None:
    """Send a tensor to the other rank, and receive one."""
    other = 1 - dist.get_rank()
    transfers = [
        dist.P2POp(dist.isend, _ONES, other, group),
        dist.P2POp(dist.irecv, _PAIR[:8], other, group),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


_ONES, _PAIR = torch.ones(8), torch.ones(16)
ON_GLOO: dict[str, Operation] = {
    "all-reduce": all_reduce,
    "all-reduce, `async_op`": all_reduce_later,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "broadcast": broadcast,
    "barrier": barrier,
    "send and receive": exchange,
}
ON_DEVICE: dict[str, Operation] = {
    "all-reduce": all_reduce,
    "all-reduce, `async_op`": all_reduce_later,
    "all-gather": all_gather,
    "barrier": barrier,
}


# A device whose operations are complete at once.


class DoneAtOnce(dist.Work):
    """An operation that a stream waits for: `wait` returns at once."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's
        return True


class GroupAtOnce(dist.ProcessGroup):
    """A group like NCCL's: a synchronous operation returns no Work."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return _AT_ONCE

    def begin(self, *arguments: Any, **options: Any) -> dist.Work | None:
        """Begin an operation. The options of the operation are the last argument."""
        last = (*arguments, *options.values())[-1]
        return DoneAtOnce() if last.asyncOp else None


for _name in OPERATIONS:
    setattr(GroupAtOnce, _name, GroupAtOnce.begin)


class ReachedPoint:
    """A point that the device has already reached."""

    def query(self) -> bool:
        return True


class BackendAtOnce(GlooBackend):
    """The interface to a device as `NcclBackend` implements it, without CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.completes_when_cut = True
        self._launch = threading.RLock()

    def make(self, store: dist.Store, rank: int, size: int, **_: float) -> Any:  # noqa: ARG002
        return GroupAtOnce(rank, size)  # pyright: ignore[reportCallIssue] - stubs

    def mark(self) -> ReachedPoint:
        return ReachedPoint()

    def launching(self, inside: Any) -> AbstractContextManager[object]:  # noqa: ARG002
        return self._launch


# The ranks.


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--operations", type=int, default=20, help="in a turn")
    parser.add_argument(
        "--write", action="store_true", help="write the table into benchmarks/README.md"
    )
    options = parser.parse_args()
    lines = [
        "| path | operation | torch's own group, us | a handle, us | difference, us |",
        "| --- | --- | --- | --- | --- |",
    ]
    for path, run_rank in (("gloo", _use_gloo), ("device", _use_device)):
        for name, turns in _measure(run_rank, options.rounds, options.operations):
            lines.append(_row(path, name, turns))
            print(lines[-1], flush=True)
    lines += [
        "",
        f"CPU of Python's threads of rank 0, medians (quartiles) of {options.rounds}"
        f" pairs of turns of {options.operations} operations.",
        f"{hardware()}; torch {torch.__version__}; commit {current_commit()}.",
    ]
    if options.write:
        page = Path(__file__).with_name("README.md")
        rewrite(page, _MARKS, lambda _: "\n".join(lines))
    return 0


def _row(path: str, name: str, turns: Sequence[tuple[float, float]]) -> str:
    """Return the table's line for an operation, from pairs of microseconds."""
    own = statistics.median(own for own, _ in turns)
    handle = statistics.median(handle for _, handle in turns)
    differences = [handle - own for own, handle in turns]
    middle = statistics.median(differences)
    first, _, third = statistics.quantiles(differences)
    spread = f"{first:.1f} to {third:.1f}"
    return f"| {path} | {name} | {own:.1f} | {handle:.1f} | {middle:.1f} ({spread}) |"


def _measure(
    run_rank: Callable[..., None], rounds: int, operations: int
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Run two ranks, and return rank 0's measurements.

    Returns:
        By operation, pairs of microseconds: on torch's own group, and on the handle.
    """
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = forks.Pipe(duplex=False)
        arguments = (folder, rounds, operations, sender)
        ranks = [
            forks.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        try:
            return receiver.recv()
        finally:
            for rank in ranks:
                rank.kill()


def _use_gloo(rank: int, folder: str, *arguments: Any) -> None:
    _compare(rank, folder, GlooBackend(), "gloo", ON_GLOO, *arguments)


def _use_device(rank: int, folder: str, *arguments: Any) -> None:
    register_groups(_AT_ONCE, _create_at_once, ["cpu"])
    _compare(rank, folder, BackendAtOnce(), _AT_ONCE, ON_DEVICE, *arguments)


def _create_at_once(options: Any, _: Any) -> GroupAtOnce:
    # torch's stubs lack the arguments
    return GroupAtOnce(options.group_rank, options.group_size)  # pyright: ignore[reportCallIssue]


def _compare(
    rank: int,
    folder: str,
    backend: GlooBackend,
    own_backend: str,
    operations: dict[str, Operation],
    rounds: int,
    count: int,
    sender: Any,
) -> None:
    """Run one rank: each operation by turns on torch's own group and on a handle.

    Rank 0 sends the measurements.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    # newer releases of torch rename operations; older releases lack the new names
    warnings.simplefilter("ignore", FutureWarning)
    # as in a worker: each operation records begin and end of its wait in the page
    page = StatusPage(Path(folder) / f"page{rank}")
    page.reset()
    timeouts = GroupTimeouts(form_s=_LIMIT_S, operation_s=_LIMIT_S, abort_s=_LIMIT_S)
    groups = ElasticGroups(backend, timeouts, page.wait, page.wait_on_device)
    groups.register()
    store = dist.FileStore(f"{folder}/store", -1)
    dist.init_process_group(ELASTIC, store=store, rank=rank, world_size=2)
    own: Any = dist.new_group([0, 1], backend=own_backend)
    handle: Any = dist.new_group([0, 1], backend=ELASTIC)
    groups.form(dist.FileStore(f"{folder}/groups", -1), 1)
    found = []
    for name, run in operations.items():
        turns = [
            (_cpu_us(run, own, count), _cpu_us(run, handle, count))
            for _ in range(rounds + 1)
        ]
        found.append((name, turns[1:]))  # the first turn warms caches and threads
    if rank == 0:
        sender.send(found)
    time.sleep(_LIMIT_S)  # the other rank may still be in its last operation


def _cpu_us(run: Operation, group: Any, count: int) -> float:
    """Return the CPU time of one of `count` operations, in microseconds."""
    begun_s = _python_s()
    for _ in range(count):
        run(group)
    return 1e6 * (_python_s() - begun_s) / count


def _python_s() -> float:
    """Return the CPU time of all Python threads, in seconds.

    gloo's own threads do not count: their work is the same for both groups.
    """
    clocks = [
        time.pthread_getcpuclockid(thread.ident or 0)
        for thread in threading.enumerate()
    ]
    return sum(map(time.clock_gettime, clocks))


if __name__ == "__main__":
    sys.exit(main())
