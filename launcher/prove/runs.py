"""Runs of the user's command, each to its end, and the exit statuses of a proof.

The output of a run goes to a file.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.proc import end_session
from launcher.prove.compare import Digests
from moe_ckpt.errors import ConfigError, MoeCkptError

EXACT, DIFFERENT, NOT_PROVEN = 0, 1, 2
"""Exit statuses."""
_FEWEST_ITERS = 6


class RunFailedError(MoeCkptError):
    """A run of the command failed, or not all of its faults were inflicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A command that has ended by itself."""

    status: int
    """The exit status; negative for a signal."""

    log: Path
    """The file with the output of the command."""

    @property
    def last_line(self) -> str:
        """The last line of the output."""
        return "".join(self.log.read_text(errors="replace").splitlines()[-1:])


def run_to_end(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    limit_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command until it ends or fails.

    Args:
        command: The words of the command.
        log: The file for the output.
        environment: The variables of the processes of the command; None: those of this
            process.
        limit_s: The seconds after which the command is ended.
        meanwhile: Called once the command has started.

    Raises:
        RunFailedError: The command does not exist, or has not ended after `limit_s`.
    """
    until_s = time.monotonic() + limit_s
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise RunFailedError(
                f"COMMAND: got {command[0]!r}, wanted a program ({error})"
            ) from error
        try:
            meanwhile()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
        finally:
            is_late = process.poll() is None
            end_session(process)
    if is_late:
        raise RunFailedError(
            f"--limit-s: got {limit_s:g}, wanted more: the run had not ended by then;"
            f" log: {log}"
        )
    return Ended(status=process.returncode, log=log)


def print_end(digests: Digests, started_s: float, log: Path) -> None:
    """Print the end of a run's line.

    Args:
        digests: The digests of the run.
        started_s: The start of the run, by the monotonic clock.
        log: The file with the output of the run.

    Raises:
        ConfigError: The run is too short for faults.
    """
    seconds, count = time.monotonic() - started_s, len(digests.iterations)
    print(
        f"({count} iterations, {digests.num_ranks} ranks, {seconds:.0f} s)", flush=True
    )
    if count < _FEWEST_ITERS:
        wanted = (
            f"at least {_FEWEST_ITERS}, so that faults have iterations before and after"
            " them"
        )
        raise ConfigError(
            f"COMMAND: got {count} iterations, wanted {wanted}; log: {log}"
        )
