"""Elastic groups compute as gloo does, end at a cut, and leave nothing behind.

The inner groups are real groups of gloo.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launcher.proc import stands_still
from moe_ckpt.collectives import TorchRanks
from moe_ckpt.elastic.backends import GlooBackend
from moe_ckpt.elastic.process_groups import (
    ELASTIC,
    ELASTIC_CPU,
    ElasticGroup,
    ElasticGroups,
    Guards,
    InnerGroup,
)
from moe_ckpt.elastic.supervisor import run_and_exit
from moe_ckpt.errors import PeersLostError
from moe_ckpt.linux import own_files
from tests.harness.gloo.backends import HeldBackend
from tests.harness.gloo.collectives import (
    COLLECTIVES,
    all_reduce,
    call_all,
    make_groups,
    outcome_of,
    over_generations,
    plain,
    with_plain_gloo,
)
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.gloo.workers import (
    PATIENT,
    count_held,
    holds_no_more,
    meet,
    open_groups,
    open_store,
    own_rank,
    wait_until,
)
from tests.waits import WAIT_S


def late() -> GlooBackend:
    """Return a backend whose ranks connect on first use, in groups of any size."""
    return GlooBackend(most_connected=1)


def late_over_generations(
    folder: str, generations: Sequence[int]
) -> list[dict[str, Any]]:
    return over_generations(folder, ELASTIC_CPU, generations, late())


def test_one_handle_computes_the_same_as_gloo_in_every_generation(
    tmp_path: Path,
) -> None:
    wanted = run_ranks(3, with_plain_gloo)
    assert [result["all_reduce"][0] for result in wanted] == [[111.0, 222.0, 333.0]] * 3
    together, later = tmp_path / "together", tmp_path / "later"
    for folder in (together, later):
        folder.mkdir()
    assert run_ranks(3, over_generations, str(together), ELASTIC_CPU, (1, 2, 5)) == [
        [want] * 3 for want in wanted
    ]
    assert run_ranks(3, late_over_generations, str(later), (1, 2)) == [
        [want] * 2 for want in wanted
    ]


def open_sockets() -> set[str]:
    return {name for _, name in own_files() if name.startswith("socket:")}


def use_groups_after_a_leave(folder: str) -> tuple[set[str], set[str], bool, bool]:
    """Use groups after a leave.

    Returns:
        The outcomes of operations begun after the leave, and of operations begun
        before; then whether the inner groups were freed, and whether their sockets were
        closed.
    """
    gc.collect()
    sockets = open_sockets()
    groups = open_groups(own_rank(), 3)
    group_ranks = make_groups(ELASTIC_CPU)
    store = open_store(folder)
    groups.form(store, 1)
    call_all(group_ranks)
    mine = [(group, ranks) for group, ranks in group_ranks if own_rank() in ranks]
    begun = [
        dist.all_reduce(torch.ones(1), group=group, async_op=True) for group, _ in mine
    ]
    insides = [weakref.ref(inside) for inside in groups.insides]
    assert len(insides) >= 3
    assert open_sockets() > sockets
    assert wait_until(
        lambda: all(work.is_completed() for work in begun if work is not None)
    )
    meet(store, "all that was begun is complete", 3)
    groups.leave()
    refused = {
        outcome_of(partial(call, group, ranks))
        for group, ranks in mine
        for call in COLLECTIVES
    }
    late = {outcome_of(work.wait) for work in begun if work is not None}
    begun.clear()
    # errors and the frames of their tracebacks refer to each other, and to operations
    gc.collect()
    are_forgotten = wait_until(lambda: all(inside() is None for inside in insides))
    are_closed = wait_until(lambda: open_sockets() == sockets)
    meet(store, "all ranks have tried", 3)
    return refused, late, are_forgotten, are_closed


def test_after_a_leave_nothing_stale_is_in_use_though_all_live(tmp_path: Path) -> None:
    lost = {"PeersLostError"}
    assert (
        run_ranks(3, use_groups_after_a_leave, str(tmp_path))
        == [(lost, lost, True, True)] * 3
    )


def large() -> torch.Tensor:
    """Return a tensor that is larger than the kernel's buffers.

    A transfer of the tensor stays half-way while the peer does not read.
    """
    return torch.zeros(32 << 20, dtype=torch.uint8)


FORGOTTEN = ("a transfer that no cut ends", "a sum that no cut ends")
WAITS: dict[str, Callable[[], object]] = {
    "recv": lambda: dist.recv(torch.zeros(1), 1),
    "all_reduce": lambda: dist.all_reduce(torch.zeros(1)),
    "barrier": dist.barrier,
    "all_gather": lambda: dist.all_gather_object([None, None], "mine"),
    "all_to_all": lambda: dist.all_to_all_single(torch.zeros(2), torch.zeros(2)),
    "batch": lambda: [
        work.wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1), 1)])
    ],
    "large send": lambda: dist.send(large(), 1),
    "large broadcast": lambda: dist.broadcast(large(), 0),
    "large all_to_all": lambda: dist.all_to_all_single(large(), large()),
    "large recv": lambda: dist.recv(large(), 1),  # the peer has sent a part
    FORGOTTEN[0]: lambda: dist.recv(torch.zeros(1), 1),
    FORGOTTEN[1]: lambda: dist.all_reduce(torch.zeros(1)),
}
"""Operations in which rank 0 waits for rank 1, which is stopped."""


def release(
    groups: ElasticGroups,
    waiting: threading.Event,
    released: threading.Event,
    name: str,
) -> None:
    """Act as the thread that watches a generation, which ends once rank 0 waits."""
    waiting.wait(WAIT_S)
    while not released.wait(0.01):
        if name not in FORGOTTEN:
            groups.cut()
        # now and then gloo loses such an operation, and never completes the operation
        if name in FORGOTTEN or name.startswith("large"):
            groups.abandon()


def wait_for_a_stopped_peer(folder: str) -> dict[str, str]:
    """Return, on rank 0, the outcome of each wait."""
    waiting, changes = threading.Event(), []

    def on_wait(is_waiting: bool) -> None:
        changes.append(is_waiting)
        if is_waiting:
            waiting.set()

    groups = open_groups(own_rank(), 2, on_wait=on_wait)
    store = open_store(folder)
    found: dict[str, str] = {}
    for generation, (name, wait) in enumerate(WAITS.items(), start=1):
        groups.form(open_store(folder), generation)
        dist.barrier()
        if own_rank() == 1:
            sending = dist.isend(large(), 0) if name == "large recv" else None
            store.set(f"{generation}/pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            del sending
        else:
            pid = int(store.get(f"{generation}/pid"))
            assert wait_until(lambda pid=pid: stands_still(pid))
            waiting.clear()
            released = threading.Event()
            watcher = threading.Thread(
                target=release, args=(groups, waiting, released, name)
            )
            watcher.start()
            found[name] = outcome_of(wait)
            released.set()
            watcher.join()
            os.kill(pid, signal.SIGCONT)
        groups.leave()
    assert changes == [True, False] * (len(changes) // 2)
    return found


def test_an_operation_that_waits_for_a_stopped_peer_is_released(tmp_path: Path) -> None:
    found, _ = run_ranks(2, wait_for_a_stopped_peer, str(tmp_path))
    assert found == dict.fromkeys(WAITS, "PeersLostError")


class LateWork:
    """An operation that its peer begins after `NUM_SLICES` waits have timed out."""

    def __init__(
        self, work: Any, begin_on_peer: Callable[[], object], timeouts: list[str]
    ) -> None:
        self.work = work
        self.is_completed = work.is_completed
        self._begin_on_peer = begin_on_peer
        self._timeouts = timeouts

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:  # a wait without slices, or the last one
            self._begin_on_peer()
            self.work.wait()
            return
        try:
            self.work.wait(timeout)
        except RuntimeError as error:
            self._timeouts.append(str(error))
            if len(self._timeouts) == NUM_SLICES:
                self._begin_on_peer()
            raise


NUM_SLICES = 3


class LateBackend(GlooBackend):
    """gloo whose operations wait for a late peer.

    Attributes:
        begin_on_peer: Lets the peer begin an operation; None: operations do not wait
            for a late peer.
        timeouts: The errors of waits that have timed out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin_on_peer: Callable[[], object] | None = None
        self.timeouts: list[str] = []

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        return LateGroup(
            super().make(store, rank, size, form_s=form_s, operation_s=operation_s),
            self,
        )


