"""How the processes of a job share the work: degrees fitted to the world size, and Megatron's process groups."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from launcher.config import AUTO, ModelConfig, ParallelConfig, TrainConfig
from launcher.launch import Launch, agent_store
from moe_ckpt.adapters import megatron_cpu
from moe_ckpt.config import require
from moe_ckpt.runtime.groups import BACKEND
from moe_ckpt.types import ParallelLayout


def fit_layout(parallel: ParallelConfig, world_size: int, *, num_experts: int) -> ParallelLayout:
    """Return the degrees for `world_size` processes; `auto` takes 2 stages from 4 processes on, and 2-way experts.

    Raises ConfigError, with the numbers, where the product or a division does not work out.
    """
    tp = 1 if parallel.tp == AUTO else int(parallel.tp)
    dp = None if parallel.dp == AUTO else int(parallel.dp)
    require(world_size % tp == 0, "parallel.tp", tp, f"a divisor of {world_size} processes")
    pp = _auto_pp(world_size, tp, dp) if parallel.pp == AUTO else int(parallel.pp)
    require(world_size % (pp * tp) == 0, "parallel.pp * parallel.tp", pp * tp, f"a divisor of {world_size} processes")
    dp = world_size // (pp * tp) if dp is None else dp
    product = f"pp={pp} * dp={dp} * tp={tp}"
    require(pp * dp * tp == world_size, f"parallel: {product}", pp * dp * tp, f"{world_size}, the number of processes")
    can_halve_experts = num_experts > 0 and num_experts % 2 == 0 and dp % 2 == 0
    ep = (2 if can_halve_experts else 1) if parallel.ep == AUTO else int(parallel.ep)
    require(dp % ep == 0, "parallel.ep", ep, f"a divisor of dp={dp}")
    return ParallelLayout(pp=pp, dp=dp, ep=ep, tp=tp)


def _auto_pp(world_size: int, tp: int, dp: int | None) -> int:
    replicas = world_size // tp
    if dp is not None and replicas % dp == 0:
        return replicas // dp
    return 2 if replicas >= 4 and replicas % 2 == 0 else 1


def check_fit(layout: ParallelLayout, model: ModelConfig, train: TrainConfig) -> None:
    """Raise ConfigError, with the numbers, unless model and batch divide over the layout."""
    require(model.num_layers % layout.pp == 0, "parallel.pp", layout.pp, f"a divisor of {model.num_layers} layers")
    if model.num_experts:
        wanted = f"a divisor of model.num_experts={model.num_experts}"
        require(model.num_experts % layout.ep == 0, "parallel.ep", layout.ep, wanted)
    else:
        require(layout.ep == 1, "parallel.ep", layout.ep, "1 where model.num_experts=0")
    heads = model.num_query_groups or model.num_attention_heads
    require(heads % layout.tp == 0, "parallel.tp", layout.tp, f"a divisor of {heads} attention heads or query groups")
    wanted = f"a divisor of model.num_attention_heads={model.num_attention_heads}"
    require(model.num_attention_heads % heads == 0, "model.num_query_groups", heads, wanted)
    dense, wanted = model.num_dense_layers, f"0 to model.num_layers={model.num_layers}"
    require(0 <= dense <= model.num_layers, "model.num_dense_layers", dense, wanted)
    length = train.sequence_length
    require(length % layout.tp == 0, "train.sequence_length", length, f"a multiple of tp={layout.tp}")
    step = train.micro_batch_size * layout.dp
    wanted = f"a multiple of train.micro_batch_size={train.micro_batch_size} * dp={layout.dp}"
    require(train.global_batch_size % step == 0, "train.global_batch_size", train.global_batch_size, wanted)


def choose_device(launch: Launch, *, deterministic: bool) -> bool:
    """Choose this process's device, a GPU where there is CUDA; return whether it is one."""
    if megatron_cpu.enable():
        torch.set_num_threads(_threads_per_process())
        return False
    if deterministic:
        _make_deterministic()
    torch.cuda.set_device(torch.device("cuda", launch.local_rank))
    return True


def join_job(launch: Launch, *, on_gpu: bool, store: dist.Store | None = None) -> None:
    """Form the world: NCCL on GPUs, gloo elsewhere.

    The ranks meet through `store`, or torchrun's where none is given. torchrun's outlives a restart of its workers,
    with the addresses that the dead ones left in it: every attempt has a part of its own.
    """
    store = store or agent_store(f"attempt-{launch.attempt}")
    world = {"store": store, "rank": launch.global_rank, "world_size": launch.world_size} if store else {}
    if on_gpu:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()), **world)
    else:
        dist.init_process_group("gloo", **world)


def join_elastic_job(launch: Launch) -> None:
    """Make the world a group that outlives the loss of ranks; nobody else is in it until a generation is formed."""
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=launch.global_rank, world_size=launch.world_size)


def _make_deterministic() -> None:
    """Make CUDA repeat itself bit for bit; call before CUDA starts. Kernels without such a form warn."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention
    os.environ.setdefault("NCCL_ALGO", "Ring")  # the order of sums
    torch.use_deterministic_algorithms(True, warn_only=True)


def _threads_per_process() -> int:
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


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
