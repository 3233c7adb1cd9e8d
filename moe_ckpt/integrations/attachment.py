"""One worker's attachment to a training loop that is not ours: its groups, events, session, and the run's result.

Owns: the way from a built model to the end of training, with all other ranks. Must not: know the loop.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_ckpt.attach import attach
from moe_ckpt.collectives import TorchRanks
from moe_ckpt.config import is_on, require
from moe_ckpt.elastic.process_groups import BACKEND, CPU_BACKEND
from moe_ckpt.events import EventLog, ModelBuilt, RunFinished, WorkerStarted
from moe_ckpt.integrations.megatron_lm_options import require_alone
from moe_ckpt.integrations.rank_training import IterationShape, LoopBatches, RankTraining
from moe_ckpt.megatron.checks import StateChecks, job_digest
from moe_ckpt.megatron.determinism import require_repeatable
from moe_ckpt.megatron.initial_weights import synchronize_fresh
from moe_ckpt.megatron.optimizer_state import renew_masters
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.run_elastic import Worker
from moe_ckpt.run_folder import RunFolder
from moe_ckpt.run_settings import RunSettings
from moe_ckpt.types import ParallelLayout, Phase, RunIdentity


class Attachment:
    """The part of an attachment that does not depend on its loop. It begins before the model is built."""

    def __init__(self, worker: Worker, settings: RunSettings, folder: RunFolder) -> None:
        self.worker = worker
        self._settings = settings
        self._folder = folder
        self._built_s = time.monotonic()
        self._digest = ""
        self._rank: RankTraining | None = None
        self.has_trained = False

    @property
    def rank(self) -> RankTraining:
        """This rank's iterations."""
        assert self._rank is not None, "train comes first"
        return self._rank

    def observing(self, schedule_of: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `get_forward_backward_func` whose transfers between stages go through the attachment."""

        def observed(*arguments: Any, **options: Any) -> Callable[..., Any]:
            forward_backward = schedule_of(*arguments, **options)
            return self._rank.observed(forward_backward) if self._rank else forward_backward

        return observed

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the loop's that writes a checkpoint, during which a rank does not count as hung."""

        @functools.wraps(save)
        def saved(*arguments: Any, **options: Any) -> Any:
            with self.worker.page.saving():
                return save(*arguments, **options)

        return saved

    def begin(
        self,
        shape: IterationShape,
        state: TrainingState,
        forward_step: Callable[..., Any],
        forward_backward: Callable[..., Any],
        batches: LoopBatches,
    ) -> RankTraining:
        """Return this rank's iterations, once the loop has built its model.

        Raises ConfigError if the optimizer would skip steps with a large gradient.
        """
        _require_no_skips(state)
        for chunk in state.model:
            chunk.train()  # loops do so in `train`, and a recovery runs passes before a new process enters that
        self._rank = RankTraining(
            shape, state, forward_step, forward_backward, batches, self.worker, self._open_events()
        )
        return self._rank

    def _open_events(self) -> EventLog:
        """Return the log of this rank's events, which begins with the start of this worker."""
        launch = self.worker.launch
        path, origin = self._folder.events(launch.global_rank), self._folder.clock_origin_unix_s
        events = EventLog(path, global_rank=launch.global_rank, clock_origin_unix_s=origin)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        started = WorkerStarted(
            pid=os.getpid(), host=socket.gethostname(), incarnation=self.worker.incarnation, device=device
        )
        events.append(started)
        return events

    def train(
        self,
        *,
        shaping: Mapping[str, object],
        last_iteration: int,
        enter: Callable[[int], Any],
        load: Callable[[], int] = lambda: 0,
    ) -> Any:
        """Return what the loop returns, once all ranks have done all iterations.

        `enter` runs the loop from the state after some iterations. `load` loads a checkpoint of the loop's own on all
        ranks of a run that has state neither in memory nor on local disks, and returns its iteration, or 0. `shaping`
        are the settings that shape the saved state.
        """
        rank, layout = self.rank, _layout()
        rank.session = attach(
            ckpt=self._settings.ckpt,
            identity=RunIdentity(run_id=self._folder.run_id, model=_hash_of(shaping), layout=layout),
            folder=self._folder.checkpoints,
            state=rank.state,
            loop=rank.as_training_loop(),
            events=rank.events,
            last_iteration=last_iteration,
            losses=self._settings.losses,
            elastic=self.worker.context(layout),
            suspect_iters=self._settings.runtime.suspect_iters,
            on_divergence=self._settings.runtime.on_divergence,
        )
        rank.checks = StateChecks(self._settings.checks, rank.state, rank.events)
        rank.events.append(ModelBuilt(seconds=time.monotonic() - self._built_s))
        rank.enter = enter

        def start() -> int:
            done = _load_state(rank, load)
            if is_on(self._settings.check_determinism, by_default=torch.cuda.is_available()):
                run_pass = functools.partial(rank.run_pass, done + 1)
                require_repeatable(TorchRanks(), rank.state, run_pass, setting="run.check_determinism")
            return done

        finish = functools.partial(self._finish, rank, last_iteration)
        self.worker.run(rank.session, rank, rank.events, start=start, finish=finish)
        self._close(rank, last_iteration)
        return rank.result

    def _finish(self, rank: RankTraining, last_iteration: int, faults: int) -> dict[str, Any]:
        """Write and return the contents of result.json. Collective."""
        self._digest, digests = job_digest(rank.state)
        committed = rank.committed
        result = {
            "iteration": last_iteration,
            "loss": committed.loss if committed else None,
            "wall_s": round(time.time() - self._folder.clock_origin_unix_s, 3),
            "faults_survived": faults,
            "digest": self._digest,
            "digest_per_rank": digests,
        }
        if self.worker.launch.global_rank == 0:
            self._folder.write_result(result)
        return result

    def _close(self, rank: RankTraining, last_iteration: int) -> None:
        """End the session; later work of the script, such as evaluation, is not protected."""
        self.worker.page.enter(Phase.BETWEEN)
        rank.session.finish()
        rank.close()
        rank.events.append(RunFinished(iteration=last_iteration, digest=self._digest))
        rank.events.close()
        self.has_trained = True
        if self.worker.launch.global_rank == 0:
            print(f"moe_ckpt: iteration {last_iteration}, digest {self._digest}", flush=True)


def _load_state(rank: RankTraining, load: Callable[[], int]) -> int:
    """Load the state that training begins with, on all ranks, which have built their models alone.

    Returns its iteration.
    """
    synchronize_fresh(rank.state)
    if done := rank.session.resume(None):
        return done
    rank.state.scheduler.num_steps = 0  # a load adds to them, and a start may come again after a death
    done = load()
    for optimizer in rank.state.inner_optimizers:
        renew_masters(optimizer)  # a load may have been of weights alone
    return done


def require_attachable(settings: RunSettings) -> None:
    """Raise ConfigError for another library for fault tolerance in this process, and for routers of our own."""
    require_alone(os.environ, sys.modules)
    boost = settings.ckpt.capacity_boost
    require(not boost, "ckpt.boost", boost, "0 with moe_ckpt.run: routers are the script's own")


def _require_no_skips(state: TrainingState) -> None:
    """Refuse steps that are skipped for a large gradient: no option of a command line, and the split step has none."""
    for inner in state.inner_optimizers:
        threshold = getattr(inner.config, "grad_norm_skip_threshold", math.inf)
        require(math.isinf(threshold), "OptimizerConfig.grad_norm_skip_threshold", threshold, "inf")


def route_groups() -> None:
    """Make all process groups that the script creates outlive the loss of ranks, and end with the worker."""
    plain, destroy = dist.new_group, dist.destroy_process_group

    @functools.wraps(plain)
    def new_group(*arguments: Any, **options: Any) -> Any:
        wanted = inspect.signature(plain).bind(*arguments, **options).arguments
        backend = wanted.pop("backend", None)
        if backend not in (BACKEND, CPU_BACKEND):
            backend = CPU_BACKEND if backend and "gloo" in backend else BACKEND
        for name in ("timeout", "pg_options"):  # NCCL's options; the runtime has timeouts of its own
            wanted.pop(name, None)
        return plain(**wanted, backend=backend)

    @functools.wraps(destroy)
    def destroy_world(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:  # torch cannot unregister the runtime's other groups
            destroy(group)

    # both names: torch's own functions, those for subgroups among them, find the second
    dist.new_group = dist.distributed_c10d.new_group = new_group
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_world


def _hash_of(shaping: Mapping[str, object]) -> str:
    """Return a short hash of the settings that shape the saved state."""
    # values as text: types of parameters are no JSON
    text = json.dumps({name: str(value) for name, value in shaping.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _layout() -> ParallelLayout:
    return ParallelLayout(
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        # context-parallel ranks hold one state and see other tokens: they count as data parallel
        dp=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
    )