class LateGroup:
    """A group of a LateBackend."""

    def __init__(self, group: Any, backend: LateBackend) -> None:
        self._group = group
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        begin = getattr(self._group, name)
        late = self._backend
        if late.begin_on_peer is None or name.startswith("_get"):
            return begin
        begin_on_peer = late.begin_on_peer
        return lambda *arguments, **options: LateWork(
            begin(*arguments, **options), begin_on_peer, late.timeouts
        )


ENDS_AT_THE_LAST = ("reduce", "gather", "gather_object")
"""Collectives in which the last rank waits for others, not the first."""


def call_with_a_late_peer(folder: str) -> dict[str, tuple[Any, bool]]:
    """Call each collective with a late peer.

    Returns:
        The result of each collective, and whether waits for the collective have timed
        out several times.
    """
    backend = LateBackend()
    groups, store = open_groups(own_rank(), 2, backend=backend), open_store(folder)
    groups.form(open_store(folder), 1)
    found = {}
    for call in COLLECTIVES:
        name = call.__name__
        is_first = own_rank() == (name in ENDS_AT_THE_LAST)
        backend.timeouts.clear()
        backend.begin_on_peer = (
            partial(store.set, f"{name}/begin", "") if is_first else None
        )
        if not is_first:
            store.wait([f"{name}/begin"], timedelta(seconds=WAIT_S))
        result = plain(call(dist.group.WORLD, [0, 1]))
        found[name] = (result, len(backend.timeouts) >= NUM_SLICES)
        if backend.begin_on_peer is not None:
            # an operation that needs no peer has ended without this call
            backend.begin_on_peer()
        backend.begin_on_peer = None
        meet(store, f"{name}/end", 2)
    return found


