"""One rank's stage of a tiny model, built as the launcher builds it, for tests of the adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from launcher.data import Batches, open_source
from launcher.launch import read_launch
from launcher.layout import fit_layout
from launcher.loop import StageRunner, Trainer
from launcher.model import build_training
from launcher.parallel import choose_device, form_groups, join_job
from launcher.parameters import padded_vocab_size
from moe_ckpt.adapters.megatron_state import TrainingState, allocate_optimizer_state
from moe_ckpt.types import ReadyGradients
from tests.ranks import rank_store
from tests.training import small_settings


class NoHooks:
    """A loop without checkpointing."""

    def iteration_started(self, iteration: int) -> None:
        pass

    def loss_known(self, iteration: int, loss: float) -> None:
        pass

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        return True

    def update_applied(self, iteration: int) -> None:
        pass

    def step_committed(self, iteration: int) -> None:
        pass


def build_stage(*overrides: str, router: type[TopKRouter] = TopKRouter) -> tuple[TrainingState, Trainer]:
    """Return this rank's state and a trainer for it. Call inside `run_ranks`."""
    settings = small_settings(*overrides)
    launch = read_launch()
    layout = fit_layout(settings.parallel, launch.world_size, num_experts=settings.model.num_experts)
    join_job(launch, on_gpu=choose_device(launch, deterministic=True), store=rank_store())
    form_groups(layout, settings.train.seed)
    source = open_source(settings.data, settings.train, None, Path("unused"))
    state = build_training(settings, layout, padded_vocab_size(source.vocab_size, layout), router)
    allocate_optimizer_state(state)
    dp_rank = parallel_state.get_data_parallel_rank()
    batches = Batches(source=source, train=settings.train, dp=layout.dp, dp_rank=dp_rank)
    return state, Trainer(StageRunner(state, batches), NoHooks())


def first_parameter(state: TrainingState) -> torch.nn.Parameter:
    """Return a parameter of this rank."""
    return next(iter(state.model[0].parameters()))


def torch_optimizer(state: TrainingState) -> Any:
    """Return the Adam inside this rank's first inner optimizer."""
    return state.inner_optimizers[0].optimizer


Mutation = Callable[[TrainingState], None]
