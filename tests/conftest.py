"""For all tests: torch and Megatron imported once, without the warnings of their import, which are errors later on.

Examples of property tests have no deadline: how busy a machine is says nothing about the code. A shell ignores Ctrl-C
for commands in the background, and their children would inherit that.
"""

import os
import shutil
import signal
import tempfile

import pytest
from hypothesis import settings

import tests.preload  # noqa: F401
from tests.references import FOLDER

settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("full", deadline=None)
settings.load_profile("ci")
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that all workers share; they inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="moe_ckpt-references-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER))
