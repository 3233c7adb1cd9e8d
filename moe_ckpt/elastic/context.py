"""The means of one rank to survive the loss of ranks: its status page, shared memory,
replica daemon and peers.
"""

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
    """One worker's means.

    `daemon` is None if peers keep no copies; `address_of` returns the address of a
    rank's daemon.

    `copy_s` limits a copy of a window, and its fetch. `peers` consecutive ranks train
    one stage, if copies must stay among these. `at_end` runs an action, in another
    thread, at each end of a generation. `serves_itself`: this rank's own daemon also
    holds its state, unless servers on `hosts` are in use, with which ranks agree before
    `use_peers`.
    """

    member: Member
    page: StatusPage
    memory: Path
    daemon: DaemonClient | None
    address_of: Callable[[int], Address]
    ticket: Ticket
    replicas: int
    ranks_per_node: int
    copy_s: float
    peers: int | None = None
    at_end: Callable[[Callable[[], None]], None] = lambda _: None
    serves_itself: bool = False
    hosts: ServerHosts | None = None

    def use_peers(self) -> None:
        """Let the daemon copy to the holders' daemons, at their present addresses.
        Raises CheckpointSaveError.
        """
        if self.daemon:
            self.page.wait_for_copies(True)
            try:
                self.daemon.use_peers([self.address(holder) for holder in self.holders])
            finally:
                # else no supervisor would notice a later hang
                self.page.wait_for_copies(False)

    @property
    def uses_hosts(self) -> bool:
        """Whether servers on machines that train nothing hold the states, and no rank
        does.
        """
        return self.hosts is not None and self.hosts.is_in_use

    @property
    def own_states(self) -> Path:
        """The folder on this machine with states of this rank that servers have made,
        in a recovery.
        """
        return (
            self.memory / "from_hosts"
            if self.uses_hosts
            else held_path(self.memory, self.member.global_rank)
        )

    @property
    def servers_on_hosts(self) -> tuple[int, ...]:
        """All servers on hosts that are in use, by their numbers among holders: those
        of ranks come first.
        """
        numbers = self.hosts.numbers if self.hosts else ()
        return tuple(self.member.world_size + number for number in numbers)

    def hosts_lines(self) -> list[str]:
        """Return the servers on hosts that hold each rank's state, for the log."""
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
        """Return the address of a holder: of a rank's daemon, or of a server on a host."""
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
