"""Attaches to Megatron-Bridge's unmodified training loop.

`pretrain` calls the loop, `megatron.bridge.training.train`. Owns: the replacements of
the loop's functions (`megatron_bridge_seams` names the functions), and entering `train`
again after a recovery. All else stays Megatron-Bridge's: forward and backward of a
step, logs, evaluation, callbacks.

    attach(bridge, joined, settings)    in a worker, before the script runs

    train        join; come to one state with all ranks; enter Bridge's `train`. Again
                 after each loss of ranks
    train_step   one iteration, with the hooks of `moe_ckpt.loop`
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_config

from moe_ckpt.config import require
from moe_ckpt.elastic_worker import Worker
from moe_ckpt.integrations.attached_loop import IterationShape, reset_loop
from moe_ckpt.integrations.attachment import (
    Attachment,
    require_attachable,
    route_groups,
)
from moe_ckpt.integrations.loop_seams import mark_attached
from moe_ckpt.integrations.megatron_bridge_data import BridgeBatches
from moe_ckpt.integrations.megatron_bridge_options import (
    course_of,
    files_of,
    require_supported,
    shaping_of,
)
from moe_ckpt.integrations.megatron_lm_data import build_in_turns
from moe_ckpt.integrations.megatron_lm_options import DETERMINISTIC
from moe_ckpt.loop import JoinedWorker
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.megatron.step import gather_late_parameters
from moe_ckpt.run_settings import RunSettings


def attach(
    bridge: Any, joined: JoinedWorker[Worker], settings: RunSettings
) -> Attachment:
    """Let the loop of this worker's process checkpoint and recover.

    The script that runs next calls the loop as always. Process groups that the script
    creates from here on outlive the loss of ranks.

    Args:
        bridge: The modules of the loop (`import_bridge`).
        joined: This worker.
        settings: The settings of the run.

    Raises:
        ConfigError: The process has an attachment already.
    """
    mark_attached(bridge.train)
    route_groups()
    attachment = Attachment(joined)
    batches = BridgeBatches(bridge.loaders.build_pretraining_data_loader)
    # `AttachedBridge` keeps the functions that are replaced below
    loop = AttachedBridge(bridge, attachment, batches)
    bridge.pretrain.runtime_config_update = _checked(
        bridge.pretrain.runtime_config_update, attachment, settings
    )
    bridge.setup.create_checkpoint_manager = loop.hold_load(
        bridge.setup.create_checkpoint_manager
    )
    bridge.setup.setup_data_iterators = build_in_turns(
        bridge.setup.setup_data_iterators, joined.worker.turn
    )
    bridge.loaders.build_pretraining_data_loader = batches.build_loader
    # each module has imported the function under a name of its own
    for module in (bridge.train, bridge.eval):
        module.get_forward_backward_func = attachment.observing(
            module.get_forward_backward_func
        )
    bridge.train.train_step = loop.train_step
    bridge.train.save_checkpoint_and_time = attachment.saving(
        bridge.train.save_checkpoint_and_time
    )
    bridge.pretrain.train = loop.train
    return attachment


class AttachedBridge:
    """Megatron-Bridge's `train` of one rank, entered again after each recovery."""

    def __init__(
        self, bridge: Any, attachment: Attachment, batches: BridgeBatches
    ) -> None:
        self._train, self._train_step = bridge.train.train, bridge.train.train_step
        self._schedule_of = bridge.train.get_forward_backward_func
        self._prepare_forward_step = bridge.train.prepare_forward_step_func
        self._attachment = attachment
        self._batches = batches
        self._load: Callable[[], object] | None = None

    def hold_load(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `create_checkpoint_manager` so that the manager's load is postponed.

        All ranks load together later, if no rank has state in memory.

        Args:
            create: Megatron-Bridge's `create_checkpoint_manager`.
        """

        def created(*arguments: Any, **options: Any) -> Any:
            manager = create(*arguments, **options)
            load = manager.load

            def hold(context: Any) -> tuple[int, int]:
                self._load = functools.partial(load, context)
                return 0, 0

            manager.load = hold
            return manager

        return created

    def train_step(
        self,
        forward_step: Any,
        samples: Any,
        model: Any,
        _optimizer: Any,
        _scheduler: Any,
        global_state: Any,
        *rest: Any,
    ) -> Any:
        """Replace `train_step`: run one iteration with hooks."""
        run = functools.partial(self._train_step, forward_step, samples, model)
        number = global_state.train_state.step + 1
        return self._attachment.loop.train_step(
            number, lambda stepping, held: run(stepping, held, global_state, *rest)
        )

    def train(
        self,
        forward_step: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        _training: Any,
        _validation: Any,
        global_state: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Replace `train`: return once all ranks have done all iterations."""
        config, model_config = global_state.cfg, get_model_config(model[0])
        self._batches.validates_as(config.validation)
        length = config.model.seq_length
        shape = IterationShape(
            micro_batch_size=config.train.micro_batch_size,
            sequence_length=length,
            decoder_sequence_length=length,
        )
        state = TrainingState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            schedule_increment=shape.num_samples,
        )
        schedule = self._schedule_of(
            pp_size=config.model.pipeline_model_parallel_size, vp_size=None
        )
        forward_step = self._prepare_forward_step(forward_step, global_state)
        loop = self._attachment.begin(
            shape, state, forward_step, schedule, self._batches
        )
        gather_in_forward = model_config.param_sync_func

        def enter(done: int) -> Any:
            # the first iteration of `train` gathers no parameters
            gather_late_parameters(state)
            # `param_sync_func` is None if a fault ended the loop in its first iteration
            model_config.param_sync_func = gather_in_forward
            # `timers` is None if a fault ended the loop in an evaluation
            model_config.timers = global_state.timers
            reset_loop(global_state.timers, state)
            self._reset(global_state, done)
            samples = (
                self._batches.training_after(done),
                self._batches.validation_after(done),
            )
            return self._train(
                loop.forward_step,
                model,
                optimizer,
                scheduler,
                *samples,
                global_state,
                *rest,
                **options,
            )

        return self._attachment.train(
            shaping=shaping_of(config),
            course=course_of(config),
            files=files_of(config),
            last_iteration=config.train.train_iters,
            length_setting="train.train_iters",
            enter=enter,
            load=lambda: self._load_held(global_state),
        )

    def _load_held(self, global_state: Any) -> int:
        """Load the checkpoint of `checkpoint.load`.

        Returns:
            The iteration of the checkpoint; 0 without a checkpoint.
        """
        if self._load is None:
            return 0
        self._load()
        train_state = global_state.train_state  # the load has replaced this object
        got, wanted = (
            train_state.consumed_train_samples,
            self._batches.consumed.after(train_state.step),
        )
        wanted_text = f"{wanted}, which {train_state.step} iterations consume"
        require(got == wanted, "checkpoint.load: consumed samples", got, wanted_text)
        return train_state.step

    def _reset(self, global_state: Any, done: int) -> None:
        """Set Bridge's counters to their values after iteration `done`."""
        train_state, consumed = global_state.train_state, self._batches.consumed
        train_state.step = done
        train_state.consumed_train_samples = consumed.after(done)
        train_state.consumed_valid_samples = self._batches.num_validated(done)
        consumed.set_batch_size(done + 1)
        flops: Any = importlib.import_module(
            "megatron.bridge.training.utils.flop_utils"
        )
        of_one = flops.num_floating_point_operations(
            global_state.cfg, batch_size=consumed.largest_batch
        )
        # all batches have the same size: `require_supported` refuses growing batches
        train_state.floating_point_operations_so_far = done * of_one
        # a pass that was cut off has added its values to the tracker, and runs again:
        # these values would count twice
        if global_state.cfg.model.num_moe_experts:
            logging: Any = importlib.import_module(
                "megatron.core.transformer.moe.moe_logging"
            )
            logging.get_moe_metrics_tracker().clear()


def _checked(
    update: Callable[[Any], None], attachment: Attachment, settings: RunSettings
) -> Callable[[Any], None]:
    """Wrap `runtime_config_update` with the checks of settings.

    The wrapped function refuses settings that cannot be exact, before anything is
    built.
    """

    def checked(config: Any) -> None:
        update(config)
        require_attachable(settings)
        require_supported(config)
        attachment.resolve_exactness(
            mode=getattr(config.model, DETERMINISTIC), option=f"model.{DETERMINISTIC}"
        )

    return checked
