"""The classes of an exception in training: a fault of the hardware, which a replacement
repairs, or the program's.

A signal or a hang is always repaired. Most hardware faults arrive as exceptions,
though: CUDA and NCCL errors, ECC, file systems that time out. `is_fault` separates them
from errors of the program by type and message. An exception that a replacement repeats
in the same iteration at the same place is the program's after all: see
`Failure.repeats`.

Owns: the patterns, and the file in which a worker leaves its last exception for its
supervisor. Must not: decide what happens to a worker (`elastic.supervisor` does).
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
"""Exit status of a worker that failed by a fault of the hardware, with a failure file.
"""

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

# errors of the program that come with the same words
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
    """An exception that ended a worker: its text, the place where it was raised, the
    iteration, and the traceback.
    """

    error: str
    place: str
    iteration: int
    traceback: str

    def repeats(self, earlier: Failure | None) -> bool:
        """Whether an earlier worker failed in the same iteration at the same place."""
        return earlier is not None and (self.iteration, self.place) == (
            earlier.iteration,
            earlier.place,
        )


def is_fault(
    error: BaseException, *, replace_on: Sequence[str] = (), end_on: Sequence[str] = ()
) -> bool:
    """Return whether an exception, or one that caused it, is a fault of the hardware.

    `end_on` and then `replace_on` come before the patterns of this module; all are
    searched in `type: message`.
    """
    chain = [_text(cause) for cause in islice(causes_of(error), _MOST_CAUSES)]
    # errors before faults: a device-side assert is also a `CUDA error`, and each
    # replacement would repeat it
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
    """Return the facts of an exception that a supervisor needs."""
    frames = traceback.extract_tb(error.__traceback__)
    place = type(error).__name__
    if frames:
        place += f" at {frames[-1].filename}:{frames[-1].lineno}"
    return Failure(
        error=text_of(error),
        place=place[-_MESSAGE_CHARS:],
        iteration=iteration,
        traceback="".join(traceback.format_exception(error)),
    )


def reserve_failure(path: Path) -> None:
    """Reserve the room of the failure file before snapshots can take it.

    Args:
        path: The file.

    Raises:
        ConfigError: The memory has no room.
    """
    ReservedFile(path).reserve()


def write_failure(path: Path, failure: Failure) -> None:
    """Leave a failure for the supervisor.

    Args:
        path: The file.
        failure: The failure; of a long traceback the end is kept, with the newest
            frames.

    Raises:
        OSError: The file was not reserved, and the memory has no room.
    """
    content = _encode(failure)
    while len(content) > CONTENT_BYTES and failure.traceback:
        rest = failure.traceback[len(failure.traceback) // 2 + 1 :]
        failure = replace(failure, traceback=rest)
        content = _encode(failure)
    ReservedFile(path).write(content)


def take_failure(path: Path) -> Failure | None:
    """Return the failure of the last worker, and forget it; None if it left none."""
    file = ReservedFile(path)
    content = file.read()
    if not content:
        return None
    # the next worker that ends with this status would seem to have failed in the same
    # way
    file.write(b"")
    return Failure(**json.loads(content))


def _encode(failure: Failure) -> bytes:
    return json.dumps(asdict(failure)).encode()


def text_of(error: BaseException) -> str:
    """Return the type and the message of an exception, cut to a line's length."""
    return _text(error)[:_MESSAGE_CHARS]


def _text(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}: {error}".removeprefix(
        "builtins."
    )
