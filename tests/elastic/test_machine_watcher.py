"""A watcher makes its machine a node, calls supervisors, and acts on the job's end.

The watchers belong to the test's process; `test_standing_by.py` has them as processes.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch.distributed as dist

from moe_ckpt.elastic.machine_calls import Call, listen_for_supervisors, wait_for_call
from moe_ckpt.elastic.machine_watcher import MachineWatcher, WatcherSettings
from moe_ckpt.elastic.machines import Machine, MachineBoard
from tests.ports import held_port
from tests.waits import WAIT_S

NUM_NODES, NUM_MACHINES = 2, 4
LOCAL, UNREACHABLE = "127.0.0.1", "255.255.255.255"


class Watched:
    """The watcher of a machine with a number of torchrun.

    `done` has what the watcher has done beside calls: `stop`, or the number of agents
    for which it has arrived at the exit barrier.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        store: dist.Store,
        number: int,
        *,
        host: str = UNREACHABLE,
        port: int = 0,
    ) -> None:
        self.board = MachineBoard(store)
        self.name = f"machine{number}"
        self.done: list[str | int] = []
        self._root = folder / self.name
        self._root.mkdir()
        self._supervisors = stack.enter_context(listen_for_supervisors(self._root))
        machines = stack.enter_context(socket.create_server((LOCAL, port)))
        settings = WatcherSettings(
            root=self._root,
            name=self.name,
            number=number,
            host=host,
            num_nodes=NUM_NODES,
            num_machines=NUM_MACHINES,
            node_s=WAIT_S,
        )
        self.watcher = MachineWatcher(
            settings,
            self.board,
            machines=machines,
            supervisors=self._supervisors,
            stop_supervisors=lambda: self.done.append("stop"),
            answer_exit_barrier=self.done.append,
        )

    def take(self) -> None:
        """Turn until the machine is a node."""
        self.turn_until(lambda: self.watcher.node is not None)

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.watcher.turn()

    def ask(self) -> SimpleQueue[Call | None]:
        """Return a queue for the call of a supervisor that asks the watcher now."""
        calls = SimpleQueue[Call | None]()
        asking = threading.Thread(
            target=lambda: calls.put(wait_for_call(self._root)), daemon=True
        )
        asking.start()
        self.watcher.admit(self._supervisors)
        return calls


def register(
    store: dist.Store, name: str, number: int, port: int, host: str = LOCAL
) -> None:
    MachineBoard(store).register(
        Machine(name=name, number=number, host=host, port=port)
    )


def give_to_other(store: dist.Store, node: int, port: int, host: str = LOCAL) -> None:
    """Make another machine a node, in place of its present machine."""
    register(store, f"other{node}", node, port, host)
    board = MachineBoard(store)
    assert board.become(node, f"other{node}", after=board.holder(node))


class Ending:
    """Machines at one address, whose processes end."""

    def __init__(self, stack: ExitStack) -> None:
        self._listening = stack.enter_context(
            socket.create_server((LOCAL, held_port(stack)))
        )
        self.port: int = self._listening.getsockname()[1]

    def end(self, num_connections: int) -> None:
        """Wait for connections, and end them and their address."""
        links = [self._listening.accept()[0] for _ in range(num_connections)]
        self._listening.close()
        for link in links:
            link.close()


