"""A training loop over Megatron-Core that survives the death of its processes.

    # in the process that torchrun starts
    sys.exit(train_elastic(config, build, forward_step, batches))

The program provides the model, the forward step and the data. `moe_ckpt.loop` has the
iteration and the worker's life; this module is the adapter. Must not: know models, data
or a launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from moe_ckpt.attach import TrainingLoop
from moe_ckpt.collectives import TorchRanks
from moe_ckpt.config import (
    AUTO,
    NO_CHECKS,
    CheckConfig,
    CkptConfig,
    RunFolderConfig,
    RuntimeConfig,
    require,
)
from moe_ckpt.config_keys import to_keys
from moe_ckpt.content import file_identity
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.elastic.job_store import say_once
from moe_ckpt.elastic.torchrun_variables import read_launch
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import DataError, MoeCkptError
from moe_ckpt.events import IterationCommitted
from moe_ckpt.exactness import BITWISE, require_valid
from moe_ckpt.faults.schedule import StateLoss
from moe_ckpt.job_config import JobConfig
from moe_ckpt.loop import (
    JoinedWorker,
    Losses,
    Training,
    TrainingIteration,
    WorkerProcess,
    run_worker,
    start_rank,
)
from moe_ckpt.megatron.schedule import asked_by_override, settings_of_optimizer
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.types import ParallelLayout

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], Any]
"""Megatron's forward step: data iterator and model to output and loss function."""

Batches = Callable[[int], Iterator[Any]]
"""Returns this rank's micro-batches of an iteration, counted from 1."""

AfterIteration = Callable[[int, float], None]
"""Called with the number and the loss of an iteration."""

