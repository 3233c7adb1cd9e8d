"""Gradients and numbers of a step, as a peer gets them, lead from the state before it to the very state after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest
import torch

from launcher.loop import StageRunner, Trainer
from moe_ckpt.adapters.megatron_operators import RankOperators
from moe_ckpt.store.codec import MOMENTS, PartKey
from moe_ckpt.store.updates import Gradients
from moe_ckpt.types import ReadyGradients
from tests.adapters.stage import NoHooks, build_stage
from tests.ranks import run_ranks

LAST = 3


class _Noting(NoHooks):
    """Notes each step, and the state before the last."""

    def __init__(self, operators: RankOperators) -> None:
        self.operators = operators
        self.before: Mapping[PartKey, torch.Tensor] = {}

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        self.operators.note_step(iteration, gradients)
        self.before = self.state()
        return True

    def state(self) -> Mapping[PartKey, torch.Tensor]:
        pieces = self.operators.pieces(range(len(self.operators.table.operators)), ())
        return {key: tensor.detach().clone() for key, tensor, _ in pieces}


def _take_again(before: Mapping[PartKey, torch.Tensor], gradients: Gradients) -> dict[PartKey, torch.Tensor]:
    after: dict[PartKey, torch.Tensor] = {}
    for key, (gradient, step) in gradients.items():
        keys = [PartKey(operator=key.operator, tensor=key.tensor, role=role) for role in (key.role, *MOMENTS)]
        master, *moments = (before[each] for each in keys)
        weights = torch.nn.Parameter(master)
        betas, decay = (step.beta1, step.beta2), step.weight_decay
        make = torch.optim.AdamW if step.decoupled else torch.optim.Adam
        adam = make([weights], lr=step.learning_rate, betas=betas, eps=step.eps, weight_decay=decay)
        adam.state[weights] = {"step": torch.tensor(step.steps), **dict(zip(MOMENTS, moments, strict=True))}
        weights.grad = gradient.clone()
        adam.step()
        after |= dict(zip(keys, (weights.detach(), *moments), strict=True))
    return after


def _differing(overrides: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return which parts a step taken again leaves in another state, and whether an older step is still told."""
    state, trainer = build_stage(*overrides)
    hooks = _Noting(RankOperators(state))
    trainer = Trainer(cast("StageRunner", trainer._runner), hooks)
    for iteration in range(1, LAST + 1):
        trainer.run_iteration(iteration)
    everything = range(len(hooks.operators.table.operators))
    gradients = hooks.operators.gradients(everything, LAST)
    assert gradients, "the step is not known"
    again, after = _take_again(hooks.before, gradients), hooks.state()
    is_stale_known = hooks.operators.gradients(everything, LAST - 1) is not None
    return [str(key) for key in after if not torch.equal(after[key], again[key])], is_stale_known


@pytest.mark.parametrize("overrides", [(), ("precision=fp32", "train.distributed_optimizer=false")], ids=", ".join)
def test_a_peer_that_takes_the_step_comes_to_the_same_state(overrides: tuple[str, ...]) -> None:
    assert run_ranks(2, _differing, overrides) == [([], False)] * 2
