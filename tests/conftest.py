"""For all tests: torch and Megatron imported once, without the warnings of their
import, which are errors later on.

The controller of two workers runs no test and imports neither: they would wait for
that.

Examples of property tests have no deadline: how busy a machine is says nothing about
the code. A shell ignores Ctrl-C for commands in the background, and their children
would inherit that.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

# the search for a GPU must not start CUDA: the fork server and its ranks inherit this
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from hypothesis import settings

from tests.made_once import FOLDER
from tests.properties import CI, FULL

if TYPE_CHECKING:
    from tests.elastic.processes import Child

signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run tests marked `full` too, and all examples of properties",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how much to run, and make the folder that all workers share; they inherit
    its name.
    """
    settings.load_profile(FULL if config.getoption("--full") else CI)
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        importlib.import_module("tests.preload")
    if not is_worker:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="moe_ckpt-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip tests marked `gpu` where there is no CUDA device, and leave those marked
    `full` out without --full.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Spare garbage collections the objects that live as long as the session."""
    gc.freeze()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends at the end of a test all that the test has started on it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: ExitStack) -> Callable[..., Child]:
    """Return a function that starts a process on a function and its arguments."""
    from tests.elastic.processes import Child  # noqa: PLC0415 - it imports torch

    return partial(Child, stack)
