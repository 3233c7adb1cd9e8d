"""A training loop over Megatron-Core that outlives the death of its processes, of which a program names the parts.

    sys.exit(train_elastic(config, build, forward_step, batches))      in the process that torchrun starts

Owns: one iteration with all hooks, in `OwnLoop.train_on`, and the way of a worker from its fork to its end. A loop that
needs more copies these two and calls the same functions. Must not: know models, data or a launcher.

    iteration_started -> forward, backward -> loss_known -> gradients_ready -> update -> update_applied -> gather
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# before torch looks for a device: supervisors fork, and a look that starts CUDA would leave their workers none
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from moe_ckpt.attach import TrainingLoop, attach
from moe_ckpt.collectives import TorchRanks
from moe_ckpt.config import AUTO, CkptConfig, RunFolderConfig, RuntimeConfig, is_on, require, require_switch
from moe_ckpt.elastic.backend_choice import open_backend, use_gpu
from moe_ckpt.elastic.torchrun import read_launch
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import ConfigError, RolledBackError
from moe_ckpt.events import EventLog
from moe_ckpt.megatron import cpu_stand_in
from moe_ckpt.megatron.checks import job_digest
from moe_ckpt.megatron.determinism import make_deterministic, require_repeatable
from moe_ckpt.megatron.initial_weights import synchronize_fresh
from moe_ckpt.megatron.pipeline import StageCommunicator
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.megatron.step import (
    advance_schedule,
    apply_update,
    clear_gradients,
    finish_gradients,
    gather_parameters,
    mean_over_job,
)
from moe_ckpt.run_elastic import ElasticConfig, Worker, run_elastic
from moe_ckpt.run_folder import RunFolder, find_run_folder
from moe_ckpt.types import ParallelLayout, RunIdentity


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """A loop's settings. An iteration has `num_micro_batches` of `micro_batch_size` sequences of `sequence_length`.

    `model` names the model: checkpoints of another one are refused. `check_determinism`: run the first iteration's
    batch twice at the start and compare gradients; auto: on a GPU.
    """

    ckpt: CkptConfig
    runtime: RuntimeConfig
    layout: ParallelLayout
    num_iterations: int
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int
    model: str
    run_dir: str | None = None
    check_determinism: bool | str = AUTO

    def __post_init__(self) -> None:
        require_switch("check_determinism", self.check_determinism)


def train_elastic(
    config: LoopConfig,
    build: Callable[[], TrainingState],
    forward_step: Callable[[Iterator[Any], torch.nn.Module], Any],
    batches: Callable[[int], Iterator[Any]],
    after_iteration: Callable[[int, float], None] = lambda _iteration, _loss: None,
) -> int:
    """Be one rank of a job until all ranks have finished; return the exit status.

    `build` makes groups, model and optimizer in each worker, without other ranks. `forward_step` is that of Megatron's
    schedules. `batches(iteration)` yields this rank's micro-batches and depends on the iteration alone: a replay reads
    it again. `after_iteration` receives the number and the loss of each iteration that all ranks have finished. Raises
    ConfigError for settings that cannot work.
    """
    if config.ckpt.in_memory is None:
        raise ConfigError(f"ckpt.policy: got {config.ckpt.policy!r}, wanted one with snapshots in memory")
    elastic = ElasticConfig(ckpt=config.ckpt.in_memory, runtime=config.runtime)

    def work(worker: Worker) -> int:
        on_gpu = not cpu_stand_in.enable()
        kind, share_gpus = config.runtime.backend, config.runtime.share_gpus
        if on_gpu:
            make_deterministic()
            use_gpu(worker.launch, kind, share_gpus=share_gpus)
        worker.join_world(open_backend(on_gpu=on_gpu, kind=kind, share_gpus=share_gpus))
        run = RunFolderConfig(dir=config.run_dir, name=config.model, configuration=repr(config))
        folder = find_run_folder(run, worker.launch, worker.place.memory, config.runtime.join_s, worker.page.waits)
        worker.announce(folder.path)
        _train(OwnLoop(config, build(), forward_step, batches, after_iteration), worker, folder)
        worker.retire(folder.path)
        return 0

    return run_elastic(elastic, read_launch(sys.argv[0]), work)


class OwnLoop:
    """One rank's iterations; implements `worker_loop.TrainingRun`. All methods are collective over all ranks."""

    session: Session

    def __init__(
        self,
        config: LoopConfig,
        state: TrainingState,
        forward_step: Callable[..., Any],
        batches: Callable[[int], Iterator[Any]],
        after_iteration: Callable[[int, float], None],
    ) -> None:
        require(len(state.model) == 1, "build: chunks of the model", len(state.model), "1: no virtual stages")
        self.config, self.state = config, state
        self._forward_step, self._batches, self._after_iteration = forward_step, batches, after_iteration
        model_config: Any = state.model[0].config
        # Megatron's schedules scale losses and reduce gradients through these, if they are set
        model_config.grad_scale_func = model_config.grad_scale_func or state.optimizer.scale_loss
        model_config.finalize_model_grads_func = model_config.finalize_model_grads_func or finalize_model_grads
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self.communicator = StageCommunicator(self._groups.pp, model_config)

    def run(self, done: int, notes: Sequence[str]) -> None:
        """Train from the state after `done` iterations to the last iteration; it is called again after each fault."""
        if dist.get_rank() == 0:
            print(*notes, sep="\n", flush=True)
        while done < self.config.num_iterations:
            try:
                loss = self.train_on(done + 1)
            except RolledBackError as back:  # all ranks are at an earlier state
                done = back.iteration
            else:
                done += 1
                self._after_iteration(done, loss)

    def train_on(self, iteration: int) -> float:
        """Train one iteration; return its loss. Raises RolledBackError on all ranks if they went back."""
        while True:
            self.session.iteration_started(iteration)
            # in each attempt: the gradients of an iteration that was undone would be added to
            clear_gradients(self.state)
            losses = self.forward_backward(iteration)
            gradients = finish_gradients(self.state)  # unscaled, with their norm
            loss = mean_over_job(losses)
            self.session.loss_known(iteration, loss)
            # a step is committed on all ranks or on none: here gradients are complete, and no parameter has changed
            if self.session.gradients_ready(iteration, gradients):
                break  # else state was lost and rebuilt: the iteration starts over
        apply_update(self.state, gradients)
        # before `update_applied`, after which a recovery repeats only the gather
        advance_schedule(self.state, gradients)
        self.session.update_applied(iteration)
        gather_parameters(self.state)  # with a sharded optimizer, weights that other ranks have updated
        self.session.step_committed(iteration)
        return loss

    def forward_backward(self, iteration: int) -> Any:
        """Leave the gradients of an iteration's batch; return the reports of losses, on the last stage."""
        return get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=self._batches(iteration),
            model=self.state.model[0],
            num_microbatches=self.config.num_micro_batches,
            seq_length=self.config.sequence_length,
            micro_batch_size=self.config.micro_batch_size,
            forward_only=False,
            p2p_communicator=self.communicator,  # logs the transfers between stages, and stands in for them in a replay
            pg_collection=self._groups,
        )


