"""Faults that are scheduled for a run: ranks, stages and times. Decides only; the
caller executes them.

A `StateLoss` overwrites the state of living processes; a `Kill` is a real signal to a
real process, or to a whole node.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_ckpt.config import require, require_all_at_least, require_choice
from moe_ckpt.faults.traces import read_removals

PHASES = ("forward", "backward", "step", "between")
KILL_PHASES = ("forward", "backward", "reduce", "step", "snapshot", "recovery")
RAISE = "RAISE"
SIGNALS = ("KILL", "STOP", "SEGV", "TERM", RAISE)
SCOPES = ("process", "node")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLoss:
    """The state of a pipeline stage is lost at an iteration (from 1), in one of PHASES.

    `dp_rank` is the data-parallel rank that loses it; None stands for all ranks of the
    stage. Raises ConfigError.
    """

    iteration: int
    stage: int
    phase: str
    dp_rank: int | None = None

    def __post_init__(self) -> None:
        require_all_at_least("fault.at: ", self, iteration=1, stage=0, dp_rank=0)
        require_choice("fault.at: phase", self.phase, PHASES)


class FaultSchedule:
    """The losses of a run. Each fires once: an iteration that runs again after a
    recovery is spared.
    """

    def __init__(self, losses: Sequence[StateLoss]) -> None:
        self._losses = tuple(losses)
        self._pending = list(losses)

    def due(self, iteration: int, phase: str) -> tuple[StateLoss, ...]:
        """Return the losses of this iteration and phase that have not fired yet, in the
        given order, and fire them.
        """
        assert phase in PHASES, phase
        due = tuple(
            loss
            for loss in self._pending
            if (loss.iteration, loss.phase) == (iteration, phase)
        )
        self._pending = [loss for loss in self._pending if loss not in due]
        return due

    def check_fit(self, num_stages: int, dp: int) -> None:
        """Raise ConfigError if a loss, fired or not, names a stage or a data-parallel
        rank that the job lacks.
        """
        for loss in self._losses:
            wanted = f"between 0 and {num_stages - 1}, the stages of the job"
            require(loss.stage < num_stages, "fault.at: stage", loss.stage, wanted)
            wanted = f"between 0 and {dp - 1}, the data-parallel ranks of the job"
            require(
                loss.dp_rank is None or loss.dp_rank < dp,
                "fault.at: dp_rank",
                loss.dp_rank,
                wanted,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A signal to a rank's worker, or the loss of its whole node with the host memory
    of all the node's ranks.

    RAISE is no signal: the worker raises the exception of a sick GPU, at a point.

    When: `after_s` seconds after the start, or at a point, as the worker enters `phase`
    of `iteration`. Without a phase that is forward, where an iteration begins; without
    an iteration, the next time. `rank` None: to be chosen. Raises ConfigError.
    """

    rank: int | None = None
    signal: str = "KILL"
    scope: str = "process"
    iteration: int | None = None
    phase: str | None = None
    after_s: float | None = None

    def __post_init__(self) -> None:
        require_all_at_least("fault.at: ", self, rank=0, iteration=1)
        check_signal("fault.at: ", self.signal, self.scope)
        if self.phase is not None:
            require_choice("fault.at: phase", self.phase, KILL_PHASES)
        if self.after_s is None:
            wanted = "a number here, a phase, or after_s"
            require(
                self.iteration is not None or self.phase is not None,
                "fault.at: iteration",
                None,
                wanted,
            )
        else:
            wanted = (
                "a signal where there is no iteration or phase: an exception is raised"
                " at a point"
            )
            require(self.signal != RAISE, "fault.at: signal", self.signal, wanted)
            require(
                0 <= self.after_s < math.inf,
                "fault.at: after_s",
                self.after_s,
                "a number of at least 0",
            )
            wanted = "null where there is an iteration or a phase"
            require(
                self.iteration is None and self.phase is None,
                "fault.at: after_s",
                self.after_s,
                wanted,
            )

    @property
    def point_phase(self) -> str:
        """The phase that a kill at a point waits for."""
        return self.phase or "forward"

    def __str__(self) -> str:
        who = (
            f"rank {self.rank}"
            if self.scope == "process"
            else f"the node of rank {self.rank}"
        )
        if self.after_s is not None:
            return f"SIG{self.signal} to {who} {_after(self.after_s)}"
        what = "an exception" if self.signal == RAISE else f"SIG{self.signal}"
        when = (
            "the next time"
            if self.iteration is None
            else f"in iteration {self.iteration}"
        )
        return f"{what} to {who} {when}, {self.point_phase}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedFault:
    """The faults of one time, `after_s` seconds after the start: one signal to each of
    these ranks.
    """

    after_s: float
    ranks: tuple[int, ...]
    signal: str
    scope: str

    def __str__(self) -> str:
        ranks = ("ranks " if len(self.ranks) > 1 else "rank ") + ", ".join(
            map(str, self.ranks)
        )
        return f"SIG{self.signal} to {ranks} {_after(self.after_s)}"


