"""Set-up of all tests: imports torch and Megatron once.

The imports happen without the warnings that would be errors in a test. The controller
of several pytest workers runs no test and imports neither package, because the workers
would wait for the controller.

Examples of property tests have no deadline, because the load of a machine is no
property of the code. This module restores the handler of SIGINT: a shell lets commands
in the background ignore Ctrl-C, and child processes would inherit the ignored signal.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.forkserver import ensure_running
from typing import TYPE_CHECKING

import pytest

# the search for a GPU must not start CUDA; the fork server and all ranks inherit the
# variable
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from hypothesis import settings

from tests.made_once import FOLDER
from tests.properties import CI, FULL

if TYPE_CHECKING:
    from tests.harness.gloo.processes import Child

signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run tests marked `full` too, and all examples of properties",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples to run, and make the folder that all workers share.

    The workers inherit the variable with the folder's name.
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
    """Skip tests that cannot run or are not wanted.

    Tests marked `gpu` are skipped without a CUDA device. Tests marked `full` are
    deselected without --full.
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
    """Start the fork server of ranks, in an environment that no test has changed.

    Ranks inherit the variables with which the server was started. Objects that live as
    long as the session are excluded from garbage collection.
    """
    if "tests.harness.gloo.ranks" in sys.modules:
        ensure_running()
    gc.freeze()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Return a stack that closes at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: ExitStack) -> Callable[..., Child]:
    """Return a function that starts a process with a function and arguments."""
    # imported here, because the module imports torch
    from tests.harness.gloo.processes import Child  # noqa: PLC0415

    return partial(Child, stack)
