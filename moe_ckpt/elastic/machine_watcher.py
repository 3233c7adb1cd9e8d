"""The watcher of a machine, in a job with spare nodes.

The watcher is a process that lives as long as torchrun's agent on the machine. It gives
signs of life. On a spare machine it also watches the other machines, and makes this
machine a node in place of a lost one.

    a node's watcher    sign ................. the node has another machine: a spare
    a spare's watcher   sign, look at nodes -- a machine is lost: become its node
    at the job's end    calls standing-by supervisors to end; after a failure, asks this
                        machine's supervisors to save and stop

Owns: this process, and the socket at which other watchers see that the machine lives.
Must not: touch ranks or their memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import NoReturn

from moe_ckpt.elastic.janitor import SUPERVISORS
from moe_ckpt.elastic.lost_machines import Loss, LostMachines
from moe_ckpt.elastic.machine_calls import Call, listen_for_supervisors, send_call
from moe_ckpt.elastic.machines import Machine, MachineBoard
from moe_ckpt.elastic.node_process import (
    Main,
    node_process,
    node_processes,
    start_node_process,
)

WATCHER = "watcher"
"""The watcher's name among the node's processes."""

_SIGNS = 5  # in `runtime.node_s`
_ANSWER_S = 2.0
_CONNECTIONS = 4  # kept of each machine, on average


@dataclass(frozen=True, kw_only=True, slots=True)
class WatcherSettings:
    """What a watcher needs to know of its machine and job."""

    root: Path
    """The machine's folder in shared memory."""

    name: str
    """Name of the machine."""

    number: int
    """torchrun's number of the machine."""

    host: str
    """Address of the machine."""

    num_nodes: int
    """Number of nodes that train."""

    num_machines: int
    """Number of machines that torchrun was told to start."""

    node_s: float
    """`runtime.node_s`."""


class WatcherProcess:
    """Starts the watcher of this machine, from any of the machine's supervisors."""

    def __init__(
        self,
        settings: WatcherSettings,
        agent_pid: int,
        open_board: Callable[[], MachineBoard],
        answer_exit_barrier: Callable[[int], None],
    ) -> None:
        """Prepare to start the watcher.

        Args:
            settings: The settings of the watcher.
            agent_pid: torchrun's agent.
            open_board: Opens the keys of machines over a new connection.
            answer_exit_barrier: Arrives at the barrier in which torchrun's agents meet
                at the end, for a number of agents that are gone.
        """
        self._settings = settings
        self._agent_pid = agent_pid
        self._open_board = open_board
        self._answer_exit_barrier = answer_exit_barrier
        self._listening: socket.socket | None = None

    def keep(self) -> int | None:
        """Start the watcher unless it runs; return its pid, if known.

        Call from a process with one thread.
        """
        root = self._settings.root
        pid = node_process(root, WATCHER)
        if pid is None:
            start_node_process(root, WATCHER, self._agent_pid, self._prepare)
            pid = node_process(root, WATCHER)
        return pid

    @contextlib.contextmanager
    def _prepare(self) -> Iterator[Main]:
        # this process keeps the socket, too: as long as one of the two lives, the
        # machine does not count as lost
        machines = self._listening or _listen(self._settings.host)
        self._listening = machines
        # this process must not keep the other socket: supervisors see at its end that
        # the watcher has ended
        with listen_for_supervisors(self._settings.root) as supervisors:
            yield lambda agent: self._main(agent, machines, supervisors)

    def _main(
        self, agent: int, machines: socket.socket, supervisors: socket.socket
    ) -> NoReturn:
        try:
            Thread(target=_end_with, args=(agent,), name="agent", daemon=True).start()
            null = os.open(os.devnull, os.O_RDWR)
            # a reader of the job's output must not wait for this process
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            os.chdir("/")
            watcher = MachineWatcher(
                self._settings,
                self._open_board(),
                machines=machines,
                supervisors=supervisors,
                stop_supervisors=self._stop_supervisors,
                answer_exit_barrier=self._answer_exit_barrier,
            )
            watcher.run(self._open_board())
        finally:
            os._exit(0)

    def _stop_supervisors(self) -> None:
        for pid in node_processes(self._settings.root, SUPERVISORS):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


