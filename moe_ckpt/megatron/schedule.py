"""The lengths of a learning-rate schedule, which stay as the run began.

Loops derive the lengths of warmup and decay from the iterations of a run. A run that is
continued for longer would derive longer lengths. With longer lengths, the iterations
before the load would have had other learning rates, and a replay would lead to another
state. The lengths are therefore part of each iteration's start and of each checkpoint.
A load restores the lengths. A new length takes effect from the load on, if the start
asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_ckpt.config import require

LENGTHS = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
"""Length attributes of Megatron's `OptimizerParamScheduler`.

The unit is iterations or samples, as the loop counts.
"""

OF_GROUPS = ("max_lr", "min_lr", "betas", "eps")
"""Hyperparameters that Megatron's optimizers load with their state.

A start restores the values of its own settings after a load.
"""

_OF_OPTIMIZER = (
    "optimizer",
    "lr",
    "min_lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
)
_OF_SCHEDULE = (
    *(
        "init_lr",
        "max_lr",
        "min_lr",
        "lr_decay_style",
        "start_wd",
        "end_wd",
        "wd_incr_style",
    ),
    *("lr_wsd_decay_style", "wsd_decay_steps"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsUsed:
    """The effect of a load on the lengths of the schedule, as lines for the log."""

    kept: Sequence[str] = ()
    """Lengths that stay as the run began, although this start has built others."""

    changed: Sequence[str] = ()
    """Lengths of this start that take effect from the load on, as the start asks."""


def settings_of_optimizer(state: Any) -> dict[str, Any]:
    """Return the settings of optimizer and schedule that determine a step.

    The lengths of the schedule are left out.

    Args:
        state: A `TrainingState`.
    """
    config, scheduler = state.inner_optimizers[0].config, state.scheduler
    of_optimizer = {
        f"optimizer {name}": getattr(config, name, None) for name in _OF_OPTIMIZER
    }
    return of_optimizer | {
        f"schedule {name}": getattr(scheduler, name, None) for name in _OF_SCHEDULE
    }


def asked_by_override(scheduler: Any) -> dict[str, str]:
    """Return the lengths that a start asks for by Megatron's own option.

    Returns:
        The name of the option by length, as `attach` takes the lengths.
    """
    return (
        dict.fromkeys(LENGTHS, "override_opt_param_scheduler")
        if scheduler.override_opt_param_scheduler
        else {}
    )


def lengths_of(scheduler: Any) -> torch.Tensor:
    """Return the lengths of a schedule, float64 [len(LENGTHS)].

    Megatron-LM's warmup may be a fraction.
    """
    return torch.tensor(
        [float(getattr(scheduler, name)) for name in LENGTHS], dtype=torch.float64
    )


def set_lengths(scheduler: Any, lengths: torch.Tensor) -> None:
    """Set the lengths of a schedule to a result of `lengths_of`."""
    for name, length in zip(LENGTHS, lengths.tolist(), strict=True):
        _set_length(scheduler, name, length)


def load_schedule(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Load a schedule's position and lengths from a checkpoint.

    Rates are those of this start.
    """
    for name in LENGTHS:
        setattr(scheduler, name, saved.get(name, getattr(scheduler, name)))
    scheduler.num_steps = int(saved["num_steps"])


def resolve_lengths(
    scheduler: Any, built: torch.Tensor, asked: Mapping[str, str]
) -> LengthsUsed:
    """Decide after a load between the loaded lengths and those of this start.

    Args:
        scheduler: The schedule, with the lengths of the loaded state.
        built: The lengths that this start has built, as in `lengths_of`.
        asked: The settings that ask for a length of this start, by the name of the
            length.

    Returns:
        The decisions, for the log.

    Raises:
        ConfigError: The resulting warmup does not end before the decay.
    """
    kept: list[str] = []
    changed: list[str] = []
    for name, mine in zip(LENGTHS, built.tolist(), strict=True):
        loaded = float(getattr(scheduler, name))
        if loaded == mine:
            continue
        if name in asked:
            changed.append(f"{asked[name]}: {name} {loaded:g} becomes {mine:g}")
            _set_length(scheduler, name, mine)
        else:
            kept.append(f"{name} {loaded:g} (this start would have {mine:g})")
    warmup, decay = scheduler.lr_warmup_steps, scheduler.lr_decay_steps
    require(
        warmup < decay,
        asked.get("lr_warmup_steps", "lr_warmup_steps"),
        warmup,
        f"less than the decay's {decay}",
    )
    scheduler.step(increment=0)  # learning rates of the groups follow from the lengths
    return LengthsUsed(kept=kept, changed=changed)


def _set_length(scheduler: Any, name: str, length: float) -> None:
    setattr(scheduler, name, int(length) if length.is_integer() else length)