def call_in_time() -> dict[str, Any]:
    dist.init_process_group("gloo", store=rank_store(), rank=own_rank(), world_size=2)
    return {
        call.__name__: plain(call(dist.group.WORLD, [0, 1])) for call in COLLECTIVES
    }


WAIT_WITH_A_HELPER = {
    *("send", "send_around"),  # a timeout closes the connection
    # a reduce-scatter takes no timeout
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_coalesced"),
}


def test_collectives_with_a_late_peer_survive_slices_of_a_wait(tmp_path: Path) -> None:
    """In processes: only gloo itself shows which operations survive a timeout."""
    wanted = run_ranks(2, call_in_time)
    found = run_ranks(2, call_with_a_late_peer, str(tmp_path))
    for rank in range(2):
        assert {name: result for name, (result, _) in found[rank].items()} == wanted[
            rank
        ]
    sliced = {name for name in wanted[0] if found[0][name][1] or found[1][name][1]}
    assert sliced == set(wanted[0]) - WAIT_WITH_A_HELPER


class Forgotten:
    """An operation that gloo never completes; the operation ends with the test."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def wait(self) -> None:
        self.end.wait(WAIT_S)


class Remembering:
    """A group whose transfers are the given operations, in turn."""

    def __init__(self, *transfers: Forgotten) -> None:
        self._transfers = iter(transfers)

    def recv(self) -> Forgotten:
        return next(self._transfers)


def test_an_abandoned_operation_keeps_no_later_one_waiting() -> None:
    groups = ElasticGroups(GlooBackend(), PATIENT, lambda waiting: None)
    handle: Any = ElasticGroup("both", 0, 2, GlooBackend(), groups)
    first, second = Forgotten(), Forgotten()
    second.end.set()
    handle.inner = InnerGroup(
        group=Remembering(first, second),
        launching=contextlib.nullcontext(),
        generation=1,
        can_outlast=False,
        guards=Guards("both", 1),
    )
    with ThreadPoolExecutor(1) as training_thread:
        abandoned = training_thread.submit(lambda: handle.recv().wait())
        assert wait_until(lambda: groups.abandon() or abandoned.done())
        with pytest.raises(PeersLostError, match="abandoned"):
            abandoned.result()
        training_thread.submit(lambda: handle.recv().wait()).result(WAIT_S / 3)
        first.end.set()


def form_without_the_last(folder: str) -> tuple[str, Any]:
    """Form groups without rank 2, then with all ranks.

    Returns:
        The outcome of the first forming, and a sum over all ranks in the next
        generation.
    """
    groups = open_groups(own_rank(), 3, form_s=1.5)
    make_groups(ELASTIC_CPU)
    store, outcome = open_store(folder), "did not come"
    if own_rank() != 2:
        outcome = outcome_of(lambda: groups.form(open_store(folder), 1))
        groups.leave()
    meet(store, "the next generation", 3)
    groups.form(open_store(folder), 2)
    return outcome, plain(all_reduce(None, [0, 1, 2]))


def test_forming_ends_where_a_rank_does_not_come_and_all_can_form_anew(
    tmp_path: Path,
) -> None:
    found = run_ranks(3, form_without_the_last, str(tmp_path))
    assert [outcome for outcome, _ in found] == [
        "PeersLostError",
        "PeersLostError",
        "did not come",
    ]
    assert [total for _, total in found] == [[111.0, 222.0, 333.0]] * 3


def form_until_cut() -> str:
    """Form with a peer that never comes; a cut follows the first key in the store."""
    client = dist.HashStore()
    groups = open_groups(0, 2)
    threading.Thread(
        target=lambda: wait_until(lambda: client.num_keys() > 0) and groups.cut()
    ).start()
    return outcome_of(lambda: groups.form(client, 1))


def test_forming_is_released_by_a_cut() -> None:
    assert run_ranks(1, form_until_cut) == ["PeersLostError"]


def outlive_a_peer_that_has_not_connected(
    folder: str, operation: Callable[[], object]
) -> tuple[str, Any]:
    """Begin an operation, as rank 0, after the peer has died without a connection.

    Returns:
        The outcome of the operation, and a sum in the next generation.
    """
    store, waiting, outcome = open_store(folder), threading.Event(), "was not there"
    dies = own_rank() == 1 and os.fork() == 0
    if own_rank() == 1 and not dies:
        os.wait()
        store.set("has died", "")
    groups = open_groups(
        own_rank(), 2, on_wait=lambda waits: waits and waiting.set(), backend=late()
    )
    if dies:
        groups.form(open_store(folder), 1)
        os.kill(os.getpid(), signal.SIGKILL)
    if own_rank() == 0:
        groups.form(open_store(folder), 1)
        store.wait(["has died"])
        released = threading.Event()
        watcher = threading.Thread(
            target=release, args=(groups, waiting, released, "large")
        )
        watcher.start()
        outcome = outcome_of(operation)
        released.set()
        watcher.join()
        groups.leave()
    groups.form(open_store(folder), 2)
    total = plain(all_reduce(None, [0, 1]))
    meet(store, "both have it", 2)
    return outcome, total


def receive_from_last() -> None:
    dist.recv(torch.zeros(3), 1)


@pytest.mark.parametrize("operation", [dist.barrier, receive_from_last])
def test_an_operation_ends_whose_peer_has_died_before_they_connected(
    operation: Callable[[], object], tmp_path: Path
) -> None:
    """gloo tries to connect for a long time, in a transfer even as the transfer begins.

    No socket exists whose shutdown could end the operation.
    """
    first, second = run_ranks(
        2, outlive_a_peer_that_has_not_connected, str(tmp_path), operation
    )
    assert first == ("PeersLostError", [11.0, 22.0, 33.0])
    assert second == ("was not there", [11.0, 22.0, 33.0])


NUM_ROLES = 6
"""Number of generations. In each, chance decides which rank connects and which rank
waits for the connection.
"""


def receive_from_an_idle_peer(folder: str) -> list[str]:
    """Receive, as rank 0, from a peer that begins no transfer, until a cut.

    Returns:
        The outcome in each generation.
    """
    waiting, outcomes = threading.Event(), []
    groups = open_groups(
        own_rank(), 2, on_wait=lambda waits: waits and waiting.set(), backend=late()
    )
    store = open_store(folder)
    for generation in range(1, 1 + NUM_ROLES):
        groups.form(open_store(folder), generation)
        if own_rank() == 0:
            waiting.clear()
            released = threading.Event()
            watcher = threading.Thread(
                target=release, args=(groups, waiting, released, "large recv")
            )
            watcher.start()
            outcomes.append(outcome_of(receive_from_last))
            released.set()
            watcher.join()
        meet(store, f"the end of {generation}", 2)
        groups.leave()
    return outcomes


def test_a_transfer_that_waits_for_its_peer_to_connect_is_released_by_a_cut(
    tmp_path: Path,
) -> None:
    outcomes, _ = run_ranks(2, receive_from_an_idle_peer, str(tmp_path))
    assert outcomes == ["PeersLostError"] * NUM_ROLES


def wait_for_a_peer_that_cuts(folder: str) -> str:
    """Wait in a barrier, as rank 0, while rank 1 cuts its groups.

    Rank 1 does not enter the barrier.

    Returns:
        The outcome of the barrier; `cut` on rank 1.
    """
    groups, store = open_groups(own_rank(), 2, backend=late()), open_store(folder)
    groups.form(open_store(folder), 1)
    dist.all_reduce(torch.ones(1))  # connects
    meet(store, "both are connected", 2)
    if own_rank() == 1:
        groups.cut()
        store.wait(["rank 0 has its outcome"])
        return "cut"
    outcome = outcome_of(dist.barrier)
    store.set("rank 0 has its outcome", "")
    return outcome


def test_a_cut_shuts_down_what_was_connected_after_the_groups_were_formed(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, wait_for_a_peer_that_cuts, str(tmp_path)) == [
        "PeersLostError",
        "cut",
    ]


NUM_DEATHS = 10


def outlive_peers(folder: str) -> list[tuple[int, int]]:
    """Survive many deaths of rank 1, as rank 0.

    Returns:
        The numbers of open files and of threads, after each death and at the end.
    """
    if own_rank() == 1:
        for generation in range(1, 1 + NUM_DEATHS):
            pid = os.fork()
            if pid == 0:
                run_and_exit(
                    lambda generation=generation: train_as_peer(folder, generation)
                )
            os.waitpid(pid, 0)
        return []
    # gloo keeps operations that it never completes for `operation_s`
    groups = open_groups(0, 2, operation_s=5.0)
    dist.new_group([0, 1], backend=ELASTIC_CPU)
    client, store, counts = open_store(folder), open_store(folder), []
    for generation in range(1, 1 + NUM_DEATHS):
        groups.form(client, generation)
        pid = int(store.get(f"{generation}/pid"))
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(PeersLostError):
            while True:
                dist.all_reduce(torch.ones(1000))
        groups.leave()
        wait_until(
            lambda: (
                "_bury" not in " ".join(thread.name for thread in threading.enumerate())
            )
        )
        counts.append(count_held())
    # gloo's own thread closes the last sockets once that thread gets a CPU
    wait_until(lambda: holds_no_more(count_held(), counts[1]))
    return [*counts, count_held()]


def train_as_peer(folder: str, generation: int) -> int:
    groups = open_groups(1, 2)
    dist.new_group([0, 1], backend=ELASTIC_CPU)
    groups.form(open_store(folder), generation)
    open_store(folder).set(f"{generation}/pid", str(os.getpid()))
    while True:
        dist.all_reduce(torch.ones(1000))


def test_a_survivor_of_many_deaths_holds_no_more_than_after_the_first(
    tmp_path: Path,
) -> None:
    counts, _ = run_ranks(2, outlive_peers, str(tmp_path))
    assert len(counts) == NUM_DEATHS + 1
    assert holds_no_more(counts[-1], counts[1]), counts


def settle_after_a_cut() -> list[str]:
    groups = open_groups(0, 2)
    ranks = TorchRanks()
    outcomes = [outcome_of(ranks.confirm)]
    groups.cut()
    return [*outcomes, outcome_of(ranks.confirm)]


def test_operations_that_were_cut_do_not_settle() -> None:
    assert run_ranks(1, settle_after_a_cut) == [["got None", "PeersLostError"]]


def lose_ranks_inside_coalesced_collectives(folder: str) -> tuple[str, Any]:
    """Return the outcome of coalesced collectives, and a sum in the next generation."""
    groups = open_groups(own_rank(), 2)

    def reduce_coalesced() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(3))
            groups.cut()
            dist.barrier()

    groups.form(open_store(folder), 1)
    meet(open_store(folder), "both have formed", 2)
    outcome = outcome_of(reduce_coalesced)
    groups.leave()
    groups.form(open_store(folder), 2)
    return outcome, plain(all_reduce(None, [0, 1]))


def test_a_loss_inside_coalesced_collectives_leaves_nothing_to_later_ones(
    tmp_path: Path,
) -> None:
    found = run_ranks(2, lose_ranks_inside_coalesced_collectives, str(tmp_path))
    assert found == [("PeersLostError", [11.0, 22.0, 33.0])] * 2


def wait_in_two_threads(folder: str) -> tuple[set[int], bool, int]:
    """Wait for the other rank in two threads.

    Returns:
        The threads that have reported waits, the last report while both threads waited,
        and the training thread.
    """
    told: list[tuple[int, bool]] = []
    groups = open_groups(
        own_rank(),
        2,
        on_wait=lambda waiting: told.append((threading.get_ident(), waiting)),
    )
    other: Any = dist.new_group([0, 1], backend=ELASTIC_CPU)
    store = open_store(folder)

    def go_on() -> None:
        wait_until(lambda: bool(told))
        thread.join()
        store.set("go on", "")

    groups.form(open_store(folder), 1)
    if own_rank() == 0:
        thread = threading.Thread(target=lambda: dist.barrier(other))
        thread.start()
        threading.Thread(target=go_on).start()
    else:
        dist.barrier(other)
        store.wait(["go on"], timedelta(seconds=WAIT_S))
    dist.barrier()
    waits = told[: told.index((threading.get_ident(), False))]
    meet(store, "the end", 2)
    return {ident for ident, _ in told}, waits[-1][1], threading.get_ident()


def test_only_the_thread_that_trains_tells_that_it_waits(tmp_path: Path) -> None:
    for idents, waited, own in run_ranks(2, wait_in_two_threads, str(tmp_path)):
        assert (idents, waited) == ({own}, True)


def wait_in_backward(folder: str) -> list[bool]:
    """Return a rank's reports while a gradient waits for the other rank.

    Another thread than the training thread computes the gradient.
    """
    told: list[bool] = []
    groups = open_groups(own_rank(), 2, on_wait=told.append)
    groups.form(open_store(folder), 1)
    told.clear()
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: dist.barrier() or gradient)
    # autograd, too, has another thread for the backward pass of a device
    thread = threading.Thread(target=lambda: (weight * 2.0).sum().backward())
    thread.start()
    thread.join()
    first = told[:2]
    meet(open_store(folder), "the end", 2)
    return first


def test_a_wait_in_the_backward_of_a_device_is_told(tmp_path: Path) -> None:
    assert run_ranks(2, wait_in_backward, str(tmp_path)) == [[True, False]] * 2


class CountingBackend(GlooBackend):
    """gloo that counts the groups that were made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_made = 0

    def make(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        form_s: float,
        operation_s: float,
    ) -> Any:
        self.num_made += 1
        return super().make(store, rank, size, form_s=form_s, operation_s=operation_s)


