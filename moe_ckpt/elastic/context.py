"""The means of one rank to survive the loss of ranks: its status page, shared memory, replica daemon and peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.elastic.generations import Member
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.messages import Address, Ticket
from moe_ckpt.replication.placement import copy_holders
from moe_ckpt.types import Phase


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ElasticContext:
    """One worker's means.

    `daemon` is None if peers keep no copies; `address_of` returns the address of a rank's daemon.

    `settle` returns once all communication of this rank is complete; it raises PeersLostError if ranks were lost.
    `copy_s` limits a copy of a window, and its fetch. `peers` consecutive ranks train one stage, if copies must stay
    among these. `at_end` runs an action, in another thread, at each end of a generation. `serves_itself`: this rank's
    own daemon also holds its state.
    """

    member: Member
    settle: Callable[[], None]
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

    def enter_phase(self, phase: Phase) -> None:
        """The training thread begins a phase. All phases that a recovery repeats count as recovery."""
        self.page.enter(Phase.RECOVERY if self.page.phase is Phase.RECOVERY else phase)

    def use_peers(self) -> None:
        """Let the daemon copy to the holders' daemons, at their present addresses. Raises CheckpointSaveError."""
        if self.daemon:
            self.page.wait_for_copies(True)
            self.daemon.use_peers([self.address_of(holder) for holder in self.holders])
            self.page.wait_for_copies(False)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that keep copies of this rank's memory."""
        own = (self.member.global_rank,) if self.serves_itself else ()
        return own + copy_holders(
            self.member.global_rank,
            world_size=self.member.world_size,
            ranks_per_node=self.ranks_per_node,
            replicas=self.replicas,
            peers=self.peers,
        )