def _after(after_s: float) -> str:
    return f"after {after_s:.1f} s" if after_s else "at once"


def check_signal(prefix: str, signal: str, scope: str) -> None:
    """Raise ConfigError, naming the setting below `prefix`, unless there is such a
    signal and it fits the scope.
    """
    require_choice(f"{prefix}signal", signal, SIGNALS)
    require_choice(f"{prefix}scope", scope, SCOPES)
    require(
        scope == "process" or signal == "KILL",
        f"{prefix}signal",
        signal,
        "KILL where scope=node: it is gone",
    )


def poisson_kills(
    *,
    mtbf_s: float,
    count: int,
    seed: int,
    world_size: int,
    signal: str = "KILL",
    scope: str = "process",
) -> tuple[Kill, ...]:
    """Return `count` kills of uniformly chosen ranks, `mtbf_s` seconds apart on average
    (exponential). By `seed`.
    """
    generator = random.Random(seed)
    kills: list[Kill] = []
    after_s = 0.0
    for _ in range(count):
        after_s += generator.expovariate(1 / mtbf_s)
        rank = generator.randrange(world_size)
        kills.append(Kill(rank=rank, signal=signal, scope=scope, after_s=after_s))
    return tuple(kills)


def trace_kills(
    text: str,
    *,
    speedup: float,
    seed: int,
    world_size: int,
    signal: str = "KILL",
    scope: str = "process",
) -> tuple[Kill, ...]:
    """Return a kill for each removal in a trace (moe_ckpt.faults.traces), `speedup`
    times as fast. By `seed`.

    Time counts from the trace's first event. Nodes that went at one time are as many
    different ranks at one time, all of them where the job is smaller than that. Raises
    ConfigError with number and content of a malformed line.
    """
    generator = random.Random(seed)
    return tuple(
        Kill(rank=rank, signal=signal, scope=scope, after_s=removals.at_s / speedup)
        for removals in read_removals(text)
        for rank in generator.sample(range(world_size), min(removals.count, world_size))
    )


def choose_ranks(
    kills: Sequence[Kill], *, seed: int, ranks: Sequence[int]
) -> tuple[Kill, ...]:
    """Give the kills without a rank one of `ranks` each. By `seed`; the others stay as
    they are.
    """
    generator = random.Random(seed)
    return tuple(
        replace(kill, rank=generator.choice(ranks)) if kill.rank is None else kill
        for kill in kills
    )


def victims(kill: Kill, world_size: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the ranks that a kill hits. Rank 5 of 7, 4 a node: rank 5, or with its
    node 4 to 6.
    """
    assert kill.rank is not None, kill
    if kill.scope == "process":
        return (kill.rank,)
    # nodes are consecutive ranks from 0 on, whichever of its ranks a kill names
    first = kill.rank // ranks_per_node * ranks_per_node
    return tuple(range(first, min(first + ranks_per_node, world_size)))


def has_come(kill: Kill, iteration: int, phase: str) -> bool:
    """Return whether a worker that was seen in a phase of an iteration is at a kill's
    point, or has just passed it.

    A kill in backward of iteration 7 has come in backward or step of 7, and in
    iteration 8; one in recovery has come in a recovery from iteration 7 on; without an
    iteration only the phase itself counts.
    """
    wanted = kill.point_phase
    if kill.iteration is None or wanted == "recovery":
        return phase == wanted and iteration >= (kill.iteration or 0)
    order = KILL_PHASES[: KILL_PHASES.index("recovery")]
    # or later: a phase may be over between two looks at a worker's page
    is_late = (
        iteration == kill.iteration
        and phase in order
        and order.index(phase) >= order.index(wanted)
    )
    return is_late or iteration > kill.iteration


def plan_faults(
    kills: Sequence[Kill], world_size: int, ranks_per_node: int
) -> tuple[TimedFault, ...]:
    """Return the faults in order of time: kills at one time hit a rank once, even if
    two of them hit its node.
    """
    ranks: dict[tuple[float, str, str], dict[int, None]] = {}
    for kill in kills:
        if kill.after_s is not None:
            hit = ranks.setdefault((kill.after_s, kill.signal, kill.scope), {})
            hit |= dict.fromkeys(victims(kill, world_size, ranks_per_node))
    faults = [
        TimedFault(after_s=after_s, ranks=tuple(hit), signal=signal, scope=scope)
        for (after_s, signal, scope), hit in ranks.items()
    ]
    return tuple(sorted(faults, key=lambda fault: fault.after_s))
