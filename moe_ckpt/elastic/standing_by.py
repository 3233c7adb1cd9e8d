"""The machine of a supervisor in a job with spare nodes: which node it is, and when.

A supervisor on a spare machine stands by: it has imported everything that workers need,
and waits for its machine's watcher. Owns: the way of one supervisor from node to node.
Must not: supervise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.elastic.janitor import janitor_of_node
from moe_ckpt.elastic.machine_calls import Call, wait_for_call
from moe_ckpt.elastic.machine_watcher import WatcherProcess, WatcherSettings
from moe_ckpt.elastic.machines import MachineBoard
from moe_ckpt.elastic.torchrun import Launch
from moe_ckpt.linux import boot_id


class OwnMachine:
    """This machine, for one of its supervisors.

    Attributes:
        root: The machine's folder in shared memory.
        host: Address of the machine.
        is_spare: Whether the machine is none of the nodes with which the job began.
    """

    def __init__(
        self,
        launch: Launch,
        store: dist.Store,
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
            store: The keys of machines.
            root: The machine's folder in shared memory.
            watcher: Returns the machine's watcher.
            host: Address of the machine.
            spare_nodes: `runtime.spare_nodes`.
            node_s: `runtime.node_s`.
        """
        self._launch = launch
        self.root = root
        self.host = host
        self.is_spare = launch.node >= launch.num_nodes - spare_nodes
        self._board = MachineBoard(store)
        self._num_nodes = launch.num_nodes - spare_nodes
        self._watcher = watcher(
            WatcherSettings(
                root=root,
                name=f"{host}/{boot_id()}/{root.name}",
                number=launch.node,
                host=host,
                num_nodes=self._num_nodes,
                num_machines=launch.num_nodes,
                node_s=node_s,
            )
        )

    def wait_for_node(self) -> Call:
        """Wait, without limit, until this machine is a node, or the job has ended.

        Returns:
            The call that says so.

        Raises:
            StoreLostError: The store is gone.
        """
        while True:
            self._watcher.keep()
            if call := wait_for_call(self.root):
                return call
            # any request: the watcher may have ended because the store is gone, and no
            # later watcher could live then
            self._board.holder(0)

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
