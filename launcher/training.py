"""A run from one iteration to its last: train, evaluate when due, show and log. May be entered again after a fault.

Owns: what has been evaluated and logged so far. Must not: build, or know how a fault is recovered from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from launcher.config import Settings
from launcher.loop import MegatronLoop
from launcher.progress import Display, Scalars, open_display
from moe_ckpt.collectives import TorchRanks
from moe_ckpt.errors import RolledBackError
from moe_ckpt.events import Evaluated, EventLog, IterationCommitted
from moe_ckpt.megatron.checks import StateChecks
from moe_ckpt.run_folder import RunFolder

_NEVER = -1


@dataclass(frozen=True, kw_only=True)
class Log:
    """This rank's events: the file, and the events that its earlier incarnations left there."""

    events: EventLog
    incarnation: int
    faults: int
    global_rank: int
    evaluated: Evaluated | None


class TrainingJob:
    """One rank's way through the iterations. Collective over all ranks."""

    def __init__(
        self, loop: MegatronLoop, settings: Settings, folder: RunFolder, log: Log, *, is_supervised: bool = False
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._folder = folder
        self._log = log
        self._is_supervised = is_supervised
        self._checks = StateChecks(settings.run, loop.state, log.events)
        self._is_open = False
        self._display: Display | None = None
        self._scalars: Scalars | None = None
        self._evaluated = log.evaluated
        self.committed: IterationCommitted | None = None

    @property
    def loss(self) -> float | None:
        """The last iteration's loss; None where an earlier incarnation had done all iterations."""
        return self.committed.loss if self.committed else None

    @property
    def eval_loss(self) -> float:
        """The last evaluation's loss."""
        return self._evaluated.loss if self._evaluated else float("nan")

    def run(self, done: int, notes: Sequence[str]) -> None:
        """Go on from the state after `done` iterations to the last; `notes` are shown first."""
        train = self._settings.train
        if not self._is_open:
            self._open(done)
        for note in notes:
            self._print(note)
        prepared = self._loop.prepared
        if prepared and prepared.iteration == done and (self.committed is None or self.committed.iteration < done):
            self._commit(prepared)  # others were lost before this rank could say so
        self._begin_checks(done)
        self._evaluate_where_due(done)
        while done < train.iterations:
            done = self._run_iteration(done + 1)

    def close(self) -> None:
        """Leave the terminal as it should be, and close what is open."""
        if self._display:
            self._display.close()
        if self._scalars:
            self._scalars.close()

    def _run_iteration(self, iteration: int) -> int:
        """Return the iteration that all ranks are at then: this one, or where they had to go back to."""
        try:
            self._commit(self._loop.run_iteration(iteration))
        except RolledBackError as back:
            self._print(f"iteration {iteration:>6}: {back}")
            self._begin_checks(back.iteration)
            return back.iteration
        self._checks.log_where_due(iteration)
        if self._is_due(iteration):
            self._evaluate(iteration)
        return iteration

    def _print(self, text: str) -> None:
        if self._display:
            self._display.note(text)

    def _open(self, done: int) -> None:
        run, train, rank = self._settings.run, self._settings.train, self._log.global_rank
        self._is_open = True
        self._display = open_display(run, global_rank=rank, total=train.iterations, done=done)
        self._scalars = Scalars(self._folder.path / "tensorboard", done + 1) if run.tensorboard and rank == 0 else None
        if self._is_supervised and self._log.incarnation:
            return  # others have said it
        self._print(f"run folder {self._folder.path}")
        policy, name = self._settings.ckpt.policy, self._settings.model.name
        self._print(f"model {name}, ckpt={policy}, {dist.get_world_size()} processes")
        if done:
            self._print(f"resumed after iteration {done}")

    def _commit(self, committed: IterationCommitted) -> None:
        self.committed = committed
        self._log.events.append(committed)
        train = self._settings.train
        num_tokens = train.global_batch_size * train.sequence_length
        tokens_per_s = num_tokens / committed.seconds if committed.seconds else 0.0
        if self._display:
            self._display.iteration(committed, tokens_per_s)
        if self._scalars:
            self._scalars.iteration(committed, tokens_per_s)

    def _begin_checks(self, done: int) -> None:
        self._checks.begin(done, is_replacement=self._is_supervised and self._log.incarnation > 0)

    def _evaluate_where_due(self, done: int) -> None:
        """Evaluate what a fault, or an earlier incarnation, has left unevaluated on any rank."""
        latest = self._evaluated.iteration if self._evaluated else _NEVER
        everywhere = torch.tensor([latest], device=torch.cuda.current_device())
        # an evaluation is collective: ranks that have its result take part for one that died before it was logged
        TorchRanks().reduce(everywhere, "min")
        if self._is_due(done) and int(everywhere) < done:
            self._evaluate(done)

    def _is_due(self, iteration: int) -> bool:
        every, last = self._settings.train.eval_every_iters, self._settings.train.iterations
        return iteration in (0, last) or (every > 0 and iteration % every == 0)

    def _evaluate(self, iteration: int) -> None:
        evaluated = Evaluated(iteration=iteration, loss=self._loop.evaluate(self._settings.train.eval_batches))
        self._evaluated = evaluated
        self._log.events.append(evaluated)
        self._print(f"iteration {iteration:>6}: evaluation loss {evaluated.loss:.4f}")
        if self._scalars:
            self._scalars.evaluated(iteration, evaluated.loss)