def _train(loop: OwnLoop, worker: Worker, folder: RunFolder) -> None:
    """Attach a loop, and train with all other ranks until all have finished."""
    config, state, rank = loop.config, loop.state, worker.launch.global_rank
    events = EventLog(folder.events(rank), global_rank=rank, clock_origin_unix_s=folder.clock_origin_unix_s)
    loop.session = attach(
        ckpt=config.ckpt,
        identity=RunIdentity(run_id=folder.run_id, model=config.model, layout=config.layout),
        folder=folder.checkpoints,
        state=state,
        loop=TrainingLoop(
            communicator=loop.communicator,
            forward_backward=loop.forward_backward,
            num_micro_batches=config.num_micro_batches,
            micro_batch_size=config.micro_batch_size,
            sequence_length=config.sequence_length,
        ),
        events=events,
        last_iteration=config.num_iterations,
        elastic=worker.context(config.layout),
    )

    def start() -> int:
        synchronize_fresh(state)  # ranks have built their models alone
        done = loop.session.resume(None)
        if is_on(config.check_determinism, by_default=torch.cuda.is_available()):
            run_pass = functools.partial(loop.forward_backward, done + 1)
            require_repeatable(TorchRanks(), state, run_pass, setting="check_determinism")
        return done

    def finish(faults: int) -> dict[str, Any]:
        _, digests = job_digest(state)
        result = {"iteration": config.num_iterations, "faults_survived": faults, "digest_per_rank": digests}
        if rank == 0:
            folder.write_result(result)
        return result

    worker.run(loop.session, loop, events, start=start, finish=finish)
    loop.session.finish()
    events.close()
