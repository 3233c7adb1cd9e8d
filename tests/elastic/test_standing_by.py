"""Machines whose processes are killed: watchers, supervisors and agents are processes.

No watcher finds a loss by silence here: `runtime.node_s` is too long for that.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_ckpt.elastic.checked_store import CheckedStore
from moe_ckpt.elastic.machine_calls import Call
from moe_ckpt.elastic.machine_watcher import WatcherProcess
from moe_ckpt.elastic.machines import MachineBoard
from moe_ckpt.elastic.shared_memory import begin_rank, open_memory_root
from moe_ckpt.elastic.standing_by import OwnMachine
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.errors import StoreLostError
from moe_ckpt.linux import is_stopped
from tests.harness.gloo.processes import Child, Watch
from tests.harness.gloo.workers import open_store, wait_until
from tests.waits import WAIT_S

NUM_LOCAL_RANKS = 2
END = Call(node=None, status=3)

WATCHER = "watcher of the machine"
Connect = Callable[[], dist.Store]


def live_on(connection: Connection) -> None:
    """Act as torchrun's agent."""
    connection.recv()


def supervise(
    connection: Connection, rank: int, memory: Path, agent_pid: int, connect: Connect
) -> None:
    """Act as a supervisor on one of two machines; the second one is a spare.

    At each message the supervisor waits for a call, or answers another question.
    """
    launch = Launch(
        global_rank=rank,
        world_size=2 * NUM_LOCAL_RANKS,
        local_rank=rank % NUM_LOCAL_RANKS,
        local_world_size=NUM_LOCAL_RANKS,
        attempt=0,
    )
    machine = OwnMachine(
        launch,
        MachineBoard(CheckedStore(connect())),
        open_memory_root(memory, agent_pid),
        lambda settings: WatcherProcess(
            settings, agent_pid, lambda: MachineBoard(connect()), lambda absent: None
        ),
        host="127.0.0.1",
        spare_nodes=1,
        node_s=WAIT_S,
    )
    begin_rank(machine.root, rank)
    answers: dict[str, Callable[[], Any]] = {
        "ready?": lambda: True,
        "wait": machine.wait_for_node,
        "processes": machine.processes,
        "end": lambda: machine.end_job(END.status),
    }
    while True:
        try:
            connection.send(answers[connection.recv()]())
        except StoreLostError:
            connection.send("the store is lost")


class OneMachine:
    """A machine: an agent and two supervisors. The first supervisor waits for calls."""

    def __init__(
        self, stack: ExitStack, folder: Path, number: int, connect: Connect
    ) -> None:
        self.stack = stack
        self.memory = folder / f"memory{number}"
        self.memory.mkdir()
        self._agent = Child(stack, live_on)
        arguments = self.memory, self._agent.pid, connect
        self.supervisors = [
            Child(stack, supervise, NUM_LOCAL_RANKS * number + local_rank, *arguments)
            for local_rank in range(NUM_LOCAL_RANKS)
        ]

    def is_ready(self) -> bool:
        """Wait until all supervisors have the store."""
        for supervisor in self.supervisors:
            supervisor.tell("ready?")
        return all(supervisor.hear() for supervisor in self.supervisors)

    def wait(self) -> None:
        self.supervisors[0].tell("wait")

    def call(self) -> Call:
        return self.supervisors[0].hear()

    def processes(self, supervisor: int = 1) -> dict[str, int]:
        """Return the processes of the machine, by name, as a supervisor sees them."""
        self.supervisors[supervisor].tell("processes")
        return {name: pid for pid, name in self.supervisors[supervisor].hear().items()}

    def watcher(self) -> int:
        # the first supervisor may be about to start it
        assert wait_until(lambda: WATCHER in self.processes())
        return self.processes()[WATCHER]

    def kill_watcher(self) -> None:
        pid = self.watcher()
        watch = Watch(self.stack, pid)
        os.kill(pid, signal.SIGKILL)
        watch.wait_for_end()

    def lose(self) -> None:
        for process in (*self.supervisors, self._agent):
            process.kill()


