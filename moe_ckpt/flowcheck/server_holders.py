"""The holders of a rank's copies under `ckpt=flowcheck`: checkpoint servers.

Servers run on machines that train nothing, or on all training nodes. Owns: which of
both are in use. Must not: know states. FlowCheck, section 4.
"""

from __future__ import annotations

from moe_ckpt.collectives import Ranks
from moe_ckpt.events import Event, ServersChanged
from moe_ckpt.flowcheck.server_hosts import ServerHosts
from moe_ckpt.replication.holders import PeerHolders
from moe_ckpt.replication.messages import Address


class ServerHolders:
    """Implements `CopyHolders` with checkpoint servers.

    The replica daemons of the rank itself and of its peers are the servers, unless
    servers on hosts are in use. Server 0 on hosts has the number of ranks as its
    number.
    """

    def __init__(self, peers: PeerHolders, hosts: ServerHosts | None) -> None:
        """Store both kinds of servers.

        Args:
            peers: The daemons of other nodes.
            hosts: The servers on machines that train nothing; None if the job has none.
        """
        self._peers = peers
        self._hosts = hosts

    @property
    def num_peers(self) -> int:
        return self._peers.num_peers

    @property
    def use_hosts(self) -> bool:
        """Whether servers on hosts hold the states, and no training node does."""
        return self._hosts is not None and self._hosts.is_in_use

    @property
    def have_taken_over(self) -> bool:
        """Whether training nodes are the servers because those on hosts are lost."""
        return self._hosts is not None and not self._hosts.is_in_use

    @property
    def on_hosts(self) -> tuple[int, ...]:
        """The numbers of all servers on hosts that are in use."""
        numbers = self._hosts.numbers if self._hosts else ()
        return tuple(self._peers.world_size + number for number in numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        rank = self._peers.global_rank
        if self._hosts is None or not self._hosts.is_in_use:
            return (rank, *self._peers.numbers)
        return tuple(
            self._peers.world_size + number for number in self._hosts.holders(rank)
        )

    def address(self, holder: int) -> Address:
        server = holder - self._peers.world_size
        if server < 0:
            return self._peers.address(holder)
        assert self._hosts is not None
        return self._hosts.address(server)

    def agree(self, ranks: Ranks) -> Event | None:
        if self._hosts is None or not self._hosts.agree(ranks):
            return None
        return ServersChanged(addresses=", ".join(self._hosts.present))

    def lines(self) -> list[str]:
        """Return the servers on hosts with the ranks of each, or the peers' table."""
        if self._hosts is None or not self._hosts.is_in_use:
            return self._peers.lines()
        lines = ["checkpoint servers, and the ranks whose states they hold:"]
        for number in self._hosts.numbers:
            owners = [
                str(rank)
                for rank in range(self._peers.world_size)
                if number in self._hosts.holders(rank)
            ]
            lines.append(f"  {self._hosts.address(number)}: ranks {', '.join(owners)}")
        return lines
