"""The launcher's training loop: an adapter over `moe_ckpt.loop`.

The loop runs Megatron's own pipeline schedules. Owns: passes over the launcher's
batches, evaluation when due, and the display. Must not: know how a recovery works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launcher.config import AUTO, Settings
from launcher.data import Batches
from launcher.progress import Display, Scalars, open_display
from moe_ckpt.attach import TrainingLoop
from moe_ckpt.collectives import TorchRanks, broadcast_result
from moe_ckpt.config import require
from moe_ckpt.durable.checkpoint_folder import CheckpointFolder, is_committed
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import DataError
from moe_ckpt.events import Evaluated, IterationCommitted
from moe_ckpt.loop import JoinedWorker, Losses, Training, TrainingIteration
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.megatron.step import mean_over_job
from moe_ckpt.types import ParallelLayout

NEVER = "never"
_NOT_YET = -1
_LENGTHS = {  # settings `train.*`, by the length of the schedule that the setting gives
    "lr_warmup_steps": "lr_warmup_iters",
    "lr_decay_steps": "lr_decay_iters",
    "wd_incr_steps": "lr_decay_iters",
}


class StagePasses:
    """Passes over batches through one rank's stage.

    All methods are collective over all ranks.
    """

    def __init__(self, iteration: TrainingIteration, batches: Batches) -> None:
        """Prepare the passes of one rank.

        Args:
            iteration: Runs Megatron's schedules.
            batches: This rank's micro-batches.
        """
        self.batches = batches
        self._iteration = iteration
        self._forward_step = iteration.marking_phases(forward_step)

    @property
    def state(self) -> TrainingState:
        """The training state of the stage."""
        return self._iteration.state

    def train_on(self, iteration: int) -> Losses:
        """Run forward and backward over an iteration's batch.

        Leaves the reduced gradients.

        Args:
            iteration: The iteration, counted from 1.

        Returns:
            The loss reports.
        """
        return self._run(lambda number: self.batches.training(iteration, number))

    def train_on_one_micro_batch(self) -> Losses:
        """Run forward and backward over the first micro-batch of iteration 1.

        Leaves the reduced gradients.

        Returns:
            The loss reports.
        """
        return self._run(
            lambda number: self.batches.training(1, number), num_micro_batches=1
        )

    # with gradients enabled, Megatron's routers would count these tokens for the next
    # update of the expert biases
    @torch.no_grad()
    def evaluate(self, num_batches: int) -> float:
        """Evaluate the model on held-out batches.

        Evaluation changes no state except the largest values that FP8 layers record,
        which the next iteration drops.

        Args:
            num_batches: The number of global batches.

        Returns:
            The mean cross-entropy, in nats per token.
        """
        losses: list[dict[str, torch.Tensor]] = []
        for chunk in self.state.model:
            chunk.eval()
        try:
            for batch in range(num_batches):
                draw = lambda number, batch=batch: self.batches.evaluation(  # noqa: E731
                    batch, number
                )
                losses += self._run(draw, forward_only=True)
        finally:
            for chunk in self.state.model:
                chunk.train()
        return mean_over_job(losses)

    def _run(
        self,
        draw: Callable[[int], torch.Tensor],
        *,
        forward_only: bool = False,
        num_micro_batches: int | None = None,
    ) -> Losses:
        # stages in the middle need no tokens
        on_edge = (
            parallel_state.is_pipeline_first_stage()
            or parallel_state.is_pipeline_last_stage()
        )
        device, count = torch.cuda.current_device(), self.batches.num_micro_batches
        model = self.state.model
        return self._iteration.run_schedule(
            forward_step_func=self._forward_step,
            data_iterator=(
                draw(number).to(device) if on_edge else None for number in range(count)
            ),
            model=model if len(model) > 1 else model[0],
            num_microbatches=num_micro_batches or count,
            seq_length=self.batches.train.sequence_length,
            micro_batch_size=self.batches.train.micro_batch_size,
            forward_only=forward_only,
        )


class LauncherLoop:
    """One rank's loop; implements `moe_ckpt.loop.LoopAdapter`.

    All methods are collective over all ranks.
    """

    session: Session

    def __init__(
        self,
        settings: Settings,
        joined: JoinedWorker[Any],
        state: TrainingState,
        batches: Batches,
    ) -> None:
        """Prepare the loop of one rank.

        Args:
            settings: The settings of the run.
            joined: This worker.
            state: The training state of this rank's stage.
            batches: This rank's micro-batches.
        """
        self._settings = settings
        self._joined = joined
        self._iteration = TrainingIteration(state, joined.worker.enter_phase)
        self._passes = StagePasses(self._iteration, batches)
        self._display: Display | None = None
        self._scalars: Scalars | None = None
        self._is_open = False
        evaluations = [
            event for event in joined.earlier if isinstance(event, Evaluated)
        ]
        self._evaluated = evaluations[-1] if evaluations else None

    def training(
        self, layout: ParallelLayout, model: str, course: RunCourse
    ) -> Training:
        """Return this loop as `moe_ckpt.loop.train` takes it.

        Args:
            layout: The degrees of parallelism.
            model: A hash of everything that shapes the saved state.
            course: The settings that decide the states of the run.
        """
        train, source = self._settings.train, self._passes.batches.source
        asked = {
            length: f"train.{name}"
            for length, name in _LENGTHS.items()
            if getattr(train, name) != AUTO
        }
        return Training(
            loop=self,
            iteration=self._iteration,
            replay=TrainingLoop(
                communicator=self._iteration.communicator,
                forward_backward=self._passes.train_on,
                batches=self._iteration.batches,
                num_micro_batches=self._passes.batches.num_micro_batches,
                micro_batch_size=train.micro_batch_size,
                sequence_length=train.sequence_length,
            ),
            model=model,
            layout=layout,
            last_iteration=train.iterations,
            length_setting="train.iterations",
            exactness=self._settings.run.exactness,
            inputs={**source.inputs, **source.shuffles},
            course=course,
            asked_lengths=asked,
            check_pass=self._passes.train_on_one_micro_batch,
            check_setting="train.check_determinism",
        )

    def start(self) -> int:
        """Load the state that a run without state in memory begins with.

        Loads the newest state of this run on disk. Without one, loads the checkpoint
        that `train.resume` names. `never` concerns only the states before the job:
        later starts continue from states that the job itself has saved.

        Returns:
            The iteration of the state; 0: the built model is the state.

        Raises:
            ConfigError: With `never` the run folder has a state, or `train.resume`
                names a path without a checkpoint.
        """
        wanted = self._settings.train.resume
        if wanted == NEVER and self._joined.worker.is_first_start:
            saved = broadcast_result(
                TorchRanks(),
                CheckpointFolder(self._joined.folder.checkpoints).committed,
                DataError,
            )
            newest = saved[0].directory if saved else None
            require(
                not saved,
                "train.resume",
                wanted,
                f"auto, or a new run.dir: this one holds {newest}",
            )
            limit = "auto, or a new run.dir: there are snapshots of this run on disk"
            require(
                not self.session.has_snapshots_on_disk(), "train.resume", wanted, limit
            )
            return 0
        done = self.session.resume(None)
        if done == 0 and wanted not in (AUTO, NEVER):
            done = self.session.resume(
                broadcast_result(
                    TorchRanks(), lambda: checkpoint_at(Path(wanted)), DataError
                )
            )
        return done

    def run_from(self, done: int, notes: Sequence[str]) -> None:
        """Train from the state after `done` iterations to the end; evaluate when due.

        Args:
            done: The iterations before the state.
            notes: Lines for the log.
        """
        if not self._is_open:
            self._open(done)
        for note in notes:
            self._print(note)
        self._evaluate_where_due(done)
        for number in range(done + 1, self._settings.train.iterations + 1):
            self._iteration.run(number, self._passes.train_on)
            if self._is_due(number):
                self._evaluate(number)

    def committed(self, event: IterationCommitted) -> None:
        """Show an iteration that all ranks have finished."""
        train = self._settings.train
        num_tokens = train.global_batch_size * train.sequence_length
        tokens_per_s = num_tokens / event.seconds if event.seconds else 0.0
        if self._display:
            self._display.iteration(event, tokens_per_s)
        if self._scalars:
            self._scalars.iteration(event, tokens_per_s)

    def result(self) -> dict[str, object]:
        """Return the last evaluation's loss, for result.json."""
        return {"eval_loss": self._evaluated.loss if self._evaluated else float("nan")}

    def close(self) -> None:
        """Restore the terminal, and close open files."""
        if self._display:
            self._display.close()
        if self._scalars:
            self._scalars.close()

    def _open(self, done: int) -> None:
        run, train, folder = (
            self._settings.run,
            self._settings.train,
            self._joined.folder,
        )
        rank = self._joined.worker.launch.global_rank
        self._is_open = True
        self._display = open_display(
            run, global_rank=rank, total=train.iterations, done=done
        )
        self._scalars = (
            Scalars(folder.path / "tensorboard", done + 1)
            if run.tensorboard and rank == 0
            else None
        )
        if self._joined.worker.is_supervised and self._joined.incarnation:
            return  # an earlier process of this rank has printed the lines below
        self._print(f"run folder {folder.path}")
        policy, name = self._settings.ckpt.policy, self._settings.model.name
        self._print(f"model {name}, ckpt={policy}, {dist.get_world_size()} processes")

    def _print(self, text: str) -> None:
        if self._display:
            self._display.note(text)

    def _evaluate_where_due(self, done: int) -> None:
        """Evaluate after iteration `done` if the evaluation is due and missing.

        A fault or an earlier process may have left out the evaluation.
        """
        latest = self._evaluated.iteration if self._evaluated else _NOT_YET
        everywhere = torch.tensor([latest], device=torch.cuda.current_device())
        # an evaluation is collective: ranks that have the result repeat it for a rank
        # that died before its result was logged
        TorchRanks().reduce(everywhere, "min")
        if self._is_due(done) and int(everywhere) < done:
            self._evaluate(done)

    def _is_due(self, iteration: int) -> bool:
        every, last = (
            self._settings.train.eval_every_iters,
            self._settings.train.iterations,
        )
        return iteration in (0, last) or (every > 0 and iteration % every == 0)

    def _evaluate(self, iteration: int) -> None:
        loss = self._passes.evaluate(self._settings.train.eval_batches)
        self._evaluated = Evaluated(iteration=iteration, loss=loss)
        self._joined.events.append(self._evaluated)
        self._print(f"iteration {iteration:>6}: evaluation loss {loss:.4f}")
        if self._scalars:
            self._scalars.evaluated(iteration, loss)


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint directory that a path means.

    Args:
        path: A checkpoint, a run folder or a folder of checkpoints. Of a folder the
            newest checkpoint is taken.

    Raises:
        ConfigError: There is no committed checkpoint.
    """
    if is_committed(path):
        return path
    candidates = (
        CheckpointFolder(path / "checkpoints").committed()
        or CheckpointFolder(path).committed()
    )
    wanted = "auto, never, a committed checkpoint or a run folder that has one"
    require(bool(candidates), "train.resume", str(path), wanted)
    return Path(candidates[0].directory)


def forward_step(
    micro_batches: Iterator[torch.Tensor | None], model: torch.nn.Module
) -> tuple[Any, Any]:
    """Run the forward pass of one micro-batch, as Megatron's schedules call it."""
    return forward(next(micro_batches), model), _mean_loss


def forward(tokens: torch.Tensor | None, model: torch.nn.Module) -> torch.Tensor:
    """Return the model's output: losses on the last stage, activations on others."""
    if tokens is None:
        return model(input_ids=None, position_ids=None, attention_mask=None)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return model(
        input_ids=inputs, position_ids=positions, attention_mask=None, labels=targets
    )


def _mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = per_token.float().mean()
    # the pipeline schedule divides `loss` in place
    return loss, {"loss": loss.detach().clone()}
