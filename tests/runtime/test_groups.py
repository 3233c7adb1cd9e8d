"""Groups that outlive generations, on real gloo: what they compute, what ends them, and what they leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.proc import stands_still
from moe_ckpt.errors import PeersLostError
from moe_ckpt.runtime.groups import BACKEND, CPU_BACKEND, ElasticGroups, GroupTimeouts
from moe_ckpt.runtime.guard import run_and_exit
from moe_ckpt.runtime.polling_store import PollingStore
from moe_ckpt.runtime.transport import GlooTransport, NcclTransport
from tests.ranks import RankFailedError, rank_store, run_ranks
from tests.runtime.trainers import WAIT_S, meet, open_groups, open_store, own_rank

MIB = 1 << 20


def ones(*sizes: int) -> torch.Tensor:
    """Return what no other rank has."""
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes) * 10 ** own_rank()


def parts(size: int) -> list[torch.Tensor]:
    return list(ones(size, 2).unbind())


def zeros(size: int) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(size)]


# What Megatron calls, on a group of which the caller is one: `ranks` are its members' global ranks.


def all_reduce(group: Any, ranks: list[int]) -> Any:
    dist.all_reduce(total := ones(3), group=group)
    return total


def all_reduce_later(group: Any, ranks: list[int]) -> Any:
    work = dist.all_reduce(largest := ones(3), op=dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    work.wait()
    return largest, work.is_completed()


def all_reduce_coalesced(group: Any, ranks: list[int]) -> Any:
    with dist._coalescing_manager(group=group):
        dist.all_reduce(first := ones(2), group=group)
        dist.all_reduce(second := ones(3), group=group)
    return first, second


def broadcast(group: Any, ranks: list[int]) -> Any:
    dist.broadcast(tensor := ones(3), src=ranks[-1], group=group)
    return tensor


def broadcast_object(group: Any, ranks: list[int]) -> Any:
    dist.broadcast_object_list(objects := [f"of rank {own_rank()}"], src=ranks[-1], group=group)
    return objects


def reduce(group: Any, ranks: list[int]) -> Any:
    dist.reduce(total := ones(3), dst=ranks[-1], group=group)
    return total if own_rank() == ranks[-1] else None  # of the others gloo makes what it likes


def barrier(group: Any, ranks: list[int]) -> Any:
    dist.barrier(group)


def all_gather(group: Any, ranks: list[int]) -> Any:
    dist.all_gather(gathered := zeros(len(ranks)), ones(2), group=group)
    return gathered


def all_gather_into_tensor(group: Any, ranks: list[int]) -> Any:
    dist.all_gather_into_tensor(gathered := torch.zeros(2 * len(ranks)), ones(2), group=group)
    return gathered


def all_gather_coalesced(group: Any, ranks: list[int]) -> Any:
    first, second = torch.zeros(2 * len(ranks)), torch.zeros(len(ranks))
    with dist._coalescing_manager(group=group):
        dist.all_gather_into_tensor(first, ones(2), group=group)
        dist.all_gather_into_tensor(second, ones(1), group=group)
    return first, second


def all_gather_object(group: Any, ranks: list[int]) -> Any:
    objects: list[Any] = [None] * len(ranks)
    dist.all_gather_object(objects, {"rank": own_rank()}, group=group)
    return objects


def gather(group: Any, ranks: list[int]) -> Any:
    gathered = zeros(len(ranks)) if own_rank() == ranks[-1] else None
    dist.gather(ones(2), gathered, dst=ranks[-1], group=group)
    return gathered


def gather_object(group: Any, ranks: list[int]) -> Any:
    objects: list[Any] | None = [None] * len(ranks) if own_rank() == ranks[-1] else None
    dist.gather_object({"rank": own_rank()}, objects, dst=ranks[-1], group=group)
    return objects


def scatter(group: Any, ranks: list[int]) -> Any:
    mine = torch.zeros(2)
    dist.scatter(mine, parts(len(ranks)) if own_rank() == ranks[-1] else None, src=ranks[-1], group=group)
    return mine


def reduce_scatter(group: Any, ranks: list[int]) -> Any:
    dist.reduce_scatter(mine := torch.zeros(2), parts(len(ranks)), group=group)
    return mine


def reduce_scatter_tensor(group: Any, ranks: list[int]) -> Any:
    dist.reduce_scatter_tensor(mine := torch.zeros(2), ones(2 * len(ranks)), group=group)
    return mine


def reduce_scatter_coalesced(group: Any, ranks: list[int]) -> Any:
    first, second = torch.zeros(2), torch.zeros(1)
    with dist._coalescing_manager(group=group):
        dist.reduce_scatter_tensor(first, ones(2 * len(ranks)), group=group)
        dist.reduce_scatter_tensor(second, ones(len(ranks)), group=group)
    return first, second


def all_to_all(group: Any, ranks: list[int]) -> Any:
    dist.all_to_all(received := zeros(len(ranks)), parts(len(ranks)), group=group)
    return received


def all_to_all_single(group: Any, ranks: list[int]) -> Any:
    """Tokens: one for the group's first rank, two for the second, ..., from everybody."""
    place, size = ranks.index(own_rank()), len(ranks)
    sent, received = [1 + other for other in range(size)], [1 + place] * size
    dist.all_to_all_single(output := torch.zeros(sum(received)), ones(sum(sent)), received, sent, group=group)
    return output


