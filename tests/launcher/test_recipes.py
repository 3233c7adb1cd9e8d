"""Options of production recipes that the launcher lacks: lost states are rebuilt.

A run that loses its state ends as the run without a loss. Each option is set inside the
ranks, in the launcher's calls of Megatron-Core. tests/integrations/test_megatron_lm.py
tests the same options under Megatron-LM's own loop, with deaths of processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

import launcher.loop
import launcher.model
from launcher.config import Settings
from launcher.run import run
from moe_ckpt.events import StateLost
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.jobs.references import outcome_of
from tests.harness.jobs.training import events_of, job_settings, losing
from tests.scenarios import BIAS, TIED

TRAINING = (
    "parallel.pp=2",
    "parallel.ep=2",
    "train.global_batch_size=8",
    "train.clip_grad=0.1",
    "train.iterations=9",
)
LOST = ((5, 1, "forward", 1), (6, 0, "backward"), (7, 1, "step"), (7, 0, "between"))


def _with_options(name: str, **options: Any) -> None:
    """Add options to a constructor of Megatron-Core that the launcher calls."""
    setattr(
        launcher.model,
        name,
        functools.partial(getattr(launcher.model, name), **options),
    )


def _overlap() -> None:
    """Overlap both collectives, with several buckets for each group."""
    _with_options(
        "DistributedDataParallelConfig",
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        bucket_size=999,
    )


def _loss_per_token() -> None:
    """Compute the loss per token, of targets that are letters.

    Micro-batches and ranks then have different numbers of counted tokens.
    """
    _with_options("TransformerConfig", calculate_per_token_loss=True)
    forward = launcher.loop.forward

    def loss_of(
        mask: torch.Tensor, per_token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total, count = (per_token.float() * mask).sum(), mask.sum()
        return total, count, {"loss": (total / count).detach()}

    def forward_step(
        micro_batches: Any, model: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens: Any = next(micro_batches)
        mask: Any = None if tokens is None else (tokens[:, 1:] >= ord("a")).int()
        return forward(tokens, model), functools.partial(loss_of, mask)

    launcher.loop.forward_step = forward_step


def _frozen_base() -> None:
    """Train experts and norms only.

    The first stage trains neither its embedding nor a router.
    """
    model = launcher.model.GPTModel

    def frozen(*arguments: Any, **options: Any) -> torch.nn.Module:
        stage = model(*arguments, **options)
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_("experts" in name or "layernorm" in name)
        return stage

    launcher.model.GPTModel = frozen


def _tokens_further_ahead() -> None:
    """Predict two tokens further, from the last stage's copy of the word embedding."""
    _with_options("TransformerConfig", mtp_num_layers=2)
    model = launcher.model.GPTModel

    def with_mtp(config: Any, layers: Any, **options: Any) -> torch.nn.Module:
        block: Any = get_gpt_mtp_block_spec(
            config, layers, use_transformer_engine=False
        )
        return model(config, layers, mtp_block_spec=block, **options)

    launcher.model.GPTModel = with_mtp


OPTIONS: dict[str, Callable[[], None]] = {
    "overlapped": _overlap,
    "loss per token": _loss_per_token,
    "frozen base": _frozen_base,
    "tokens further ahead": _tokens_further_ahead,
}
ROWS = {
    "overlapped": (("overlapped",), BIAS),
    "overlapped, loss per token, tied": (("overlapped", "loss per token"), TIED),
    "loss per token": (("loss per token",), ()),
    "frozen base": (("frozen base",), ()),
    "frozen base, overlapped, tied": (("frozen base", "overlapped"), TIED),
    "tokens further ahead": (("tokens further ahead",), ()),
    "tokens further ahead, tied, per token": (
        ("tokens further ahead", "loss per token"),
        TIED,
    ),
}
IN_DEFAULT = ("overlapped, loss per token, tied", "frozen base")


def _run_with(settings: Settings, options: tuple[str, ...]) -> dict[str, Any]:
    for option in options:
        OPTIONS[option]()
    return run(settings, store=rank_store())


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row in IN_DEFAULT else pytest.mark.full)
        for row in ROWS
    ],
)
def test_recovered_run_of_a_recipe_is_exact(row: str, tmp_path: Path) -> None:
    options, training = ROWS[row]
    plain, lost = tmp_path / "plain", tmp_path / "lost"
    recovery = (*losing(*LOST), "ckpt.window=3", "train.check_determinism=true")
    outcomes = [
        outcome_of(
            folder,
            run_ranks(
                4, _run_with, job_settings(folder, *TRAINING, *training, *more), options
            )[0],
        )
        for folder, more in ((plain, ()), (lost, recovery))
    ]

    assert {
        loss.phase for rank in range(4) for loss in events_of(lost, StateLost, rank)
    } == {loss[2] for loss in LOST}
    assert outcomes[1] == outcomes[0]
