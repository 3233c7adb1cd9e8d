"""Elastic groups over backends that behave like a device's, made from gloo.

Covered are operations without a Work, batches, a host that blocks for its device,
results that an abort has spoilt, sockets, and aborts that hang.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from benchmarks.counted_store import CountedStore, Traffic
from moe_ckpt.collectives import TorchRanks
from moe_ckpt.elastic import process_groups
from moe_ckpt.elastic.backends import GlooBackend
from moe_ckpt.elastic.generations import Generations
from moe_ckpt.elastic.process_groups import (
    ELASTIC,
    ELASTIC_CPU,
    ElasticGroups,
    GroupTimeouts,
)
from moe_ckpt.elastic.status_page import StatusPage
from tests.harness.gloo.backends import HeldBackend, passes
from tests.harness.gloo.collectives import (
    all_gather_into_tensor,
    all_reduce,
    all_reduce_later,
    barrier,
    broadcast,
    broadcast_object,
    ones,
    outcome_of,
    plain,
)
from tests.harness.gloo.ranks import RankFailedError, run_ranks
from tests.harness.gloo.workers import (
    PATIENT,
    DevicePoint,
    meet,
    open_groups,
    open_membership,
    open_store,
    own_rank,
    wait_until,
)
from tests.waits import WAIT_S


class LikeNccl:
    """gloo that returns no Work from synchronous operations.

    NCCL's groups do so since torch 2.8.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            is_asynchronous = any(
                getattr(value, "asyncOp", False)
                for value in (*arguments, *options.values())
            )
            assert is_asynchronous or name != "barrier", (
                "a barrier would block a thread that no abort waits for"
            )
            work = getattr(self._group, name)(*arguments, **options)
            if is_asynchronous:
                return work
            work.wait()
            return None

        return operation


class LikeNcclBackend(GlooBackend):
    """gloo with `LikeNccl` groups."""

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        return LikeNccl(
            super().make(store, rank, size, form_s=form_s, operation_s=operation_s)
        )


def use_groups_without_work(folder: str) -> tuple[list[Any], int, str]:
    """Use groups without Works, then cut the groups.

    Returns:
        The results of the operations, the number of operations kept as unfinished, and
        the outcome of an operation after the cut.
    """
    groups = open_groups(own_rank(), 2, backend=LikeNcclBackend())
    groups.form(open_store(folder), 1)
    calls = (
        all_reduce,
        all_reduce_later,
        broadcast,
        broadcast_object,
        barrier,
        all_gather_into_tensor,
    )
    results = [plain(call(dist.group.WORLD, [0, 1])) for call in calls]
    kept = sum(len(inner.unfinished) for inner in groups.inners.values())
    meet(open_store(folder), "all operations are done", 2)
    groups.cut()
    return results, kept, outcome_of(dist.barrier)


def test_an_inside_that_returns_no_work_is_used(tmp_path: Path) -> None:
    for results, kept, after in run_ranks(2, use_groups_without_work, str(tmp_path)):
        assert results[0] == [11.0, 22.0, 33.0]
        assert results[1:3] == [[[10.0, 20.0, 30.0], True], [10.0, 20.0, 30.0]]
        assert results[3:] == [["of rank 1"], None, [1.0, 2.0, 10.0, 20.0]]
        assert (kept, after) == (0, "PeersLostError")


class SerialGroup:
    """gloo whose transfers run one after another unless they are batched.

    Transfers on the one stream of an NCCL communicator do so, too.
    """

    supports_coalescing = True

    def __init__(self, group: Any) -> None:
        self._group = group
        self._stream = ThreadPoolExecutor(1)
        self._batch: list[Callable[[], Any]] | None = None
        self.open_batches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _get_backend(self, device: torch.device) -> SerialGroup:
        return self

    def send(self, *arguments: Any) -> Any:
        return self._queue(partial(self._group.send, *arguments))

    def recv(self, *arguments: Any) -> Any:
        return self._queue(partial(self._group.recv, *arguments))

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []
        self.open_batches += 1

    def _end_coalescing(self, device: torch.device) -> Any:
        batch, self._batch = self._batch or [], None
        self.open_batches -= 1
        return Queued(
            self._stream.submit(
                lambda: [work.wait() for work in [call() for call in batch]]
            )
        )

    def _queue(self, call: Callable[[], Any]) -> Any:
        if self._batch is not None:
            return self._batch.append(call)
        return Queued(self._stream.submit(lambda: call().wait()))


