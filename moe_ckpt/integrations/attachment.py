"""One worker's attachment to a training loop that is not ours: process groups, and the
call of `moe_ckpt.loop.train`.

Must not: know the loop.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.config import require
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.elastic.process_groups import BACKEND, CPU_BACKEND
from moe_ckpt.exactness import BITWISE, settle
from moe_ckpt.integrations.attached_loop import (
    AttachedLoop,
    IterationShape,
    LoopBatches,
)
from moe_ckpt.integrations.loop_inputs import identities_of, script_identity
from moe_ckpt.integrations.megatron_lm_options import require_alone
from moe_ckpt.loop import JoinedWorker, Training, train
from moe_ckpt.megatron.determinism import make_deterministic
from moe_ckpt.megatron.schedule import asked_by_override, settings_of_optimizer
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.run_elastic import Worker
from moe_ckpt.run_settings import RunSettings
from moe_ckpt.types import ParallelLayout


class Attachment:
    """The part of an attachment that does not depend on its loop. It begins before the
    model is built.
    """

    def __init__(self, joined: JoinedWorker[Worker]) -> None:
        """Begin the attachment of a worker's process.

        Args:
            joined: The worker.
        """
        self._joined = joined
        self._loop: AttachedLoop | None = None
        self._exactness: str | None = None
        self.has_trained = False

    @property
    def loop(self) -> AttachedLoop:
        """This rank's loop."""
        assert self._loop is not None, "begin comes first"
        return self._loop

    def settle_exactness(self, *, mode: bool, option: str | None) -> None:
        """Decide what recoveries promise; call once the loop's settings are known,
        before a model is built.

        Args:
            mode: Whether the loop's own deterministic mode is on.
            option: The name of that mode's option; None if the loop has no such mode.

        Raises:
            ConfigError: The loop's kernels do not keep the promise that was asked for,
                or that the policy needs.
        """
        job, on_gpu = self._joined.worker.job, torch.cuda.is_available()
        self._exactness = settle(
            job.exactness, job.ckpt, on_gpu=on_gpu, mode=mode, option=option
        )
        if on_gpu and self._exactness == BITWISE:
            make_deterministic()

    def observing(self, schedule_of: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `get_forward_backward_func` whose transfers between stages go
        through the attachment.
        """

        def observed(*arguments: Any, **options: Any) -> Callable[..., Any]:
            forward_backward = schedule_of(*arguments, **options)
            return (
                self._loop.observed(forward_backward)
                if self._loop
                else forward_backward
            )

        return observed

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the loop's that writes a checkpoint, during which a rank
        does not count as hung.
        """

        @functools.wraps(save)
        def saved(*arguments: Any, **options: Any) -> Any:
            with self._joined.worker.page.saving():
                return save(*arguments, **options)

        return saved

    def begin(
        self,
        shape: IterationShape,
        state: TrainingState,
        forward_step: Callable[..., Any],
        forward_backward: Callable[..., Any],
        batches: LoopBatches,
    ) -> AttachedLoop:
        """Return this rank's loop, once the model is built.

        Raises:
            ConfigError: The optimizer would skip steps with a large gradient.
        """
        _require_no_skips(state)
        for chunk in state.model:
            # loops do so in `train`, and a recovery runs passes before a new process
            # enters that
            chunk.train()
        self._loop = AttachedLoop(
            shape, state, forward_step, forward_backward, batches, self._joined
        )
        return self._loop

    def train(
        self,
        *,
        shaping: Mapping[str, object],
        course: Mapping[str, object],
        files: Mapping[str, object],
        last_iteration: int,
        length_setting: str,
        enter: Callable[[int], Any],
        load: Callable[[], int] = lambda: 0,
    ) -> Any:
        """Train until all ranks have done all iterations.

        Later work of the script, such as evaluation, is not protected.

        Args:
            shaping: The settings that shape the saved state.
            course: The other settings that decide the states of the run.
            files: The settings that may name files of data and tokenizers.
            last_iteration: The iteration after which the run is finished.
            length_setting: The name of the loop's setting for `last_iteration`.
            enter: Runs the loop from the state after some iterations.
            load: Loads a checkpoint of the loop's own, on all ranks of a run that has
                state neither in memory nor on local disks; returns the checkpoint's
                iteration, or 0.

        Returns:
            The loop's own outcome.
        """
        assert self._exactness is not None, "settle_exactness comes first"
        loop, state = self.loop, self.loop.iteration.state
        loop.enter, loop.load = enter, load
        data = identities_of(files)
        settings = {**shaping, **course, **settings_of_optimizer(state), **data}
        training = Training(
            loop=loop,
            iteration=loop.iteration,
            replay=loop.as_training_loop(),
            model=_hash_of(shaping),
            # the script may change between starts: a print more leads to the same
            # states
            inputs=data | script_identity(),
            course=RunCourse(self._joined.folder.path, settings, TorchRanks()),
            asked_lengths=asked_by_override(state.scheduler),
            layout=_layout(),
            last_iteration=last_iteration,
            length_setting=length_setting,
            exactness=self._exactness,
            check_setting="run.check_determinism",
        )
        result = train(self._joined, training)
        self.has_trained = True
        if self._joined.is_first_rank:
            print(
                f"moe_ckpt: iteration {last_iteration}, digest {result['digest']}",
                flush=True,
            )
        return loop.outcome


def require_attachable(settings: RunSettings) -> None:
    """Raise ConfigError for another library for fault tolerance in this process, and
    for routers of our own.
    """
    require_alone(os.environ, sys.modules)
    boost = settings.job.ckpt.capacity_boost
    require(
        not boost,
        "ckpt.boost",
        boost,
        "0 with moe_ckpt.run: routers are the script's own",
    )


def _require_no_skips(state: TrainingState) -> None:
    """Refuse steps that are skipped for a large gradient: no option of a command line,
    and the split step has none.
    """
    for inner in state.inner_optimizers:
        threshold = getattr(inner.config, "grad_norm_skip_threshold", math.inf)
        require(
            math.isinf(threshold),
            "OptimizerConfig.grad_norm_skip_threshold",
            threshold,
            "inf",
        )


def route_groups() -> None:
    """Make all process groups that the script creates outlive the loss of ranks, and
    end with the worker.
    """
    plain, destroy = dist.new_group, dist.destroy_process_group

    @functools.wraps(plain)
    def new_group(*arguments: Any, **options: Any) -> Any:
        wanted = inspect.signature(plain).bind(*arguments, **options).arguments
        backend = wanted.pop("backend", None)
        if backend not in (BACKEND, CPU_BACKEND):
            backend = CPU_BACKEND if backend and "gloo" in backend else BACKEND
        # NCCL's options; the runtime has timeouts of its own
        for name in ("timeout", "pg_options"):
            wanted.pop(name, None)
        return plain(**wanted, backend=backend)

    @functools.wraps(destroy)
    def destroy_world(group: Any = None) -> None:
        # torch cannot unregister the runtime's other groups
        if group is None or group is dist.group.WORLD:
            destroy(group)

    # both names: torch's own functions, those for subgroups among them, find the second
    dist.new_group = dist.distributed_c10d.new_group = new_group
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = (
        destroy_world
    )


def _hash_of(shaping: Mapping[str, object]) -> str:
    """Return a short hash of the settings that shape the saved state."""
    # values as text: types of parameters are no JSON
    text = json.dumps(
        {name: str(value) for name, value in shaping.items()}, sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _layout() -> ParallelLayout:
    return ParallelLayout(
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        # context-parallel ranks hold one state and see other tokens: they count as data
        # parallel
        dp=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
    )
