"""A training program of one's own over Megatron-Core that lives through the death of its processes.

    torchrun --nproc-per-node=2 examples/own_loop.py [RUN_FOLDER]

Two data-parallel ranks, each with two of four experts and half of the optimizer's state, on GPUs or CPUs. The iteration
with its hooks is `train_on` in moe_ckpt/loop.py; a loop that needs more copies it.
"""
# Megatron-Core takes other layer specifications than its annotations say:
# pyright: reportArgumentType=false

import sys

# first: it keeps other imports from starting CUDA, which no forked worker could use
from moe_ckpt.loop import LoopConfig, train_elastic

# isort: split
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.run_settings import ckpt_config, runtime_config
from moe_ckpt.types import ParallelLayout

NUM_ITERS, NUM_MICRO_BATCHES, MICRO_BATCH, LENGTH, VOCABULARY = 8, 2, 2, 16, 256
LAYOUT = ParallelLayout(pp=1, dp=2, ep=2, tp=1)
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 4, "moe_ffn_hidden_size": 32}
FUSIONS = ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion")
OFF = (*FUSIONS, "add_bias_linear")


def build():
    parallel_state.initialize_model_parallel(expert_model_parallel_size=LAYOUT.ep, create_gloo_process_groups=False)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    experts = {"moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": LAYOUT.ep}
    config = TransformerConfig(**SHAPE, **experts, **dict.fromkeys(OFF, False), pipeline_dtype=torch.float32)
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    stage = GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    stage = stage.cuda() if torch.cuda.is_available() else stage
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), stage)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    rates = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 2, "lr_decay_steps": NUM_ITERS}
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": NUM_ITERS, "wd_incr_style": "constant"}
    style = {"lr_decay_style": "cosine", "use_checkpoint_opt_param_scheduler": False}
    schedule = OptimizerParamScheduler(optimizer, **rates, **decay, **style)
    return TrainingState(model=[model], optimizer=optimizer, scheduler=schedule)


def micro_batches(iteration):
    """Yield an iteration's tokens [MICRO_BATCH, LENGTH + 1]: a function of the iteration, which a replay runs again."""
    generator = torch.Generator().manual_seed(iteration * LAYOUT.dp + parallel_state.get_data_parallel_rank())
    for _ in range(NUM_MICRO_BATCHES):
        yield torch.randint(VOCABULARY, (MICRO_BATCH, LENGTH + 1), generator=generator).to(torch.cuda.current_device())


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(LENGTH, device=tokens.device).expand(MICRO_BATCH, LENGTH)
    return model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()), mean_loss


def mean_loss(per_token):
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}


if __name__ == "__main__":
    config = LoopConfig(
        ckpt=ckpt_config("moevement", window=2),
        runtime=runtime_config(heartbeat_s=20.0),
        layout=LAYOUT,
        num_iterations=NUM_ITERS,
        num_micro_batches=NUM_MICRO_BATCHES,
        micro_batch_size=MICRO_BATCH,
        sequence_length=LENGTH,
        model="own_loop",
        run_dir=sys.argv[1] if len(sys.argv) > 1 else None,
    )
    sys.exit(train_elastic(config, build, forward_step, micro_batches))
