"""For all tests: torch and Megatron imported once, without the warnings of their import, which are errors later on.

An example of a property test may take as long as it does: how busy a machine is says nothing about the code. A shell
ignores Ctrl-C for what it runs in the background, and so would all processes that tests start.
"""

import signal

from hypothesis import settings

import tests.preload  # noqa: F401

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
signal.signal(signal.SIGINT, signal.default_int_handler)