class MeetingStore(dist.HashStore):
    """A store in which two processes swap the machine of a node at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._both_swap = threading.Barrier(2)
        self._num_swaps = 0

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        if expected_value.startswith("other"):
            self._both_swap.wait(WAIT_S)
            self._num_swaps += 1
        return super().compare_set(key, expected_value, desired_value)

    def has_met(self) -> bool:
        return self._num_swaps > 0


def test_one_of_two_spares_becomes_the_node_that_is_lost(
    tmp_path: Path, stack: ExitStack
) -> None:
    store, ending = MeetingStore(), Ending(stack)
    give_to_other(store, 0, ending.port)
    give_to_other(store, 1, 1, UNREACHABLE)
    MachineBoard(store).sign("other0")
    spares = [Watched(stack, tmp_path, store, number) for number in (2, 3)]
    calls = [spare.ask() for spare in spares]
    for spare in spares:
        spare.watcher.look()
    ending.end(len(spares))
    with ThreadPoolExecutor(2) as threads:
        # both see the loss, and only one is the node after its swap
        list(threads.map(lambda spare: spare.turn_until(store.has_met), spares))
    [taker] = [n for n, spare in enumerate(spares) if spare.watcher.node is not None]
    assert spares[taker].watcher.node == 0
    assert spares[taker].board.holder(0) == spares[taker].name
    call = calls[taker].get(timeout=WAIT_S)
    assert call is not None
    why = "its processes on 127.0.0.1 have ended"
    assert (call.node, call.why) == (0, why)
    assert 0 < call.last_seen_unix_s <= call.found_unix_s <= time.time()
    spares[1 - taker].watcher.end(5)
    assert calls[1 - taker].get(timeout=WAIT_S) == Call(node=None, status=5)


def test_a_spare_whose_node_was_taken_becomes_another_one(
    tmp_path: Path, stack: ExitStack
) -> None:
    store, ending = dist.HashStore(), Ending(stack)
    for node in range(NUM_NODES):
        give_to_other(store, node, ending.port)
    spares = [Watched(stack, tmp_path, store, number) for number in (2, 3)]
    for spare in spares:
        spare.watcher.look()
    ending.end(NUM_NODES * len(spares))
    for spare in spares:
        spare.take()
    assert [spare.watcher.node for spare in spares] == [0, 1]


@pytest.mark.parametrize("has_looked", [True, False])
def test_a_machine_that_was_replaced_is_a_spare(
    tmp_path: Path, stack: ExitStack, has_looked: bool
) -> None:
    """A supervisor may ask before the watcher, which was stopped for long, has looked.

    The machine may become its node again.
    """
    store = dist.HashStore()
    replaced = Watched(stack, tmp_path, store, 1)
    assert replaced.watcher.node == 1
    assert replaced.ask().get(timeout=WAIT_S) == Call(node=1)
    give_to_other(store, 1, 1, UNREACHABLE)
    if has_looked:
        replaced.watcher.look()
        assert replaced.watcher.node is None
    calls = replaced.ask()
    assert replaced.watcher.node is None
    ending = Ending(stack)
    register(store, "other1", 1, ending.port)
    replaced.watcher.look()
    ending.end(1)
    replaced.take()
    call = calls.get(timeout=WAIT_S)
    assert call is not None
    assert (call.node, bool(call.why)) == (1, True)


def test_a_spare_that_ends_right_after_it_has_become_a_node_is_lost_at_once(
    tmp_path: Path, stack: ExitStack
) -> None:
    """There is no time for a connection to the machine as a node."""
    store, ending = dist.HashStore(), Ending(stack)
    for node in range(NUM_NODES):
        give_to_other(store, node, 1, UNREACHABLE)
    register(store, "spare2", 2, ending.port)
    other = Watched(stack, tmp_path, store, 3)
    other.watcher.look()
    assert MachineBoard(store).become(0, "spare2", after="other0")
    ending.end(1)
    calls = other.ask()
    other.take()
    call = calls.get(timeout=WAIT_S)
    assert call is not None
    assert (call.node, call.why) == (0, "its processes on 127.0.0.1 have ended")


@pytest.mark.parametrize("noted", [None, Call(node=0, why="lost before")])
def test_a_watcher_that_is_started_again_finds_its_machines_node(
    tmp_path: Path, stack: ExitStack, noted: Call | None
) -> None:
    """Another spare may have taken the node of an earlier loss."""
    store = dist.HashStore()
    board = MachineBoard(store)
    if noted:
        board.note_call("machine2", noted)
    board.become(1, "machine2", after="")
    again = Watched(stack, tmp_path, store, 2)
    assert again.watcher.node == 1
    assert again.ask().get(timeout=WAIT_S) == Call(node=1)


class KilledError(Exception):
    """The watcher is killed."""


class KillingStore(dist.HashStore):
    """A store in which a watcher is killed right after its machine is a node."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        there = super().compare_set(key, expected_value, desired_value)
        if expected_value.startswith("other"):
            raise KilledError
        return there


