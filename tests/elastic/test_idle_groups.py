"""Idle process groups continue in the next generation if all members agree.

The vote runs in every order of its requests. The groups are real groups of gloo in real
processes, as the bytes that gloo's sockets have carried decide whether a group is idle,
broken or out of step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.elastic.idle_groups import agree_to_keep
from moe_ckpt.elastic.process_groups import ELASTIC_CPU, ElasticGroups
from moe_ckpt.elastic.supervisor import run_and_exit
from moe_ckpt.linux import duplicate_socket, own_files
from tests.harness.gloo.collectives import outcome_of
from tests.harness.gloo.ranks import run_ranks
from tests.harness.gloo.workers import (
    count_held,
    holds_no_more,
    meet,
    open_groups,
    open_store,
    own_rank,
    wait_until,
)


class NotYetError(Exception):
    """A voter waits for a key, or for its turn to send a request."""


class Replayed:
    """The store for one voter, which repeats its answers to earlier requests.

    The voter may send one further request at most.
    """

    def __init__(self, store: dist.Store, answers: list[Any], *, may_ask: bool) -> None:
        self._store = store
        self._answers = answers
        self._rest = iter(tuple(answers))
        self._may_ask = may_ask

    def add(self, key: str, value: int) -> int:
        return self._ask(partial(self._store.add, key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(partial(self._store.compare_set, key, expected, desired))

    def get(self, key: str) -> bytes:
        if not self._store.check([key]):
            raise NotYetError
        return self._store.get(key)

    def _ask(self, request: Callable[[], Any]) -> Any:
        for answer in self._rest:
            return answer
        if not self._may_ask:
            raise NotYetError
        self._answers.append(request())
        raise NotYetError


class Vote:
    """A vote after some requests of its voters, which were sent in the given order."""

    def __init__(self, positions: Sequence[str | None], order: Sequence[int]) -> None:
        self._positions = positions
        self._store = dist.HashStore()
        self._answers: list[list[Any]] = [[] for _ in positions]
        for voter in order:
            self._run(voter, may_ask=True)

    def decisions(self) -> list[bool | None]:
        """Return each voter's decision; None while the voter has requests, or waits."""
        return [
            self._run(voter, may_ask=False) for voter in range(len(self._positions))
        ]

    def asks(self, voter: int) -> bool:
        """Let a voter send its next request; return whether the voter has one."""
        before = len(self._answers[voter])
        self._run(voter, may_ask=True)
        return len(self._answers[voter]) > before

    def _run(self, voter: int, *, may_ask: bool) -> bool | None:
        store: Any = Replayed(self._store, self._answers[voter], may_ask=may_ask)
        try:
            return agree_to_keep(store, len(self._positions), self._positions[voter])
        except NotYetError:
            return None


def orders(positions: Sequence[str | None]) -> Iterator[tuple[int, ...]]:
    """Yield each order of the voters' requests, from no request to all requests."""
    unseen: list[tuple[int, ...]] = [()]
    while unseen:
        order = unseen.pop()
        yield order
        voters = range(len(positions))
        unseen += [
            (*order, voter) for voter in voters if Vote(positions, order).asks(voter)
        ]


@pytest.mark.parametrize(
    ("positions", "is_kept"),
    [
        (("1/7", "1/7"), True),
        (("1/7", "1/8"), False),
        (("1/7", "2/7"), False),
        (("1/7", None), False),
        ((None, None), False),
        (("3/1", "3/1", "3/1"), True),
        (("3/1", "3/2", "3/1"), False),
        (("3/1", None, "3/1"), False),
        (("3/1", None, "2/1"), False),
    ],
)
def test_members_agree_in_every_order_of_their_requests(
    positions: tuple[str | None, ...], is_kept: bool
) -> None:
    num_orders = 0
    for order in orders(positions):
        decisions = Vote(positions, order).decisions()
        assert set(decisions) <= {None, is_kept}, order
        # after the last request, no voter waits for a member that has voted
        is_last = not any(
            Vote(positions, order).asks(voter) for voter in range(len(positions))
        )
        assert not is_last or None not in decisions, order
        num_orders += is_last
    assert num_orders > 1


WORLD, EARLY, LATE = [0, 1, 2, 3], [0, 1], [2, 3]


