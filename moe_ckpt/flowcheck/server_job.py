"""What `ckpt=flowcheck` adds to the processes of a supervised rank.

Owns: the servers' settings in the job's store, and the parts of worker and daemon that
know servers. Must not: supervise a rank (`run_elastic` does). FlowCheck, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from moe_ckpt.config import FlowcheckConfig, RuntimeConfig, require
from moe_ckpt.elastic.job_store import open_store, write_store_address
from moe_ckpt.flowcheck.mirror.port import MirrorPort
from moe_ckpt.flowcheck.mirror.settings import MirrorSettings, observe_gradients
from moe_ckpt.flowcheck.server_holders import ServerHolders
from moe_ckpt.flowcheck.server_hosts import (
    PART,
    SETTINGS,
    ServerHosts,
    ServerRules,
    ServerSettings,
)
from moe_ckpt.replication.holders import PeerHolders
from moe_ckpt.replication.messages import Ticket
from moe_ckpt.snapshot.arriving_update import OpenGradients


class ServerJob:
    """The checkpoint servers of a job, in the processes of one rank."""

    def __init__(
        self, config: FlowcheckConfig, runtime: RuntimeConfig, global_rank: int
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._rank = global_rank

    def prepare(self) -> None:
        """Check the settings, and write those for which servers on hosts wait.

        Called in the supervisor, before training begins.

        Raises:
            ConfigError: Settings that cannot work, or a mirror port that cannot be
                read.
        """
        if not self._config.on_hosts:
            if mirror := self._mirror():
                # a port that cannot be read is a user error
                MirrorPort(mirror.interface).close()
            return
        runtime, wait_s = self._runtime, self._config.server_wait_s
        wanted = (
            "empty where ckpt.servers=hosts: servers find the job by the store that"
            " torchrun keeps"
        )
        require(not runtime.etcd, "runtime.etcd", runtime.etcd, wanted)
        wanted = (
            f"less than runtime.operation_s={runtime.operation_s:g}: other ranks wait"
            " meanwhile"
        )
        require(wait_s < runtime.operation_s, "ckpt.server_wait_s", wait_s, wanted)
        settings = ServerSettings(
            num_servers=self._config.server_hosts,
            timeout_s=runtime.copy_s,
            most_bytes_per_owner=self._config.memory_budget_bytes,
            mirror=self._mirror(),
            tls=self._config.replication.tls,
        )
        if self._rank == 0:
            open_store(PART).set(SETTINGS, msgspec.json.encode(settings).decode())

    def announce(self, run: Path) -> None:
        """Write the address of the store, where servers on hosts find the job.

        Args:
            run: The run folder.
        """
        if self._config.on_hosts and self._rank == 0:
            write_store_address(run)

    def holders(
        self,
        peers: PeerHolders,
        ticket: Ticket,
        waits: Callable[[], AbstractContextManager[object]],
    ) -> ServerHolders:
        """Return the holders of the rank's states, for the rank's worker.

        Args:
            peers: The daemons of other nodes.
            ticket: The run, and its secret.
            waits: Returns a context inside which the training thread waits for servers.
        """
        if not self._config.on_hosts:
            return ServerHolders(peers, None)
        rules = ServerRules(
            num_servers=self._config.server_hosts,
            copies=self._config.server_copies,
            join_s=self._runtime.join_s,
            wait_s=self._config.server_wait_s,
        )
        # a connection of its own: another thread may need the shared one while this
        # object waits for a server
        store = open_store(PART, own_connection=True)
        return ServerHolders(peers, ServerHosts(store, ticket, rules, waits))

    def observe(self) -> OpenGradients:
        """Begin to capture gradients in the rank's daemon, and return their opener.

        Raises:
            ConfigError: The mirror port cannot be opened.
        """
        mirror = None if self._config.on_hosts else self._mirror()
        return observe_gradients(mirror, self._rank)

    def _mirror(self) -> MirrorSettings | None:
        interface = self._config.mirror_interface
        if interface is None:
            return None
        return MirrorSettings(
            interface=interface,
            captures=self._config.captures,
            loss=self._config.capture_loss,
            keep_iters=self._config.max_lag_iters + 2,
        )
