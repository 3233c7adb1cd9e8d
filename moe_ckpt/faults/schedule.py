"""Faults that are scheduled for a run: ranks, stages and times.

This module only decides; the caller executes the faults. A `StateLoss` overwrites the
state of living processes. A `Kill` is a real signal to a real process, or to a whole
node.
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
    """The loss of a pipeline stage's state.

    Raises:
        ConfigError: A field is out of range.
    """

    iteration: int
    """Iteration of the loss, from 1."""

    stage: int
    """Pipeline stage, from 0."""

    phase: str
    """Phase of the iteration, one of PHASES."""

    dp_rank: int | None = None
    """Data-parallel rank that loses its state. None: all ranks of the stage."""

    def __post_init__(self) -> None:
        require_all_at_least("fault.at: ", self, iteration=1, stage=0, dp_rank=0)
        require_choice("fault.at: phase", self.phase, PHASES)


class FaultSchedule:
    """The state losses of a run.

    Each loss fires once: an iteration that runs again after a recovery has no loss.
    """

    def __init__(self, losses: Sequence[StateLoss]) -> None:
        self._losses = tuple(losses)
        self._pending = list(losses)

    def due(self, iteration: int, phase: str) -> tuple[StateLoss, ...]:
        """Return and fire the losses of an iteration and a phase.

        The result has only losses that have not fired yet, in their given order.
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
        """Check that the job has the stages and data-parallel ranks of all losses.

        Losses that have fired are checked, too.

        Args:
            num_stages: Number of pipeline stages.
            dp: Number of data-parallel ranks.

        Raises:
            ConfigError: A loss names a stage or a data-parallel rank that the job
                lacks.
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
    """A signal to a rank's worker, or the loss of the rank's whole node.

    A lost node loses the host memory of all its ranks. A kill comes either at a time
    (`after_s`), or at a point: as the worker enters `phase` of `iteration`.

    Raises:
        ConfigError: A field is out of range, or fields contradict each other.
    """

    rank: int | None = None
    """Global rank. None: to be chosen."""

    signal: str = "KILL"
    """Signal, one of SIGNALS.

    RAISE is no signal: at a point, the worker raises the exception of a sick GPU.
    """

    scope: str = "process"
    """`process`: the rank's worker. `node`: the rank's whole node."""

    iteration: int | None = None
    """Iteration of the point, from 1. None: the next iteration with the phase."""

    phase: str | None = None
    """Phase of the point, one of KILL_PHASES. None: forward.

    An iteration begins with forward.
    """

    after_s: float | None = None
    """Time after the start, in seconds. None: the kill comes at a point."""

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
    """The faults of one time: one signal to each of some ranks."""

    after_s: float
    """Time after the start, in seconds."""

    ranks: tuple[int, ...]
    """Global ranks that get the signal."""

    signal: str
    """Signal, one of SIGNALS."""

    scope: str
    """Scope of the kills, one of SCOPES."""

    def __str__(self) -> str:
        ranks = ("ranks " if len(self.ranks) > 1 else "rank ") + ", ".join(
            map(str, self.ranks)
        )
        return f"SIG{self.signal} to {ranks} {_after(self.after_s)}"


def _after(after_s: float) -> str:
    return f"after {after_s:.1f} s" if after_s else "at once"


def check_signal(prefix: str, signal: str, scope: str) -> None:
    """Check that a signal exists, and that the signal fits a scope.

    Args:
        prefix: Start of the names of both settings.
        signal: The signal.
        scope: The scope.

    Raises:
        ConfigError: The signal or the scope is wrong. The message names the setting.
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
    """Return kills of uniformly chosen ranks at random times.

    Args:
        mtbf_s: Mean time between kills, in seconds. The times are exponential.
        count: Number of kills.
        seed: Seed of all choices.
        world_size: Number of ranks of the job.
        signal: Signal of each kill.
        scope: Scope of each kill.
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
    """Return a kill for each removal in a trace (`moe_ckpt.faults.traces`).

    Time counts from the trace's first event. Nodes that went at one time become as many
    different ranks at one time, or all ranks of a smaller job.

    Args:
        text: The trace.
        speedup: Factor by which kills come faster than the trace's removals.
        seed: Seed of the choice of ranks.
        world_size: Number of ranks of the job.
        signal: Signal of each kill.
        scope: Scope of each kill.

    Raises:
        ConfigError: The trace is empty, or a line is malformed. The message then has
            the line's number and content.
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
    """Choose a rank for each kill without a rank; other kills stay unchanged.

    Args:
        kills: The kills.
        seed: Seed of the choice.
        ranks: Ranks to choose from.
    """
    generator = random.Random(seed)
    return tuple(
        replace(kill, rank=generator.choice(ranks)) if kill.rank is None else kill
        for kill in kills
    )


def victims(kill: Kill, world_size: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the ranks that a kill hits.

    Kill of rank 5 of 7 ranks, 4 a node: rank 5, or with the node ranks 4 to 6.
    """
    assert kill.rank is not None, kill
    if kill.scope == "process":
        return (kill.rank,)
    # nodes are consecutive ranks from 0 on; a kill may name any rank of a node
    first = kill.rank // ranks_per_node * ranks_per_node
    return tuple(range(first, min(first + ranks_per_node, world_size)))


def has_come(kill: Kill, iteration: int, phase: str) -> bool:
    """Return whether a kill's point has come.

    The point has come if the worker is at the point, or has just passed the point. A
    kill in backward of iteration 7 has come in backward or step of 7, and in iteration
    8. A kill in recovery of iteration 7 has come in a recovery from iteration 7 on.
    Without an iteration only the phase counts.

    Args:
        kill: A kill at a point.
        iteration: Iteration in which the worker was seen.
        phase: Phase in which the worker was seen.
    """
    wanted = kill.point_phase
    if kill.iteration is None or wanted == "recovery":
        return phase == wanted and iteration >= (kill.iteration or 0)
    order = KILL_PHASES[: KILL_PHASES.index("recovery")]
    # later phases count: a phase may be over between two looks at a worker's page
    is_late = (
        iteration == kill.iteration
        and phase in order
        and order.index(phase) >= order.index(wanted)
    )
    return is_late or iteration > kill.iteration


def plan_faults(
    kills: Sequence[Kill], world_size: int, ranks_per_node: int
) -> tuple[TimedFault, ...]:
    """Return the faults of all kills with a time, in order of time.

    Kills at one time hit a rank once, even if two of these kills hit the rank's node.
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
