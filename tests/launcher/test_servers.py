"""Settings under which checkpoint servers cannot follow a job are one error each."""

from __future__ import annotations

import pytest

from launcher.config import compose_settings
from launcher.job_checks import check_job, require_servable
from moe_ckpt.errors import ConfigError

_MIRROR = ["ckpt.capture=mirror", "ckpt.mirror_interface=lo"]
_WHOLE = "train.distributed_optimizer=false"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["precision=fp16_fp16_fp16"],
            "precision.master: got 'fp16', wanted fp32 where ckpt=flowcheck",
        ),
        (
            ["precision=fp8_fp32_fp32", "precision.exp_avg=fp8"],
            "precision.exp_avg: got 'fp8', wanted fp32",
        ),
        (
            ["precision.exp_avg_sq=fp16"],
            "precision.exp_avg_sq: got 'fp16', wanted fp32",
        ),
        (
            ["runtime.guard=false"],
            "runtime.guard: got False, wanted auto or true with ckpt=flowcheck",
        ),
        (
            ["ckpt.capture=mirror"],
            (
                "ckpt.mirror_interface: got None, wanted an interface where"
                " ckpt.capture=mirror"
            ),
        ),
        (
            ["ckpt.mirror_interface=e0"],
            "ckpt.mirror_interface: got 'e0', wanted an interface where",
        ),
        (
            ["ckpt.capture_loss=0.1"],
            "ckpt.capture_loss: got 0.1, wanted 0 where ckpt.capture=tap",
        ),
        (
            ["ckpt.servers=cloud"],
            "ckpt.servers: got 'cloud', wanted one of peers, hosts",
        ),
        (
            ["ckpt.server_hosts=2"],
            "ckpt.server_hosts: got 2, wanted 1 where ckpt.servers=peers",
        ),
        (
            ["ckpt.servers=hosts", "ckpt.server_hosts=0"],
            "ckpt.server_hosts: got 0, wanted at least 1",
        ),
        (
            ["ckpt.servers=hosts", "ckpt.server_wait_s=-1"],
            "ckpt.server_wait_s: got -1.0, wanted at least 0",
        ),
        (
            ["ckpt.servers=hosts", "ckpt.replicas=1"],
            (
                "ckpt.replicas: got 1, wanted less than ckpt.server_hosts=1 where"
                " ckpt.servers=hosts"
            ),
        ),
        (["ckpt.capture=hub"], "ckpt.capture: got 'hub', wanted one of tap, mirror"),
        ([*_MIRROR, "ckpt.captures=1"], "ckpt.captures: got 1, wanted at least 2"),
        (
            [*_MIRROR, "ckpt.capture_loss=1"],
            "ckpt.capture_loss: got 1.0, wanted at least 0 and less than 1",
        ),
        (
            _MIRROR,
            (
                "train.distributed_optimizer: got True, wanted false where"
                " ckpt.capture=mirror: a sharded"
            ),
        ),
        (
            [*_MIRROR, _WHOLE, "precision=fp16"],
            "precision.dtype: got 'fp16', wanted bf16 or fp32 where",
        ),
    ],
)
def test_what_servers_cannot_follow_is_named(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_job(compose_settings(["ckpt=flowcheck", *overrides]), world_size=4)
    assert str(caught.value).startswith(says)


def test_other_policies_take_any_number_format() -> None:
    require_servable(compose_settings(["ckpt=gemini", "precision=fp16_fp16_fp16"]))