@pytest.fixture
def folder(stack: ExitStack) -> Path:
    """Return a folder with a short path, as the paths of Unix sockets must be short."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))


@pytest.fixture
def machines(
    folder: Path, stack: ExitStack
) -> Callable[..., tuple[OneMachine, OneMachine]]:
    """Return a function that starts the machine of node 0, and a spare one that waits.

    By default the store is a file.
    """

    def start(connect: Connect | None = None) -> tuple[OneMachine, OneMachine]:
        connect = connect or partial(open_store, str(folder))
        node, spare = (OneMachine(stack, folder, number, connect) for number in (0, 1))
        node.wait()
        assert node.call() == Call(node=0)
        spare.wait()
        return node, spare

    return start


def is_watched(folder: Path) -> bool:
    """Return whether another machine has connected to the machine of node 0."""
    machine = MachineBoard(open_store(str(folder))).newest(0)
    assert machine is not None
    connected = re.compile(rf"\d+: \w+:{machine.port:04X} \w+:\w+ 01 ")
    return connected.search(Path("/proc/net/tcp").read_text()) is not None


def test_a_spare_machine_takes_the_node_of_a_machine_that_is_lost(
    machines, folder: Path
) -> None:
    """Of the lost machine nothing is left: its watcher and memory go with its agent."""
    node, spare = machines()
    # a refusal counts only after a connection has ended
    assert wait_until(lambda: is_watched(folder))
    left = [Watch(node.stack, pid) for pid in node.processes().values()]
    assert node.processes(0) == node.processes(1), "a machine has one watcher"
    node.lose()
    call = spare.call()
    assert (call.node, call.why) == (0, "its processes on 127.0.0.1 have ended")
    assert call.last_seen_unix_s <= call.found_unix_s
    for watch in left:
        watch.wait_for_end()
    assert list(node.memory.iterdir()) == []


def test_a_watcher_that_is_killed_is_started_again_and_its_machine_is_not_lost(
    machines,
) -> None:
    node, spare = machines()
    for machine in (node, spare):
        before = machine.watcher()
        machine.kill_watcher()
        assert machine.watcher() != before
    node.wait()
    assert node.call() == Call(node=0), "the machine is the node still"
    node.supervisors[1].tell("end")
    assert spare.call() == END


def test_a_supervisor_whose_call_is_not_taken_sees_the_end_of_the_watcher(
    machines,
) -> None:
    """The watcher is stopped as the supervisor calls it, and then killed."""
    node, _ = machines()
    pid = node.watcher()
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(pid))
    before = num_connections(node)
    node.wait()
    assert wait_until(lambda: num_connections(node) > before)
    node.kill_watcher()
    assert node.call() == Call(node=0)


def num_connections(machine: OneMachine) -> int:
    """Return the number of Unix sockets in a machine's memory."""
    return Path("/proc/net/unix").read_text().count(f"{machine.memory}/")


def test_after_a_failure_the_supervisors_of_nodes_are_stopped_and_no_others(
    machines,
) -> None:
    node, spare = machines()
    node.supervisors[1].tell("end")
    for supervisor in node.supervisors:
        assert supervisor.exit_status() == -signal.SIGTERM
    assert spare.call() == END
    spare.supervisors[1].tell("wait")
    assert spare.supervisors[1].hear() == END


def serve_store(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()


def test_a_spare_machine_waits_no_more_once_the_store_is_lost(machines, start) -> None:
    host = start(serve_store)
    connect = partial(dist.TCPStore, "127.0.0.1", host.hear(), is_master=False)
    _, spare = machines(connect)
    board = MachineBoard(connect())
    assert wait_until(lambda: board.newest(1) is not None)
    machine = board.newest(1)
    assert machine
    # its watcher has all connections by then
    assert wait_until(lambda: bool(board.signs([machine.name])))
    host.kill()
    assert spare.call() == "the store is lost"


def test_a_watcher_that_finds_no_store_ends_with_its_agent(
    folder: Path, stack: ExitStack, start
) -> None:
    """Its client of the store tries to connect for long."""
    host = start(serve_store)
    connect = partial(dist.TCPStore, "127.0.0.1", host.hear(), is_master=False)
    machine = OneMachine(stack, folder, 1, connect)
    assert machine.is_ready()
    host.kill()
    watch = Watch(stack, machine.watcher())
    machine.lose()
    watch.wait_for_end()
