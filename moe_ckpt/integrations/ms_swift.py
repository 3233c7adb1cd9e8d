"""Attaches to ms-swift's unmodified Megatron trainer, `swift.megatron.trainers`.

The pipelines of ms-swift call the trainer's `train`. Owns: the replacements of the
trainer's methods (`ms_swift_seams` names the methods), and entering `train` again after
a recovery. All else stays ms-swift's: forward and backward of a step, logs, evaluation,
callbacks, checkpoints.

    attach(base, joined, settings)    in a worker, before the script runs

    train        join; come to one state with all ranks; enter ms-swift's `train`. Again
                 after each loss of ranks
    train_step   one iteration, with the hooks of `moe_ckpt.loop`
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron.core import num_microbatches_calculator, parallel_state

from moe_ckpt.config import require
from moe_ckpt.elastic_worker import Worker
from moe_ckpt.integrations.attached_loop import IterationShape, Stepping, reset_loop
from moe_ckpt.integrations.attachment import (
    Attachment,
    require_attachable,
    route_groups,
)
from moe_ckpt.integrations.loop_seams import mark_attached
from moe_ckpt.integrations.megatron_lm_options import COURSE
from moe_ckpt.integrations.ms_swift_data import SwiftBatches
from moe_ckpt.integrations.ms_swift_options import (
    require_supported,
    require_supported_model,
    shaping_of,
)
from moe_ckpt.loop import JoinedWorker
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.run_settings import RunSettings


def attach(
    base: Any, joined: JoinedWorker[Worker], settings: RunSettings
) -> Attachment:
    """Let the trainer of this worker's process checkpoint and recover.

    The script that runs next uses the trainer as always. Process groups that the script
    creates from here on outlive the loss of ranks.

    Args:
        base: The module of the base class of ms-swift's trainers.
        joined: This worker.
        settings: The settings of the run.

    Raises:
        ConfigError: The process has an attachment already.
    """
    mark_attached(base)
    route_groups()
    attachment = Attachment(joined)
    # `AttachedSwift` keeps the methods that are replaced below
    trainer, loop = base.BaseMegatronTrainer, AttachedSwift(base, attachment)
    base.get_forward_backward_func = attachment.observing(
        base.get_forward_backward_func
    )
    trainer.__init__ = _checked(trainer.__init__, attachment, settings)
    trainer._prepare_data_iterator = _method(loop.data_iterators)
    trainer.train_step = _method(loop.train_step)
    trainer.save_checkpoint = attachment.saving(trainer.save_checkpoint)
    trainer.train = _method(loop.train)
    return attachment


class AttachedSwift:
    """ms-swift's `train` of one rank, entered again after each recovery."""

    def __init__(self, base: Any, attachment: Attachment) -> None:
        self._base = base
        self._train, self._train_step = (
            base.BaseMegatronTrainer.train,
            base.BaseMegatronTrainer.train_step,
        )
        self._schedule_of = base.get_forward_backward_func
        self._attachment = attachment
        self._iterators: tuple[Any, Any] = (None, None)

    def data_iterators(
        self, _trainer: Any, *_datasets: Any, **_options: Any
    ) -> tuple[Any, Any]:
        """Replace `_prepare_data_iterator`: return both iterators of the loop.

        The iterators of training and validation stand where the iteration to be entered
        needs them.
        """
        return self._iterators

    def train_step(self, trainer: Any, samples: Any) -> Any:
        """Replace `train_step`: run one iteration with hooks."""

        def run(stepping: Stepping, held: Stepping) -> Any:
            optimizer, scheduler = trainer.optimizer, trainer.opt_param_scheduler
            trainer.optimizer, trainer.opt_param_scheduler = stepping, held
            try:
                return self._train_step(trainer, samples)
            finally:
                # also after a rollback: `train` is entered again with the trainer's own
                # optimizer and scheduler
                trainer.optimizer, trainer.opt_param_scheduler = optimizer, scheduler

        return self._attachment.loop.train_step(trainer.state.iteration + 1, run)

    def train(self, trainer: Any, train_dataset: Any, val_dataset: Any) -> Any:
        """Replace `train`: return once all ranks have done all iterations.

        Raises:
            ConfigError: The model cannot be built by a rank alone, or has done
                iterations.
        """
        args, config = trainer.args, trainer.config
        require_supported_model(args, config)
        require(
            trainer.state.iteration == 0,
            "--finetune",
            args.finetune,
            "a model without finished iterations",
        )
        shape = IterationShape(
            micro_batch_size=args.micro_batch_size,
            sequence_length=args.seq_length,
            decoder_sequence_length=None,
        )
        # ms-swift creates no such calculator of its own
        if num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
            num_microbatches_calculator.init_num_microbatches_calculator(
                0,
                None,
                args.global_batch_size,
                args.micro_batch_size,
                parallel_state.get_data_parallel_world_size(),
            )
        state = TrainingState(
            model=trainer.wrapped_models,
            optimizer=trainer.optimizer,
            scheduler=trainer.opt_param_scheduler,
            schedule_increment=args.global_batch_size,
        )
        batches = SwiftBatches(
            trainer._create_dataloader,
            args,
            *trainer._prepare_dataloader(train_dataset, val_dataset),
        )
        loop = self._attachment.begin(
            shape, state, trainer.forward_step, self._schedule_of(), batches
        )
        loop.iteration.communicator.rows = (
            1 if args.padding_free else args.micro_batch_size
        )
        trainer.forward_step = loop.forward_step

        def enter(done: int) -> Any:
            reset_loop(SimpleNamespace(_timers={}), state)
            _reset(trainer.state, done, args.global_batch_size)
            # `train` sets `finalize_model_grads_func` to this function of the module
            self._base.finalize_model_grads = config.finalize_model_grads_func
            self._iterators = (
                batches.training_after(done),
                batches.validation_after(done),
            )
            return self._train(trainer, train_dataset, val_dataset)

        return self._attachment.train(
            shaping=shaping_of(args, config),
            course={f"--{name}": getattr(args, name, None) for name in COURSE},
            files={
                f"--{name}": getattr(args, name, None)
                for name in ("dataset", "val_dataset", "model")
            },
            last_iteration=args.train_iters,
            length_setting="--train_iters",
            enter=enter,
        )


def _reset(counters: Any, done: int, batch: int) -> None:
    """Set ms-swift's `TrainerState` to its values after iteration `done`."""
    counters.iteration, counters.consumed_train_samples = done, done * batch
    # An iteration that a fault cut off may have set these flags. The flags would act in
    # the iteration that is entered now.
    counters.should_log = counters.should_eval = counters.should_save = False


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method as a function that a class can hold as its own method.

    Python passes the instance of that class as the first argument.
    """

    @functools.wraps(function)
    def method(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return method


def _checked(
    initialize: Callable[..., Any], attachment: Attachment, settings: RunSettings
) -> Callable[..., Any]:
    """Wrap the `__init__` of trainers with the checks of settings.

    The wrapped function first refuses settings that cannot be exact, before a model is
    built.
    """

    @functools.wraps(initialize)
    def checked(trainer: Any, args: Any, template: Any) -> None:
        require_attachable(settings)
        require_supported(type(trainer).__name__, args)
        attachment.resolve_exactness(mode=False, option=None)
        initialize(trainer, args, template)

    return checked
