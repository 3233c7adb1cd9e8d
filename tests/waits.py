"""How long a test waits for something that comes in a fraction of a second on a quiet machine, before it fails."""

from __future__ import annotations

WAIT_S = 60.0
START_S = 90.0  # the first process of a test run imports torch and Megatron
