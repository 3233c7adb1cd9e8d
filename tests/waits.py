"""How long a test waits before it fails: some 15 times as long as a quiet machine
needs, for one with a load of 30.

No test waits for the end of these times, unless it fails.
"""

from __future__ import annotations

WAIT_S = 180.0
"""For what a process does in a fraction of a second."""

START_S = 300.0
"""For the start of a process: the first one of a test run imports torch and Megatron.
"""

JOB_S = 900.0
"""For the end of a job."""