def send(group: Any, ranks: list[int]) -> Any:
    place, tensor = ranks.index(own_rank()), ones(2)
    if place > 0:
        dist.recv(tensor, ranks[place - 1], group=group)
    if place < len(ranks) - 1:
        dist.send(tensor, ranks[place + 1], group=group)
    return tensor


def send_around(group: Any, ranks: list[int]) -> Any:
    place = ranks.index(own_rank())
    to, source = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    sending = dist.P2POp(dist.isend, ones(2), to, group)
    receiving = dist.P2POp(dist.irecv, received := torch.zeros(2), source, group)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return received


COLLECTIVES = (
    *(all_reduce, all_reduce_later, all_reduce_coalesced, broadcast, broadcast_object, reduce, barrier),
    *(all_gather, all_gather_into_tensor, all_gather_coalesced, all_gather_object, gather, gather_object),
    *(scatter, reduce_scatter, reduce_scatter_tensor, reduce_scatter_coalesced, all_to_all, all_to_all_single),
    *(send, send_around),
)


def plain(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return [plain(part) for part in result] if isinstance(result, list | tuple) else result


def call_all(places: list[tuple[Any, list[int]]]) -> dict[str, Any]:
    """Return what each collective gives in each group that this rank is in."""
    mine = [(group, ranks) for group, ranks in places if own_rank() in ranks]
    return {call.__name__: [plain(call(group, ranks)) for group, ranks in mine] for call in COLLECTIVES}


def make_groups(backend: str) -> list[tuple[Any, list[int]]]:
    members = [[0, 2], [1, 2], [0, 1, 2]]
    return [(dist.group.WORLD, [0, 1, 2]), *((dist.new_group(ranks, backend=backend), ranks) for ranks in members)]


def with_plain_gloo() -> dict[str, Any]:
    dist.init_process_group("gloo", store=rank_store(), rank=own_rank(), world_size=3)
    return call_all(make_groups("gloo"))


def over_generations(folder: str) -> list[dict[str, Any]]:
    groups = open_groups(own_rank(), 3)
    places, store = make_groups(CPU_BACKEND), open_store(folder)
    results = []
    for generation in (1, 2, 5):
        groups.form(open_store(folder), generation)
        results.append(call_all(places))
        assert places[0][0] is dist.group.WORLD
        meet(store, f"the end of {generation}", 3)
        groups.leave()
    return results


def test_one_handle_gives_what_gloo_gives_in_every_generation(tmp_path: Path) -> None:
    wanted = run_ranks(3, with_plain_gloo)
    assert [result["all_reduce"][0] for result in wanted] == [[111.0, 222.0, 333.0]] * 3
    for results, want in zip(run_ranks(3, over_generations, str(tmp_path)), wanted, strict=True):
        for result in results:
            assert result == want


def outcome_of(call: Callable[[], object]) -> str:
    try:
        return f"got {call()}"
    except Exception as error:  # what the test is about
        return type(error).__name__


def use_what_was_left(folder: str) -> list[Counter[str]]:
    """Return how operations ended, after a leave, and what was left of the groups, while all ranks live."""
    gc.collect()
    sockets = open_sockets()
    groups = open_groups(own_rank(), 3)
    places = make_groups(CPU_BACKEND)
    store = open_store(folder)
    groups.form(store, 1)
    call_all(places)
    mine = [(group, ranks) for group, ranks in places if own_rank() in ranks]
    begun = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group, _ in mine]
    insides = [weakref.ref(inside) for inside in groups.insides]
    assert len(insides) >= 3
    assert open_sockets() > sockets
    assert wait_until(lambda: all(work.is_completed() for work in begun if work is not None))
    meet(store, "all that was begun is complete", 3)
    groups.leave()
    refused = [
        outcome_of(lambda call=call, group=group, ranks=ranks: call(group, ranks))
        for group, ranks in mine
        for call in COLLECTIVES
    ]
    late = [outcome_of(work.wait) for work in begun if work is not None]
    begun.clear()
    gc.collect()  # errors and the frames that they went through hold each other, and operations
    left = ["forgotten" if wait_until(lambda inside=inside: inside() is None) else "kept" for inside in insides]
    closed = ["closed" if wait_until(lambda: open_sockets() == sockets) else "open"]
    meet(store, "everybody has tried", 3)
    return [Counter(outcomes) for outcomes in (refused, late, left, closed)]


