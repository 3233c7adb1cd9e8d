"""Choose the backend that moves bytes between ranks, and the GPU of a rank.

The settings are `runtime.backend` and `runtime.share_gpus`.
"""

from __future__ import annotations

import os
import socket
import sys

import torch

from moe_ckpt.config import AUTO, BACKENDS, GLOO, NCCL, STAGED, require, require_choice
from moe_ckpt.elastic.backends import Backend, GlooBackend
from moe_ckpt.elastic.nccl_backend import NcclBackend
from moe_ckpt.elastic.staged import staged_backend
from moe_ckpt.elastic.torchrun_variables import Launch


def backend_kind(wanted: str, *, on_gpu: bool, share_gpus: bool = False) -> str:
    """Resolve `runtime.backend` for the devices of a job.

    Args:
        wanted: `runtime.backend`.
        on_gpu: Whether ranks train on GPUs.
        share_gpus: `runtime.share_gpus`.

    Returns:
        One of `BACKENDS` other than `AUTO`.

    Raises:
        ConfigError: The backend cannot carry all tensors of a training on these
            devices, or `share_gpus` is set for another backend than NCCL, which needs
            no permission to share GPUs.
    """
    kind = (NCCL if on_gpu else GLOO) if wanted == AUTO else wanted
    # gloo cannot send or scatter tensors of a GPU
    others = (NCCL, STAGED) if on_gpu else (GLOO, STAGED)
    where = "on a GPU" if on_gpu else "without a GPU"
    require(
        kind in others,
        "runtime.backend",
        kind,
        f"{AUTO}, {others[0]} or {others[1]} {where}",
    )
    wanted_share = (
        f"false with runtime.backend={kind}: it is NCCL that refuses to share a GPU"
    )
    require(
        kind == NCCL or not share_gpus, "runtime.share_gpus", share_gpus, wanted_share
    )
    return kind


def gpu_index(
    local_rank: int, num_gpus: int, kind: str, *, share_gpus: bool = False
) -> int:
    """Return the index of a rank's GPU. Ranks that may share GPUs take GPUs in turn.

    Args:
        local_rank: The rank among the ranks of its node.
        num_gpus: The number of GPUs that this process sees.
        kind: The backend, as `backend_kind` returns it.
        share_gpus: `runtime.share_gpus`.

    Raises:
        ConfigError: The node has no GPU for the rank, and ranks may not share GPUs.
    """
    wanted = (
        f"{STAGED} for {local_rank + 1} or more ranks on {num_gpus} GPUs, or"
        " runtime.share_gpus=true for a test: NCCL refuses to share one, and each"
        " process needs to see all GPUs of its node"
    )
    require(
        kind == STAGED or share_gpus or local_rank < num_gpus,
        "runtime.backend",
        kind,
        wanted,
    )
    return local_rank % num_gpus


def use_gpu(launch: Launch, wanted: str, *, share_gpus: bool = False) -> None:
    """Make a rank's GPU the current device. Call before the rank's first process group.

    With `share_gpus`, also sets NCCL's environment variables in this process, and local
    rank 0 prints a warning.

    Args:
        launch: The rank's position in the job.
        wanted: `runtime.backend`.
        share_gpus: `runtime.share_gpus`: several ranks share a GPU, on one node.

    Raises:
        ConfigError: `runtime.backend` or `runtime.share_gpus` does not fit the devices,
            or `share_gpus` is set in a job of several nodes.
    """
    kind, num_gpus = (
        backend_kind(wanted, on_gpu=True, share_gpus=share_gpus),
        torch.cuda.device_count(),
    )
    torch.cuda.set_device(
        torch.device(
            "cuda", gpu_index(launch.local_rank, num_gpus, kind, share_gpus=share_gpus)
        )
    )
    if not share_gpus:
        return
    is_one_node = launch.local_world_size == launch.world_size
    require(
        is_one_node,
        "runtime.share_gpus",
        share_gpus,
        "false on several nodes: ranks meet on the loopback",
    )
    os.environ.update(
        environment_of_shared_gpus(f"{socket.gethostname()}-{launch.local_rank}")
    )
    if launch.local_rank == 0:
        said = (
            f"{launch.world_size} ranks on {num_gpus} GPUs, through NCCL's sockets:"
            " slow, for tests alone"
        )
        print(f"runtime.share_gpus: {said}", file=sys.stderr, flush=True)


def environment_of_shared_gpus(host_id: str) -> dict[str, str]:
    """Return NCCL's environment variables for ranks that share a GPU.

    NCCL refuses two ranks of one host on one GPU. So each rank presents itself as a
    host of its own, and ranks communicate over the loopback (NCCL 2.27 to 2.29,
    `init.cc` and `utils.cc`).

    Args:
        host_id: A name for the rank that no other rank of the job has.
    """
    return {
        "NCCL_HOSTID": host_id,
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        # otherwise NCCL asks several hosts for a common NVLink fabric
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        # this feature needs NUMA nodes, which virtual machines may not expose
        "NCCL_CUMEM_HOST_ENABLE": "0",
        # each step of the LL protocol waits until the other ranks' kernels have had a
        # turn on the GPU
        "NCCL_PROTO": "Simple",
        # ranks take turns anyway, and each channel costs buffers and sockets
        "NCCL_MAX_CTAS": "2",
    }


def open_backend(
    *, on_gpu: bool, kind: str = AUTO, share_gpus: bool = False
) -> Backend:
    """Open the backend that moves bytes between ranks.

    Args:
        on_gpu: Whether ranks train on GPUs. The current device must then be set.
        kind: `runtime.backend`.
        share_gpus: `runtime.share_gpus`.

    Raises:
        ConfigError: The backend is unknown, or does not fit the devices.
    """
    require_choice("runtime.backend", kind, BACKENDS)
    chosen = backend_kind(kind, on_gpu=on_gpu, share_gpus=share_gpus)
    if chosen == NCCL:
        return NcclBackend()
    if chosen == GLOO:
        return GlooBackend()
    if chosen == STAGED:
        return staged_backend(
            torch.device("cuda", torch.cuda.current_device())
            if on_gpu
            else torch.device("cpu")
        )
    raise AssertionError(f"{chosen} is in BACKENDS, and no backend here serves it")
