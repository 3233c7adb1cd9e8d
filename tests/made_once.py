"""Values that are made once in a test session and read by all processes of the session.

These processes are pytest's workers and the ranks that the workers fork. Each value is
a file in a folder that exists as long as the session. With a lock beside the file, one
process makes the value while the others wait for the value.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")

FOLDER = "MOE_CKPT_TEST_SESSION"
"""The environment variable that names the folder; tests/conftest.py sets it."""


def made_once(make: Callable[..., T], *arguments: int | str) -> T:
    """Return `make(*arguments)`; only the first call in the session calls `make`."""
    return pickle.loads(_pickled(make, arguments))


@functools.cache
def _pickled(make: Callable[..., object], arguments: tuple[int | str, ...]) -> bytes:
    content = json.dumps([make.__module__, make.__qualname__, *arguments])
    path = (
        Path(os.environ[FOLDER])
        / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.pickle"
    )
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            path.write_bytes(pickle.dumps(make(*arguments)))
    return path.read_bytes()
