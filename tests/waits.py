"""Time limits of waits in tests, in seconds, after which a test fails.

The limits are some 15 times as long as a quiet machine needs, and are meant for a
machine with a load of 30. A test that passes never waits until a limit.
"""

from __future__ import annotations

WAIT_S = 180.0
"""Limit for work that a process does in a fraction of a second."""

START_S = 300.0
"""Limit for the start of a process; the first one imports torch and Megatron."""

JOB_S = 900.0
"""Limit for the end of a job."""
