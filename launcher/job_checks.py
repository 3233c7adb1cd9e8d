"""Checks of a job's settings and layout, before torchrun is started and again in each
rank. Pure: no torch.
"""

from __future__ import annotations

from launcher.config import Settings
from launcher.layout import check_fit, check_supervised, fit_layout
from launcher.servers import require_servable
from moe_ckpt.config import require
from moe_ckpt.types import ParallelLayout


def check_job(settings: Settings, world_size: int) -> ParallelLayout:
    """Return the layout of a job.

    Raises:
        ConfigError: Settings that cannot work together, or with this number of
            processes.
    """
    is_supervised = settings.job.is_supervised
    require_servable(settings)
    kills_none = settings.fault.kind in ("none", "state_loss")
    wanted = (
        "none or state_loss: no supervisor replaces a killed worker with this policy"
    )
    require(is_supervised or kills_none, "fault.kind", settings.fault.kind, wanted)
    return lay_out(settings, world_size, is_supervised=is_supervised)


def lay_out(
    settings: Settings, world_size: int, *, is_supervised: bool
) -> ParallelLayout:
    """Return the layout of a job. Raises ConfigError where model, batch or layout do
    not divide.
    """
    model, train = settings.model, settings.train
    layout = fit_layout(settings.parallel, world_size, num_experts=model.num_experts)
    check_fit(layout, model, train)
    if is_supervised:
        check_supervised(layout, model, train)
    return layout
