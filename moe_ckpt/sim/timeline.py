"""The events of a simulated run, and the run's time by part."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_ckpt.faults.schedule import TimedFault
from moe_ckpt.recovery.plan import RecoveryPlan
from moe_ckpt.sim.generation import Generation
from moe_ckpt.sim.partial import Lost

HOST_MEMORY = "host memory"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained:
    """A stretch of training in one generation.

    The stretch may end with a part of an iteration in vain.
    """

    generation: Generation
    """The generation."""

    iterations: int
    """Iterations that the generation completed after its start."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recovered:
    """A recovery: faults, costs, and the state from which training continues."""

    since_s: float
    """Start of the recovery, in seconds of the run: the first fault, or the end of an
    update that live ranks complete after that fault.
    """

    faults: tuple[TimedFault, ...]
    """The faults of the recovery. All except the first struck while the recovery was in
    progress.
    """

    iteration: int
    """The iteration of the state from which training continues."""

    lost_iters: int
    """Iterations that had been completed and are trained again."""

    source: str
    """Source of the state: host memory, disk, or the beginning."""

    plan: RecoveryPlan | None
    """Plan of the last attempt. None: all ranks went back together, without a plan."""

    detect_s: float
    """Seconds of all attempts until losses were detected."""

    rebuild_s: float
    """Seconds of all attempts until ranks met again."""

    fetch_s: float
    """Seconds of all attempts for fetching windows or state."""

    replay_s: float
    """Seconds of all attempts for replaying or loading."""

    lost: Lost | None = None
    """Tokens that the recovery lost. None: the recovery used no partial checkpoint."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole recovery."""
        return self.detect_s + self.rebuild_s + self.fetch_s + self.replay_s


@dataclass(kw_only=True, slots=True)
class Ledger:
    """Seconds of a run by part. All parts are at least 0."""

    useful_s: float = 0.0
    """Seconds of useful iterations, at the duration of their first run."""

    stall_s: float = 0.0
    """Seconds that saving added to training."""

    again_s: float = 0.0
    """Seconds of iterations, and of parts of iterations, that are run again."""

    recovery_s: float = 0.0
    """Seconds of recoveries."""

    @property
    def wall_s(self) -> float:
        return self.useful_s + (self.stall_s + self.again_s + self.recovery_s)

    @property
    def ettr(self) -> float:
        """The share of useful time: exactly 1 if no other part took time."""
        return self.useful_s / self.wall_s if self.wall_s else 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """The outcome of a simulated run."""

    iterations: int
    """The last iteration of the run."""

    ledger: Ledger
    """Seconds of the run by part."""

    num_faults: int
    """Number of faults."""

    plt: float
    """PLT: share of tokens that experts lost, mean over MoE layers."""

    mlt: float
    """MLT: share of tokens that experts lost, sum over MoE layers."""

    timeline: tuple[Trained | Recovered, ...] = field(default=())
    """The stretches of training and the recoveries, in order."""

    @property
    def recovery_s(self) -> float:
        """Seconds that all faults cost: recoveries, and repeated iterations."""
        return self.ledger.recovery_s + self.ledger.again_s
