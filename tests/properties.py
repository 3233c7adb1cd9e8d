"""How many examples a property test tries: few in `make test`, the number that its author chose with `--full`."""

from __future__ import annotations

from hypothesis import settings

CI, FULL = "ci", "full"
MANY = 100_000
"""Examples of a fuzz test with `--full`, and the seconds that they may take."""
FUZZ_S = 1200.0

settings.register_profile(CI, deadline=None, max_examples=40, derandomize=True)
settings.register_profile(FULL, deadline=None)


def examples(number: int) -> settings:
    """Decorate a property test: it tries `number` examples with `--full`, otherwise at most those of the profile."""
    is_full = settings.get_current_profile_name() == FULL
    return settings(max_examples=number if is_full else min(number, settings().max_examples))
