"""Numbers of examples of property tests: few in `make test`, more with `--full`.

With `--full` a property test tries the number of examples that its author chose. A fuzz
test makes many inputs with the generator of each example: an example costs hypothesis a
millisecond, an input a small part of a millisecond.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st

CI, FULL = "ci", "full"
MANY = 100_000
"""Number of inputs of a fuzz test with `--full`."""

PER_EXAMPLE = 100
"""Number of inputs that a fuzz test makes with one example."""

GENERATORS = st.integers(0, 2**64 - 1).map(random.Random)
"""Strategy for the generators of a fuzz test's inputs."""

settings.register_profile(CI, deadline=None, max_examples=40, derandomize=True)
settings.register_profile(FULL, deadline=None)


def examples(number: int) -> settings:
    """Return the decorator of a property test that sets the number of examples.

    The test tries `number` examples with `--full`, otherwise at most the number of the
    profile.
    """
    is_full = settings.get_current_profile_name() == FULL
    return settings(
        max_examples=number if is_full else min(number, settings().max_examples)
    )


def inputs(number: int) -> settings:
    """Return the decorator of a fuzz test that sets the number of inputs.

    The test makes `PER_EXAMPLE` inputs with each example, and `number` inputs with
    `--full`.
    """
    return examples(number // PER_EXAMPLE)


def random_text(chosen: random.Random, longest: int = 12) -> str:
    """Return a text of any characters, in which those of keys are frequent."""
    alphabet = 'ab/._-"\\ \n\x00é\u20ac\U0001f600'
    return "".join(
        chosen.choice(alphabet) for _ in range(chosen.randrange(longest + 1))
    )


def random_number(chosen: random.Random, below: int) -> int:
    """Return a number of any size from 0 to a limit, or at either end of that range."""
    return chosen.choice(
        (
            0,
            1,
            below - 1,
            chosen.randrange(below),
            chosen.getrandbits(chosen.randrange(1, 11)) % below,
        )
    )