def form_megatrons_groups(folder: str) -> tuple[int, int, list[float]]:
    """Form Megatron's groups, and compute sums in two groups that share an inner group.

    Each rank begins the two sums in the same order, and waits for the sums in the
    reverse order.

    Returns:
        The number of groups with more than one rank, the number of inner groups made,
        and the two sums.
    """
    backend = CountingBackend()
    groups = ElasticGroups(backend, PATIENT, lambda waiting: None)
    groups.register()
    dist.init_process_group(
        ELASTIC, store=dist.HashStore(), rank=own_rank(), world_size=4
    )
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        create_gloo_process_groups=False,
    )
    store = open_store(folder)
    for generation in (1, 2):
        groups.form(open_store(folder), generation)
        totals = [
            torch.tensor([float(1 + own_rank())]),
            torch.tensor([10.0 * (1 + own_rank())]),
        ]
        parallel_groups: list[Any] = [
            parallel_state.get_data_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
        ]
        begun = [
            dist.all_reduce(total, group=group, async_op=True)
            for total, group in zip(totals, parallel_groups, strict=True)
        ]
        for work in reversed(begun):
            assert work is not None
            work.wait()
        meet(store, f"the end of {generation}", 4)
        groups.leave()
    handles = dist.distributed_c10d._world.pg_map
    shared = [handle for handle in handles if handle.size() > 1]
    return len(shared), backend.num_made, [total.item() for total in totals]