class Queued:
    """A transfer on the stream of a SerialGroup."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class Counted(contextlib.AbstractContextManager[None]):
    """A context whose `depth` is the number of entries without an exit so far."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class SerialBackend(GlooBackend):
    """gloo with `SerialGroup` groups; counts open launches and dropped calls."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = Counted()
        self.num_discarded = 0

    def keeps_idle(self, size: int) -> bool:
        return False

    def launching(self, inside: Any) -> contextlib.AbstractContextManager[object]:
        return self.launches

    def discard(self, num_open: int = 0) -> None:
        assert self.launches.depth, "a cut could abort the group meanwhile"
        self.num_discarded += 1

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        return SerialGroup(
            super().make(store, rank, size, form_s=form_s, operation_s=operation_s)
        )


def exchange_in_batches(
    folder: str, cut_at: str
) -> tuple[str, list[float], int, str, int, int, int]:
    """Exchange tensors in a batch, and cut the groups inside a second batch.

    Args:
        folder: The folder of the store in which both ranks meet.
        cut_at: The method of the inner group after which the cut comes:
            `_start_coalescing`, which starts the batch, or `recv`, before the end of
            the batch.

    Returns:
        Of the first batch, the outcome, the received data, and the number of operations
        kept as unfinished. Of the second batch, the outcome, the number of batches that
        are still open, how often the backend is held, and whether calls were dropped.
    """
    backend = SerialBackend()
    groups = open_groups(own_rank(), 2, operation_s=3.0, backend=backend)
    groups.form(open_store(folder), 1)
    other, received = 1 - own_rank(), torch.zeros(2)
    both_send_first = [
        dist.P2POp(dist.isend, ones(2), other),
        dist.P2POp(dist.irecv, received, other),
    ]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(both_send_first):
            work.wait()

    outcome, kept = (
        outcome_of(exchange),
        sum(len(inner.unfinished) for inner in groups.inners.values()),
    )
    meet(open_store(folder), "the exchange ended", 2)
    (inside,) = groups.insides
    call = getattr(inside, cut_at)
    setattr(inside, cut_at, lambda *arguments: (call(*arguments), groups.cut())[0])
    failed = outcome_of(exchange)
    held, dropped = backend.launches.depth, backend.num_discarded > 0
    return outcome, received.tolist(), kept, failed, inside.open_batches, held, dropped


@pytest.mark.parametrize("cut_at", ["_start_coalescing", "recv"])
def test_transfers_are_batched_where_the_inside_can(
    cut_at: str, tmp_path: Path
) -> None:
    """A batch is ended even if a cut comes before its end.

    Otherwise NCCL would begin no later operation.
    """
    first, second = run_ranks(2, exchange_in_batches, str(tmp_path), cut_at)
    assert first == ("got None", [10.0, 20.0], 0, "PeersLostError", 0, 0, True)
    assert second == ("got None", [1.0, 2.0], 0, "PeersLostError", 0, 0, True)


def hold_batches(folder: str) -> list[int]:
    """Return how often the backend is held around batches.

    Returns:
        The counts before, inside and after a batch, and after `leave` has ended a batch
        that was left open, as an error leaves it.
    """
    backend = SerialBackend()
    groups, store = open_groups(own_rank(), 2, backend=backend), open_store(folder)
    groups.form(open_store(folder), 1)
    handle, device = cast("Any", dist.group.WORLD), torch.device("cpu")
    depths = [backend.launches.depth]
    handle._start_coalescing(device)
    depths.append(backend.launches.depth)
    handle._end_coalescing(device).wait()
    depths.append(backend.launches.depth)
    handle._start_coalescing(device)
    meet(store, "both have begun", 2)
    groups.leave()
    return [*depths, backend.launches.depth]


def test_a_batch_is_held_until_it_has_begun(tmp_path: Path) -> None:
    assert run_ranks(2, hold_batches, str(tmp_path)) == [[0, 1, 0, 0]] * 2


def abilities_before_and_after_forming(folder: str) -> list[bool]:
    """Return whether a group batches transfers, at three moments.

    torch 2.14 asks every group this question before torch batches transfers.

    Returns:
        The answers before the group is formed, while the group is formed, and after
        `leave`.
    """
    groups = open_groups(own_rank(), 2)
    handle: Any = dist.group.WORLD
    answers = [handle._get_backend(torch.device("cpu")).supports_coalescing]
    groups.form(open_store(folder), 1)
    answers.append(handle._get_backend(torch.device("cpu")).supports_coalescing)
    meet(open_store(folder), "both have asked", 2)
    groups.leave()
    return [*answers, handle._get_backend(torch.device("cpu")).supports_coalescing]


def test_a_handle_answers_whether_it_batches_transfers(tmp_path: Path) -> None:
    assert (
        run_ranks(2, abilities_before_and_after_forming, str(tmp_path))
        == [[False] * 3] * 2
    )


class Launching:
    """A group that only launches operations, without a wait of the host.

    A device would carry the operations out later.
    """

    num_begun = 0

    def allreduce(self, _: Any, options: Any) -> Launched | None:
        self.num_begun += 1
        return Launched() if options.asyncOp else None

    def barrier(self, opts: Any) -> Launched | None:
        return Launched() if opts.asyncOp else None


class Launched:
    """An operation for which the current stream waits, and the host does not."""

    def wait(self) -> None: ...


def fail_in_calls(folder: str) -> tuple[list[str], list[int], int]:
    """Make four wrong calls, of which the first two are in batches.

    The first call does not reach the inner group.

    Returns:
        The outcome of each call, how often each call has dropped calls, and how often
        the backend is held after all calls.
    """
    backend = SerialBackend()
    groups = open_groups(own_rank(), 2, backend=backend)
    groups.form(open_store(folder), 1)
    (inside,) = groups.insides

    def fail(*_: Any) -> None:
        raise RuntimeError("an error of the network")

    # the first two accept no tensor
    inside.send, inside.broadcast, inside.allreduce = lambda: None, lambda: None, fail
    wrong, right = (dist.P2POp(dist.isend, ones(2), 1 - own_rank()) for _ in range(2))
    wrong.tensor = cast("Any", SimpleNamespace(device=torch.device("cpu")))
    calls: list[Callable[[], object]] = [
        lambda: dist.batch_isend_irecv([wrong]),
        lambda: dist.batch_isend_irecv([right]),
        lambda: dist.broadcast(ones(2), 0),
        reduce_now,
    ]
    outcomes, dropped = [], []
    for call in calls:
        before = backend.num_discarded
        outcomes.append(outcome_of(call))
        dropped.append(backend.num_discarded - before)
    meet(open_store(folder), "both have failed", 2)
    return outcomes, dropped, backend.launches.depth


def test_a_call_that_fails_leaves_no_others_behind(tmp_path: Path) -> None:
    outcomes = ["TypeError", "TypeError", "TypeError", "PeersLostError"]
    assert (
        run_ranks(2, fail_in_calls, str(tmp_path)) == [(outcomes, [1, 2, 1, 1], 0)] * 2
    )


class LaunchingBackend(HeldBackend):
    """A device's backend whose points the test lets the device reach.

    The backend counts how often the host waits for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held.set()
        self.completes_when_cut = True
        self.points: list[DevicePoint] = []
        self.num_waits_of_host = 0

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        self.num_waits_of_host += 1

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        return Launching()

    def mark(self) -> DevicePoint:
        self.points.append(DevicePoint())
        return self.points[-1]


