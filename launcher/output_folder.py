"""The output folder of a command that runs several jobs.

The folder contains a run folder for each job, with the job's output beside it.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from moe_ckpt.errors import ConfigError


def make_output_folder(wanted: Path | None, command: str) -> Path:
    """Make the output folder of a command.

    Args:
        wanted: The folder; None: outputs/DATE/TIME-COMMAND.
        command: The name of the command.

    Raises:
        ConfigError: The folder cannot be made.
    """
    folder = (
        wanted
        or Path("outputs")
        / f"{datetime.now():%Y-%m-%d}"
        / f"{datetime.now():%H-%M-%S}-{command}"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"-o: got {str(folder)!r}, wanted a folder that can be written ({error})"
        ) from error
    return folder.resolve()


def log_of(run: Path) -> Path:
    """Return the path of the file with the output of a run."""
    return run.with_name(f"{run.name}.log")
