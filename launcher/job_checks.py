"""Checks of a job's settings and layout. Pure: no torch.

The checks run before torchrun is started, and again in each rank.
"""

from __future__ import annotations

from launcher.config import Settings
from launcher.layout import check_fit, check_supervised, fit_layout
from moe_ckpt.config import FlowcheckConfig, require
from moe_ckpt.types import ParallelLayout


def check_job(settings: Settings, world_size: int) -> ParallelLayout:
    """Check the settings of a job, and return the layout.

    Args:
        settings: The settings of the job.
        world_size: The number of processes.

    Raises:
        ConfigError: The settings cannot work together, or not with this number of
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
    """Return the layout of a job.

    Args:
        settings: The settings of the job.
        world_size: The number of processes.
        is_supervised: Whether supervisors replace dead workers.

    Raises:
        ConfigError: Model, batch or layout do not divide, or a replaced rank could not
            build its model alone.
    """
    model, train = settings.model, settings.train
    layout = fit_layout(settings.parallel, world_size, num_experts=model.num_experts)
    check_fit(layout, model, train)
    if is_supervised:
        check_supervised(layout, model, train)
    return layout


def require_servable(settings: Settings) -> None:
    """Require settings under which checkpoint servers can take the optimizer's steps.

    Raises:
        ConfigError: With `ckpt=flowcheck`, a setting that servers cannot follow.
    """
    servers = settings.ckpt
    if not isinstance(servers, FlowcheckConfig):
        return
    wanted = "fp32 where ckpt=flowcheck, whose servers take the steps of torch's Adam"
    for name in ("master", "exp_avg", "exp_avg_sq"):
        got = getattr(settings.precision, name)
        require(got == "fp32", f"precision.{name}", got, wanted)
    if not servers.mirrors:
        return
    sharded, where = settings.train.distributed_optimizer, "where ckpt.capture=mirror"
    wanted = (
        f"false {where}: a sharded optimizer gathers weights over the network, and not"
        " gradients"
    )
    require(not sharded, "train.distributed_optimizer", sharded, wanted)
    dtype = settings.precision.dtype
    wanted = (
        f"bf16 or fp32 {where}: gradients of scaled losses differ from those that cross"
        " the network"
    )
    require(dtype != "fp16", "precision.dtype", dtype, wanted)
