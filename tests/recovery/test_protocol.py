"""The protocol's model (protocol.py) keeps the invariants in every interleaving.

Each rule of the model is needed for an invariant.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recovery.checker import (
    GOES_ON,
    KEEPS_LAST_COPY,
    ONE_TRAINS,
    STAYS_FINISHED,
    STEPS_TOGETHER,
    check,
)
from tests.recovery.protocol import At, Move, Protocol, Rules, World


@pytest.mark.parametrize(
    ("protocol", "least"),
    [
        (
            Protocol(iterations=1, faults=1, kinds=("kill",), moments=(At.COMPUTE,)),
            25_000,
        ),
        pytest.param(
            Protocol(iterations=1, faults=1, kinds=("kill",), moments=(At.VOTED,)),
            100_000,
            marks=pytest.mark.full,
        ),
        pytest.param(
            Protocol(iterations=1, faults=1, kinds=("lose",), moments=(At.COMPUTE,)),
            30_000,
            marks=pytest.mark.full,
        ),
    ],
    ids=["a worker dies", "a worker dies after its vote", "a node is lost"],
)
def test_every_interleaving_keeps_the_invariants(
    protocol: Protocol, least: int
) -> None:
    report = check(protocol)
    print(f"{report.states} states, {report.moves} moves")
    assert report.violation is None, "\n".join(
        [report.violation.invariant, *report.violation.moves]
    )
    assert report.states > least


@pytest.mark.parametrize(
    ("rule", "iterations", "faults", "kinds", "moments", "invariant"),
    [
        ("waits_for_all", 1, 1, ("kill",), (At.COMPUTE,), ONE_TRAINS),
        ("fences", 1, 1, ("cut off",), (At.COMPUTE,), ONE_TRAINS),
        ("fences_first", 1, 1, ("cut off",), (At.COMPUTE,), ONE_TRAINS),
        ("votes", 1, 0, (), None, STEPS_TOGETHER),
        ("confirms", 2, 1, ("lose",), (At.COMPUTE,), KEEPS_LAST_COPY),
        ("keeps_safest", 1, 1, ("kill",), (At.DONE,), KEEPS_LAST_COPY),
        ("finishes_once", 1, 1, ("kill",), (At.LAST,), STAYS_FINISHED),
        ("heeds_finish", 1, 1, ("kill",), (At.LAST,), STAYS_FINISHED),
    ],
)
def test_without_a_rule_the_checker_finds_a_violation(
    rule: str,
    iterations: int,
    faults: int,
    kinds: tuple[str, ...],
    moments: tuple[At, ...] | None,
    invariant: str,
) -> None:
    rules = Rules(**{rule: False})
    protocol = Protocol(
        rules=rules, iterations=iterations, faults=faults, kinds=kinds, moments=moments
    )
    violation = check(protocol).violation
    assert violation is not None
    assert violation.invariant == invariant


def test_a_job_that_stands_still_is_found() -> None:
    """Without copies at peers no rank may go on."""
    stuck = check(_WithoutCopies(faults=0)).violation
    assert stuck is not None
    assert stuck.invariant == GOES_ON
    assert all(f"rank {rank} takes window 1" in stuck.moves for rank in range(3))


class _WithoutCopies(Protocol):
    """A protocol in which the windows of iteration 1 never reach peers."""

    def moves(self, world: World) -> Iterator[Move]:
        return (
            move
            for move in super().moves(world)
            if "'s window 1 reaches" not in move[0]
        )