class Rank:
    """One rank of four, with a group for each half of the world beside the world."""

    def __init__(self, folder: str) -> None:
        self.number = own_rank()
        self.groups = open_groups(self.number, 4, world=ELASTIC_CPU)
        halves = [dist.new_group(ranks, backend=ELASTIC_CPU) for ranks in (EARLY, LATE)]
        self.half = halves[self.number // 2]
        self.folder, self.store = folder, open_store(folder)

    def form(self, generation: int) -> tuple[int, int]:
        """Form the groups; return the number of formed groups, and of kept groups."""
        self.groups.form(open_store(self.folder), generation)
        return self.groups.num_formed, self.groups.num_kept

    def sum_of(self, group: Any) -> float:
        dist.all_reduce(total := torch.tensor(float(10**self.number)), group=group)
        return total.item()

    def sums(self) -> tuple[float, float]:
        return self.sum_of(self.half), self.sum_of(None)

    def meet(self, name: str) -> None:
        meet(self.store, name, 4)


SUMS = [(11.0, 1111.0)] * 2 + [(1100.0, 1111.0)] * 2


def lose_rank_0(folder: str) -> list[Any]:
    """Return a survivor's numbers of groups and its sums, for each generation.

    Rank 0 dies at the end of each generation.
    """
    if own_rank() == 0:
        for generation in (1, 2, 3):
            pid = os.fork()
            if pid == 0:
                run_and_exit(partial(_be_rank_0, folder, generation))
            os.waitpid(pid, 0)
        return []
    rank = Rank(folder)
    found = []
    for generation in (1, 2, 3):
        found.append((rank.form(generation), rank.sums()))
        pid = int(rank.store.get(f"{generation}/pid"))
        rank.meet(f"{generation} was used")
        if rank.number == 1:
            os.kill(pid, signal.SIGKILL)
        assert outcome_of(lambda: rank.sum_of(None)) == "PeersLostError"
        rank.groups.leave()
    return found


def _be_rank_0(folder: str, generation: int) -> int:
    rank = Rank(folder)
    rank.form(generation)
    rank.sums()
    rank.store.set(f"{generation}/pid", str(os.getpid()))
    rank.meet(f"{generation} was used")
    rank.store.wait(["never"])
    return 0


def test_groups_without_the_lost_rank_go_on(tmp_path: Path) -> None:
    _, *found = run_ranks(4, lose_rank_0, str(tmp_path))
    counts = [[(2, 0)] * 3, *[[(2, 0), (1, 1), (1, 1)]] * 2]
    assert found == [
        [(count, sums) for count in of]
        for of, sums in zip(counts, SUMS[1:], strict=True)
    ]


def stay(groups: ElasticGroups) -> None:
    """Begin no further operation."""


def wait_for_the_other(groups: ElasticGroups) -> None:
    if own_rank() == 0:
        waiting = threading.Event()
        watcher = threading.Thread(target=lambda: waiting.wait() and groups.cut())
        watcher.start()
        work = dist.all_reduce(torch.ones(1), async_op=True)
        waiting.set()
        assert work is not None
        assert outcome_of(work.wait) == "PeersLostError"
        watcher.join()


def await_nothing(groups: ElasticGroups) -> None:
    """Complete an operation for whose outcome rank 0 does not wait."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    assert wait_until(work.is_completed) if own_rank() == 0 else work.wait()


def transfer(groups: ElasticGroups) -> None:
    if own_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)


def be_refused(groups: ElasticGroups) -> None:
    """Begin, as rank 0, an operation that gloo refuses."""
    if own_rank() == 0:
        assert (
            outcome_of(lambda: dist.all_gather([torch.ones(1)] * 3, torch.ones(1)))
            == "PeersLostError"
        )


def lose_the_connection(groups: ElasticGroups) -> None:
    for fd, name in own_files():
        if name.startswith("socket:"):
            with contextlib.suppress(OSError), duplicate_socket(fd) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if connection.family != socket.AF_UNIX and not listens:
                    connection.shutdown(socket.SHUT_RDWR)


LAST_ACTS: dict[Callable[[ElasticGroups], None], bool] = {
    stay: True,
    wait_for_the_other: False,
    await_nothing: False,
    transfer: False,
    be_refused: False,
    lose_the_connection: True,
}
"""Acts of two ranks before their generation ends, and whether the ranks keep their
group.
"""


def go_on_after(
    act: Callable[[ElasticGroups], None], folder: str
) -> tuple[int, list[str]]:
    """Act at the end of the first of three generations.

    Returns:
        The number of groups that the second generation has kept, and the outcomes of a
        sum in each generation.
    """
    groups, store = open_groups(own_rank(), 2, world=ELASTIC_CPU), open_store(folder)
    groups.form(open_store(folder), 1)
    sums = [outcome_of(sum_of_two)]
    act(groups)
    meet(store, "both have acted", 2)
    groups.leave()
    groups.form(open_store(folder), 2)
    num_kept = groups.num_kept
    sums.append(outcome_of(sum_of_two))
    meet(store, "both have the sum", 2)
    groups.leave()
    groups.form(open_store(folder), 3)
    sums.append(outcome_of(sum_of_two))
    meet(store, "the end", 2)  # a process that ends resets connections
    return num_kept, sums


def sum_of_two() -> float:
    dist.all_reduce(total := torch.tensor(10.0 ** own_rank()))
    return total.item()


@pytest.mark.parametrize("act", LAST_ACTS, ids=lambda act: act.__name__)
def test_a_group_is_kept_if_nothing_is_under_way_in_it(
    tmp_path: Path, act: Callable[[ElasticGroups], None]
) -> None:
    # the next operation finds a connection that was lost while the group was idle
    second = "PeersLostError" if act is lose_the_connection else "got 11.0"
    wanted = int(LAST_ACTS[act]), ["got 11.0", second, "got 11.0"]
    assert run_ranks(2, go_on_after, act, str(tmp_path)) == [wanted] * 2


def cut_a_kept_group(folder: str) -> tuple[int, int, float]:
    """Keep a group, and cut the group in the next generation.

    Returns:
        The number of groups that generations 2 and 3 have kept, and a sum in generation
        3.
    """
    groups, store = open_groups(own_rank(), 2, world=ELASTIC_CPU), open_store(folder)
    groups.form(open_store(folder), 1)
    groups.leave()
    groups.form(open_store(folder), 2)
    num_kept = groups.num_kept
    wait_for_the_other(groups)
    meet(store, "the wait has ended", 2)
    groups.leave()
    groups.form(open_store(folder), 3)
    found = num_kept, groups.num_kept, sum_of_two()
    meet(store, "the end", 2)  # a process that ends resets connections
    return found


def test_what_waits_in_a_kept_group_is_cut_off(tmp_path: Path) -> None:
    assert run_ranks(2, cut_a_kept_group, str(tmp_path)) == [(1, 0, 11.0)] * 2


def end_before_all_have_voted(folder: str) -> tuple[str, int, float]:
    """Form groups on rank 0 alone until a cut ends the vote, then on both ranks.

    Returns:
        The outcome of the forming that was cut, the number of groups that the next
        generation has kept, and a sum in that generation.
    """
    groups, store = open_groups(own_rank(), 2, world=ELASTIC_CPU), open_store(folder)
    groups.form(open_store(folder), 1)
    sum_of_two()
    meet(store, "both have the sum", 2)
    groups.leave()
    outcome = "has not voted"
    if own_rank() == 0:
        client = open_store(folder)
        votes = threading.Thread(
            target=lambda: (
                wait_until(lambda: client.num_keys() > before) and groups.cut()
            )
        )
        before = client.num_keys()
        votes.start()
        outcome = outcome_of(lambda: groups.form(client, 2))
        votes.join()
        groups.leave()
        store.set("rank 0 has left", "")
    # without a key of rank 1 meanwhile: rank 0's thread looks for one of its own
    store.wait(["rank 0 has left"])
    groups.form(open_store(folder), 3)
    found = outcome, groups.num_kept, sum_of_two()
    meet(store, "the end", 2)  # a process that ends resets connections
    return found


def test_a_vote_that_a_cut_has_ended_is_held_again(tmp_path: Path) -> None:
    outcomes = "PeersLostError", "has not voted"
    assert run_ranks(2, end_before_all_have_voted, str(tmp_path)) == [
        (each, 1, 11.0) for each in outcomes
    ]


NUM_GENERATIONS = 20


def keep_a_group(folder: str) -> tuple[list[int], tuple[int, int], tuple[int, int]]:
    """Keep a group over many generations.

    Returns:
        The number of kept groups of each generation; then the numbers of open files and
        of threads, in generation 2 and at the end.
    """
    groups, store = open_groups(own_rank(), 2, world=ELASTIC_CPU), open_store(folder)
    client, kept, first = open_store(folder), [], (0, 0)
    for generation in range(1, 1 + NUM_GENERATIONS):
        groups.form(client, generation)
        assert sum_of_two() == 11.0
        kept.append(groups.num_kept)
        first = first if generation > 2 else count_held()
        meet(store, f"the end of {generation}", 2)
        groups.leave()
    # threads that have formed groups end by themselves, but later
    wait_until(lambda: holds_no_more(count_held(), first))
    return kept, first, count_held()


def test_a_group_that_is_kept_for_long_costs_no_more(tmp_path: Path) -> None:
    for kept, first, last in run_ranks(2, keep_a_group, str(tmp_path)):
        assert kept == [0] + [1] * (NUM_GENERATIONS - 1)
        assert holds_no_more(last, first), (first, last)
