"""One rank's stage of a tiny model, for tests of the adapters.

The stage is built as the launcher builds a stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe.router import TopKRouter

from launcher.config import Settings
from launcher.data import Batches, open_source
from launcher.layout import fit_layout
from launcher.loop import StagePasses
from launcher.model import build_training
from launcher.parameters import padded_vocab_size
from launcher.run import form_groups, use_cpu
from moe_ckpt.elastic.torchrun_variables import read_launch
from moe_ckpt.events import IterationCommitted
from moe_ckpt.loop import TrainingIteration, choose_device
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.state import TrainingState, allocate_optimizer_state
from moe_ckpt.plain_worker import PlainWorker
from moe_ckpt.snapshot.capture import Piece
from moe_ckpt.snapshot.codec import PartKey
from moe_ckpt.types import ParallelLayout, ReadyGradients
from tests.harness.gloo.ranks import rank_store
from tests.harness.jobs.training import small_settings

FP16 = ("precision=fp16", "precision.initial_loss_scale=1024.0")

Parts = dict[PartKey, torch.Tensor]
Tensors = dict[str, torch.Tensor]


class NoHooks:
    """Implements `TrainingHooks` without any effect."""

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        return True

    def loss_known(self, iteration: int, loss: float) -> None:
        pass

    def _ignore(self, iteration: int) -> None:
        pass

    iteration_started = update_applied = step_committed = _ignore


def join(*overrides: str) -> tuple[Settings, ParallelLayout]:
    """Join this rank's job and form its groups. Call inside `run_ranks`."""
    settings = small_settings(*overrides)
    launch = read_launch()
    layout = fit_layout(
        settings.parallel, launch.world_size, num_experts=settings.model.num_experts
    )
    on_gpu = choose_device(settings.job, launch, use_cpu)
    PlainWorker(settings.job, launch, rank_store()).join_world(on_gpu=on_gpu)
    form_groups(layout, settings.train.seed)
    return settings, layout


class StageLoop:
    """The iterations and passes of one rank, without a session."""

    def __init__(self, state: TrainingState, batches: Batches) -> None:
        self.iteration = TrainingIteration(state)
        self.iteration.hooks = NoHooks()
        self.passes = StagePasses(self.iteration, batches)

    def run_iteration(self, iteration: int) -> IterationCommitted:
        return self.iteration.run(iteration, self.passes.train_on)


def build_stage(
    *overrides: str, router: type[TopKRouter] = TopKRouter
) -> tuple[TrainingState, StageLoop]:
    """Return this rank's state and a loop for it. Call inside `run_ranks`."""
    settings, layout = join(*overrides)
    source = open_source(settings.data, settings.train, None, Path("unused"))
    state = build_training(
        settings, layout, padded_vocab_size(source.vocab_size, layout), router
    )
    allocate_optimizer_state(state)
    dp_rank = parallel_state.get_data_parallel_rank()
    consumed = lambda done: done * settings.train.global_batch_size  # noqa: E731
    batches = Batches(
        source=source,
        train=settings.train,
        dp=layout.dp,
        dp_rank=dp_rank,
        consumed=consumed,
    )
    return state, StageLoop(state, batches)


def trained_stage(*overrides: str, iterations: int) -> tuple[TrainingState, StageLoop]:
    """Return a stage after its first iterations."""
    state, loop = build_stage(*overrides)
    for iteration in range(1, iterations + 1):
        loop.run_iteration(iteration)
    return state, loop


def stage_number() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def first_parameter(state: TrainingState) -> torch.nn.Parameter:
    return next(iter(state.model[0].parameters()))


def torch_optimizer(state: TrainingState) -> Any:
    return state.inner_optimizers[0].optimizer


def draw_from_tracker() -> None:
    """Draw from the generator that Megatron keeps for dropout."""
    with cast("Any", tensor_parallel.get_cuda_rng_tracker()).fork():
        torch.rand(1)


def double_loss_scale(state: TrainingState) -> None:
    cast("Any", state.inner_optimizers[0]).grad_scaler._scale *= 2


def everything(operators: RankOperators) -> range:
    return range(len(operators.table.operators))


def names_of(operators: RankOperators) -> set[str]:
    return {str(operator) for operator in operators.table.operators}


def copied(pieces: Iterable[Piece]) -> Parts:
    return {key: tensor.detach().clone() for key, tensor, _ in pieces}


def full_parts(operators: RankOperators) -> Parts:
    """Return copies of the master weights, moments and buffers that this rank owns."""
    each = everything(operators)
    return copied([*operators.pieces(each, ()), *operators.buffer_pieces(each)])


def compute_parts(operators: RankOperators) -> Parts:
    """Return copies of the tensors that forward reads: compute weights and buffers."""
    each = everything(operators)
    return copied([*operators.pieces((), each), *operators.buffer_pieces(each)])


def differing(before: Tensors, after: Tensors) -> set[str]:
    assert before.keys() == after.keys()
    return {
        name for name, tensor in before.items() if not torch.equal(tensor, after[name])
    }
