"""A peer that takes a step from gradients and numbers gets the owner's exact state."""

from __future__ import annotations

import pytest
import torch

from moe_ckpt.megatron.gradients import repeats_on_a_host
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.snapshot.adam_update import Gradients
from moe_ckpt.snapshot.codec import MOMENTS, PartKey
from moe_ckpt.types import ReadyGradients
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import (
    NoHooks,
    Parts,
    build_stage,
    copied,
    everything,
    full_parts,
)
from tests.scenarios import UNSHARDED

LAST = 3


class _Noting(NoHooks):
    """Logs each step, and keeps the state before the last step."""

    def __init__(self, operators: RankOperators) -> None:
        self._operators = operators
        self.before: Parts = {}

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        self._operators.log_step(iteration, gradients)
        self.before = full_parts(self._operators)
        return True


def _take_again(before: Parts, gradients: Gradients) -> Parts:
    after: Parts = {}
    for key, (gradient, step) in gradients.items():
        keys = [
            PartKey(operator=key.operator, tensor=key.tensor, role=role)
            for role in (key.role, *MOMENTS)
        ]
        master, *moments = (before[each] for each in keys)
        weights = torch.nn.Parameter(master)
        betas, decay = (step.beta1, step.beta2), step.weight_decay
        make = torch.optim.AdamW if step.decoupled else torch.optim.Adam
        adam = make(
            [weights],
            lr=step.learning_rate,
            betas=betas,
            eps=step.eps,
            weight_decay=decay,
        )
        adam.state[weights] = {
            "step": torch.tensor(step.steps),
            **dict(zip(MOMENTS, moments, strict=True)),
        }
        weights.grad = gradient.clone()
        adam.step()
        after |= dict(zip(keys, (weights.detach(), *moments), strict=True))
    return after


def _step_as_a_peer(overrides: tuple[str, ...]) -> None:
    state, loop = build_stage(*overrides)
    operators = RankOperators(state)
    hooks = _Noting(operators)
    loop.iteration.hooks = hooks
    for iteration in range(1, LAST + 1):
        loop.run_iteration(iteration)
    gradients = operators.gradients(everything(operators), LAST)
    assert gradients, "the step is not known"
    again = _take_again(hooks.before, gradients)
    after = copied(operators.pieces(everything(operators), ()))
    assert all(torch.equal(tensor, again[key]) for key, tensor in after.items())
    assert operators.gradients(everything(operators), LAST - 1) is None, (
        "an older step is still told"
    )


@pytest.mark.parametrize(
    "overrides", [(), ("precision=fp32", *UNSHARDED)], ids=", ".join
)
def test_a_peer_that_takes_the_step_comes_to_the_same_state(
    overrides: tuple[str, ...],
) -> None:
    run_ranks(2, _step_as_a_peer, overrides)


def test_a_step_that_a_device_takes_is_left_to_the_device() -> None:
    """Peers compute on hosts, whose Adam differs from a device's in the last bits.

    `meta` stands for any device.
    """
    assert repeats_on_a_host(torch.empty(1))
    assert not repeats_on_a_host(torch.empty(1, device="meta"))
