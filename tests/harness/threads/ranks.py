"""Ranks that are threads of one process: the second implementation of `Ranks`.

Implements `collectives.Ranks`. Values cross threads as pickled copies, as values would
cross processes. After a cut, a group raises PeersLostError in all operations in
progress and in all later operations. A rank whose worker was killed raises WorkerKilled
in the rank's next operation.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from moe_ckpt.collectives import Reduction
from moe_ckpt.errors import PeersLostError

T = TypeVar("T")

_DEADLINE_S = 60.0


@contextlib.contextmanager
def one_processor() -> Iterator[None]:
    """Keep threads that start inside the block on one processor.

    Each worker of pytest-xdist uses another processor. One thread at a time holds
    Python's lock, and releases the lock around each operation on a tensor. Between two
    processors, passing the lock costs as much time as the operations.
    """
    allowed = os.sched_getaffinity(0)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    os.sched_setaffinity(
        0, {sorted(allowed)[int(worker.removeprefix("gw")) % len(allowed)]}
    )
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class WorkerKilled(BaseException):
    """The worker of this thread is dead.

    The worker's code must not catch this error: no code could run after SIGKILL.
    """


class ThreadGroup:
    """The ranks of one group in one generation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        # operation and pickled value, by round and rank
        self._rounds: dict[int, dict[int, tuple[str, bytes]]] = defaultdict(dict)
        self._position = [0] * size
        self._mail: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._reason: str | None = None

    def cut(self, reason: str) -> None:
        """End the group. From now on all operations raise PeersLostError."""
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()

    def exchange(self, rank: int, operation: str, value: T) -> list[T]:
        """Return the values of all ranks. All ranks must call the same operation."""
        with self._changed:
            self._require_whole()
            number = self._position[rank]
            self._position[rank] += 1
            arrived = self._rounds[number]
            arrived[rank] = operation, _to_bytes(value)
            self._changed.notify_all()
            self._wait(
                lambda: len(arrived) == self.size,
                f"rank {rank} in {operation}: {sorted(arrived)} are here",
            )
            operations = {name for name, _ in arrived.values()}
            assert len(operations) == 1, (
                f"ranks disagree on collective {number}: {arrived}"
            )
            self._rounds.pop(number - 1, None)
        return [pickle.loads(arrived[each][1]) for each in range(self.size)]

    def send(self, source: int, target: int, tensor: torch.Tensor) -> None:
        with self._changed:
            self._require_whole()
            self._mail[source, target].append(tensor.detach().clone())
            self._changed.notify_all()

    def receive(self, source: int, target: int) -> torch.Tensor:
        with self._changed:
            mail = self._mail[source, target]
            self._wait(lambda: bool(mail), f"rank {target} receives from rank {source}")
            return mail.popleft()

    def _wait(self, is_over: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + _DEADLINE_S
        while not is_over():
            self._require_whole()
            if not self._changed.wait(until_s - time.monotonic()):
                raise AssertionError(f"deadlock: {what}")

    def _require_whole(self) -> None:
        if self._reason is not None:
            raise PeersLostError(self._reason)


class ThreadRanks:
    """Implements `Ranks` for a rank that is a thread, over all generations of a job.

    `use` sets the group of the next generation.
    """

    def __init__(self, rank: int, is_killed: threading.Event | None = None) -> None:
        self.rank = rank
        self._is_killed = is_killed or threading.Event()
        self._group: ThreadGroup | None = None

    def use(self, group: ThreadGroup) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return self._current().size

    def reduce(self, tensor: torch.Tensor, operation: Reduction) -> None:
        stacked = torch.stack(
            self._current().exchange(self.rank, f"reduce {operation}", tensor.detach())
        )
        reduced = {"sum": stacked.sum, "min": stacked.amin, "max": stacked.amax}[
            operation
        ](0)
        tensor.copy_(reduced)

    def gather(self, value: T) -> list[T]:
        return self._current().exchange(self.rank, "gather", value)

    def broadcast(self, value: T) -> T:
        return self._current().exchange(
            self.rank, "broadcast", value if self.rank == 0 else None
        )[0]  # type: ignore[return-value]

    def barrier(self) -> None:
        self._current().exchange(self.rank, "barrier", None)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._current().send(self.rank, rank, tensor)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        received = self._current().receive(rank, self.rank)
        assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype), (
            received,
            tensor,
        )
        tensor.copy_(received)

    def confirm(self) -> None:
        """Do nothing: an operation that was cut off has already raised."""

    def require_alive(self) -> None:
        """Raise WorkerKilled if this rank's worker was killed."""
        if self._is_killed.is_set():
            raise WorkerKilled

    def _current(self) -> ThreadGroup:
        self.require_alive()
        assert self._group is not None, "no group was formed"
        return self._group


class _Pickler(pickle.Pickler):
    """Pickles tensors as raw bytes: torch's own way takes 0.1 ms for each tensor."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            content = (
                value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
            return _tensor_of, (content, value.dtype, tuple(value.shape))
        return NotImplemented


def _to_bytes(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def _tensor_of(
    content: bytes, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def run_threads(size: int, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Return `function(ranks, *arguments)` of each rank of a new group, by rank.

    A rank that raises ends the other ranks, and the first error is raised.
    """
    group, outcomes = ThreadGroup(size), dict[int, T]()
    errors: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        ranks = ThreadRanks(rank)
        ranks.use(group)
        try:
            outcomes[rank] = function(ranks, *arguments)
        except BaseException as error:  # top of a thread: the caller raises the error
            errors.append((rank, error))
            group.cut(f"rank {rank} raised {error!r}")

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    with one_processor():
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return [outcomes[rank] for rank in range(size)]


class HostRanks:
    """The same ranks, for tensors in host memory.

    `sent` keeps all tensors that this rank sends.
    """

    def __init__(self, ranks: ThreadRanks, sent: list[torch.Tensor]) -> None:
        self._ranks = ranks
        self._sent = sent

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._sent.append(tensor)
        self._ranks.send(tensor, rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)
