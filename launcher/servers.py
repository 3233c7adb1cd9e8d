"""Checks that checkpoint servers can follow a job (`ckpt=flowcheck`). Pure."""

from __future__ import annotations

from launcher.config import Settings
from moe_ckpt.config import FlowcheckConfig, require


def require_servable(settings: Settings) -> None:
    """Raise ConfigError where checkpoint servers could not take the optimizer's steps."""
    if not isinstance(settings.ckpt, FlowcheckConfig):
        return
    wanted = "fp32 where ckpt=flowcheck, whose servers take the steps of torch's Adam"
    for name in ("master", "exp_avg", "exp_avg_sq"):
        got = getattr(settings.precision, name)
        require(got == "fp32", f"precision.{name}", got, wanted)
