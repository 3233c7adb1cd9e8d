"""The objects with which one rank survives the loss of ranks: page, memory, peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.elastic.generations import Member
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.holders import CopyHolders
from moe_ckpt.replication.messages import Ticket


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

    holders: CopyHolders
    """The processes that keep copies of the rank's memory. Ranks agree on the holders
    before `use_peers`.
    """

    ticket: Ticket
    """The run, and its secret, for connections to holders."""

    copy_s: float
    """Time limit for a copy of a window, and for a fetch of a window, in seconds."""

    at_end: Callable[[Callable[[], None]], None] = lambda _: None
    """Registers an action that runs, in another thread, at each end of a generation."""

    def use_peers(self) -> None:
        """Let the daemon copy to all holders, at the holders' present addresses.

        Raises:
            CheckpointSaveError: The rank's own daemon does not answer in time.
        """
        if self.daemon:
            self.page.wait_for_copies(True)
            try:
                self.daemon.use_peers(
                    [self.holders.address(each) for each in self.holders.numbers]
                )
            finally:
                # otherwise the supervisor would not notice a later hang
                self.page.wait_for_copies(False)
