"""One worker's attachment to a third-party training loop.

Owns: the process groups of the script, and the call of `moe_ckpt.loop.train`. Must not:
know the loop.
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
from moe_ckpt.elastic.process_groups import ELASTIC, ELASTIC_CPU
from moe_ckpt.elastic_worker import Worker
from moe_ckpt.exactness import BITWISE, resolve_exactness
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
from moe_ckpt.run_settings import RunSettings
from moe_ckpt.types import ParallelLayout


class Attachment:
    """The part of an attachment that does not depend on the loop.

    The attachment begins before the model is built.

    Attributes:
        has_trained: Whether all iterations are done.
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

    def resolve_exactness(self, *, mode: bool, option: str | None) -> None:
        """Decide between the promises `bitwise` and `state` of `run.exactness`.

        Call once the loop's settings are known, before a model is built. On a GPU,
        `bitwise` also switches torch to deterministic kernels.

        Args:
            mode: Whether the loop's own deterministic mode is on.
            option: The name of that mode's option; None if the loop has no such mode.

        Raises:
            ConfigError: The loop's kernels cannot keep the promise that `run.exactness`
                or the policy asks for.
        """
        job, on_gpu = self._joined.worker.job, torch.cuda.is_available()
        self._exactness = resolve_exactness(
            job.exactness, job.ckpt, on_gpu=on_gpu, mode=mode, option=option
        )
        if on_gpu and self._exactness == BITWISE:
            make_deterministic()

    def observing(self, schedule_of: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `get_forward_backward_func` for the attachment.

        Transfers between stages go through the attachment once the attachment has its
        loop.

        Args:
            schedule_of: Megatron's `get_forward_backward_func`.
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
        """Wrap a checkpoint function so that a saving rank does not count as hung.

        Args:
            save: The loop's function that writes a checkpoint.
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

        Args:
            shape: The sizes of an iteration.
            state: The training state of this rank's stage.
            forward_step: The loop's forward step, called with an iterator and a model.
            forward_backward: Megatron's pipeline schedule.
            batches: This rank's samples.

        Raises:
            ConfigError: The optimizer would skip steps with a large gradient.
        """
        _require_no_skips(state)
        for chunk in state.model:
            # loops switch to training mode in their `train`, but in a new process a
            # recovery runs passes before that
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
            load: Loads a checkpoint in the loop's own format and returns the
                checkpoint's iteration, or 0. Called on all ranks of a run that has
                state neither in memory nor on local disks.

        Returns:
            The return value of the loop.
        """
        assert self._exactness is not None, "resolve_exactness comes first"
        loop, state = self.loop, self.loop.iteration.state
        loop.enter, loop.load = enter, load
        data = identities_of(files)
        settings = {**shaping, **course, **settings_of_optimizer(state), **data}
        training = Training(
            loop=loop,
            iteration=loop.iteration,
            replay=loop.as_training_loop(),
            model=_hash_of(shaping),
            # the script is no part of the course and may change between starts: a
            # script with one more print leads to the same states
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
    """Refuse other fault-tolerance libraries and routers of this project.

    Args:
        settings: The settings of the run.

    Raises:
        ConfigError: Another fault-tolerance library is active in this process, or
            `ckpt.boost` is not 0.
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
    """Refuse an optimizer that skips steps with a large gradient.

    No command-line option sets such a threshold, and the split step has no such skip.
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
    """Make the script's process groups survive the loss of ranks.

    Replaces torch's `new_group` and `destroy_process_group` in this process. All groups
    that the script creates from here on end with the worker.
    """
    plain, destroy = dist.new_group, dist.destroy_process_group

    @functools.wraps(plain)
    def new_group(*arguments: Any, **options: Any) -> Any:
        wanted = inspect.signature(plain).bind(*arguments, **options).arguments
        backend = wanted.pop("backend", None)
        if backend not in (ELASTIC, ELASTIC_CPU):
            backend = ELASTIC_CPU if backend and "gloo" in backend else ELASTIC
        # `pg_options` are for NCCL, and `runtime` has timeouts of its own
        for name in ("timeout", "pg_options"):
            wanted.pop(name, None)
        return plain(**wanted, backend=backend)

    @functools.wraps(destroy)
    def destroy_world(group: Any = None) -> None:
        # torch cannot unregister the other groups of the runtime's backend
        if group is None or group is dist.group.WORLD:
            destroy(group)

    # both names are replaced, because torch's own functions, such as the functions for
    # subgroups, look up the second one
    dist.new_group = dist.distributed_c10d.new_group = new_group
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = (
        destroy_world
    )


def _hash_of(shaping: Mapping[str, object]) -> str:
    """Return a short hash of the settings that shape the saved state."""
    # values as text, because JSON has no types of parameters (dtypes)
    text = json.dumps(
        {name: str(value) for name, value in shaping.items()}, sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _layout() -> ParallelLayout:
    return ParallelLayout(
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        # context-parallel ranks hold the same state and see other tokens, so these
        # ranks count as data parallel
        dp=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
    )