class MachineWatcher:
    """The work of a watcher."""

    def __init__(
        self,
        settings: WatcherSettings,
        board: MachineBoard,
        *,
        machines: socket.socket,
        supervisors: socket.socket,
        stop_supervisors: Callable[[], None],
        answer_exit_barrier: Callable[[int], None],
    ) -> None:
        """Register the machine, and make it a node if it is one from the start.

        Args:
            settings: The machine and the job.
            board: The keys of machines, over a connection of this thread.
            machines: The socket to which other machines connect.
            supervisors: The socket at which the machine's supervisors wait for calls.
            stop_supervisors: Asks the machine's supervisors to save and stop.
            answer_exit_barrier: As in `WatcherProcess`.
        """
        self._settings = settings
        self._board = board
        self._supervisors = supervisors
        self._stop_supervisors = stop_supervisors
        self._answer_exit_barrier = answer_exit_barrier
        self._waiting: list[socket.socket] = []
        self._look_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(supervisors, selectors.EVENT_READ, self.admit)
        self._selector.register(machines, selectors.EVENT_READ, self._admit_machine)
        self._others: list[socket.socket] = []
        self._lost = LostMachines(settings.node_s, self._selector)
        name, number = settings.name, settings.number
        port = machines.getsockname()[1]
        board.register(Machine(name=name, number=number, host=settings.host, port=port))
        if number < settings.num_nodes:
            board.become(number, name, after="")
        self._call = self._call_of_node()

    def run(self, ends: MachineBoard) -> NoReturn:
        """Watch until the process ends.

        Args:
            ends: The keys of machines, over another connection, for a thread that waits
                for the end of the job.
        """
        read_end, write_end = os.pipe()
        self._selector.register(read_end, selectors.EVENT_READ, self._read_end)
        Thread(
            target=_tell_end, args=(ends, write_end), name="job-end", daemon=True
        ).start()
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for an event, or for the time of the next look; then look."""
        wait_s = max(0.0, self._look_s - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            key.data(key.fileobj)
        self.look()

    @property
    def node(self) -> int | None:
        """The node that this machine is; None: none."""
        return self._call.node if self._call else None

    def look(self) -> None:
        """Give a sign of life; on a spare machine, take the place of a lost one."""
        board, name = self._board, self._settings.name
        self._look_s = time.monotonic() + self._settings.node_s / _SIGNS
        board.sign(name)
        if self._has_ended() or self._is_node():
            return
        holders = {
            node: holder
            for node in range(self._settings.num_nodes)
            if (holder := board.holder(node))
        }
        nodes = {holder: board.machine(holder) for holder in holders.values()}
        watched = nodes | self._other_spares(nodes.values())
        self._lost.watch(watched)
        losses = self._lost.look(board.signs(watched))
        for node, holder in holders.items():
            if holder in losses and self._take(node, holder, losses[holder]):
                return

    def admit(self, supervisors: socket.socket) -> None:
        """Admit a supervisor that waits for a call."""
        supervisor, _ = supervisors.accept()
        self._waiting.append(supervisor)
        # asked anew: this machine may have been stopped for long
        if self._has_ended() or self._is_node():
            self._send()

    def _admit_machine(self, machines: socket.socket) -> None:
        """Keep a connection of another machine, which sees at its end that this ended.

        Only the newest connections are kept: anybody can connect.
        """
        # OSError: the other machine has given up meanwhile
        with contextlib.suppress(OSError):
            self._others.append(machines.accept()[0])
        for old in self._others[: -_CONNECTIONS * self._settings.num_machines]:
            old.close()
        del self._others[: -_CONNECTIONS * self._settings.num_machines]

    def end(self, status: int) -> None:
        """Act on the end of the job.

        Args:
            status: The exit status of the job.
        """
        node = self.node if self._may_be_node() else None
        self._call = Call(node=None, status=status)
        self._send()
        if status and node is not None:
            self._stop_supervisors()
        if status == 0 and node == 0 and (absent := self._count_absent()):
            self._answer_exit_barrier(absent)

    def _has_ended(self) -> bool:
        return self._call is not None and self._call.node is None

    def _is_node(self) -> bool:
        """Return whether this machine is a node still; another may have replaced it."""
        node = self.node
        if node is not None and self._board.holder(node) != self._settings.name:
            self._call = None
        return self.node is not None

    def _may_be_node(self) -> bool:
        """Return whether this machine is a node still, as far as the store answers.

        A machine that was frozen may have been replaced without having looked since.
        """
        try:
            return self._is_node()
        except RuntimeError:  # torch's error for a store that is gone
            return self.node is not None

    def _call_of_node(self) -> Call | None:
        """Return the call for the node that this machine is; None: it is no node.

        A watcher before this one may have made the machine a node.
        """
        board, name = self._board, self._settings.name
        for node in range(self._settings.num_nodes):
            if board.holder(node) == name:
                noted = board.noted_call(name)
                return noted if noted and noted.node == node else Call(node=node)
        return None

    def _other_spares(self, nodes: Iterable[Machine]) -> dict[str, Machine]:
        """Return the other spare machines by name.

        A machine whose end shows at once needs a connection, which a machine that has
        just become a node has from before.

        Args:
            nodes: The machines that are nodes.
        """
        numbers = set(range(self._settings.num_machines))
        numbers -= {self._settings.number, *(machine.number for machine in nodes)}
        newest = map(self._board.newest, sorted(numbers))
        return {machine.name: machine for machine in newest if machine}

    def _take(self, node: int, holder: str, loss: Loss) -> bool:
        """Become a node in place of its lost machine, and call the supervisors.

        Returns:
            False if another spare machine has taken the node meanwhile.
        """
        call = Call(
            node=node,
            why=loss.why,
            last_seen_unix_s=loss.last_seen_unix_s,
            found_unix_s=time.time(),
        )
        self._board.note_call(self._settings.name, call)
        if not self._board.become(node, self._settings.name, after=holder):
            return False
        self._lost.close()
        self._call = call
        self._send()
        return True

    def _send(self) -> None:
        assert self._call is not None
        for supervisor in self._waiting:
            send_call(supervisor, self._call)
        self._waiting.clear()

    def _read_end(self, read_end: int) -> None:
        self._selector.unregister(read_end)
        # empty: the thread that waits for the end has lost the store
        if status := os.read(read_end, 1):
            self.end(int.from_bytes(status))

    def _count_absent(self) -> int:
        """Return the number of torchrun's machines that do not answer."""
        machines = map(self._board.newest, range(self._settings.num_machines))
        return sum(machine is None or not _answers(machine) for machine in machines)


def _end_with(agent: int) -> NoReturn:
    """End this process with the agent, also while a request to the store blocks."""
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.poll()
    os._exit(0)


def _tell_end(ends: MachineBoard, write_end: int) -> None:
    # torch's error for a store that is gone
    with contextlib.suppress(RuntimeError):
        os.write(write_end, ends.wait_for_end().to_bytes())
    os.close(write_end)


def _answers(machine: Machine) -> bool:
    try:
        socket.create_connection((machine.host, machine.port), _ANSWER_S).close()
    except OSError:
        return False
    return True


def _listen(host: str) -> socket.socket:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, 0), family=family)
    listening.setblocking(False)
    return listening
