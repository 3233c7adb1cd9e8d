"""The host memory that snapshots and logs will take.

Pure arithmetic over sizes (MoEvement, section 3.2).
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
    """Host memory that a rank will need, in bytes."""

    snapshots_bytes: int
    """Bytes of the rank's own snapshots, kept and in flight."""

    boundary_log_bytes: int
    """Bytes of boundary logs, which hold tensors sent to neighbouring stages."""

    step_log_bytes: int
    """Bytes of step logs and of logged gradients."""

    copies_bytes: int
    """Bytes of snapshots and logs that the rank keeps for other ranks."""

    total_bytes: int
    """Sum of all bytes that the rank will need."""

    double_buffered_dense_bytes: int
    """Bytes that two dense checkpoints would need, for comparison. Not part of the
    total.
    """

    @property
    def shared_bytes(self) -> int:
        """The bytes in `runtime.shared_memory`: all except boundary logs.

        Boundary logs end with their worker.
        """
        return self.total_bytes - self.boundary_log_bytes

    def lines(self) -> list[str]:
        """Return a readable line for each part."""
        parts = {
            "snapshots, persisted and in flight": self.snapshots_bytes,
            "boundary logs": self.boundary_log_bytes,
            "step logs and gradients": self.step_log_bytes,
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
    """The host memory that a policy needs, derived from the need of each stage.

    Args:
        stages: All stages.
        own_stage: The number of this rank's stage.
    """

    def __init__(self, stages: Sequence[S], own_stage: int) -> None:
        self._stages = stages
        self._stage = stages[own_stage]

    @abstractmethod
    def _forecast(self, stage: S) -> MemoryForecast:
        """Return the most host memory that a rank of a stage can need."""

    def forecast(self) -> MemoryForecast:
        """Return the most host memory that a rank of any stage can need."""
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
    audit_every_iters: int = 0,
) -> MemoryForecast:
    """Return the host memory of a rank's snapshots, logs and copies at their peak.

    The peak is reached when `keep_windows` windows are kept and the next window is
    nearly complete. Logs reach from the start of the oldest window to the current
    iteration.

    With 2 bytes of compute weights and 12 bytes of full state per parameter, and W
    equal slots, a window takes 12 + (W - 1) bytes per parameter. W = 3 and one kept
    window take 28 bytes per parameter, where two dense checkpoints take 24 (MoEvement,
    section 3.2).

    Args:
        window_bytes: The bytes of a window of the rank.
        period_iters: The iterations from the start of a window to the start of the
            next.
        keep_windows: The number of windows that are kept.
        log_bytes_per_iteration: The bytes that the rank adds to its boundary log.
        dense_bytes: The bytes of the rank's whole state.
        step_log_bytes_per_iteration: The bytes that the rank adds to its step log, and
            to its gradient log.
        num_copies: The number of other ranks whose windows and step logs the rank also
            keeps.
        largest_window_bytes: The largest window of these other ranks, in bytes.
        audit_every_iters: The iterations between audits, over which one more window
            and the logs stay; 0: no audits.
    """
    # the next window is nearly complete before the oldest one is dropped
    num_windows = keep_windows + 1
    num_logged = num_windows * period_iters + 1 + audit_every_iters
    num_windows += audit_every_iters > 0
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
    """Check that no rank may need more memory than its budget.

    Args:
        budget_bytes: `ckpt.memory_budget_bytes`; None: no limit.
        needed: The forecast of the rank that needs the most.

    Raises:
        ConfigError: The forecast exceeds the budget.
    """
    if budget_bytes is not None and needed.total_bytes > budget_bytes:
        wanted = f"at least {needed.total_bytes}:\n  " + "\n  ".join(needed.lines())
        raise ConfigError(
            f"ckpt.memory_budget_bytes: got {budget_bytes}, wanted {wanted}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedUse:
    """One rank's use of a memory that several ranks may share."""

    memory: str
    """Name of the memory; ranks that share a memory have the same name."""

    free_bytes: int
    """Free bytes of the memory."""

    held_bytes: int
    """Bytes that the rank already holds in the memory, for example after torchrun has
    restarted the rank.
    """

    needed_bytes: int
    """Bytes that the rank will need in the memory, in all."""


def require_room(uses: Sequence[SharedUse]) -> None:
    """Check that each memory has room for all ranks that share the memory.

    Two ranks that need 40 bytes each fit into 60 free bytes if each rank already holds
    10 bytes.

    Args:
        uses: The use of each rank, by rank.

    Raises:
        ConfigError: A memory has too little room. The message names the ranks.
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
