"""A stack that ends what a test has started, and processes on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from tests.elastic.processes import Child


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: ExitStack) -> Callable[..., Child]:
    """Return what starts a process on a function and its arguments."""
    return partial(Child, stack)
