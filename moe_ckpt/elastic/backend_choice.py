"""The backend that moves bytes between ranks, and the GPU of a rank: `runtime.backend`."""

from __future__ import annotations

import torch

from moe_ckpt.config import AUTO, BACKENDS, require, require_choice
from moe_ckpt.elastic.backends import Backend, GlooBackend
from moe_ckpt.elastic.nccl_backend import NcclBackend
from moe_ckpt.elastic.staged import staged_backend

_, NCCL, GLOO, STAGED = BACKENDS


def backend_kind(wanted: str, *, on_gpu: bool) -> str:
    """Return what `runtime.backend` means with these devices: nccl, gloo or staged.

    Raises ConfigError for a backend that cannot carry all of a training's tensors there.
    """
    if wanted == AUTO:
        return NCCL if on_gpu else GLOO
    others = (NCCL, STAGED) if on_gpu else (GLOO, STAGED)  # gloo neither sends nor scatters tensors of a GPU
    place = "on a GPU" if on_gpu else "without a GPU"
    require(wanted in others, "runtime.backend", wanted, f"{AUTO}, {others[0]} or {others[1]} {place}")
    return wanted


def gpu_index(local_rank: int, num_gpus: int, kind: str) -> int:
    """Return the GPU of a rank. With `staged`, ranks share GPUs in turn; raises ConfigError if they cannot."""
    wanted = (
        f"staged for {local_rank + 1} or more ranks on {num_gpus} GPUs: NCCL refuses to share one, and each process "
        "needs to see all GPUs of its node"
    )
    require(kind == STAGED or local_rank < num_gpus, "runtime.backend", kind, wanted)
    return local_rank % num_gpus


def use_gpu(local_rank: int, wanted: str) -> None:
    """Make a rank's GPU the current device. Raises ConfigError where `runtime.backend` does not fit the devices."""
    kind = backend_kind(wanted, on_gpu=True)
    torch.cuda.set_device(torch.device("cuda", gpu_index(local_rank, torch.cuda.device_count(), kind)))


def open_backend(*, on_gpu: bool, kind: str = AUTO) -> Backend:
    """Return the backend that moves bytes between ranks; call once the device is chosen. Raises ConfigError."""
    require_choice("runtime.backend", kind, BACKENDS)
    match backend_kind(kind, on_gpu=on_gpu):
        case "nccl":
            return NcclBackend()
        case "staged":
            return staged_backend(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
        case "gloo":
            return GlooBackend()
        case unknown:
            raise AssertionError(f"{unknown} is in BACKENDS, and no backend here serves it")
