"""The host memory that snapshots and logs will take. Pure arithmetic over sizes
(MoEvement, section 3.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_ckpt.errors import ConfigError

S = TypeVar("S")
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """Host memory that a rank will need, in bytes, with what two dense checkpoints
    would need for comparison.
    """

    snapshots_bytes: int
    boundary_log_bytes: int
    step_log_bytes: int
    copies_bytes: int
    total_bytes: int
    double_buffered_dense_bytes: int

    @property
    def shared_bytes(self) -> int:
        """The bytes in `runtime.shared_memory`: all but boundary logs, which end with
        their worker.
        """
        return self.total_bytes - self.boundary_log_bytes

    def lines(self) -> list[str]:
        """Return a readable line for each part."""
        parts = {
            "snapshots, persisted and in flight": self.snapshots_bytes,
            "boundary logs": self.boundary_log_bytes,
            "step logs": self.step_log_bytes,
            "copies for other ranks": self.copies_bytes,
            "total": self.total_bytes,
            "for comparison, two dense checkpoints": self.double_buffered_dense_bytes,
        }
        width = max(map(len, parts))
        return [
            f"{name:<{width}} {nbytes / _MIB:12.1f} MiB"
            for name, nbytes in parts.items()
        ]


class StageForecasts(ABC, Generic[S]):
    """The host memory that a policy needs, by that of each stage; `own_stage` is the
    number of this rank's stage.
    """

    def __init__(self, stages: Sequence[S], own_stage: int) -> None:
        self._stages = stages
        self._stage = stages[own_stage]

    @abstractmethod
    def _forecast(self, stage: S) -> MemoryForecast:
        """Return the most host memory that a rank of a stage can need."""

    def forecast(self) -> MemoryForecast:
        """Return the most host memory that a rank can need."""
        return max(
            map(self._forecast, self._stages), key=lambda needed: needed.total_bytes
        )

    def own_forecast(self) -> MemoryForecast:
        """Return the most host memory that a rank of this stage can need."""
        return self._forecast(self._stage)

    def start_forecast(self) -> MemoryForecast:
        """Return the host memory that a rank of this stage needs as training begins."""
        return self.own_forecast()


def forecast(
    *,
    window_bytes: int,
    period_iters: int,
    keep_windows: int,
    log_bytes_per_iteration: int,
    dense_bytes: int,
    step_log_bytes_per_iteration: int,
    num_copies: int = 0,
    largest_window_bytes: int = 0,
) -> MemoryForecast:
    """Return the bytes of a rank's snapshots and logs once `keep_windows` are persisted
    and one is nearly complete.

    A window begins every `period_iters` iterations. Logs reach from the start of the
    oldest window to the current iteration. With 2 bytes of compute weights and 12 of
    full state a parameter and W equal slots, a window takes 12 + (W - 1) bytes a
    parameter: W = 3 and one kept window make 28, where two dense checkpoints take 24
    (MoEvement, section 3.2). A rank also keeps all that for `num_copies` others, whose
    windows take up to `largest_window_bytes`.
    """
    # the next window is nearly complete before an older one is dropped
    num_windows = keep_windows + 1
    num_logged = num_windows * period_iters + 1
    snapshots_bytes = num_windows * window_bytes
    boundary_log_bytes = num_logged * log_bytes_per_iteration
    step_log_bytes = num_logged * step_log_bytes_per_iteration
    copies_bytes = num_copies * (num_windows * largest_window_bytes + step_log_bytes)
    return MemoryForecast(
        snapshots_bytes=snapshots_bytes,
        boundary_log_bytes=boundary_log_bytes,
        step_log_bytes=step_log_bytes,
        copies_bytes=copies_bytes,
        total_bytes=snapshots_bytes
        + boundary_log_bytes
        + step_log_bytes
        + copies_bytes,
        double_buffered_dense_bytes=2 * dense_bytes,
    )


def require_budget(budget_bytes: int | None, needed: MemoryForecast) -> None:
    """Raise ConfigError if a rank may need more than its budget."""
    if budget_bytes is not None and needed.total_bytes > budget_bytes:
        wanted = f"at least {needed.total_bytes}:\n  " + "\n  ".join(needed.lines())
        raise ConfigError(
            f"ckpt.memory_budget_bytes: got {budget_bytes}, wanted {wanted}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedUse:
    """One rank's use of a memory that several ranks may share."""

    memory: str
    """The name of the memory: the same for ranks that share one."""

    free_bytes: int
    """The bytes that are free there."""

    held_bytes: int
    """The bytes that the rank has there already, as after torchrun has started it
    again.
    """

    needed_bytes: int
    """The bytes that the rank will have there."""


def require_room(uses: Sequence[SharedUse]) -> None:
    """Check that each memory has room for all ranks that share it.

    Two ranks that need 40 each fit into 60 free bytes if each holds 10 already.

    Args:
        uses: The use of each rank, by rank.

    Raises:
        ConfigError: A memory has less room, with its ranks.
    """
    for memory in dict.fromkeys(use.memory for use in uses):
        ranks = [rank for rank, use in enumerate(uses) if use.memory == memory]
        free_bytes = min(uses[rank].free_bytes for rank in ranks)
        room_bytes = free_bytes + sum(uses[rank].held_bytes for rank in ranks)
        needed_bytes = sum(uses[rank].needed_bytes for rank in ranks)
        if needed_bytes > room_bytes:
            raise ConfigError(
                f"runtime.shared_memory: got {room_bytes} bytes for ranks"
                f" {', '.join(map(str, ranks))}, of which {free_bytes} are free, wanted"
                f" the {needed_bytes} that their snapshots and copies will take:"
                " enlarge the memory (docker run --shm-size), take smaller or fewer"
                " snapshots, or train without protection, by ckpt=none"
            )
