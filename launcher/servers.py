"""Checks that checkpoint servers can follow a job (`ckpt=flowcheck`). Pure."""

from __future__ import annotations

from launcher.config import Settings
from moe_ckpt.config import FlowcheckConfig, require


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
