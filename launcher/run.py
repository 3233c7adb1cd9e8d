"""One run of one process, from settings to result: join the job, build, resume, train, report."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launcher.config import AUTO, Settings, TrainConfig
from launcher.data import Batches, TokenSource, open_source
from launcher.launch import Launch, read_launch
from launcher.loop import StageRunner, Trainer
from launcher.model import build_training, padded_vocab_size
from launcher.parallel import check_fit, fit_layout, form_groups, join_job, leave_job
from launcher.progress import Display, Scalars, open_display
from launcher.run_folder import RunFolder, open_run_folder
from moe_ckpt.adapters.megatron_state import TrainingState, digest_of
from moe_ckpt.attach import TrainingLoop, attach
from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError, DataError
from moe_ckpt.events import Evaluated, EventLog, IterationCommitted, RunFinished, TrainerStarted, read_events
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.runtime.session import Session
from moe_ckpt.store.agree import from_rank_zero, on_all_ranks
from moe_ckpt.store.disk import CheckpointFolder, is_committed
from moe_ckpt.types import ParallelLayout, RunIdentity

_NEVER = "never"


def run(
    settings: Settings,
    *,
    store: dist.Store | None = None,
    around_hooks: Callable[[TrainingHooks], TrainingHooks] = lambda hooks: hooks,
) -> dict[str, Any]:
    """Train as the settings say and return what result.json holds.

    Ranks meet through `store`, or torchrun's; `around_hooks` may wrap what the loop calls, to inject faults, say.

    Raises MoeCkptError on all ranks where a user can mend the cause.
    """
    launch = read_launch()
    layout = fit_layout(settings.parallel, launch.world_size, num_experts=settings.model.num_experts)
    check_fit(layout, settings.model, settings.train)
    join_job(launch, deterministic=settings.train.deterministic, store=store)
    folder = open_run_folder(settings, launch)
    form_groups(layout, settings.train.seed)
    log = _open_log(folder, launch)
    source = _open_source_everywhere(settings, folder)
    vocab_size = _vocab_size(settings, source, layout)
    state = build_training(settings, layout, vocab_size)
    runner = StageRunner(state, _batches(source, settings.train, layout))
    session = attach(
        ckpt=settings.ckpt,
        identity=RunIdentity(run_id=folder.run_id, model=_fingerprint(settings, vocab_size), layout=layout),
        folder=folder.checkpoints,
        state=state,
        loop=_training_loop(runner, settings.train),
        events=log.events,
        last_iteration=settings.train.iterations,
        losses=settings.fault.at,
    )
    done = _resume(session, settings, folder, launch)
    outcome = _train(Trainer(runner, around_hooks(session)), settings, folder, log, done, session.notes)
    session.finish()
    result = _finish(outcome, state, settings, folder, log)
    leave_job()
    return result


@dataclass(frozen=True, kw_only=True)
class _Log:
    """This rank's event file, and how many earlier lives of the rank ended before they were done."""

    events: EventLog
    faults: int
    global_rank: int


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The last losses; `loss` is None where an earlier life had done all iterations."""

    loss: float | None
    eval_loss: float


def _open_log(folder: RunFolder, launch: Launch) -> _Log:
    path = folder.events(launch.global_rank)
    earlier = read_events(path) if path.exists() else ()
    lives_and_ends = [logged.event for logged in earlier if isinstance(logged.event, TrainerStarted | RunFinished)]
    life = sum(isinstance(event, TrainerStarted) for event in lives_and_ends)
    faults = life - sum(isinstance(event, RunFinished) for event in lives_and_ends)
    events = _open_events(path, folder, launch)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    events.append(TrainerStarted(pid=os.getpid(), host=socket.gethostname(), life=life, device=device))
    return _Log(events=events, faults=faults, global_rank=launch.global_rank)


def _open_events(path: Path, folder: RunFolder, launch: Launch) -> EventLog:
    opened: list[EventLog] = []
    origin = folder.clock_origin_unix_s
    on_all_ranks(
        lambda: opened.append(EventLog(path, global_rank=launch.global_rank, clock_origin_unix_s=origin)), ConfigError
    )
    return opened[0]


def _open_source_everywhere(settings: Settings, folder: RunFolder) -> TokenSource:
    opened: list[TokenSource] = []

    def vocab_size_of_mine() -> int:  # not the source itself: that is the whole text
        opened.append(_open_source(settings, folder))
        return opened[0].vocab_size

    sizes = on_all_ranks(vocab_size_of_mine, DataError)
    require(len(set(sizes)) == 1, "data.path: vocabulary size on each rank", sizes, "the same everywhere")
    return opened[0]


def _open_source(settings: Settings, folder: RunFolder) -> TokenSource:
    wanted = settings.model.vocab_size
    source = open_source(settings.data, settings.train, None if wanted == AUTO else int(wanted), folder.cache)
    if wanted != AUTO and source.vocab_size > int(wanted):
        raise DataError(f"model.vocab_size: got {wanted}, wanted at least the data's {source.vocab_size}")
    return source


def _batches(source: TokenSource, train: TrainConfig, layout: ParallelLayout) -> Batches:
    return Batches(source=source, train=train, dp=layout.dp, dp_rank=parallel_state.get_data_parallel_rank())


def _training_loop(runner: StageRunner, train: TrainConfig) -> TrainingLoop:
    return TrainingLoop(
        communicator=runner.communicator,
        forward_backward=runner.train_on,
        num_micro_batches=runner.batches.num_micro_batches,
        micro_batch_size=train.micro_batch_size,
        sequence_length=train.sequence_length,
    )


def _vocab_size(settings: Settings, source: TokenSource, layout: ParallelLayout) -> int:
    wanted = settings.model.vocab_size
    return padded_vocab_size(source.vocab_size if wanted == AUTO else int(wanted), layout)


def _fingerprint(settings: Settings, vocab_size: int) -> str:
    """Return a short hash over everything that shapes the saved state."""
    shaping = {
        "model": {**asdict(settings.model), "vocab_size": vocab_size},
        "dtype": settings.precision.dtype,
        "optimizer": settings.train.optimizer,
        "distributed_optimizer": settings.train.distributed_optimizer,
        "sequence_length": settings.train.sequence_length,
    }
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]


def _resume(session: Session, settings: Settings, folder: RunFolder, launch: Launch) -> int:
    """Return the iteration that the state is at; an own checkpoint is newer than one that `train.resume` names.

    `never` is about what was there before the job: a restart by torchrun continues from what the job saved itself.
    """
    wanted = settings.train.resume
    if wanted == _NEVER and launch.attempt == 0:
        saved = from_rank_zero(CheckpointFolder(folder.checkpoints).committed, DataError)
        newest = saved[0].directory if saved else None
        require(not saved, "train.resume", wanted, f"auto, or a new run.dir: this one holds {newest}")
        return 0
    done = session.resume(None)
    if done == 0 and wanted not in (AUTO, _NEVER):
        done = session.resume(from_rank_zero(lambda: _checkpoint_at(Path(wanted)), DataError))
    require(done <= settings.train.iterations, "train.iterations", settings.train.iterations, f"at least {done}, done")
    return done


def _checkpoint_at(path: Path) -> Path:
    """Return the checkpoint directory that a path means: itself, or the newest in a run folder."""
    if is_committed(path):
        return path
    candidates = CheckpointFolder(path / "checkpoints").committed() or CheckpointFolder(path).committed()
    wanted = "auto, never, a committed checkpoint or a run folder that has one"
    require(bool(candidates), "train.resume", str(path), wanted)
    return Path(candidates[0].directory)


def _train(
    trainer: Trainer, settings: Settings, folder: RunFolder, log: _Log, done: int, notes: Sequence[str]
) -> _Outcome:
    train = settings.train
    display = open_display(settings.run, global_rank=log.global_rank, total=train.iterations, done=done)
    scalars = Scalars(folder.tensorboard, done + 1) if settings.run.tensorboard and log.global_rank == 0 else None
    _greet(display, settings, folder, done)
    for note in notes:
        display.note(note)

    def evaluate(iteration: int) -> float:
        loss = trainer.evaluate(train.eval_batches)
        log.events.append(Evaluated(iteration=iteration, loss=loss))
        display.note(f"iteration {iteration:>6}: evaluation loss {loss:.4f}")
        if scalars:
            scalars.evaluated(iteration, loss)
        return loss

    committed: IterationCommitted | None = None
    eval_loss = evaluate(done) if done in (0, train.iterations) else float("nan")
    for iteration in range(done + 1, train.iterations + 1):
        committed = trainer.run_iteration(iteration)
        tokens_per_s = train.global_batch_size * train.sequence_length / committed.seconds
        log.events.append(committed)
        display.iteration(committed, tokens_per_s)
        if scalars:
            scalars.iteration(committed, tokens_per_s)
        due = train.eval_every_iters > 0 and iteration % train.eval_every_iters == 0
        if due or iteration == train.iterations:
            eval_loss = evaluate(iteration)
    display.close()
    if scalars:
        scalars.close()
    return _Outcome(loss=committed.loss if committed else None, eval_loss=eval_loss)


def _greet(display: Display, settings: Settings, folder: RunFolder, done: int) -> None:
    display.note(f"run folder {folder.path}")
    display.note(f"model {settings.model.name}, ckpt={settings.ckpt.policy}, {dist.get_world_size()} processes")
    if done:
        display.note(f"resumed after iteration {done}")


def _finish(
    outcome: _Outcome, state: TrainingState, settings: Settings, folder: RunFolder, log: _Log
) -> dict[str, Any]:
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest_of(state))
    overall = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    result = {
        "iteration": settings.train.iterations,
        "loss": outcome.loss,
        "eval_loss": outcome.eval_loss,
        "wall_s": round(time.time() - folder.clock_origin_unix_s, 3),
        "faults_survived": log.faults,
        "digest": overall,
        "digest_per_rank": digests,
    }
    log.events.append(RunFinished(iteration=settings.train.iterations, digest=overall))
    log.events.close()
    if log.global_rank == 0:
        print(f"done: iteration {settings.train.iterations}, evaluation loss {outcome.eval_loss:.4f}, digest {overall}")
        folder.write_result(result)
    return result
