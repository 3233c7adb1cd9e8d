"""A training loop of one's own over Megatron-Core, with checkpoints in host memory: two pipeline stages, random tokens.

    torchrun --nproc-per-node=2 examples/own_loop.py

Stage 1 loses its state in iteration 6 and is rebuilt from its last window, bit for bit. docs/attach.md explains the
hooks.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

import moe_ckpt
from moe_ckpt.attach import TrainingLoop, attach
from moe_ckpt.faults.schedule import StateLoss
from moe_ckpt.megatron import cpu_stand_in
from moe_ckpt.megatron.state import digest_of
from moe_ckpt.types import ParallelLayout, RunIdentity

ITERATIONS, MICRO_BATCHES, SEQUENCES, LENGTH, VOCABULARY = 10, 2, 2, 16, 64
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # the stand-in's, too


def build() -> moe_ckpt.TrainingState:
    """Return this rank's stage of a small MoE GPT, its optimizer and its schedule."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,
    )
    stage = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), stage.cuda())
    model.broadcast_params()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True), [model])
    rates = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 1, "lr_decay_steps": ITERATIONS}
    decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": ITERATIONS, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(optimizer, lr_decay_style="cosine", **rates, **decay)
    return moe_ckpt.TrainingState(model=[model], optimizer=optimizer, scheduler=scheduler)


def tokens_of(iteration: int, micro_batch: int) -> torch.Tensor:
    """Return a micro-batch, int64 [SEQUENCES, LENGTH + 1]: the same numbers whenever the iteration is replayed."""
    generator = torch.Generator().manual_seed(1000 * iteration + micro_batch)
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator).to(DEVICE)


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(LENGTH, device=DEVICE).expand(SEQUENCES, -1)
    output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach().clone()})


def main(folder: Path, losses: tuple[StateLoss, ...] = (StateLoss(iteration=6, stage=1, phase="backward"),)) -> str:
    """Train, lose states as told, and return the digest of this rank's state."""
    cpu_stand_in.enable()  # where there is no GPU
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    state, groups = build(), ProcessGroupCollection.use_mpu_process_groups()
    communicator = moe_ckpt.StageCommunicator(groups.pp, state.model[0].config)
    schedule = get_forward_backward_func()

    def forward_backward(iteration: int) -> list[dict[str, torch.Tensor]]:
        return schedule(
            forward_step_func=forward_step,
            data_iterator=(tokens_of(iteration, micro_batch) for micro_batch in range(MICRO_BATCHES)),
            model=state.model[0], num_microbatches=MICRO_BATCHES, seq_length=LENGTH, micro_batch_size=SEQUENCES,
            p2p_communicator=communicator, pg_collection=groups,
        )  # fmt: skip

    session = attach(
        ckpt=moe_ckpt.policy_config("moevement", window=2, pause_iters=0),
        identity=RunIdentity(run_id=folder.name, model="example", layout=ParallelLayout(pp=2, dp=1, ep=1, tp=1)),
        folder=folder / "checkpoints",
        state=state,
        loop=TrainingLoop(
            communicator=communicator,
            forward_backward=forward_backward,
            num_micro_batches=MICRO_BATCHES,
            micro_batch_size=SEQUENCES,
            sequence_length=LENGTH,
        ),
        events=moe_ckpt.EventLog(
            folder / f"rank{dist.get_rank()}.jsonl", global_rank=dist.get_rank(), clock_origin_unix_s=time.time()
        ),
        last_iteration=ITERATIONS,
        losses=losses,
    )
    for iteration in range((session.resume(None) or 0) + 1, ITERATIONS + 1):
        while True:
            session.iteration_started(iteration)
            moe_ckpt.clear_gradients(state)
            outputs = forward_backward(iteration)
            gradients = moe_ckpt.finish_gradients(state)
            loss = (
                torch.stack([output["loss"] for output in outputs]).sum() if outputs else torch.zeros((), device=DEVICE)
            )
            dist.all_reduce(loss)  # the last stage has it
            session.loss_known(iteration, float(loss) / MICRO_BATCHES)
            if session.gradients_ready(iteration, gradients):
                break  # else a state was lost and rebuilt: the iteration starts over
        moe_ckpt.apply_update(state, gradients)
        moe_ckpt.advance_schedule(state, gradients)
        session.update_applied(iteration)
        moe_ckpt.gather_parameters(state)
        session.step_committed(iteration)
    session.finish()
    return digest_of(state)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    print(f"rank {dist.get_rank()}: {main(Path('outputs/own_loop'))}")
    dist.destroy_process_group()