def reduce_now() -> None:
    dist.all_reduce(torch.ones(1))


def reduce_and_wait() -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()


def block_in_an_event(
    folder: str, reduce: Callable[[], None]
) -> tuple[bool, bool, bool, bool, float]:
    """Return whether a rank counts as waiting for other ranks while its host blocks.

    Returns:
        Whether the rank waits before an operation, while the host blocks, after the
        host has gone on, and after `leave`, when a last operation has not ended; then
        the age of the last progress as the first wait has ended, in seconds.
    """
    page, backend = StatusPage(Path(folder) / "page"), LaunchingBackend()
    page.reset()
    groups = ElasticGroups(backend, PATIENT, page.wait, page.wait_on_device)
    groups.register()
    dist.init_process_group(ELASTIC, store=dist.HashStore(), rank=0, world_size=2)
    groups.form(dist.HashStore(), 1)
    seen = [page.waiting]
    reduce()
    # blocks as `.item()` does
    host = threading.Thread(target=backend.points[-1].reached.wait)
    host.start()
    seen.append(wait_until(lambda: page.waiting))
    backend.points[-1].reached.set()
    host.join()
    wait_until(lambda: not page.waiting)
    age_s = time.monotonic() - page.progress_s
    seen.append(page.waiting)
    reduce()
    wait_until(lambda: page.waiting)
    groups.leave()
    return seen[0], seen[1], seen[2], page.waiting, age_s


