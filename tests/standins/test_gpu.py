"""The CPU stand-in, and the undocumented Megatron-Core names that this project uses.

An upgrade that moves such a name (a seam) fails here first, with the name.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_ckpt.standins import gpu
from tests.harness.gloo.ranks import run_ranks

SHARDED = "optimizer.distrib_optimizer.DistributedOptimizer"

SEAMS = {
    "pipeline_parallel.p2p_communication.P2PCommunicator._communicate": (
        "tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape"
    ),
    "pipeline_parallel.p2p_communication.P2PCommunicator.__init__": "pp_group config",
    "pipeline_parallel.schedules.forward_backward_no_pipelining": (
        "p2p_communicator pg_collection"
    ),
    "pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving": (
        "p2p_communicator pg_collection"
    ),
    "pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving": (
        "p2p_communicator pg_collection"
    ),
    "optimizer.get_megatron_optimizer": "config model_chunks use_gloo_process_groups",
    "optimizer.optimizer.ChainedOptimizer.prepare_grads": "",
    "optimizer.optimizer.ChainedOptimizer.get_grad_norm": "",
    "optimizer.optimizer.ChainedOptimizer.step_with_ready_grads": "",
    "optimizer.clip_grads.clip_grad_by_total_norm_fp32": (
        "parameters max_norm total_norm"
    ),
    f"{SHARDED}.load_parameter_state_from_fully_reshardable": ("state_dict"),
    f"{SHARDED}._get_main_param_and_optimizer_states": ("model_param"),
    f"{SHARDED}._set_main_param_and_optimizer_states": ("model_param tensors"),
    f"{SHARDED}._copy_main_params_to_model_params": (""),
    "fp8_utils.quantize_param_shard": (
        "model_params main_params start_offsets data_parallel_group"
    ),
    "fp8_utils.post_all_gather_processing": "model_params",
    "dist_checkpointing.state_dict_utils.save_preprocess": "sharded_state_dict",
    "dist_checkpointing.strategies.torch._replace_state_dict_keys_with_sharded_keys": (
        "sharded_state_dict keep_only_main_replica"
    ),
    "dist_checkpointing.strategies.torch.mcore_to_pyt_state_dict": "state_dict",
    "dist_checkpointing.load": "sharded_state_dict checkpoint_dir",
    "parallel_state.initialize_model_parallel": (
        "tensor_model_parallel_size pipeline_model_parallel_size"
        " expert_model_parallel_size create_gloo_process_groups"
    ),
}
"""Names of the parameters that this project passes, by name in Megatron-Core."""


@pytest.mark.parametrize(("name", "parameters"), SEAMS.items(), ids=SEAMS.keys())
def test_seam_is_where_we_use_it(name: str, parameters: str) -> None:
    found = pkgutil.resolve_name(f"megatron.core.{name}")
    assert inspect.signature(found).parameters.keys() >= set(parameters.split())


def _values_under_the_stand_in() -> dict[str, Any]:
    assert gpu.enable()
    assert gpu.enable(), "a second call changes nothing"
    half = torch.zeros(2, dtype=torch.bfloat16, device="cuda")
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    return {
        "current device": str(torch.cuda.current_device()),
        "literal": str(half.device),
        "cuda()": str(half.cuda().device),
        "to": str(torch.zeros(1).to("cuda").device),
        "type name": half.type(),
        "type conversion": str(half.type(torch.float32).dtype),
        "generator is restored": bool(torch.equal(drawn, torch.rand(3))),
        "streams agree": torch.cuda.current_stream() == torch.cuda.Stream(),
        "available": torch.cuda.is_available(),
    }


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-in is off where there is a GPU"
)
def test_cuda_names_mean_the_cpu() -> None:
    assert run_ranks(1, _values_under_the_stand_in)[0] == {
        "current device": "cpu",
        "literal": "cpu",
        "cuda()": "cpu",
        "to": "cpu",
        "type name": "torch.cuda.BFloat16Tensor",
        "type conversion": "torch.float32",
        "generator is restored": True,
        "streams agree": True,
        "available": False,
    }


@pytest.mark.gpu
def test_stand_in_is_off_where_there_is_a_gpu() -> None:
    original: Callable[[], Any] = torch.cuda.current_device
    assert not gpu.enable()
    assert torch.cuda.current_device is original
