"""How many examples a property test tries: few in `make test`, the number that its
author chose with `--full`.

A fuzz test makes many inputs of each example's generator: an example costs hypothesis a
millisecond, and an input a small part of that.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st

CI, FULL = "ci", "full"
MANY = 100_000
"""Inputs of a fuzz test with `--full`."""
PER_EXAMPLE = 100
"""Inputs that a fuzz test makes of one example."""

GENERATORS = st.integers(0, 2**64 - 1).map(random.Random)
"""Generators of a fuzz test's inputs."""

settings.register_profile(CI, deadline=None, max_examples=40, derandomize=True)
settings.register_profile(FULL, deadline=None)


def examples(number: int) -> settings:
    """Decorate a property test: it tries `number` examples with `--full`, otherwise at
    most those of the profile.
    """
    is_full = settings.get_current_profile_name() == FULL
    return settings(
        max_examples=number if is_full else min(number, settings().max_examples)
    )


def inputs(number: int) -> settings:
    """Decorate a fuzz test: `PER_EXAMPLE` inputs an example make `number` inputs with
    `--full`.
    """
    return examples(number // PER_EXAMPLE)


def random_text(chosen: random.Random, longest: int = 12) -> str:
    """Return a text of any characters, more of them those of a key."""
    alphabet = 'ab/._-"\\ \n\x00é\u20ac\U0001f600'
    return "".join(
        chosen.choice(alphabet) for _ in range(chosen.randrange(longest + 1))
    )


def random_number(chosen: random.Random, below: int) -> int:
    """Return a number of any size below a limit, or one at either end."""
    return chosen.choice(
        (
            0,
            1,
            below - 1,
            chosen.randrange(below),
            chosen.getrandbits(chosen.randrange(1, 11)) % below,
        )
    )
