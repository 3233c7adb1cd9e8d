"""Attaches to Megatron-LM's unmodified training loop.

A script's `pretrain` calls the loop, `megatron.training.training`. Owns: the
replacements of the loop's functions (`megatron_lm_seams` names the functions), and
entering `train` again after a recovery. All else stays Megatron-LM's: forward and
backward of a step, logs, evaluation, checkpoints.

    attach(training, joined, settings)    in a worker, before the script runs

    train        join; come to one state with all ranks; enter Megatron-LM's `train`.
                 Again after each loss of ranks
    train_step   one iteration, with the hooks of `moe_ckpt.loop`
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from moe_ckpt.config import require
from moe_ckpt.elastic_worker import Worker
from moe_ckpt.integrations.attached_loop import IterationShape, reset_loop
from moe_ckpt.integrations.attachment import (
    Attachment,
    require_attachable,
    route_groups,
)
from moe_ckpt.integrations.loop_seams import mark_attached
from moe_ckpt.integrations.megatron_lm_data import IterationBatches, build_in_turns
from moe_ckpt.integrations.megatron_lm_options import (
    COURSE,
    DETERMINISTIC,
    LAYER_SHAPE,
    require_supported,
)
from moe_ckpt.loop import JoinedWorker
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.megatron.step import gather_late_parameters
from moe_ckpt.run_settings import RunSettings

_SHAPING = (
    *(
        *LAYER_SHAPE,
        "num_experts",
        "padded_vocab_size",
        "seq_length",
        "untie_embeddings_and_output_weights",
    ),
    *("optimizer", "use_distributed_optimizer", "global_batch_size"),
)
_FILES = (
    *(
        "data_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "data_args_path",
    ),
    *("per_split_data_args_path", "tokenizer_model", "vocab_file", "merge_file"),
)


def attach(
    training: Any, joined: JoinedWorker[Worker], settings: RunSettings
) -> Attachment:
    """Let the loop of this worker's process checkpoint and recover.

    The script that runs next calls the loop as always. Process groups that the script
    creates from here on outlive the loss of ranks.

    Args:
        training: The module `megatron.training.training`.
        joined: This worker.
        settings: The settings of the run.

    Raises:
        ConfigError: The process has an attachment already.
    """
    mark_attached(training)
    route_groups()
    # only in the first worker: a replacement compares the batches that it reads with
    # the batches of the process before it
    tries_iterators = joined.worker.incarnation == 0
    batches = IterationBatches(
        training, settings.keep_batches_bytes, tries_iterators=tries_iterators
    )
    attachment = Attachment(joined)
    # `AttachedMegatronLm` keeps the functions that are replaced below
    loop = AttachedMegatronLm(training, attachment, batches)
    training.initialize_megatron = _checked(training, attachment, settings)
    training.build_train_valid_test_datasets = batches.build_datasets
    build = training.build_train_valid_test_data_iterators
    training.build_train_valid_test_data_iterators = build_in_turns(
        build, joined.worker.turn
    )
    training.load_checkpoint = loop.hold_load
    training.save_checkpoint = attachment.saving(training.save_checkpoint)
    training.get_forward_backward_func = attachment.observing(
        training.get_forward_backward_func
    )
    training.train_step = loop.train_step
    training.train = loop.train
    return attachment


class AttachedMegatronLm:
    """Megatron-LM's `train` of one rank, entered again after each recovery."""

    def __init__(
        self, training: Any, attachment: Attachment, batches: IterationBatches
    ) -> None:
        self._training = training
        self._train, self._train_step = training.train, training.train_step
        self._schedule_of, self._load_checkpoint = (
            training.get_forward_backward_func,
            training.load_checkpoint,
        )
        self._attachment = attachment
        self._batches = batches
        self._load: Callable[[], tuple[int, Any]] | None = None

    def hold_load(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        """Replace `load_checkpoint` while a rank builds alone: postpone the load.

        All ranks load together later, if no rank has state in memory.

        Returns:
            Iteration 0, and 0 operations.
        """
        self._load = functools.partial(self._load_checkpoint, *arguments, **options)
        return 0, 0

    def train_step(
        self,
        forward_step: Any,
        batches: Any,
        model: Any,
        _optimizer: Any,
        _scheduler: Any,
        *rest: Any,
        iteration: int,
        **options: Any,
    ) -> Any:
        """Replace `train_step`: run one iteration with hooks.

        Args:
            iteration: The iteration, counted from 0 as in Megatron-LM.
        """
        run = functools.partial(self._train_step, forward_step, batches, model)
        return self._attachment.loop.train_step(
            iteration + 1,
            lambda stepping, held: run(
                stepping, held, *rest, iteration=iteration, **options
            ),
        )

    def train(
        self,
        forward_step: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Replace `train`: return once all ranks have done all iterations.

        Returns:
            The return value of Megatron-LM's `train`.

        Raises:
            ConfigError: The script passes a communicator or process groups of its own.
        """
        for name in ("p2p_communicator", "pg_collection"):
            require(
                options.get(name) is None,
                f"pretrain: {name}",
                options.get(name),
                "None with moe_ckpt.run",
            )
        _, _, process_non_loss, config, *others = rest
        args = self._training.get_args()
        shape = IterationShape(
            micro_batch_size=args.micro_batch_size,
            sequence_length=args.seq_length,
            decoder_sequence_length=args.decoder_seq_length,
        )
        state = TrainingState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            schedule_increment=shape.num_samples,
            data=self._batches.data,
        )
        _set_schedule_hooks(config, args, self._training.get_timers(), state)
        loop = self._attachment.begin(
            shape, state, forward_step, self._schedule_of(), self._batches
        )

        def enter(done: int) -> Any:
            # the first iteration of `train` gathers no parameters
            gather_late_parameters(state)
            self._reset(config, state, done)
            # `train` of 0.18 sets `finalize_model_grads_func` to this function of the
            # module
            self._training.finalize_model_grads = config.finalize_model_grads_func
            iterators = (
                self._batches.training_after(done),
                self._batches.validation_after(done),
            )
            return self._train(
                loop.forward_step,
                model,
                optimizer,
                scheduler,
                *iterators,
                process_non_loss,
                config,
                *others,
                **options,
            )

        return self._attachment.train(
            shaping={name: getattr(args, name, None) for name in _SHAPING},
            course=_by_option(args, COURSE),
            files=_by_option(args, _FILES),
            last_iteration=args.train_iters,
            length_setting="--train-iters",
            enter=enter,
            load=self._load_held,
        )

    def _load_held(self) -> int:
        """Load the checkpoint of `--load`.

        Returns:
            The iteration of the checkpoint; 0 without a checkpoint.
        """
        if self._load is None:
            return 0
        done, _ = self._load()
        got, wanted = (
            self._training.get_args().consumed_train_samples,
            self._batches.consumed.after(done),
        )
        require(
            got == wanted,
            "--load: consumed samples",
            got,
            f"{wanted}, which {done} iterations consume",
        )
        return done

    def _reset(self, config: Any, state: TrainingState, done: int) -> None:
        """Set Megatron-LM's globals to the values that `train` expects at the start.

        Args:
            config: Megatron's configuration of the model.
            state: The training state of this rank's stage.
            done: The iterations before `train` begins.
        """
        args, consumed = self._training.get_args(), self._batches.consumed
        args.iteration = args.curr_iteration = done
        # `train` sets these functions itself, and asserts that `no_sync_func` is None
        # before
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
        # a pass that was cut off has added its values to the tracker, and runs again:
        # these values would count twice
        if args.num_experts:
            self._training.get_moe_metrics_tracker().clear()
        reset_loop(self._training.get_timers(), state)
        args.consumed_train_samples = consumed.after(done)
        args.consumed_valid_samples = self._batches.num_validated(done)
        consumed.set_batch_size(done + 1)
        operations = self._training.num_floating_point_operations
        sizes = (
            consumed.after(iteration) - consumed.after(iteration - 1)
            for iteration in range(1, done + 1)
        )
        args.num_floating_point_operations_so_far = sum(
            times * operations(args, size)
            for size, times in collections.Counter(sizes).items()
        )


def _checked(
    training: Any, attachment: Attachment, settings: RunSettings
) -> Callable[..., Any]:
    """Wrap `initialize_megatron`: first refuse unsupported options."""

    initialize = training.initialize_megatron

    def checked(*arguments: Any, **options: Any) -> Any:
        args = training.get_args()
        require_attachable(settings)
        require_supported(args)
        attachment.resolve_exactness(
            mode=getattr(args, DETERMINISTIC), option="--deterministic-mode"
        )
        ckpt = settings.job.ckpt
        if ckpt.loses_tokens:  # the account of lost tokens counts iterations
            growth = getattr(args, "step_batch_size_schedule", None)
            require(
                growth is None,
                "--step-batch-size-schedule",
                growth,
                f"None with --ckpt {ckpt.policy}",
            )
        return initialize(*arguments, **options)

    return checked


def _set_schedule_hooks(
    config: Any, args: Any, timers: Any, state: TrainingState
) -> None:
    """Set the hooks of the pipeline schedule as `train` does.

    In a new process a recovery runs schedules before the process enters `train`.
    """
    model: list[Any] = list(state.model)
    config.timers = timers
    if args.overlap_grad_reduce:
        config.no_sync_func = _by_chunk([chunk.no_sync for chunk in model])
        starts = [chunk.start_grad_sync for chunk in model]
        config.grad_sync_func = _by_chunk(starts) if args.align_grad_reduce else None


def _by_option(args: Any, names: Sequence[str]) -> dict[str, object]:
    """Return the values of options, by the names on a command line."""
    return {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}


def _by_chunk(functions: list[Any]) -> Any:
    """Return functions of model chunks in the form of Megatron's configuration.

    A single function is not put into a list.
    """
    return functions[0] if len(functions) == 1 else functions
