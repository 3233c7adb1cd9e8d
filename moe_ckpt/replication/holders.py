"""The processes that keep copies of one rank's blobs.

Owns: the holders of a rank, their numbers and addresses. Must not: copy blobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moe_ckpt.collectives import Ranks
from moe_ckpt.events import Event
from moe_ckpt.replication.messages import Address
from moe_ckpt.replication.placement import copy_holders, placement_lines


class CopyHolders(Protocol):
    """The holders of one rank's copies.

    A holder is a process with a number. The replica daemon of a rank has the rank's
    number. Other processes have numbers from the number of ranks on.
    """

    @property
    def num_peers(self) -> int:
        """The number of other nodes whose memory holds copies of each rank."""
        ...

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the processes that hold this rank's copies at present."""
        ...

    def address(self, holder: int) -> Address:
        """Return the present address of a holder, or of the daemon of any rank."""
        ...

    def agree(self, ranks: Ranks) -> Event | None:
        """Agree with all ranks on the holders to use from now on. Collective.

        Returns:
            An event for the log if the holders have changed, else None.

        Raises:
            ConfigError: The job begins without its holders. Raised on all ranks.
            CheckpointLoadError: The ranks cannot agree. Raised on all ranks.
        """
        ...

    def lines(self) -> list[str]:
        """Return a readable table of the holders of all ranks, for the log."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PeerHolders:
    """Implements `CopyHolders` with the replica daemons of other nodes."""

    global_rank: int
    """The rank whose copies are held."""

    world_size: int
    """Number of ranks."""

    ranks_per_node: int
    """Number of consecutive ranks that fail together."""

    num_peers: int
    """Number of other nodes that hold copies of the rank's memory."""

    address_of: Callable[[int], Address]
    """Returns the address of a rank's daemon."""

    stage_ranks: int | None = None
    """Number of consecutive ranks that train one stage, if copies must stay among these
    ranks; else None.
    """

    @property
    def numbers(self) -> tuple[int, ...]:
        return copy_holders(
            self.global_rank,
            world_size=self.world_size,
            ranks_per_node=self.ranks_per_node,
            replicas=self.num_peers,
            peers=self.stage_ranks,
        )

    def address(self, holder: int) -> Address:
        return self.address_of(holder)

    def agree(self, ranks: Ranks) -> Event | None:  # noqa: ARG002
        """Return None: the placement follows from the number of ranks."""
        return None

    def lines(self) -> list[str]:
        rows = placement_lines(
            world_size=self.world_size,
            ranks_per_node=self.ranks_per_node,
            replicas=self.num_peers,
            peers=self.stage_ranks,
        )
        return ["where copies of host memory are:", *rows]
