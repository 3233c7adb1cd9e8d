"""The classes of an exception in training: a fault of the hardware, which a replacement repairs, or the program's.

A signal or a hang is always repaired. Most hardware faults arrive as exceptions, though: CUDA and NCCL errors, ECC,
file systems that time out. `is_fault` separates them from errors of the program by type and message. An exception that
a replacement repeats in the same iteration at the same place is the program's after all: see `Failure.repeats`.

Owns: the patterns, and the file in which a worker leaves its last exception for its supervisor. Must not: decide what
happens to a worker (`elastic.supervisor` does).
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from moe_ckpt.errors import causes_of
from moe_ckpt.private_files import write_private

WORKER_FAULT = 77
"""Exit status of a worker that failed by a fault of the hardware, with a failure file."""

FAULTS = (
    r"(^|\.)AcceleratorError: ",  # torch 2.8 and later; older releases raise RuntimeError
    r"CUDA error",
    r"CUDA driver error",
    r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
    r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
    r"NCCL error",
    r"uncorrectable ECC|double.bit ECC",
    r"Xid \d+",
    r"\[Errno (5|107|110|116|121)\]",  # EIO, ENOTCONN, ETIMEDOUT, ESTALE, EREMOTEIO: network file systems
)
"""Patterns of `type: message` of an exception after which a worker is replaced."""

# errors of the program that come with the same words
_ERRORS = (r"device-side assert", r"invalid argument", r"out of memory|OutOfMemoryError", r"invalid device ordinal")
_MESSAGE_CHARS = 300
_MOST_CAUSES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception that ended a worker: its text, the place where it was raised, the iteration, and the traceback."""

    error: str
    place: str
    iteration: int
    traceback: str

    def repeats(self, earlier: Failure | None) -> bool:
        """Whether an earlier worker failed in the same iteration at the same place."""
        return earlier is not None and (self.iteration, self.place) == (earlier.iteration, earlier.place)


def is_fault(error: BaseException, *, replace_on: Sequence[str] = (), end_on: Sequence[str] = ()) -> bool:
    """Return whether an exception, or one that caused it, is a fault of the hardware.

    `end_on` and then `replace_on` come before the patterns of this module; all are searched in `type: message`.
    """
    chain = [_text(cause) for cause in islice(causes_of(error), _MOST_CAUSES)]
    # errors before faults: a device-side assert is also a `CUDA error`, and each replacement would repeat it
    for patterns, answer in ((end_on, False), (replace_on, True), (_ERRORS, False), (FAULTS, True)):
        if any(re.search(pattern, text) for pattern in patterns for text in chain):
            return answer
    return False


def failure_of(error: BaseException, iteration: int) -> Failure:
    """Return the facts of an exception that a supervisor needs."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    return Failure(
        error=text_of(error),
        place=f"{type(error).__name__} at {last.filename}:{last.lineno}" if last else type(error).__name__,
        iteration=iteration,
        traceback="".join(traceback.format_exception(error)),
    )


def write_failure(path: Path, failure: Failure) -> None:
    """Leave a failure for the supervisor."""
    write_private(path, json.dumps(asdict(failure)))


def take_failure(path: Path) -> Failure | None:
    """Return the failure of the last worker, and remove its file; None if it left none."""
    if not path.exists():
        return None
    text = path.read_text()
    # removed: the next worker that ends with this status would seem to have failed in the same way
    path.unlink()
    return Failure(**json.loads(text))


def text_of(error: BaseException) -> str:
    """Return the type and the message of an exception, cut to a line's length."""
    return _text(error)[:_MESSAGE_CHARS]


def _text(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}: {error}".removeprefix("builtins.")
