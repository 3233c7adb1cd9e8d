"""The objects with which one rank survives the loss of ranks: page, memory, peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.elastic.generations import Member
from moe_ckpt.elastic.server_hosts import ServerHosts
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.messages import Address, Ticket
from moe_ckpt.replication.placement import copy_holders
from moe_ckpt.snapshot.blobs import held_path


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ElasticContext:
    """The objects with which one worker survives the loss of ranks."""

    member: Member
    """The rank, its incarnation, and the number of ranks."""

    page: StatusPage
    """Status page of the worker."""

    memory: Path
    """The rank's folder in shared memory."""

    daemon: DaemonClient | None
    """Client of the rank's replica daemon; None if peers keep no copies and the rank
    runs no daemon.
    """

    address_of: Callable[[int], Address]
    """Returns the address of a rank's daemon."""

    ticket: Ticket
    """The run, and its secret, for connections to daemons and servers."""

    replicas: int
    """Number of nodes that hold copies of the rank's memory."""

    ranks_per_node: int
    """Number of consecutive ranks that fail together."""

    copy_s: float
    """Time limit for a copy of a window, and for a fetch of a window, in seconds."""

    peers: int | None = None
    """Number of consecutive ranks that train one stage, if copies must stay among these
    ranks; else None.
    """

    at_end: Callable[[Callable[[], None]], None] = lambda _: None
    """Registers an action that runs, in another thread, at each end of a generation."""

    serves_itself: bool = False
    """Whether the rank's own daemon also holds the rank's state, unless servers on
    `hosts` are in use.
    """

    hosts: ServerHosts | None = None
    """Checkpoint servers on machines that train nothing; None if the job has none.
    Ranks agree on these servers before `use_peers`.
    """

    def use_peers(self) -> None:
        """Let the daemon copy to all `holders`, at their present addresses.

        Raises:
            CheckpointSaveError: The rank's own daemon does not answer in time.
        """
        if self.daemon:
            self.page.wait_for_copies(True)
            try:
                self.daemon.use_peers([self.address(holder) for holder in self.holders])
            finally:
                # otherwise the supervisor would not notice a later hang
                self.page.wait_for_copies(False)

    @property
    def uses_hosts(self) -> bool:
        """Whether servers on hosts hold the states, and no rank does."""
        return self.hosts is not None and self.hosts.is_in_use

    @property
    def own_states(self) -> Path:
        """The folder on this machine for states of this rank that servers have made.

        A recovery takes the rank's states from this folder.
        """
        return (
            self.memory / "from_hosts"
            if self.uses_hosts
            else held_path(self.memory, self.member.global_rank)
        )

    @property
    def servers_on_hosts(self) -> tuple[int, ...]:
        """The numbers of all servers on hosts that are in use, counted as holders.

        Numbers of holders begin with the ranks, so server 0 has the number
        `world_size`.
        """
        numbers = self.hosts.numbers if self.hosts else ()
        return tuple(self.member.world_size + number for number in numbers)

    def hosts_lines(self) -> list[str]:
        """Return lines for the log: the servers on hosts, and the ranks of each."""
        assert self.hosts is not None
        hosts, ranks = self.hosts, range(self.member.world_size)
        held = {
            number: [rank for rank in ranks if number in hosts.holders(rank)]
            for number in hosts.numbers
        }
        rows = [
            f"  {hosts.address(number)}: ranks {', '.join(map(str, owners))}"
            for number, owners in held.items()
        ]
        return ["checkpoint servers, and the ranks whose states they hold:", *rows]

    def address(self, holder: int) -> Address:
        """Return the address of a rank's daemon, or of a server on a host.

        Args:
            holder: A rank, or the number of a server as in `servers_on_hosts`.
        """
        server = holder - self.member.world_size
        if server < 0:
            return self.address_of(holder)
        assert self.hosts is not None
        return self.hosts.address(server)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks, or servers on hosts, that keep copies of this rank's memory."""
        if self.hosts is not None and self.hosts.is_in_use:
            numbers = self.hosts.holders(self.member.global_rank)
            return tuple(self.member.world_size + number for number in numbers)
        own = (self.member.global_rank,) if self.serves_itself else ()
        return own + copy_holders(
            self.member.global_rank,
            world_size=self.member.world_size,
            ranks_per_node=self.ranks_per_node,
            replicas=self.replicas,
            peers=self.peers,
        )
