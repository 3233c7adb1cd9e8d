"""Stand-ins for the start of loops, with the builds of torch that users have."""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

from moe_ckpt.integrations import loop_cpu
from moe_ckpt.standins import gpu
from tests.harness.gloo.processes import Child

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without a GPU"
)


def test_a_counted_device_is_no_gpu_for_a_cuda_build(stack: ExitStack) -> None:
    # in another process: the stand-ins change torch until the process ends
    assert Child(stack, _enable_in_a_cuda_build).hear() == {
        "on_cpu": True,
        "devices": 1,
        "available": False,
        "again": True,
    }


def _enable_in_a_cuda_build(connection: Connection) -> None:
    on_cpu = loop_cpu.enable(
        SimpleNamespace(initialize_megatron=print), SimpleNamespace()
    )
    # makes a CPU build of torch look like a CUDA build
    torch.cuda._is_compiled = lambda: True  # type: ignore[method-assign]
    connection.send(
        {
            "on_cpu": on_cpu,
            "devices": torch.cuda.device_count(),
            "available": torch.cuda.is_available(),
            "again": gpu.enable(),
        }
    )
