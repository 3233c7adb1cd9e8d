"""The processes of a job: their device, how they meet, and Megatron's process groups."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from moe_ckpt.config import AUTO
from moe_ckpt.elastic.backend_choice import NCCL, STAGED, backend_kind, use_gpu
from moe_ckpt.elastic.job_store import agent_store
from moe_ckpt.elastic.staged import register_staged
from moe_ckpt.elastic.torchrun import Launch
from moe_ckpt.megatron import cpu_stand_in
from moe_ckpt.megatron.determinism import make_deterministic
from moe_ckpt.types import ParallelLayout


def choose_device(launch: Launch, *, deterministic: bool, backend: str = AUTO, share_gpus: bool = False) -> bool:
    """Choose this process's device, a GPU where there is CUDA; return whether it is one.

    Raises ConfigError where `runtime.backend` or `runtime.share_gpus` does not fit the devices.
    """
    if cpu_stand_in.enable():
        # a share that no load changes: sums depend on the number of threads
        num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_processes))
        backend_kind(backend, on_gpu=False, share_gpus=share_gpus)
        return False
    if deterministic:
        make_deterministic()
    use_gpu(launch, backend, share_gpus=share_gpus)
    return True


def join_job(launch: Launch, *, on_gpu: bool, store: dist.Store | None = None, backend: str = AUTO) -> None:
    """Form the world with the backend that `runtime.backend` names. Raises ConfigError for one that does not fit.

    The ranks meet through `store`, or torchrun's where none is given. torchrun's outlives a restart of its workers,
    with the addresses that the dead ones left in it: every attempt has a part of its own.
    """
    store = store or agent_store(f"attempt-{launch.attempt}")
    world: dict[str, Any] = (
        {"store": store, "rank": launch.global_rank, "world_size": launch.world_size} if store else {}
    )
    kind = backend_kind(backend, on_gpu=on_gpu)
    if kind == STAGED:
        register_staged()
    if kind == NCCL:
        world["device_id"] = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(kind, **world)


def form_groups(layout: ParallelLayout, seed: int) -> None:
    """Form Megatron's process groups and seed its generators, differently on each stage, as Megatron does."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,
    )
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def leave_job() -> None:
    """Undo `form_groups` and `join_job`, whatever of them was done."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
