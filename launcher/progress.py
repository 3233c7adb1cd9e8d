"""Progress of a run on global rank 0: a bar or lines, and TensorBoard scalars."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from launcher.config import AUTO, RunConfig
from moe_ckpt.events import IterationCommitted

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 5.0


class Display(Protocol):
    """Shows iterations of a run."""

    def iteration(self, committed: IterationCommitted, tokens_per_s: float) -> None:
        """Show one more iteration.

        Args:
            committed: The event of the iteration.
            tokens_per_s: The throughput of the iteration on all ranks together.
        """
        ...

    def note(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...


class Bar:
    """A rich progress bar, for terminals.

    Args:
        total: The last iteration of the run.
        done: The iterations before this start.
    """

    def __init__(self, total: int, done: int) -> None:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        # standard output has only the last line of the run, for programs that read it
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=total, completed=done, facts="")
        self._progress.start()

    def iteration(self, committed: IterationCommitted, tokens_per_s: float) -> None:
        facts = _facts(committed, tokens_per_s)
        self._progress.update(self._task, completed=committed.iteration, facts=facts)

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class Lines:
    """A line every few seconds, for logs.

    Args:
        total: The last iteration of the run.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._next_s = 0.0

    def iteration(self, committed: IterationCommitted, tokens_per_s: float) -> None:
        last = committed.iteration == self._total
        if time.monotonic() >= self._next_s or last:
            self._next_s = time.monotonic() + _SECONDS_BETWEEN_LINES
            self.note(
                f"iteration {committed.iteration:>6}/{self._total} "
                f" {_facts(committed, tokens_per_s)}"
            )

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def open_display(
    run: RunConfig, *, global_rank: int, total: int, done: int
) -> Display | None:
    """Return the display of this rank's progress.

    Args:
        run: The settings of the run.
        global_rank: This rank.
        total: The last iteration of the run.
        done: The iterations before this start.

    Returns:
        The display; None on every rank but 0, and for `run.progress=none`.
    """
    if global_rank != 0 or run.progress == "none":
        return None
    if run.progress == "bar" or (run.progress == AUTO and sys.stderr.isatty()):
        return Bar(total, done)
    return Lines(total)


def _facts(committed: IterationCommitted, tokens_per_s: float) -> str:
    skipped = "  overflow, skipped" if committed.skipped else ""
    return (
        f"loss {committed.loss:.4f}  {tokens_per_s:,.0f} tokens/s "
        f" {committed.seconds:.2f} s/iteration{skipped}"
    )


class Scalars:
    """TensorBoard scalars.

    Values of earlier processes for iterations that run again are purged. A full disk
    ends the scalars with a warning, and does not end the run.

    Args:
        folder: The folder of the scalars.
        first_iteration: The first iteration of this process. Values from that iteration
            on are purged.
    """

    def __init__(self, folder: Path, first_iteration: int) -> None:
        self._writer: SummaryWriter | None = None
        self._attempt(lambda: self._open(folder, first_iteration))

    def iteration(self, committed: IterationCommitted, tokens_per_s: float) -> None:
        values = {
            "train/loss": committed.loss,
            "train/learning_rate": committed.learning_rate,
            "train/loss_scale": committed.loss_scale,
            "time/iteration_s": committed.seconds,
            "time/stall_s": committed.stall_s,
            "time/tokens_per_s": tokens_per_s,
        }
        if committed.grad_norm is not None:
            values["train/grad_norm"] = committed.grad_norm
        self._write(committed.iteration, values)

    def evaluated(self, iteration: int, loss: float) -> None:
        self._write(iteration, {"eval/loss": loss})

    def close(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.close)

    def _open(self, folder: Path, first_iteration: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first_iteration)

    def _write(self, iteration: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if self._writer is not None:
                self._attempt(self._writer.add_scalar, name, value, iteration)

    def _attempt(self, write: Callable[..., None], *arguments: object) -> None:
        try:
            write(*arguments)
        except OSError as error:
            self._writer = None
            _log.warning("no more TensorBoard scalars: %s", error)