@pytest.mark.parametrize("reduce", [reduce_now, reduce_and_wait])
def test_a_host_that_blocks_for_its_device_waits_for_others(
    reduce: Callable[[], None], tmp_path: Path
) -> None:
    ((*waits, age_s),) = run_ranks(1, block_in_an_event, str(tmp_path), reduce)
    assert waits == [False, True, False, False]
    assert age_s < 1.0, (
        "the supervisor would kill a rank as soon as a long wait has ended"
    )


class CutOffGroup:
    """gloo whose sums can be cut off, as by an abort.

    Attributes:
        left: Returns the contents with which a sum that is cut off completes. The
            arguments are this rank's summand and the last complete sum. None: sums are
            not cut off.
        last: The last complete sum.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.left: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self.last = torch.zeros(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        (tensor,) = tensors
        if self.left is not None:
            tensor.copy_(self.left(tensor, self.last))
            return Launched()
        self._group.allreduce(tensors, options).wait()
        self.last = tensor.clone()
        return Launched()


class CutOffBackend(GlooBackend):
    """gloo whose operations complete when they are cut off, as NCCL's do."""

    def __init__(self) -> None:
        super().__init__()
        self.completes_when_cut = True

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        return CutOffGroup(
            super().make(store, rank, size, form_s=form_s, operation_s=operation_s)
        )


NUM_RANKS = 3
LEFT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda own, _: torch.zeros_like(own),
    "the summand of this rank": lambda own, _: own,
    "the summands of all ranks but one": lambda own, _: (NUM_RANKS - 1) * own,
    "the sum before": lambda _, last: last,
    "other summands beside the sum before": lambda own, last: last + own,
}
RIGHT = [
    f"got [{NUM_RANKS}.0]",
    "got ['value', 'value', 'value']",
    "got value",
    "got None",
    "got None",
]


def decide() -> list[str]:
    """Return the outcomes of operations by whose values ranks decide."""
    ranks, total = TorchRanks(), torch.ones(1)

    def reduce() -> list[float]:
        ranks.reduce(total, "sum")
        return total.tolist()

    gather, broadcast = (
        partial(ranks.gather, "value"),
        partial(ranks.broadcast, "value"),
    )
    return [
        outcome_of(call)
        for call in (reduce, gather, broadcast, ranks.barrier, ranks.confirm)
    ]


def decide_after_an_abort(folder: str, left: str) -> tuple[list[str], list[str]]:
    """Return the outcomes of decisions before and after a peer's abort.

    The generation of this rank has not ended yet at the abort.
    """
    groups = open_groups(own_rank(), NUM_RANKS, backend=CutOffBackend())
    groups.form(open_store(folder), 1)
    before = decide()
    for inside in groups.insides:
        inside.left = LEFT[left]
    return before, decide()


@pytest.mark.parametrize("left", LEFT)
def test_results_that_an_abort_has_completed_count_for_nothing(
    left: str, tmp_path: Path
) -> None:
    # in processes, as torch has one world in each process
    found = run_ranks(NUM_RANKS, decide_after_an_abort, str(tmp_path), left)
    assert found == [(RIGHT, ["PeersLostError"] * len(RIGHT))] * NUM_RANKS


def decide_in_a_next_generation(folder: str) -> list[str]:
    """Return the outcome of a decision in a second generation, in a list.

    The decision's sum is cut off there, and completes with the last sum of the first
    generation, which is still in memory.
    """
    groups = open_groups(own_rank(), 2, backend=CutOffBackend())
    groups.form(open_store(folder), 1)
    TorchRanks().barrier()
    (inside,) = groups.insides
    last = inside.last
    groups.leave()
    groups.form(open_store(folder), 2)
    (inside,) = groups.insides
    inside.left = lambda *_: last
    return [outcome_of(TorchRanks().barrier)]


def test_a_sum_of_an_earlier_generation_counts_for_nothing(tmp_path: Path) -> None:
    assert (
        run_ranks(2, decide_in_a_next_generation, str(tmp_path))
        == [["PeersLostError"]] * 2
    )


