"""The machine of a supervisor in a job with spare nodes: which node it is, and when.

A supervisor on a spare machine stands by: it has imported everything that workers need,
and waits for its machine's watcher. Owns: the start of the watcher, the wait for the
watcher's call, and the position of the supervisor's rank in the node of the call. Must
not: supervise (`moe_ckpt.spare_nodes` does, before the next wait).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from moe_ckpt.elastic.janitor import janitor_of_node
from moe_ckpt.elastic.machine_calls import Call, wait_for_call
from moe_ckpt.elastic.machine_watcher import WatcherProcess, WatcherSettings
from moe_ckpt.elastic.machines import MachineBoard
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.linux import boot_id


class OwnMachine:
    """This machine, for one of its supervisors.

    Attributes:
        root: The machine's folder in shared memory.
        host: Address of the machine.
    """

    def __init__(
        self,
        launch: Launch,
        board: MachineBoard,
        root: Path,
        watcher: Callable[[WatcherSettings], WatcherProcess],
        *,
        host: str,
        spare_nodes: int,
        node_s: float,
    ) -> None:
        """Begin to have this machine watched.

        Args:
            launch: This process's position, as torchrun has given it.
            board: The keys of machines.
            root: The machine's folder in shared memory.
            watcher: Returns the machine's watcher.
            host: Address of the machine.
            spare_nodes: `runtime.spare_nodes`.
            node_s: `runtime.node_s`.
        """
        self._launch = launch
        self.root = root
        self.host = host
        self._board = board
        self._num_nodes = launch.num_nodes - spare_nodes
        self._name = f"{host}/{boot_id()}/{root.name}"
        self._watcher = watcher(
            WatcherSettings(
                root=root,
                name=self._name,
                number=launch.node,
                host=host,
                num_nodes=self._num_nodes,
                num_machines=launch.num_nodes,
                node_s=node_s,
            )
        )

    def stands_by(self) -> bool:
        """Return whether this machine is no node now.

        The machine is a spare one, or another machine has become its node.
        """
        node = self._launch.node
        return node >= self._num_nodes or self._board.holder(node) not in (
            "",  # the job begins
            self._name,
        )

    def wait_for_node(self) -> Call:
        """Wait, without limit, until this machine is a node, or the job has ended.

        Returns:
            The call that says so.

        Raises:
            StoreLostError: The store is gone, with which the watcher has ended.
        """
        while True:
            self._watcher.keep()
            if call := wait_for_call(self.root):
                return call
            self._board.require_store()

    def position(self, node: int) -> Launch:
        """Return this process's position in the job while this machine is a node."""
        return self._launch.as_node(node, self._num_nodes)

    def end_job(self, status: int) -> None:
        """Record that the job has ended, so that all machines end.

        Args:
            status: The exit status of the job.
        """
        self._board.end(status)

    def processes(self) -> Mapping[int, str]:
        """Return the names, by pid, of the processes that serve the whole machine.

        A watcher that has died is started again.
        """
        pid = self._watcher.keep()
        watcher = {pid: "watcher of the machine"} if pid else {}
        return {**janitor_of_node(self.root), **watcher}
