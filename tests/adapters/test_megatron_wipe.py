"""A wipe leaves nothing of the training state, and comes at the moment that was asked for, once."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import pytest
import torch

from moe_ckpt.adapters.megatron_operators import bare_model
from moe_ckpt.adapters.megatron_state import TrainingState, named_state, small_state
from moe_ckpt.adapters.megatron_wipe import StateWiper
from tests.adapters.stage import build_stage, first_parameter
from tests.ranks import run_ranks

FP16 = ("precision=fp16", "precision.initial_loss_scale=1024.0")
BIAS = ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")


def _copied(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_state(state)}


def _gradients(state: TrainingState) -> list[torch.Tensor]:
    return [cast("Any", parameter).main_grad.clone() for parameter in state.model[0].parameters()]


def _same_after_wipe(overrides: tuple[str, ...]) -> tuple[set[str], set[str], set[str], int]:
    """Return the names that a wipe left as they were, those that it left at zero, all names, and equal gradients."""
    state, trainer = build_stage(*overrides)
    for iteration in (1, 2, 3):
        trainer.run_iteration(iteration)
    random.gauss(0, 1)  # either keeps the second number that it drew
    np.random.standard_normal()
    before, small, gradients = _copied(state), small_state(state), _gradients(state)
    StateWiper(state).wipe()
    after, small_after = _copied(state), small_state(state)
    before |= {f"small {name}": tensor for name, tensor in small.items()}
    after |= {f"small {name}": tensor for name, tensor in small_after.items()}
    same = {name for name in before if torch.equal(before[name], after[name])}
    zero = {name for name in before if not after[name].count_nonzero()}
    num_same_gradients = sum(map(torch.equal, gradients, _gradients(state)))
    return same, zero, set(before), num_same_gradients


@pytest.mark.parametrize(
    "overrides",
    [(), (*FP16, *BIAS), ("train.distributed_optimizer=false",), ("precision=fp32", "model.tied_embeddings=true")],
    ids=lambda overrides: ", ".join(overrides) or "default",
)
def test_nothing_is_left_of_the_state(overrides: tuple[str, ...]) -> None:
    for same, zero, names, num_same_gradients in run_ranks(2, _same_after_wipe, overrides):
        buffers = {name for name in names if name.endswith(("expert_bias", "local_tokens_per_expert"))}
        assert len(buffers) == (4 if "model.moe_balancing=bias" in overrides else 0)
        assert same <= {name for name in buffers if name.endswith("local_tokens_per_expert")}
        assert buffers <= zero
        assert num_same_gradients == 0


@pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq", "step", "lr", "scaler.scale"])
def test_every_kind_of_state_is_there_to_be_lost(kind: str) -> None:
    ((_, _, names, _),) = run_ranks(1, _same_after_wipe, FP16)
    assert any(name.startswith("optimizer0.") and name.endswith(f".{kind}") for name in names)


def _wiped_values(seed: int) -> list[float]:
    """Return a parameter's values after a wipe, from a process whose generators were seeded."""
    state, _ = build_stage()
    torch.manual_seed(seed)
    random.seed(seed)
    StateWiper(state).wipe()
    return first_parameter(state).flatten().tolist()


def test_no_two_wipes_leave_the_same_weights() -> None:
    first, second = run_ranks(1, _wiped_values, 7)[0], run_ranks(1, _wiped_values, 7)[0]
    assert first != second
    assert np.isfinite([*first, *second]).all()


def _calls(phase: str, overrides: tuple[str, ...]) -> list[list[str]]:
    """Return, for three iterations of which the callback is armed before the second, what happened, in order."""
    state, trainer = build_stage(*overrides)
    layer = bare_model(state.model[0]).get_submodule("decoder.layers.0")
    seen: list[str] = []

    def note(what: str) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        seen.append(f"{what} in {'backward' if in_backward else 'forward'}")

    layer.register_forward_hook(lambda *_: note("layer ran"))
    found: list[list[str]] = []
    for iteration in (1, 2, 3):
        if iteration == 2:
            StateWiper(state).arm(phase, lambda: note("called"))
        trainer.run_iteration(iteration)
        found.append(seen.copy())
        seen.clear()
    trainer.evaluate(1)
    return [*found, seen.copy()]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_armed_callback_comes_once_in_its_phase(phase: str, recompute: str) -> None:
    overrides = ("parallel.pp=2", f"train.recompute={recompute}")
    for first, armed, next_, evaluation in run_ranks(2, _calls, phase, overrides):
        called = f"called in {phase}"
        assert first == next_ == [what for what in armed if what != called]
        assert set(first) <= {"layer ran in forward", "layer ran in backward"}
        assert armed.count(called) == 1
        assert evaluation == ["layer ran in forward"] * 4
        if phase == "forward":
            assert armed[0] == called
        else:  # after the first micro-batch's forward, and before any layer's backward is over
            before = armed[: armed.index(called)]
            assert before[0] == "layer ran in forward"
            assert before.count("layer ran in backward") == (1 if recompute == "full" else 0)
