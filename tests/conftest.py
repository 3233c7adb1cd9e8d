"""Imports torch and Megatron once, without the warnings that their import gives; tests treat all others as errors."""

import tests.preload  # noqa: F401