_COURSE_FIELDS = ("model", "num_micro_batches", "micro_batch_size", "sequence_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """Settings of `train_elastic`.

    Raises:
        ConfigError: A setting is out of its range.

    Example:
        config = LoopConfig(
            ckpt=ckpt_config("moevement", window=4),
            runtime=runtime_config(),
            layout=ParallelLayout(pp=1, dp=2, ep=2, tp=1),
            num_iterations=100,
            num_micro_batches=2,
            micro_batch_size=2,
            sequence_length=128,
            model="my_model",
        )
    """

    ckpt: CkptConfig
    """The checkpoint policy; `run_settings.ckpt_config` has the defaults."""

    runtime: RuntimeConfig
    """How the job survives deaths; `run_settings.runtime_config` has the defaults."""

    layout: ParallelLayout
    """Degrees of parallelism."""

    num_iterations: int
    """Number of iterations of the run."""

    num_micro_batches: int
    """Micro-batches of an iteration, on each rank."""

    micro_batch_size: int
    """Sequences of a micro-batch."""

    sequence_length: int
    """Tokens of a sequence."""

    model: str
    """Name of the model; checkpoints of another model are refused."""

    run_dir: str | None = None
    """Path of the run folder; None: a new one, outputs/DATE/TIME-`model`."""

    ranks_per_node: int | str = AUTO
    """Number of ranks that fail together.

    auto: the ranks that torchrun starts on a node; on a single machine each rank counts
    alone.
    """

    checks: CheckConfig = NO_CHECKS
    """Digests of the state, for comparison of runs."""

    losses: Sequence[StateLoss] = ()
    """Losses of state in living processes, on purpose."""

    inputs: Sequence[str] = ()
    """Files that `batches` reads, data and tokenizer.

    A file with another content in a replacement, on another node or at a later start is
    refused.
    """

    check_determinism: bool | str = AUTO
    """Whether the start runs the first iteration's batch twice and compares gradients.

    auto: on a GPU, with `exactness` bitwise.
    """

    exactness: str = BITWISE
    """Promise of recoveries, `bitwise` or `state`.

    bitwise: a run with faults ends bit for bit as the run without faults; CUDA is set
    to deterministic kernels. state: after a recovery each rank has, bit for bit, a
    state that the rank had before the fault; for policies that run no iteration again.
    """

    def __post_init__(self) -> None:
        require_valid(self.exactness, may_be_auto=False)
        # the property checks the settings
        _ = self.job
        for path in self.inputs:
            require(Path(path).is_file(), "inputs", path, "a file")

    @property
    def job(self) -> JobConfig:
        """The settings of the job."""
        settings = {**asdict(self), "ckpt": to_keys(self.ckpt)}
        text = yaml.safe_dump(settings, sort_keys=False)
        return JobConfig(
            ckpt=self.ckpt,
            runtime=self.runtime,
            folder=RunFolderConfig(
                dir=self.run_dir, name=self.model, configuration=text
            ),
            ranks_per_node=self.ranks_per_node,
            checks=self.checks,
            losses=self.losses,
            exactness=self.exactness,
            check_determinism=self.check_determinism,
        )


def train_elastic(
    config: LoopConfig,
    build: Callable[[], TrainingState],
    forward_step: ForwardStep,
    batches: Batches,
    after_iteration: AfterIteration = lambda _iteration, _loss: None,
) -> int:
    """Run one rank of a job until all ranks have finished.

    Args:
        config: The settings.
        build: Builds groups, model and optimizer. Each worker calls this function
            alone; the groups connect later, when all ranks meet.
        forward_step: The forward step of Megatron's schedules.
        batches: Yields this rank's micro-batches of an iteration. The micro-batches
            must depend on the iteration alone, because a replay reads the iteration
            again.
        after_iteration: Receives the number and the loss of each iteration that all
            ranks have finished. Each rank makes the call alone, so the function must
            not communicate: after a fault, some ranks make the call for an iteration
            later than others.

    Returns:
        The exit status: 1 after an error that a user can correct, which one rank
        prints.

    Example:
        def build():
            return TrainingState(model=[model], optimizer=optimizer, scheduler=schedule)

        sys.exit(train_elastic(config, build, forward_step, micro_batches))
    """

    def build_training(joined: JoinedWorker[Any]) -> Training:
        return OwnLoop(
            config, build(), forward_step, batches, after_iteration, joined
        ).training()

    def work(worker: WorkerProcess) -> object:
        return run_worker(worker, build_training)

    try:
        return start_rank(config.job, read_launch(sys.argv[0]), work)
    except MoeCkptError as error:
        say_once(str(error))
        return 1


def _identities(paths: Sequence[str]) -> dict[str, str]:
    # by number and name: a folder may be mounted at another path on another node
    names = {
        f"inputs[{number}]: {Path(path).name}": path
        for number, path in enumerate(paths)
    }
    try:
        return {name: file_identity(Path(path)) for name, path in names.items()}
    except OSError as error:
        raise DataError(f"inputs: {error}") from error


class OwnLoop:
    """One rank's loop; implements `loop.LoopAdapter`."""

    session: Session

    def __init__(
        self,
        config: LoopConfig,
        state: TrainingState,
        forward_step: ForwardStep,
        batches: Batches,
        after_iteration: AfterIteration,
        joined: JoinedWorker[Any],
    ) -> None:
        require(
            len(state.model) == 1,
            "build: chunks of the model",
            len(state.model),
            "1: no virtual stages",
        )
        self._config = config
        self._joined = joined
        self._iteration = TrainingIteration(state, joined.worker.enter_phase)
        self._forward_step = self._iteration.marking_phases(forward_step)
        self._batches = batches
        self._after_iteration = after_iteration

    def training(self) -> Training:
        """Return this loop in the form that `loop.train` takes."""
        config, state = self._config, self._iteration.state
        inputs = _identities(config.inputs)
        settings = (
            {name: getattr(config, name) for name in _COURSE_FIELDS}
            | settings_of_optimizer(state)
            | inputs
        )
        return Training(
            loop=self,
            iteration=self._iteration,
            replay=TrainingLoop(
                communicator=self._iteration.communicator,
                forward_backward=self.forward_backward,
                batches=self._iteration.batches,
                num_micro_batches=config.num_micro_batches,
                micro_batch_size=config.micro_batch_size,
                sequence_length=config.sequence_length,
            ),
            model=config.model,
            layout=config.layout,
            last_iteration=config.num_iterations,
            length_setting="num_iterations",
            exactness=config.exactness,
            inputs=inputs,
            course=RunCourse(self._joined.folder.path, settings, TorchRanks()),
            asked_lengths=asked_by_override(state.scheduler),
        )

    def start(self) -> int:
        """Load the newest checkpoint of this run, if there is one."""
        return self.session.resume(None)

    def run_from(self, done: int, notes: Sequence[str]) -> None:
        """Train from the state after `done` iterations to the last iteration."""
        if notes and self._joined.is_first_rank:
            print(*notes, sep="\n", flush=True)
        for number in range(done + 1, self._config.num_iterations + 1):
            self._iteration.run(number, self.forward_backward)

    def forward_backward(self, iteration: int) -> Losses:
        """Compute the gradients of an iteration's batch; return the loss reports."""
        return self._iteration.run_schedule(
            forward_step_func=self._forward_step,
            data_iterator=self._batches(iteration),
            model=self._iteration.state.model[0],
            num_microbatches=self._config.num_micro_batches,
            seq_length=self._config.sequence_length,
            micro_batch_size=self._config.micro_batch_size,
            forward_only=False,
        )

    def committed(self, event: IterationCommitted) -> None:
        """Pass a finished iteration to `after_iteration`."""
        self._after_iteration(event.iteration, event.loss)

    def result(self) -> dict[str, object]:
        """Return no further entries of result.json."""
        return {}

    def close(self) -> None:
        """Close nothing: the loop opens nothing of its own."""
