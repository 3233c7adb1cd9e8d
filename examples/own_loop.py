"""A training program over Megatron-Core that survives the death of its processes.

    torchrun --nproc-per-node=2 examples/own_loop.py [RUN_FOLDER]

Two data-parallel ranks train a small Mixture-of-Experts model, on GPUs or CPUs. Each
rank has two of the four experts and half of the optimizer's state. The program provides
three functions in `main`: how a rank builds its model (`build`), a forward step
(`forward_step`), and the micro-batches of an iteration (`micro_batches`).
`moe_ckpt.own_loop` runs the iterations.

Kill a rank while the program runs: a new process takes the rank's place, and the losses
stay the same, bit for bit.
"""
# Megatron-Core takes other layer specifications than its annotations say:
# pyright: reportArgumentType=false
# Warnings are chosen before imports that warn:
# ruff: noqa: E402

import sys
import warnings

# of Megatron-Core and torch, in each process: kernels that a CPU or an environment
# lacks
warnings.filterwarnings("ignore", module=r"(megatron|torch|moe_ckpt)\.")

# first: the import keeps later ones from starting CUDA, which no forked worker could
# use
from moe_ckpt.own_loop import LoopConfig, train_elastic

# isort: split
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.run_settings import ckpt_config, runtime_config
from moe_ckpt.types import ParallelLayout

NUM_ITERATIONS = 8
NUM_MICRO_BATCHES = 2
MICRO_BATCH_SIZE = 2
SEQUENCE_LENGTH = 16
VOCABULARY_SIZE = 256
LEARNING_RATE = 1e-3
LAYOUT = ParallelLayout(pp=1, dp=2, ep=2, tp=1)


def build():
    """Build groups, model, optimizer and schedule of this rank.

    Each rank calls this function alone. The groups connect later, when all ranks meet.
    """
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=LAYOUT.ep,
        create_gloo_process_groups=False,
    )
    # the same seed on all ranks: replicas begin with the same weights
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build_model()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            min_lr=LEARNING_RATE / 10,
            use_distributed_optimizer=True,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LEARNING_RATE,
        min_lr=LEARNING_RATE / 10,
        lr_warmup_steps=2,
        lr_decay_steps=NUM_ITERATIONS,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=NUM_ITERATIONS,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
    return TrainingState(model=[model], optimizer=optimizer, scheduler=schedule)


def build_model():
    """Build this rank's model, on its GPU if there is one."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=LAYOUT.ep,
        pipeline_dtype=torch.float32,
        add_bias_linear=False,
        # the fusions need kernels that a CPU lacks
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY_SIZE,
        max_sequence_length=SEQUENCE_LENGTH,
    )
    if torch.cuda.is_available():
        model = model.cuda()
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return DistributedDataParallel(config, ddp_config, model)


def micro_batches(iteration):
    """Yield this rank's micro-batches of an iteration.

    A replay runs an iteration again, so that the micro-batches must depend on the
    iteration alone.

    Args:
        iteration: The iteration, counted from 1.

    Yields:
        Tokens, [MICRO_BATCH_SIZE, SEQUENCE_LENGTH + 1].
    """
    dp_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(iteration * LAYOUT.dp + dp_rank)
    shape = (MICRO_BATCH_SIZE, SEQUENCE_LENGTH + 1)
    for _ in range(NUM_MICRO_BATCHES):
        tokens = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
        yield tokens.to(torch.cuda.current_device())


def forward_step(batches, model):
    """Run forward for the next micro-batch, as Megatron's schedules ask for."""
    tokens = next(batches)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE_LENGTH, device=tokens.device).expand_as(inputs)
    return model(inputs, positions, None, labels=labels), mean_loss


def mean_loss(loss_per_token):
    """Return the loss for backward, and the loss report."""
    loss = loss_per_token.float().mean()
    # a copy: the schedule divides the first one in place
    return loss, {"loss": loss.detach().clone()}


def print_loss(iteration, loss):
    """Print the loss of an iteration that all ranks have finished."""
    if torch.distributed.get_rank() == 0:
        print(f"iteration {iteration}: loss {loss:.6f}", flush=True)


def main():
    """Train; return the exit status."""
    config = LoopConfig(
        ckpt=ckpt_config("moevement", window=2),
        runtime=runtime_config(heartbeat_s=20.0),
        layout=LAYOUT,
        num_iterations=NUM_ITERATIONS,
        num_micro_batches=NUM_MICRO_BATCHES,
        micro_batch_size=MICRO_BATCH_SIZE,
        sequence_length=SEQUENCE_LENGTH,
        model="own_loop",
        run_dir=sys.argv[1] if len(sys.argv) > 1 else None,
    )
    return train_elastic(config, build, forward_step, micro_batches, print_loss)


if __name__ == "__main__":
    sys.exit(main())
