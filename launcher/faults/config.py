"""Scheduled faults as plain values: a class for each `fault=KIND`.

The files of conf/fault/ explain the keys. Each class gives the states that are lost
inside living processes (`losses`), and the processes that are killed (`kills`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from moe_ckpt.config import require, require_all_at_least, require_at_least
from moe_ckpt.errors import ConfigError
from moe_ckpt.faults.schedule import (
    Kill,
    StateLoss,
    check_signal,
    choose_ranks,
    poisson_kills,
    trace_kills,
)


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """A kind of faults.

    Most kinds either lose no state of living processes or kill no process.
    """

    kind: str
    """The name of the kind."""

    @property
    def losses(self) -> list[StateLoss]:
        """Losses of state in living processes."""
        return []

    def kills(self, world_size: int) -> tuple[Kill, ...]:  # noqa: ARG002
        """Return the kills, each with a rank.

        Args:
            world_size: The number of ranks of the job.

        Raises:
            ConfigError: The job lacks a rank, or a trace is missing or malformed.
        """
        return ()


@dataclass(frozen=True, kw_only=True)
class NoFaultConfig(FaultConfig):
    """`fault=none`."""


@dataclass(frozen=True, kw_only=True)
class StateLossConfig(FaultConfig):
    """`fault=state_loss`: a stage's state is overwritten, and its processes live on."""

    at: list[StateLoss]
    """The losses."""

    @property
    def losses(self) -> list[StateLoss]:
        return self.at


@dataclass(frozen=True, kw_only=True)
class AtConfig(FaultConfig):
    """`fault=at`: kills at given points or at given times."""

    at: list[Kill]
    """The kills, in the order of their iterations."""

    seed: int
    """Seed of the choice of ranks."""

    def __post_init__(self) -> None:
        require_at_least("fault.seed", self.seed, 0)
        # a rank gets its orders one after the other: a later point in front would hold
        # up an earlier one
        iterations = [kill.iteration for kill in self.at if kill.iteration is not None]
        in_order = all(before <= after for before, after in pairwise(iterations))
        require(
            in_order, "fault.at: iteration", iterations, "the order in which they come"
        )

    def kills(self, world_size: int) -> tuple[Kill, ...]:
        for kill in self.at:
            wanted = f"between 0 and {world_size - 1}, the ranks of the job"
            require(
                kill.rank is None or kill.rank < world_size,
                "fault.at: rank",
                kill.rank,
                wanted,
            )
        return choose_ranks(self.at, seed=self.seed, ranks=range(world_size))


@dataclass(frozen=True, kw_only=True)
class PoissonConfig(FaultConfig):
    """`fault=poisson`: kills of random ranks at random times."""

    mtbf_s: float
    """Mean time between failures of the job, in seconds."""

    count: int
    """Number of kills."""

    seed: int
    """Seed of times and ranks."""

    signal: str
    """Signal of the kills, as `KILL`."""

    scope: str
    """`process`, or `node`: all ranks of the node, with their host memory."""

    def __post_init__(self) -> None:
        require(
            0 < self.mtbf_s < math.inf, "fault.mtbf_s", self.mtbf_s, "a number above 0"
        )
        require_all_at_least("fault.", self, count=0, seed=0)
        check_signal("fault.", self.signal, self.scope)

    def kills(self, world_size: int) -> tuple[Kill, ...]:
        return poisson_kills(
            mtbf_s=self.mtbf_s,
            count=self.count,
            seed=self.seed,
            world_size=world_size,
            signal=self.signal,
            scope=self.scope,
        )


@dataclass(frozen=True, kw_only=True)
class TraceConfig(FaultConfig):
    """`fault=trace`: kills at the times at which a real cluster lost nodes."""

    path: str
    """Path of the trace."""

    speedup: float
    """Speed at which the faults come, relative to the trace."""

    seed: int
    """Seed of the choice of ranks."""

    signal: str
    """Signal of the kills, as `KILL`."""

    scope: str
    """`process`, or `node`: all ranks of the node, with their host memory."""

    def __post_init__(self) -> None:
        require(
            0 < self.speedup < math.inf,
            "fault.speedup",
            self.speedup,
            "a number above 0",
        )
        require_at_least("fault.seed", self.seed, 0)
        check_signal("fault.", self.signal, self.scope)

    def kills(self, world_size: int) -> tuple[Kill, ...]:
        """Read the trace, and return the kills.

        Raises:
            ConfigError: The trace is missing or malformed.
        """
        text, seed = read_trace("fault.path", self.path), self.seed
        return trace_kills(
            text,
            speedup=self.speedup,
            seed=seed,
            world_size=world_size,
            signal=self.signal,
            scope=self.scope,
        )


def read_trace(setting: str, path: str) -> str:
    """Return the text of a trace.

    Args:
        setting: The name of the setting, for an error.
        path: The path of the trace.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{setting}: got {path!r}, wanted a file with a trace ({error})"
        ) from error


FAULT_CONFIGS: dict[str, type[FaultConfig]] = {
    "none": NoFaultConfig,
    "state_loss": StateLossConfig,
    "at": AtConfig,
    "poisson": PoissonConfig,
    "trace": TraceConfig,
}
