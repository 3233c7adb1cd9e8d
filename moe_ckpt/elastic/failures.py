"""Classes of exceptions in training: hardware faults, and errors of the program.

A replacement repairs a hardware fault, and always a signal or a hang. Most hardware
faults arrive as exceptions, though: CUDA and NCCL errors, ECC, file systems that time
out. `is_fault` separates hardware faults from errors of the program by type and
message. An exception that a replacement repeats in one iteration at one location is an
error of the program after all: see `Failure.repeats`.

Owns: the patterns, and the file in which a worker leaves its last exception for its
supervisor. Must not: decide the consequences for a worker (`elastic.supervisor` does).
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from moe_ckpt.errors import causes_of
from moe_ckpt.reserved_file import CONTENT_BYTES, ReservedFile

WORKER_FAULT = 77
"""Exit status of a worker that failed by a hardware fault and left a failure file."""

FAULTS = (
    # torch 2.8 and later; older releases raise RuntimeError
    r"(^|\.)AcceleratorError: ",
    r"CUDA error",
    r"CUDA driver error",
    r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
    r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
    r"NCCL error",
    r"uncorrectable ECC|double.bit ECC",
    r"Xid \d+",
    # EIO, ENOTCONN, ETIMEDOUT, ESTALE, EREMOTEIO: network file systems
    r"\[Errno (5|107|110|116|121)\]",
)
"""Patterns of `type: message` of an exception after which a worker is replaced."""

# errors of the program whose messages contain the same words
_ERRORS = (
    r"device-side assert",
    r"invalid argument",
    r"out of memory|OutOfMemoryError",
    r"invalid device ordinal",
)
_MESSAGE_CHARS = 300
_MOST_CAUSES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception that ended a worker."""

    error: str
    """Type and message of the exception, cut to 300 characters."""

    location: str
    """Type of the exception, and the file and line that raised the exception."""

    iteration: int
    """The iteration in which the worker failed."""

    traceback: str
    """The traceback, as text."""

    def repeats(self, earlier: Failure | None) -> bool:
        """Return whether an earlier failure had the same iteration and location.

        Args:
            earlier: The failure of an earlier worker of the rank; None: there was none.
        """
        return earlier is not None and (self.iteration, self.location) == (
            earlier.iteration,
            earlier.location,
        )


def is_fault(
    error: BaseException, *, replace_on: Sequence[str] = (), end_on: Sequence[str] = ()
) -> bool:
    """Return whether an exception, or one of its causes, is a hardware fault.

    All patterns are searched in `type: message`.

    Args:
        error: The exception.
        replace_on: Further patterns of hardware faults, which come before this module's
            patterns.
        end_on: Further patterns of errors of the program, which come before
            `replace_on`.
    """
    chain = [_text(cause) for cause in islice(causes_of(error), _MOST_CAUSES)]
    # errors before faults: a device-side assert is also a `CUDA error`, and each
    # replacement would repeat the assert
    for patterns, answer in (
        (end_on, False),
        (replace_on, True),
        (_ERRORS, False),
        (FAULTS, True),
    ):
        if any(re.search(pattern, text) for pattern in patterns for text in chain):
            return answer
    return False


def failure_of(error: BaseException, iteration: int) -> Failure:
    """Describe an exception for the supervisor.

    Args:
        error: The exception.
        iteration: The iteration in which the worker failed.
    """
    frames = traceback.extract_tb(error.__traceback__)
    location = type(error).__name__
    if frames:
        location += f" at {frames[-1].filename}:{frames[-1].lineno}"
    return Failure(
        error=text_of(error),
        location=location[-_MESSAGE_CHARS:],
        iteration=iteration,
        traceback="".join(traceback.format_exception(error)),
    )


def reserve_failure(path: Path) -> None:
    """Reserve the room of the failure file before snapshots can take the room.

    Args:
        path: The file.

    Raises:
        ConfigError: The shared memory has no room.
    """
    ReservedFile(path).reserve()


def write_failure(path: Path, failure: Failure) -> None:
    """Leave a failure for the supervisor.

    Args:
        path: The file.
        failure: The failure. Of a long traceback only the end is kept, which has the
            newest frames.

    Raises:
        OSError: The file was not reserved, and the shared memory has no room.
    """
    content = _encode(failure)
    while len(content) > CONTENT_BYTES and failure.traceback:
        rest = failure.traceback[len(failure.traceback) // 2 + 1 :]
        failure = replace(failure, traceback=rest)
        content = _encode(failure)
    ReservedFile(path).write(content)


def take_failure(path: Path) -> Failure | None:
    """Read the failure that the last worker left, and clear the file.

    Args:
        path: The file.

    Returns:
        The failure; None if the worker left none.
    """
    file = ReservedFile(path)
    content = file.read()
    if not content:
        return None
    # otherwise the next worker that ends with this status would seem to have failed in
    # the same way
    file.write(b"")
    return Failure(**json.loads(content))


def _encode(failure: Failure) -> bytes:
    return json.dumps(asdict(failure)).encode()


def text_of(error: BaseException) -> str:
    """Return the type and message of an exception, cut to 300 characters."""
    return _text(error)[:_MESSAGE_CHARS]


def _text(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}: {error}".removeprefix(
        "builtins."
    )