def decide_on_gloo(folder: str) -> tuple[list[str], int]:
    """Return the outcomes of decisions, and a number of operations.

    The number counts the operations of one sum and one confirmation.
    """
    groups = open_groups(own_rank(), NUM_RANKS)
    groups.form(open_store(folder), 1)
    ranks = TorchRanks()
    ranks.reduce(torch.ones(1), "sum")
    ranks.confirm()
    num_operations = cast("Any", dist.group.WORLD).num_operations
    return decide(), num_operations


def test_results_of_gloo_count_as_they_are(tmp_path: Path) -> None:
    assert (
        run_ranks(NUM_RANKS, decide_on_gloo, str(tmp_path)) == [(RIGHT, 1)] * NUM_RANKS
    )


def decide_without_the_store(folder: str) -> tuple[bool, int]:
    """Return whether joining sends requests to the store, and a number of requests.

    The number counts the requests of a hundred barriers and a hundred confirmations.
    """
    Generations(open_store(folder)).claim(own_rank(), 0)
    traffic = Traffic()
    membership = open_membership(
        folder,
        own_rank(),
        2,
        connect=lambda folder: CountedStore(open_store(folder), traffic),
        watched=open_store(folder),
        backend=CutOffBackend(),
    )
    membership.join()
    TorchRanks().barrier()  # gloo reads addresses on first use
    joined = traffic.operations
    for _ in range(100):
        TorchRanks().barrier()
        TorchRanks().confirm()
    return joined > 0, traffic.operations - joined


def test_no_decision_asks_the_store(tmp_path: Path) -> None:
    assert run_ranks(2, decide_without_the_store, str(tmp_path)) == [(True, 0)] * 2


class BusyBackend(LaunchingBackend):
    """A device's backend; the generation ends while the host waits for the device."""

    groups: ElasticGroups

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        self.groups.cut()


def confirm_what_is_cut() -> tuple[str, int]:
    """Return a confirmation's outcome during a cut, and how many sums have begun."""
    backend = BusyBackend()
    backend.groups = groups = open_groups(0, 2, backend=backend)
    groups.form(dist.HashStore(), 1)
    return outcome_of(TorchRanks().confirm), groups.insides[0].num_begun


def test_a_rank_adds_its_summand_only_while_its_generation_lasts() -> None:
    """Otherwise peers would confirm results that this rank's abort has spoilt."""
    assert run_ranks(1, confirm_what_is_cut) == [("PeersLostError", 0)]


