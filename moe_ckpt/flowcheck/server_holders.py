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
        return self._in_use is not None

    @property
    def have_taken_over(self) -> bool:
        """Whether training nodes are the servers because those on hosts are lost."""
        return self._hosts is not None and self._in_use is None

    @property
    def on_hosts(self) -> tuple[int, ...]:
        """The numbers of all servers on hosts that are in use."""
        numbers = self._in_use.numbers if self._in_use else ()
        return tuple(self._peers.world_size + number for number in numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        rank, hosts = self._peers.global_rank, self._in_use
        if hosts is None:
            return (rank, *self._peers.numbers)
        return tuple(self._peers.world_size + number for number in hosts.holders(rank))

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
        hosts = self._in_use
        if hosts is None:
            return self._peers.lines()
        lines = ["checkpoint servers, and the ranks whose states they hold:"]
        for number in hosts.numbers:
            owners = [
                str(rank)
                for rank in range(self._peers.world_size)
                if number in hosts.holders(rank)
            ]
            lines.append(f"  {hosts.address(number)}: ranks {', '.join(owners)}")
        return lines

    @property
    def _in_use(self) -> ServerHosts | None:
        """The servers on hosts, if the job has any and still uses one."""
        return self._hosts if self._hosts and self._hosts.is_in_use else None
