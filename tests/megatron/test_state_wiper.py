"""A wipe leaves nothing of the training state.

An armed callback runs once, at the requested moment.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import pytest
import torch

from moe_ckpt.megatron.operator_names import bare_model
from moe_ckpt.megatron.state import TrainingState, named_state, small_state
from moe_ckpt.megatron.state_wiper import StateWiper
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import (
    FP16,
    Tensors,
    build_stage,
    differing,
    first_parameter,
    trained_stage,
)
from tests.scenarios import BIAS, UNSHARDED


def _state_and_gradients(state: TrainingState) -> Tensors:
    parameters = state.model[0].named_parameters()
    return {
        **{name: tensor.detach().clone() for name, tensor in named_state(state)},
        **{f"small {name}": tensor for name, tensor in small_state(state).items()},
        **{
            f"gradient {name}": cast("Any", parameter).main_grad.clone()
            for name, parameter in parameters
        },
    }


def _wipe_after_training(overrides: tuple[str, ...]) -> None:
    state, _ = trained_stage(*overrides, iterations=3)
    random.gauss(0, 1)  # each generator draws two numbers and keeps one
    np.random.standard_normal()
    before = _state_and_gradients(state)
    StateWiper(state).wipe()
    after = _state_and_gradients(state)
    counts = {name for name in before if name.endswith("local_tokens_per_expert")}
    buffers = {name for name in before if name.endswith("expert_bias")} | counts
    assert len(buffers) == (4 if "model.moe_balancing=bias" in overrides else 0)
    assert before.keys() - differing(before, after) <= counts
    assert not any(after[name].any() for name in buffers)
    if "precision=fp16" in overrides:  # FP16 has every kind of state
        kinds = {
            name.rpartition(".")[2] for name in before if name.startswith("optimizer0.")
        }
        assert kinds >= {"master", "exp_avg", "exp_avg_sq", "step", "lr", "scale"}


@pytest.mark.parametrize(
    "overrides",
    [(*FP16, *BIAS), UNSHARDED, ("precision=fp32", "model.tied_embeddings=true")],
    ids=", ".join,
)
def test_nothing_is_left_of_the_state(overrides: tuple[str, ...]) -> None:
    run_ranks(2, _wipe_after_training, overrides)


def _weights_of_two_wipes() -> list[list[float]]:
    """Return a parameter's values after each of two wipes.

    The process's generators have the same seed before both wipes.
    """
    state, _ = build_stage()
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        random.seed(7)
        StateWiper(state).wipe()
        found.append(first_parameter(state).flatten().tolist())
    return found


def test_no_two_wipes_leave_the_same_weights() -> None:
    weights = [
        values for rank in run_ranks(2, _weights_of_two_wipes) for values in rank
    ]
    assert len({tuple(values) for values in weights}) == 4
    assert np.isfinite(weights).all()


def _calls(recompute: str) -> list[list[str]]:
    """Return the events of five iterations and an evaluation, as one list for each.

    Each list is in the order of the events.

    A callback is armed at the start of iteration 2 for forward, and at the start of
    iteration 4 for backward.
    """
    state, worker = build_stage("parallel.pp=2", f"train.recompute={recompute}")
    layer = bare_model(state.model[0]).get_submodule("decoder.layers.0")
    found: list[list[str]] = [[]]

    def note(what: str) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        found[-1].append(f"{what} in {'backward' if in_backward else 'forward'}")

    layer.register_forward_hook(lambda *_: note("layer ran"))
    for iteration, phase in enumerate(
        (None, "forward", None, "backward", None), start=1
    ):
        if phase:
            StateWiper(state).arm(phase, lambda: note("called"))
        worker.run_iteration(iteration)
        found.append([])
    worker.passes.evaluate(1)
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_armed_callback_comes_once_in_its_phase(recompute: str) -> None:
    for first, in_forward, second, in_backward, third, evaluation in run_ranks(
        2, _calls, recompute
    ):
        assert first == second == third
        assert set(first) <= {"layer ran in forward", "layer ran in backward"}
        assert evaluation == ["layer ran in forward"] * 4
        assert in_forward == ["called in forward", *first]
        where = in_backward.index("called in backward")
        assert [*in_backward[:where], *in_backward[where + 1 :]] == first
        # after the first micro-batch's forward, before the end of any layer's backward
        assert in_backward[0] == "layer ran in forward"
        assert in_backward[:where].count("layer ran in backward") == (
            1 if recompute == "full" else 0
        )