def test_after_a_leave_nothing_stale_is_in_use_though_all_live(tmp_path: Path) -> None:
    for refused, late, left, closed in run_ranks(3, use_what_was_left, str(tmp_path)):
        assert set(refused) == {"PeersLostError"}
        assert refused.total() >= 3 * len(COLLECTIVES)
        assert set(late) == {"PeersLostError"}
        assert set(left) == {"forgotten"}
        assert set(closed) == {"closed"}


def wait_until(look: Callable[[], bool]) -> bool:
    """Return whether something that nobody tells of came to be in time."""
    deadline_s = time.monotonic() + WAIT_S
    while not look() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return look()


def open_sockets() -> set[str]:
    return {target for target in map(link_of, Path("/proc/self/fd").iterdir()) if target.startswith("socket:")}


def link_of(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:  # closed meanwhile
        return ""


def large(*, mib: int = 32) -> torch.Tensor:
    """Return more than the kernel's buffers take: its transfer stays half-way."""
    return torch.zeros(mib * MIB, dtype=torch.uint8)


FORGOTTEN = "an operation that no cut ends"
WAITS: dict[str, Callable[[], object]] = {
    "recv": lambda: dist.recv(torch.zeros(1), 1),
    "all_reduce": lambda: dist.all_reduce(torch.zeros(1)),
    "barrier": dist.barrier,
    "all_gather": lambda: dist.all_gather_object([None, None], "mine"),
    "all_to_all": lambda: dist.all_to_all_single(torch.zeros(2), torch.zeros(2)),
    "batch": lambda: [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1), 1)])],
    "large send": lambda: dist.send(large(), 1),
    "large broadcast": lambda: dist.broadcast(large(), 0),
    "large all_to_all": lambda: dist.all_to_all_single(large(), large()),
    "large recv": lambda: dist.recv(large(), 1),  # the peer has sent a part of it
    FORGOTTEN: lambda: dist.recv(torch.zeros(1), 1),
}
"""What rank 0 waits in for rank 1, which stands still."""


def release(groups: ElasticGroups, waiting: threading.Event, released: threading.Event, name: str) -> None:
    """Be the thread that watches the generation: it ends as soon as rank 0 waits."""
    waiting.wait(WAIT_S)
    while not released.wait(0.01):
        if name != FORGOTTEN:
            groups.cut()
        if name == FORGOTTEN or name.startswith("large"):  # which gloo forgets now and then
            groups.abandon()


