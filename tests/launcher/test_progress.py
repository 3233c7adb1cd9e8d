"""Shown progress: a bar on a terminal, lines in a log, and scalars for TensorBoard.

A full disk ends the scalars, but not the run.
"""

from __future__ import annotations

import logging
import resource
import signal
from pathlib import Path
from types import NoneType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launcher.config import RunConfig
from launcher.progress import Bar, Lines, Scalars, open_display
from tests.harness.gloo.ranks import run_ranks
from tests.report_runs import committed


@pytest.mark.parametrize(
    ("progress", "global_rank", "kind"),
    [
        ("auto", 0, Lines),
        ("lines", 0, Lines),
        ("bar", 0, Bar),
        ("none", 0, NoneType),
        ("bar", 1, NoneType),
    ],
)
def test_rank_zero_shows_progress_as_configured(
    progress: str, global_rank: int, kind: type
) -> None:
    run = RunConfig(
        dir=None,
        name="x",
        exactness="bitwise",
        progress=progress,
        tensorboard=False,
        digest_every_iters=0,
        digest_tensors=False,
        leave_out="nothing",
    )
    display = open_display(run, global_rank=global_rank, total=10, done=0)
    if display:
        display.close()
    assert isinstance(display, kind)


def test_lines_show_the_first_and_the_last_iteration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(total=3)
    for iteration in (1, 2, 3):
        lines.iteration(
            committed(iteration, seconds=0.5, loss=1.0 / iteration), tokens_per_s=1234.5
        )
    shown = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in shown] == ["1/3", "3/3"]
    assert "loss 0.3333  1,234 tokens/s  0.50 s/iteration" in shown[-1]


def test_a_second_incarnation_replaces_scalars_of_iterations_run_again(
    tmp_path: Path,
) -> None:
    for first, last in ((1, 5), (4, 6)):
        scalars = Scalars(tmp_path, first)
        for iteration in range(first, last + 1):
            scalars.iteration(committed(iteration), tokens_per_s=1.0)
        scalars.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [event.step for event in read.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def _warnings_when_the_disk_fills(folder: Path) -> list[str]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("launcher.progress").addHandler(handler)
    scalars = Scalars(folder, 1)
    for iteration in range(1, 200):
        scalars.iteration(committed(iteration), tokens_per_s=1.0)
    scalars.close()
    return warnings


def test_a_full_disk_ends_the_scalars_with_one_warning_and_not_the_run(
    tmp_path: Path,
) -> None:
    warnings = run_ranks(1, _warnings_when_the_disk_fills, tmp_path)[0]
    assert len(warnings) == 1
    assert "File too large" in warnings[0]
