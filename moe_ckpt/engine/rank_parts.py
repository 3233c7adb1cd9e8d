"""The parts of one rank that the tier and the recoveries share in all generations."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.engine.interfaces import Counts, RankAdapter
from moe_ckpt.engine.measurements import Measurements
from moe_ckpt.engine.rank_memory import RankMemory
from moe_ckpt.engine.token_account import TokenAccount
from moe_ckpt.events import EventLog


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankParts:
    """The training of one rank, its host memory, and the records of both.

    Lifetime: that of the process. The first generation makes the parts. Every
    generation builds a policy, a tier and recoveries anew over the same parts.
    """

    adapter: RankAdapter
    """The rank's training."""

    memory: RankMemory
    """The rank's snapshots and logs."""

    meter: Measurements
    """Measured times and rates. Policies of later generations use these values at once,
    without trial windows.
    """

    events: EventLog
    """The rank's log of events."""

    counts: Counts | None
    """Counts of the tokens that the router sends to each expert. None: the policy does
    not use popularity.
    """

    account: TokenAccount | None
    """Tokens that each expert has received and lost. None: recoveries of the policy
    lose no tokens.
    """

    @property
    def dense_bytes(self) -> int:
        """Bytes of this rank's whole state."""
        position, table = self.adapter.position, self.adapter.operators.table
        return int(table.full_bytes[position.stage_ranks.rank].sum())
