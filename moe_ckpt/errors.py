"""The errors that moe_ckpt raises on purpose, and helpers for any error.

Each error class also derives from a suitable standard exception.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator


class MoeCkptError(Exception):
    """Base class of all errors that a caller may want to catch.

    The message names the subject, the value found and the value wanted.

    Example:
        try:
            config = ckpt_config("moevement", window=4)
        except MoeCkptError as error:
            sys.exit(f"error: {error}")
    """


class ConfigError(MoeCkptError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(MoeCkptError, ValueError):
    """Training data that is missing, empty or does not fit the model."""


class CheckpointSaveError(MoeCkptError, OSError):
    """A checkpoint could not be written; earlier checkpoints are untouched."""


class CheckpointLoadError(MoeCkptError, RuntimeError):
    """A checkpoint is incomplete, damaged, or of another run, model or layout."""


class NothingLeftError(CheckpointLoadError):
    """The remaining host memory does not lead to any state of the whole job."""


class RolledBackError(MoeCkptError, RuntimeError):
    """All ranks are at an earlier state.

    The training loop continues after `iteration` steps.
    """

    def __init__(self, iteration: int) -> None:
        super().__init__(f"all ranks are at iteration {iteration} again")
        self.iteration = iteration


class PeersLostError(MoeCkptError, RuntimeError):
    """Other ranks died, or are about to be replaced.

    Results of communication since then must not be used.
    """


class RanksMissingError(PeersLostError):
    """Ranks did not arrive in time, and no other process has taken their place."""


class StoreLostError(MoeCkptError, RuntimeError):
    """The store in which the ranks of a job meet no longer answers.

    This process cannot continue with the other ranks.
    """


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def lacks_room(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, reports a full file system."""
    return any(
        isinstance(cause, OSError) and cause.errno == errno.ENOSPC
        for cause in causes_of(error)
    )


def exit_status(command: Callable[[], int | None], *, failed: int = 1) -> int:
    """Run a command and return its exit status.

    Args:
        command: The command. None counts as status 0.
        failed: The status after a MoeCkptError, whose message is printed as one line.
    """
    try:
        return command() or 0
    except MoeCkptError as error:
        print(f"error: {error}", file=sys.stderr)
        return failed
