"""The errors that moe_ckpt raises on purpose, each derived from a suitable standard
error; the causes of any error.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator


class MoeCkptError(Exception):
    """Root of all errors that a caller may want to catch; the message says what, got
    and wanted.
    """


class ConfigError(MoeCkptError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(MoeCkptError, ValueError):
    """Training data that is missing, empty or does not fit the model."""


class CheckpointSaveError(MoeCkptError, OSError):
    """A checkpoint could not be written; earlier ones are untouched."""


class CheckpointLoadError(MoeCkptError, RuntimeError):
    """A checkpoint is incomplete, damaged, or belongs to another run, model or layout."""


class NothingLeftError(CheckpointLoadError):
    """The remaining host memory leads to no state of the whole job."""


class RolledBackError(MoeCkptError, RuntimeError):
    """All ranks are at an earlier state: the training loop continues after `iteration`
    steps.
    """

    def __init__(self, iteration: int) -> None:
        super().__init__(f"all ranks are at iteration {iteration} again")
        self.iteration = iteration


class PeersLostError(MoeCkptError, RuntimeError):
    """Other ranks died, or are about to be replaced: results of communication since
    then must not be used.
    """


class StoreLostError(MoeCkptError, RuntimeError):
    """The store in which the ranks of a job meet does not answer any more: this process
    cannot go on with them.
    """


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def lacks_room(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, says that a file system is full."""
    return any(
        isinstance(cause, OSError) and cause.errno == errno.ENOSPC
        for cause in causes_of(error)
    )


def exit_status(command: Callable[[], int | None], *, failed: int = 1) -> int:
    """Run a command; return its exit status, or `failed` after one message about an
    error of the user's.
    """
    try:
        return command() or 0
    except MoeCkptError as error:
        print(f"error: {error}", file=sys.stderr)
        return failed