class OrderedBackend(LaunchingBackend):
    """A device's backend that records the number of sums begun at each wait."""

    groups: ElasticGroups

    def __init__(self) -> None:
        super().__init__()
        self.begun_at_waits: list[int] = []

    def sync(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        self.begun_at_waits.append(self.groups.insides[0].num_begun)


def confirm_in_order() -> list[int]:
    """Return the number of sums begun at each of the host's waits for the device."""
    backend = OrderedBackend()
    backend.groups = groups = open_groups(0, 2, backend=backend)
    groups.form(dist.HashStore(), 1)
    outcome_of(TorchRanks().confirm)
    return backend.begun_at_waits


def test_a_rank_adds_its_summand_after_its_device_has_finished() -> None:
    assert run_ranks(1, confirm_in_order) == [[0, 1]]


class CutAtEntry(contextlib.AbstractContextManager[None]):
    """A context at whose entry the generation ends."""

    def __init__(self, groups: ElasticGroups) -> None:
        self._groups = groups

    def __enter__(self) -> None:
        self._groups.cut()

    def __exit__(self, *_: object) -> None: ...


class CuttingBackend(LaunchingBackend):
    """A backend whose generation ends as a thread is about to begin an operation."""

    groups: ElasticGroups

    def launching(self, inside: Any) -> contextlib.AbstractContextManager[object]:
        return CutAtEntry(self.groups)


def begin_as_the_generation_ends() -> tuple[str, int]:
    """Return an operation's outcome during a cut, and how many sums have begun."""
    backend = CuttingBackend()
    backend.groups = groups = open_groups(0, 2, backend=backend)
    groups.form(dist.HashStore(), 1)
    return outcome_of(reduce_now), groups.insides[0].num_begun


def test_no_operation_begins_once_its_group_may_be_aborted() -> None:
    assert run_ranks(1, begin_as_the_generation_ends) == [("PeersLostError", 0)]


class FailingBackend(LaunchingBackend):
    """A device's backend whose network has failed, though all ranks live."""

    def failure(self) -> str | None:
        return "NCCL reports COMM_ERROR"


def block_on_a_failed_network(folder: str) -> str:
    """Return why the generation ended before the device had reached a point."""
    generations = Generations(open_store(folder))
    generations.claim(own_rank(), 0)
    membership = open_membership(folder, own_rank(), 2, backend=FailingBackend())
    generation = membership.join()
    meet(open_store(folder), "both have joined", 2)
    reduce_now()
    return generations.wait_for_end(generation).partition(": ")[2]


def test_a_failed_network_ends_the_generation_of_a_host_that_blocks(
    tmp_path: Path,
) -> None:
    assert (
        run_ranks(2, block_on_a_failed_network, str(tmp_path))
        == ["NCCL reports COMM_ERROR"] * 2
    )


def count_waits_of_the_host() -> list[int]:
    """Return how often the host has waited for its device, at two moments.

    Returns:
        The counts after two sums, and after a barrier that follows.
    """
    backend = LaunchingBackend()
    groups = open_groups(0, 2, backend=backend)
    groups.form(dist.HashStore(), 1)
    reduce_now()
    reduce_and_wait()
    counts = [backend.num_waits_of_host]
    dist.barrier()
    return [*counts, backend.num_waits_of_host]


def test_a_host_waits_for_its_device_in_a_barrier_alone() -> None:
    assert run_ranks(1, count_waits_of_the_host) == [[0, 1]]


class DeviceBackend(HeldBackend):
    """A device's backend that opens a pair of sockets for each group.

    NCCL's bootstrap opens sockets, too. `open_socket` opens another pair.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device, self.completes_when_cut = torch.device("cuda"), True
        self.held.set()
        self.sockets: list[tuple[socket.socket, socket.socket]] = []
        self.worked_at_the_cut: list[bool] = []

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        self.open_socket()
        return object()

    def open_socket(self) -> None:
        self.sockets.append(socket.socketpair())

    def cut(self, limit_s: float, spared: Collection[Any] = ()) -> None:
        self.worked_at_the_cut += [passes(pair) for pair in self.sockets]


class HostBackend(GlooBackend):
    """The host's backend, beside a device's backend.

    While a group of the host is formed, the device opens another pair of sockets, if
    the device's groups were formed first.
    """

    def __init__(self, device: DeviceBackend) -> None:
        super().__init__()
        self._beside = device

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        if self._beside.sockets:
            self._beside.open_socket()
        return super().make(store, rank, size, form_s=form_s, operation_s=operation_s)


def cut_beside_a_device(folder: str) -> tuple[list[bool], list[bool]]:
    """Return whether a device's sockets work at its own cut, and after all cuts."""
    backend = DeviceBackend()
    process_groups.GlooBackend = partial(HostBackend, backend)  # type: ignore[misc]
    groups = open_groups(own_rank(), 2, backend=backend, world=ELASTIC_CPU)
    dist.new_group([0, 1], backend=ELASTIC)
    groups.form(open_store(folder), 1)
    meet(open_store(folder), "both have formed", 2)
    groups.cut()
    return backend.worked_at_the_cut, [passes(pair) for pair in backend.sockets]


def test_a_cut_leaves_a_devices_sockets_to_its_abort(tmp_path: Path) -> None:
    assert run_ranks(2, cut_beside_a_device, str(tmp_path)) == [([True], [True])] * 2


class HangingBackend(DeviceBackend):
    """A device's backend whose aborts never end."""

    def __init__(self) -> None:
        super().__init__()
        self.closing_s: float | None = None

    def is_quiet(self) -> bool:
        return False


def leave_a_device_that_hangs() -> str:
    timeouts = GroupTimeouts(form_s=WAIT_S, operation_s=WAIT_S, abort_s=0.1)
    ElasticGroups(HangingBackend(), timeouts, lambda waiting: None).leave()
    return "it went on"


def test_a_device_that_does_not_abort_in_time_ends_its_worker() -> None:
    begun_s = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 0 died"):
        run_ranks(1, leave_a_device_that_hangs)
    assert time.monotonic() - begun_s < WAIT_S, (
        "runtime.operation_s ended it, not runtime.abort_s"
    )
