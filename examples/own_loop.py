"""A training loop of one's own over Megatron-Core that lives through the death of its processes.

    torchrun --nproc-per-node=2 examples/own_loop.py [RUN_FOLDER]

Two data-parallel ranks, each with two of four experts and half of the optimizer's state, on GPUs or CPUs.
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from moe_ckpt.attach import TrainingLoop, attach
from moe_ckpt.config import RunFolderConfig
from moe_ckpt.elastic.torchrun import read_launch
from moe_ckpt.errors import RolledBackError
from moe_ckpt.events import EventLog
from moe_ckpt.megatron import cpu_stand_in
from moe_ckpt.megatron.initial_weights import synchronize_fresh
from moe_ckpt.megatron.pipeline import StageCommunicator
from moe_ckpt.megatron.state import TrainingState, digest_of
from moe_ckpt.megatron.step import (
    advance_schedule,
    apply_update,
    clear_gradients,
    finish_gradients,
    gather_parameters,
)
from moe_ckpt.run_elastic import ElasticConfig, Worker, open_backend, run_elastic
from moe_ckpt.run_folder import find_run_folder
from moe_ckpt.run_settings import ckpt_config, runtime_config
from moe_ckpt.types import ParallelLayout, RunIdentity

NUM_ITERS, NUM_MICRO_BATCHES, MICRO_BATCH, LENGTH, VOCABULARY = 8, 2, 2, 16, 256
RUN = RunFolderConfig(dir=sys.argv[1] if len(sys.argv) > 1 else None, name="own_loop", configuration="")
LAYOUT = ParallelLayout(pp=1, dp=2, ep=2, tp=1)
CKPT, RUNTIME = ckpt_config("moevement", window=2), runtime_config(heartbeat_s=20.0)


class OwnLoop:
    """The loop. `session` has the hooks that it calls, in this order, once per iteration."""

    def __init__(self, state):
        self.state, self.session = state, None
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.communicator = StageCommunicator(self.groups.pp, state.model[0].config)

    def run(self, done, notes):
        """Train from the state after `done` iterations to the last iteration; it is called again after each fault."""
        if dist.get_rank() == 0:
            print(*notes, sep="\n")
        while done < NUM_ITERS:
            try:
                self.train_on(done + 1)
                done += 1
            except RolledBackError as back:  # all ranks are at an earlier state
                done = back.iteration

    def train_on(self, iteration):
        while True:
            self.session.iteration_started(iteration)
            clear_gradients(self.state)
            losses = self.forward_backward(iteration)
            gradients = finish_gradients(self.state)  # unscaled, with their norm
            self.session.loss_known(iteration, mean_over_job(losses))
            if self.session.gradients_ready(iteration, gradients):
                break  # else state was lost and rebuilt: the iteration starts over
        apply_update(self.state, gradients)
        advance_schedule(self.state, gradients)
        self.session.update_applied(iteration)
        gather_parameters(self.state)  # with a sharded optimizer, weights that other ranks have updated
        self.session.step_committed(iteration)

    def forward_backward(self, iteration):
        """Leave the gradients of an iteration's batch, which is a function of the iteration: a replay runs it again."""
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=micro_batches(iteration),
            model=self.state.model[0],
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
            p2p_communicator=self.communicator,
            pg_collection=self.groups,
        )


def train(worker: Worker) -> int:
    """Be one of a rank's workers: build alone, then train with the others until all have finished."""
    on_gpu = not cpu_stand_in.enable()
    if on_gpu:
        torch.cuda.set_device(worker.launch.local_rank)
    worker.join_world(open_backend(on_gpu=on_gpu))
    folder = find_run_folder(RUN, worker.launch, worker.place.memory, RUNTIME.join_s)
    worker.announce(folder.path)
    loop = OwnLoop(build())
    rank = worker.launch.global_rank
    events = EventLog(folder.events(rank), global_rank=rank, clock_origin_unix_s=folder.clock_origin_unix_s)
    loop.session = attach(
        ckpt=CKPT,
        identity=RunIdentity(run_id=folder.run_id, model="own_loop", layout=LAYOUT),
        folder=folder.checkpoints,
        state=loop.state,
        loop=TrainingLoop(
            communicator=loop.communicator,
            forward_backward=loop.forward_backward,
            num_micro_batches=NUM_MICRO_BATCHES,
            micro_batch_size=MICRO_BATCH,
            sequence_length=LENGTH,
        ),
        events=events,
        last_iteration=NUM_ITERS,
        elastic=worker.context(LAYOUT),
    )

    def start() -> int:
        synchronize_fresh(loop.state)  # ranks have built their models alone
        return loop.session.resume(None)

    def finish(faults: int) -> dict:
        digests = [""] * LAYOUT.world_size
        dist.all_gather_object(digests, digest_of(loop.state))
        result = {"faults_survived": faults, "digest_per_rank": digests}
        if rank == 0:
            folder.write_result(result)
        return result

    worker.run(loop.session, loop, events, start=start, finish=finish)
    loop.session.finish()
    worker.retire(folder.path)
    return 0


def build() -> TrainingState:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=LAYOUT.ep, create_gloo_process_groups=False)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=LAYOUT.ep,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        batch_p2p_sync=False,  # it would wait for the copies of snapshots
        pipeline_dtype=torch.float32,
    )
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    stage = GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    if torch.cuda.is_available():
        stage.cuda()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), stage)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    rates = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 2, "lr_decay_steps": NUM_ITERS}
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": NUM_ITERS, "wd_incr_style": "constant"}
    schedule = OptimizerParamScheduler(
        optimizer, **rates, **decay, lr_decay_style="cosine", use_checkpoint_opt_param_scheduler=False
    )
    return TrainingState(model=[model], optimizer=optimizer, scheduler=schedule)


def micro_batches(iteration):
    """Yield an iteration's tokens [MICRO_BATCH, LENGTH + 1]; they draw from a generator of their own."""
    seed = iteration * LAYOUT.dp + parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_MICRO_BATCHES):
        tokens = torch.randint(VOCABULARY, (MICRO_BATCH, LENGTH + 1), generator=generator)
        yield tokens.to(torch.cuda.current_device())


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(LENGTH, device=tokens.device).expand(MICRO_BATCH, LENGTH)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    output = model(input_ids=inputs, position_ids=positions, attention_mask=None, labels=targets)
    return output, mean_loss


def mean_loss(per_token):
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}


def mean_over_job(losses):
    total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    for reported in losses:
        total += torch.stack([reported["loss"].double(), torch.ones_like(reported["loss"], dtype=torch.float64)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    sys.exit(run_elastic(ElasticConfig(ckpt=CKPT, runtime=RUNTIME), read_launch(__file__), train))