def test_groups_of_the_same_members_share_one_inner_group(tmp_path: Path) -> None:
    for rank, (num_groups, num_made, totals) in enumerate(
        run_ranks(4, form_megatrons_groups, str(tmp_path))
    ):
        # the second generation keeps the groups of the first
        assert (num_groups, num_made) == (12, 3)
        assert totals == ([3.0, 30.0] if rank < 2 else [7.0, 70.0])


def form_beside_threads_that_are_late() -> tuple[str, set[int], int]:
    """Form groups in threads that are late, then in the next generation.

    Returns:
        The outcome of the first forming, the numbers of groups that its threads have
        made, and the number of groups in the next generation.
    """
    backend = HeldBackend()
    limits: Any = SimpleNamespace(form_s=0.02, operation_s=WAIT_S, abort_s=WAIT_S)
    groups = ElasticGroups(backend, limits, lambda waiting: None)
    groups.register()
    dist.init_process_group(ELASTIC, store=dist.HashStore(), rank=0, world_size=8)
    for other in range(1, 8):
        dist.new_group([0, other], backend=ELASTIC_CPU)
    outcome = outcome_of(lambda: groups.form(dist.HashStore(), 1))
    groups.leave()
    late = set(backend.made_by)
    limits.form_s = WAIT_S
    next_one = threading.Thread(target=lambda: groups.form(dist.HashStore(), 2))
    next_one.start()
    wait_until(lambda: len(set(backend.made_by)) == 2 * len(late))
    backend.held.set()
    for thread in (*late, next_one):
        thread.join(WAIT_S)
    return (
        outcome,
        {backend.made_by.count(thread) for thread in late},
        len(groups.insides),
    )


def test_a_thread_that_is_late_in_forming_ends_with_its_generation() -> None:
    assert run_ranks(1, form_beside_threads_that_are_late) == [
        ("PeersLostError", {1}, 8)
    ]


def form_while_the_generation_ends() -> str:
    backend = HeldBackend()
    backend.held.set()
    groups = open_groups(0, 2, backend=backend)
    backend.when_formed = groups.cut
    return outcome_of(lambda: groups.form(dist.HashStore(), 1))


def test_groups_of_a_generation_that_ended_meanwhile_are_not_used() -> None:
    assert run_ranks(1, form_while_the_generation_ends) == ["PeersLostError"]