def wait_for_a_stopped_peer(folder: str) -> dict[str, tuple[str, float]]:
    """Return, as rank 0, how each wait ended, and after how many seconds."""
    waiting, changes = threading.Event(), []

    def on_wait(is_waiting: bool) -> None:
        changes.append(is_waiting)
        if is_waiting:
            waiting.set()

    groups = open_groups(own_rank(), 2, on_wait=on_wait)
    store = open_store(folder)
    found: dict[str, tuple[str, float]] = {}
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
            watcher = threading.Thread(target=release, args=(groups, waiting, released, name))
            watcher.start()
            begun_s = time.monotonic()
            found[name] = (outcome_of(wait), time.monotonic() - begun_s)
            released.set()
            watcher.join()
            os.kill(pid, signal.SIGCONT)
        groups.leave()
    assert changes == [True, False] * (len(changes) // 2)
    return found


def test_an_operation_that_waits_for_a_stopped_peer_is_released(tmp_path: Path) -> None:
    found, _ = run_ranks(2, wait_for_a_stopped_peer, str(tmp_path))
    assert {name: kind for name, (kind, _) in found.items()} == dict.fromkeys(WAITS, "PeersLostError")
    assert max(seconds for _, seconds in found.values()) < WAIT_S / 3, found


class Forgotten:
    """An operation that gloo has forgotten: it ends when the test does."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def wait(self) -> None:
        self.end.wait(WAIT_S)


def test_an_abandoned_operation_keeps_no_later_one_waiting() -> None:
    timeouts = GroupTimeouts(form_s=WAIT_S, operation_s=WAIT_S)
    groups = ElasticGroups(GlooTransport(), timeouts, lambda waiting: None)
    over, first, second = threading.Event(), Forgotten(), Forgotten()
    second.end.set()
    with ThreadPoolExecutor(1) as training_thread:
        abandoned = training_thread.submit(groups.wait, first, over, can_be_forgotten=True)
        assert wait_until(lambda: groups.abandon() or abandoned.done())
        with pytest.raises(PeersLostError, match="abandoned"):
            abandoned.result()
        training_thread.submit(groups.wait, second, over, can_be_forgotten=True).result(WAIT_S / 3)
        first.end.set()


FORM_S = 1.5


def form_without_the_last(folder: str) -> tuple[str, float, str]:
    """Return how forming ended on those who came, after how many seconds, and what all have after the next."""
    groups = open_groups(own_rank(), 3, form_s=FORM_S)
    make_groups(CPU_BACKEND)
    store, begun_s, outcome = open_store(folder), time.monotonic(), "did not come"
    if own_rank() != 2:
        outcome = outcome_of(lambda: groups.form(open_store(folder), 1))
        groups.leave()
    seconds = time.monotonic() - begun_s
    meet(store, "the next generation", 3)
    groups.form(open_store(folder), 2)
    return outcome, seconds, plain(all_reduce(None, [0, 1, 2]))


def test_forming_ends_where_a_rank_does_not_come_and_all_can_form_anew(tmp_path: Path) -> None:
    *early, late = run_ranks(3, form_without_the_last, str(tmp_path))
    for outcome, seconds, total in early:
        assert (outcome, total) == ("PeersLostError", late[2])
        assert seconds < 2 * FORM_S


def form_until_cut() -> tuple[str, float]:
    """Form with a peer that never comes, and be cut once all is said that can be."""
    client = dist.HashStore()
    groups = open_groups(0, 2)
    begun_s = time.monotonic()

    def cut() -> None:
        wait_until(lambda: client.num_keys() > 0)
        groups.cut()

    threading.Thread(target=cut).start()
    outcome = outcome_of(lambda: groups.form(client, 1))
    return outcome, time.monotonic() - begun_s


def test_forming_is_released_by_a_cut() -> None:
    [(outcome, seconds)] = run_ranks(1, form_until_cut)
    assert outcome == "PeersLostError"
    assert seconds < WAIT_S / 3


NUM_DEATHS = 20


def outlive_peers(folder: str) -> list[tuple[int, int]]:
    """Return, as rank 0, how many files and threads there were after each death of rank 1."""
    if own_rank() == 1:
        for generation in range(1, 1 + NUM_DEATHS):
            pid = os.fork()
            if pid == 0:
                run_and_exit(lambda generation=generation: train_as_peer(folder, generation))
            os.waitpid(pid, 0)
        return []
    groups = open_groups(0, 2, operation_s=5.0)  # as long as gloo may keep what it has forgotten
    dist.new_group([0, 1], backend=CPU_BACKEND)
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
        wait_until(lambda: "_bury" not in " ".join(thread.name for thread in threading.enumerate()))
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


def train_as_peer(folder: str, generation: int) -> int:
    groups = open_groups(1, 2)
    dist.new_group([0, 1], backend=CPU_BACKEND)
    groups.form(open_store(folder), generation)
    open_store(folder).set(f"{generation}/pid", str(os.getpid()))
    while True:
        dist.all_reduce(torch.ones(1000))


def test_a_survivor_of_many_deaths_holds_what_it_held_after_the_first(tmp_path: Path) -> None:
    counts, _ = run_ranks(2, outlive_peers, str(tmp_path))
    assert len(counts) == NUM_DEATHS
    assert counts[-1] == counts[1], counts


def settle_after_a_cut() -> list[str]:
    groups = open_groups(0, 2)
    outcomes = [outcome_of(groups.settle)]
    groups.cut()
    return [*outcomes, outcome_of(groups.settle)]


def test_what_was_cut_meanwhile_does_not_settle() -> None:
    assert run_ranks(1, settle_after_a_cut) == [["got None", "PeersLostError"]]


def wait_in_two_threads(folder: str) -> tuple[set[int], bool, int]:
    """Return which threads told that they wait, what was told last while both did, and the training thread."""
    told: list[tuple[int, bool]] = []
    groups = open_groups(own_rank(), 2, on_wait=lambda waiting: told.append((threading.get_ident(), waiting)))
    other: Any = dist.new_group([0, 1], backend=CPU_BACKEND)
    store = open_store(folder)
    groups.form(open_store(folder), 1)
    if own_rank() == 0:
        thread = threading.Thread(target=lambda: dist.barrier(other))
        thread.start()
        beside = threading.Thread(target=lambda: (wait_until(lambda: bool(told)), thread.join(), go_on(store)))
        beside.start()
    else:
        dist.barrier(other)
        store.wait(["go on"], timedelta(seconds=WAIT_S))
    dist.barrier()
    waits = told[: told.index((threading.get_ident(), False))]
    meet(store, "the end", 2)
    return {ident for ident, _ in told}, waits[-1][1], threading.get_ident()


def go_on(store: dist.Store) -> None:
    store.set("go on", "")


def test_only_the_thread_that_trains_tells_that_it_waits(tmp_path: Path) -> None:
    for idents, waited, own in run_ranks(2, wait_in_two_threads, str(tmp_path)):
        assert (idents, waited) == ({own}, True)


class HeldTransport:
    """A transport that opens nothing: its groups are made as soon as `held` ends."""

    def __init__(self) -> None:
        self.device, self.can_forget = torch.device("cpu"), True
        self.closing_s: float | None = 0.5
        self.held = threading.Event()
        self.made_by: list[threading.Thread] = []

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> object:
        self.made_by.append(threading.current_thread())
        self.held.wait(WAIT_S)
        return object()

    def begin(self) -> None: ...

    def formed(self) -> None: ...

    def settle(self, is_over: Callable[[], bool], timeout_s: float) -> None: ...

    def cut(self, insides: Sequence[Any]) -> None: ...

    def is_quiet(self) -> bool:
        return True


def form_beside_threads_that_are_late() -> tuple[str, list[int], int]:
    """Return how forming ended, how many groups each of its threads made, and how many are in the next generation."""
    transport = HeldTransport()
    groups = ElasticGroups(transport, GroupTimeouts(form_s=0.02, operation_s=WAIT_S), lambda waiting: None)
    groups.register()
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=2)
    for _ in range(7):
        dist.new_group([0, 1], backend=CPU_BACKEND)
    outcome = outcome_of(lambda: groups.form(dist.HashStore(), 1))
    groups.leave()
    late = set(transport.made_by)
    groups._timeouts = GroupTimeouts(form_s=WAIT_S, operation_s=WAIT_S)
    next_one = threading.Thread(target=lambda: groups.form(dist.HashStore(), 2))
    next_one.start()
    wait_until(lambda: len(set(transport.made_by)) == 2 * len(late))
    transport.held.set()
    for thread in (*late, next_one):
        thread.join(WAIT_S)
    return outcome, [transport.made_by.count(thread) for thread in late], len(groups.insides)


def test_a_thread_that_is_late_in_forming_ends_with_its_generation() -> None:
    [(outcome, made, formed)] = run_ranks(1, form_beside_threads_that_are_late)
    assert (outcome, set(made), formed) == ("PeersLostError", {1}, 8)


# The store in which groups meet.


def polling(client: dist.Store, *, is_over: Callable[[], bool] = lambda: False, timeout_s: float = WAIT_S) -> Any:
    return PollingStore(client, threading.Lock(), "7/", is_over, timeout_s)


def test_a_polling_store_is_a_part_of_its_client() -> None:
    client = dist.HashStore()
    store = polling(client)
    store.set("a", "1")
    assert (client.get("7/a"), store.get("a"), store.add("n", 2)) == (b"1", b"1", 2)
    assert (store.check(["a", "n"]), store.check(["a", "b"])) == (True, False)


def test_a_polling_store_waits_for_what_another_sets() -> None:
    client = dist.HashStore()
    store = polling(client)
    asked = threading.Event()
    store._is_over = lambda: bool(asked.set())
    setter = threading.Thread(target=lambda: asked.wait(WAIT_S) and client.set("7/a", "late"))
    setter.start()
    assert store.get("a") == b"late"
    setter.join()
    assert asked.is_set()


@pytest.mark.parametrize("timeout", [None, timedelta(seconds=WAIT_S)])
def test_a_wait_in_a_polling_store_ends_when_others_are_lost(timeout: timedelta | None) -> None:
    answers = iter([False, False, True])
    store = polling(dist.HashStore(), is_over=lambda: next(answers))
    with pytest.raises(PeersLostError, match="rendezvous: other ranks were lost"):
        store.wait(["a"], timeout)


@pytest.mark.parametrize(("own_s", "asked_s"), [(0.02, None), (0.02, WAIT_S), (WAIT_S, 0.02)])
def test_a_wait_in_a_polling_store_has_a_deadline(own_s: float, asked_s: float | None) -> None:
    store = polling(dist.HashStore(), timeout_s=own_s)
    with pytest.raises(PeersLostError, match=r"got no \['a'\] in 0.02 s"):
        store.wait(["a"], None if asked_s is None else timedelta(seconds=asked_s))


@pytest.mark.parametrize("ask", [lambda store: store.set("a", "1"), lambda store: store.add("a", 1)])
def test_a_polling_store_that_is_over_asks_nothing(ask: Callable[[Any], object]) -> None:
    client = dist.HashStore()
    with pytest.raises(PeersLostError, match="rendezvous: other ranks were lost"):
        ask(polling(client, is_over=lambda: True))
    assert client.num_keys() == 0


def test_a_polling_store_asks_less_and_less_often() -> None:
    asked: list[float] = []
    store = polling(dist.HashStore(), is_over=lambda: bool(asked.append(time.monotonic())), timeout_s=0.4)
    with pytest.raises(PeersLostError, match="got no"):
        store.wait(["a"])
    assert 10 < len(asked) < 60
    assert asked[1] - asked[0] < asked[-1] - asked[-2]


# The sockets that are a generation's.


@pytest.fixture
def pair() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    with contextlib.ExitStack() as stack:

        def make() -> tuple[socket.socket, socket.socket]:
            left, right = socket.socketpair()
            return stack.enter_context(left), stack.enter_context(right)

        yield make


def passes(ends: tuple[socket.socket, socket.socket]) -> bool:
    """Return whether what is sent at one end arrives at the other."""
    try:
        ends[0].send(b"x")
        return ends[1].recv(1) == b"x"
    except OSError:
        return False


def test_only_what_was_opened_for_a_generation_is_cut(pair) -> None:
    transport = GlooTransport()
    before = pair()
    transport.begin()
    during = pair()
    transport.formed()
    after = pair()
    transport.cut([])
    assert [passes(ends) for ends in (before, during, after)] == [True, False, True]


def test_a_generation_that_is_being_formed_can_be_cut(pair) -> None:
    transport = GlooTransport()
    before = pair()
    transport.begin()
    during = pair()
    transport.cut([])
    assert [passes(ends) for ends in (before, during)] == [True, False]


def test_a_file_that_got_the_number_of_a_generations_socket_is_not_cut(pair) -> None:
    transport = GlooTransport()
    transport.begin()
    during = pair()
    transport.formed()
    numbers = {end.fileno() for end in during}
    for end in during:
        end.close()
    later = pair()
    assert {end.fileno() for end in later} == numbers
    transport.cut([])
    assert passes(later)


def test_a_socket_that_gets_the_number_during_a_cut_is_not_cut(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = GlooTransport()
    transport.begin()
    during = pair()
    transport.formed()
    later: list[tuple[socket.socket, socket.socket]] = []

    def close_and_dup(fd: int, *, dup: Callable[[int], int] = os.dup) -> int:
        if not later:
            numbers = {end.fileno() for end in during}
            for end in during:
                end.close()
            later.append(pair())
            assert {end.fileno() for end in later[0]} == numbers
        return dup(fd)

    monkeypatch.setattr(os, "dup", close_and_dup)
    transport.cut([])
    monkeypatch.undo()
    assert passes(later[0])


def test_a_listening_socket_is_not_cut() -> None:
    transport = GlooTransport()
    transport.begin()
    with socket.create_server(("127.0.0.1", 0)) as server:
        transport.cut([])
        socket.create_connection(server.getsockname(), WAIT_S).close()
        server.accept()[0].close()


def test_it_is_quiet_once_all_that_came_is_read(pair) -> None:
    transport = GlooTransport()
    transport.begin()
    left, right = pair()
    transport.formed()
    others = pair()
    others[0].send(b"not the generation's")
    assert transport.is_quiet()
    left.send(b"late")
    transport.cut([])
    assert not transport.is_quiet()
    right.recv(4)
    assert transport.is_quiet()


# NCCL's transport, on a device that is not there: what it asks of CUDA.


class FakeEvent:
    """A point in a stream, reached after some looks."""

    looks = 0

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        FakeEvent.looks -= 1
        return FakeEvent.looks <= 0


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> NcclTransport:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "1")  # as torchrun does; undone when the test ends
    return nccl_without_cuda(monkeypatch)


def nccl_without_cuda(monkeypatch: pytest.MonkeyPatch) -> NcclTransport:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return NcclTransport()


def test_nccl_is_kept_from_ending_those_who_survive(nccl: NcclTransport) -> None:
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_what_was_launched_is_waited_for_unless_it_does_not_count(nccl: NcclTransport) -> None:
    FakeEvent.looks = 5
    nccl.settle(lambda: False, WAIT_S)
    assert FakeEvent.looks == 0
    FakeEvent.looks = 1 << 60
    nccl.settle(lambda: True, WAIT_S)
    with pytest.raises(PeersLostError, match=r"operations on cuda:0 took more than 0\.01 s"):
        nccl.settle(lambda: False, 0.01)


class StuckGroup:
    """A group whose abort takes its time."""

    def __init__(self) -> None:
        self.aborts = 0
        self.may_end = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.may_end.wait(WAIT_S)


def test_a_device_is_quiet_once_all_aborts_and_all_streams_are_done(
    nccl: NcclTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained, synchronized = threading.Event(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda at: synchronized.append(at) or drained.wait(WAIT_S))
    stuck = [StuckGroup(), StuckGroup()]
    for _ in range(2):
        nccl.begin()
        begun_s = time.monotonic()
        for _ in range(3):
            nccl.cut(stuck)
            assert not nccl.is_quiet()
        assert not synchronized, "the device was asked before all was aborted"
        for group in stuck:
            group.may_end.set()
        assert wait_until(lambda: not nccl.is_quiet() and bool(synchronized))
        assert not nccl.is_quiet()
        drained.set()
        assert wait_until(nccl.is_quiet)
        assert time.monotonic() - begun_s < WAIT_S / 3, "a call blocked"
        assert ([group.aborts for group in stuck], synchronized) == ([1, 1], [torch.device("cuda", 0)])
        stuck = [StuckGroup(), StuckGroup()]
        synchronized.clear()
        drained.clear()


def lose_the_device() -> str:
    def fail(device: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    nccl = nccl_without_cuda(monkeypatch)
    nccl.begin()
    wait_until(nccl.is_quiet)
    return "it went on"


def test_a_device_that_is_lost_ends_the_process_by_a_signal() -> None:
    with pytest.raises(RankFailedError, match="rank 0 died"):
        run_ranks(1, lose_the_device)


def test_what_was_open_before_is_not_cut_even_before_anything_is_formed() -> None:
    """A generation can end before a rank that is new in it has begun to form its groups."""
    here, there = socket.socketpair()
    with here, there:
        GlooTransport().cut([])
        here.sendall(b"still open")
        assert there.recv(16) == b"still open"
