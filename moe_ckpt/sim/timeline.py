"""The events of a simulated run, and its time by part."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_ckpt.faults.schedule import TimedFault
from moe_ckpt.recovery.plan import RecoveryPlan
from moe_ckpt.sim.generation import Generation
from moe_ckpt.sim.partial import Lost

HOST_MEMORY = "host memory"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained:
    """A generation trained: `iterations` after its start, then perhaps a part of one in
    vain.
    """

    generation: Generation
    iterations: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recovered:
    """Faults up to one that was survived, and the state after `iteration` from which
    training continues.

    `plan` is that of the last recovery, None if all ranks went back together, to a
    `source`, which may have `lost` tokens. Seconds: of all attempts.
    """

    since_s: float
    faults: tuple[TimedFault, ...]
    iteration: int
    lost_iters: int
    source: str
    plan: RecoveryPlan | None
    detect_s: float
    rebuild_s: float
    fetch_s: float
    replay_s: float
    lost: Lost | None = None

    @property
    def seconds(self) -> float:
        return self.detect_s + self.rebuild_s + self.fetch_s + self.replay_s


@dataclass(kw_only=True, slots=True)
class Ledger:
    """Seconds of a run: useful time, and the parts of the rest. All parts are at least
    0.
    """

    useful_s: float = 0.0
    stall_s: float = 0.0
    again_s: float = 0.0
    recovery_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.useful_s + (self.stall_s + self.again_s + self.recovery_s)

    @property
    def ettr(self) -> float:
        """The share of useful time: exactly 1 if nothing else took any."""
        return self.useful_s / self.wall_s if self.wall_s else 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """A simulated run: its progress, its time by part, the share of tokens that its
    experts lost, its events.
    """

    iterations: int
    ledger: Ledger
    num_faults: int
    plt: float
    mlt: float
    timeline: tuple[Trained | Recovered, ...] = field(default=())

    @property
    def recovery_s(self) -> float:
        """The cost of all faults: recovering, and repeating lost iterations."""
        return self.ledger.recovery_s + self.ledger.again_s
