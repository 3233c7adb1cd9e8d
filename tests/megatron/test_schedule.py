"""A load keeps the schedule lengths of the run, unless a start asks for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.schedule import (
    LENGTHS,
    asked_by_override,
    lengths_of,
    load_schedule,
    resolve_lengths,
    set_lengths,
)


def schedule(warmup: float, decay: int, **options: Any) -> OptimizerParamScheduler:
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=warmup,  # type: ignore[arg-type]
        lr_decay_steps=decay,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        **options,
    )


def rates(scheduler: OptimizerParamScheduler, num_iterations: int) -> list[float]:
    found = []
    for _ in range(num_iterations):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return found


def loaded(
    saved: OptimizerParamScheduler, *, built: OptimizerParamScheduler
) -> OptimizerParamScheduler:
    load_schedule(built, saved.state_dict())
    return built


def test_lengths_are_set_as_they_were_also_fractions() -> None:
    saved, other = schedule(2.5, 10), schedule(1, 4)
    set_lengths(other, lengths_of(saved))
    assert [getattr(other, name) for name in LENGTHS] == [2.5, 10, 10]


def test_a_longer_schedule_goes_on_as_the_run_began() -> None:
    whole, saved, built = schedule(2, 10), schedule(2, 10), schedule(4, 20)
    first, mine = rates(saved, 6), lengths_of(built)
    used = resolve_lengths(loaded(saved, built=built), mine, {})
    assert first + rates(built, 6) == rates(whole, 12)
    assert [line.split(" (")[0] for line in used.kept] == [
        "lr_warmup_steps 2",
        "lr_decay_steps 10",
        "wd_incr_steps 10",
    ]
    assert used.changed == []


def test_a_length_that_is_asked_for_holds_from_there_on() -> None:
    whole, saved, built = schedule(2, 20), schedule(2, 10), schedule(2, 20)
    rates(saved, 6)
    mine = lengths_of(built)
    used = resolve_lengths(
        loaded(saved, built=built),
        mine,
        {"lr_decay_steps": "decay", "wd_incr_steps": "decay"},
    )
    assert rates(built, 6) == rates(whole, 12)[6:]
    assert used.changed == [
        "decay: lr_decay_steps 10 becomes 20",
        "decay: wd_incr_steps 10 becomes 20",
    ]


def test_a_warmup_beyond_the_decay_of_the_run_is_refused() -> None:
    saved, built = schedule(2, 4), schedule(10, 30)
    mine = lengths_of(built)
    with pytest.raises(
        ConfigError,
        match=r"^train.lr_warmup_iters: got 10, wanted less than the decay's 4",
    ):
        resolve_lengths(
            loaded(saved, built=built),
            mine,
            {"lr_warmup_steps": "train.lr_warmup_iters"},
        )


def test_megatrons_own_option_asks_for_all_lengths() -> None:
    assert asked_by_override(schedule(1, 4)) == {}
    override = schedule(
        1,
        4,
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )
    assert asked_by_override(override).keys() == set(LENGTHS)
