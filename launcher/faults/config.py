"""Scheduled faults as plain values: one class for each `fault=KIND`. Key by key
explained in conf/fault/.

Each says which states are lost inside living processes (`losses`) and which processes
are killed (`kills`).
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
    """A kind of faults. Most kinds lose no state of living processes, or kill none."""

    kind: str

    @property
    def losses(self) -> list[StateLoss]:
        return []

    def kills(self, world_size: int) -> tuple[Kill, ...]:  # noqa: ARG002
        """Return the kills, each with a rank. Raises ConfigError for a rank that the
        job lacks.
        """
        return ()


@dataclass(frozen=True, kw_only=True)
class NoFaultConfig(FaultConfig):
    """`fault=none`."""


@dataclass(frozen=True, kw_only=True)
class StateLossConfig(FaultConfig):
    """`fault=state_loss`: a stage's state is overwritten, its processes live on."""

    at: list[StateLoss]

    @property
    def losses(self) -> list[StateLoss]:
        return self.at


@dataclass(frozen=True, kw_only=True)
class AtConfig(FaultConfig):
    """`fault=at`: kills at given points, or given times."""

    at: list[Kill]
    seed: int

    def __post_init__(self) -> None:
        require_at_least("fault.seed", self.seed, 0)
        # kills of one rank are ordered one after the other: a later point in front
        # would hold up an earlier one
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
    count: int
    seed: int
    signal: str
    scope: str

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
    """`fault=trace`: kills when nodes went in a real cluster."""

    path: str
    speedup: float
    seed: int
    signal: str
    scope: str

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
        """Read the trace; raises ConfigError where it is missing or malformed."""
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
    """Return a trace's text; raises ConfigError naming the setting."""
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