def test_a_watcher_that_is_killed_as_it_takes_a_node_leaves_the_reason(
    tmp_path: Path, stack: ExitStack
) -> None:
    store, ending = KillingStore(), Ending(stack)
    give_to_other(store, 0, 1, UNREACHABLE)
    give_to_other(store, 1, ending.port)
    killed = Watched(stack, tmp_path, store, 2)
    killed.watcher.look()
    ending.end(1)
    with pytest.raises(KilledError):
        killed.take()
    (tmp_path / "again").mkdir()
    again = Watched(stack, tmp_path / "again", store, 2)
    call = again.ask().get(timeout=WAIT_S)
    assert call is not None
    assert (call.node, call.why) == (1, "its processes on 127.0.0.1 have ended")
    assert 0 < call.last_seen_unix_s <= call.found_unix_s <= time.time()


@pytest.mark.parametrize(
    ("number", "status", "num_come", "done"),
    [
        pytest.param(0, 0, 3, [2], id="the first node answers for absent machines"),
        pytest.param(0, 0, 4, [1], id="the first node answers for one machine"),
        pytest.param(0, 3, 3, ["stop"], id="the first node after a failure"),
        pytest.param(1, 0, 3, [], id="another node"),
        pytest.param(1, 3, 3, ["stop"], id="another node after a failure"),
        pytest.param(2, 0, 3, [], id="a spare"),
        pytest.param(2, 3, 3, [], id="a spare after a failure"),
    ],
)
def test_the_end_of_a_job_reaches_all_supervisors(
    tmp_path: Path,
    stack: ExitStack,
    number: int,
    status: int,
    num_come: int,
    done: Sequence[str | int],
) -> None:
    """Of the machines, 1 has ended, 2 was started again, and 3 may not have come."""
    store = dist.HashStore()
    ended, alive = held_port(stack), held_port(stack)
    for each, port in [(0, alive), (1, ended), (2, ended), (2, alive), (3, alive)]:
        if each < num_come:
            register(store, f"{port}/{each}", each, port)
    watched = Watched(stack, tmp_path, store, number, host=LOCAL, port=alive)
    # supervisors of a node are called before
    calls = [watched.ask()] if number >= NUM_NODES else []
    watched.watcher.end(status)
    calls.append(watched.ask())
    for call in calls:
        assert call.get(timeout=WAIT_S) == Call(node=None, status=status)
    assert watched.done == done


class LosingStore(dist.HashStore):
    """A store that may be lost."""

    is_lost = False

    def check(self, keys: list[str]) -> bool:
        if self.is_lost:
            raise dist.DistNetworkError("Connection reset by peer")
        return super().check(keys)


@pytest.mark.parametrize(("is_lost", "done"), [(False, []), (True, ["stop"])])
def test_a_replaced_machine_that_thaws_as_the_job_fails_stops_no_supervisor(
    tmp_path: Path, stack: ExitStack, is_lost: bool, done: Sequence[str]
) -> None:
    """Without an answer of the store the machine counts as the node that it was."""
    store = LosingStore()
    replaced = Watched(stack, tmp_path, store, 1)
    give_to_other(store, 1, 1, UNREACHABLE)
    store.is_lost = is_lost
    replaced.watcher.end(3)
    assert replaced.done == done
    assert replaced.ask().get(timeout=WAIT_S) == Call(node=None, status=3)


def test_without_absent_machines_the_exit_barrier_needs_no_answer(
    tmp_path: Path, stack: ExitStack
) -> None:
    store = dist.HashStore()
    port = held_port(stack)
    for number in range(1, NUM_MACHINES):
        register(store, f"machine{number}", number, port)
    first = Watched(stack, tmp_path, store, 0, host=LOCAL, port=port)
    first.watcher.end(0)
    assert first.done == []
