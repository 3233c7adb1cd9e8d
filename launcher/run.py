"""One run of one process, from settings to result: join the job, build, resume, train, report."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from launcher.config import AUTO, Settings
from launcher.data import Batches, TokenSource, open_source
from launcher.layout import check_fit, check_supervised, fit_layout
from launcher.loop import MegatronLoop, StageRunner
from launcher.model import build_training
from launcher.parallel import choose_device, form_groups, join_job, leave_job
from launcher.parameters import padded_vocab_size
from launcher.training import Log, TrainingJob
from moe_ckpt.attach import TrainingLoop, attach
from moe_ckpt.collectives import TorchRanks, broadcast_result, gather_results
from moe_ckpt.config import is_on, require
from moe_ckpt.durable.checkpoint_folder import CheckpointFolder, is_committed
from moe_ckpt.elastic.backend_choice import open_backend
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.torchrun import Launch, read_launch
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import ConfigError, DataError
from moe_ckpt.events import Evaluated, EventLog, ModelBuilt, RunFinished, WorkerStarted, read_events
from moe_ckpt.megatron.capacity_boost import BoostedRouter
from moe_ckpt.megatron.checks import job_digest
from moe_ckpt.megatron.determinism import require_repeatable
from moe_ckpt.megatron.initial_weights import synchronize_fresh
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.run_elastic import Worker
from moe_ckpt.run_folder import RunFolder, find_run_folder, open_run_folder
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
    layout = _fit(settings, launch)
    backend, share_gpus = settings.runtime.backend, settings.runtime.share_gpus
    deterministic = settings.train.deterministic
    on_gpu = choose_device(launch, deterministic=deterministic, backend=backend, share_gpus=share_gpus)
    join_job(launch, on_gpu=on_gpu, store=store, backend=backend)
    folder = open_run_folder(settings.folder, launch)
    form_groups(layout, settings.train.seed)
    log = _open_log(folder, launch)
    state, runner, session = _build(settings, layout, folder, log, None)
    done = _resume(session, settings, folder, is_first=launch.attempt == 0)
    _check_determinism(settings, runner)
    training = TrainingJob(MegatronLoop(runner, around_hooks(session)), settings, folder, log)
    training.run(done, session.notes)
    training.close()
    session.finish()
    result = _result(training, state, settings, folder, log.faults)
    _say_done(result, log)
    leave_job()
    return result


def run_supervised(
    settings: Settings, worker: Worker, *, around_hooks: Callable[[TrainingHooks], TrainingHooks] = lambda hooks: hooks
) -> dict[str, Any]:
    """Train as `run` does, in one incarnation of a rank: it outlives deaths of other ranks, and others may follow it.

    The model is built before the others are met: those that live do not wait for what they have no part in.
    """
    started_s, launch = time.monotonic(), worker.launch
    layout = _fit(settings, launch)
    check_supervised(layout, settings.model, settings.train)
    backend, share_gpus = settings.runtime.backend, settings.runtime.share_gpus
    deterministic = settings.train.deterministic
    on_gpu = choose_device(launch, deterministic=deterministic, backend=backend, share_gpus=share_gpus)
    worker.join_world(open_backend(on_gpu=on_gpu, kind=backend))
    memory, join_s = worker.place.memory, settings.runtime.join_s
    folder = find_run_folder(settings.folder, launch, memory, join_s, worker.page.waits)
    worker.announce(folder.path)
    form_groups(layout, settings.train.seed)
    log = _open_log(folder, launch)
    state, runner, session = _build(settings, layout, folder, log, worker.context(layout))
    log.events.append(ModelBuilt(seconds=time.monotonic() - started_s))
    loop = MegatronLoop(runner, around_hooks(session))
    training = TrainingJob(loop, settings, folder, log, is_supervised=True)

    def start() -> int:
        # ranks have built their models alone, each with its own draws and its own copy of the tied embedding
        synchronize_fresh(state)
        is_first = launch.attempt == 0 and worker.page.generation == 1
        done = _resume(session, settings, folder, is_first=is_first)
        _check_determinism(settings, runner)
        return done

    finish = functools.partial(_result, training, state, settings, folder)
    result = worker.run(session, training, log.events, start=start, finish=finish)
    training.close()
    session.finish()
    _say_done(result, log)
    worker.retire(folder.path)
    return result


def _check_determinism(settings: Settings, runner: StageRunner) -> None:
    """Run one micro-batch twice where training must repeat itself. Collective. Raises ConfigError on all ranks."""
    train = settings.train
    if is_on(train.check_determinism, by_default=train.deterministic and torch.cuda.is_available()):
        run_pass = runner.train_on_one_micro_batch
        require_repeatable(TorchRanks(), runner.state, run_pass, setting="train.check_determinism")


def _fit(settings: Settings, launch: Launch) -> ParallelLayout:
    layout = fit_layout(settings.parallel, launch.world_size, num_experts=settings.model.num_experts)
    check_fit(layout, settings.model, settings.train)
    return layout


def _build(
    settings: Settings, layout: ParallelLayout, folder: RunFolder, log: Log, elastic: ElasticContext | None
) -> tuple[TrainingState, StageRunner, Session]:
    source = _open_source_everywhere(settings, folder)
    vocab_size = _vocab_size(settings, source, layout)
    router = BoostedRouter if settings.ckpt.capacity_boost else TopKRouter
    state = build_training(settings, layout, vocab_size, router)
    on_phase = elastic.enter_phase if elastic else lambda _: None
    train, dp_rank = settings.train, parallel_state.get_data_parallel_rank()
    runner = StageRunner(state, Batches(source=source, train=train, dp=layout.dp, dp_rank=dp_rank), on_phase)
    session = attach(
        ckpt=settings.ckpt,
        identity=RunIdentity(run_id=folder.run_id, model=_fingerprint(settings, source), layout=layout),
        folder=folder.checkpoints,
        state=state,
        loop=TrainingLoop(
            communicator=runner.communicator,
            forward_backward=runner.train_on,
            num_micro_batches=runner.batches.num_micro_batches,
            micro_batch_size=train.micro_batch_size,
            sequence_length=train.sequence_length,
        ),
        events=log.events,
        last_iteration=train.iterations,
        losses=settings.fault.losses,
        elastic=elastic,
        suspect_iters=settings.runtime.suspect_iters,
        on_divergence=settings.runtime.on_divergence,
    )
    return state, runner, session


def _open_log(folder: RunFolder, launch: Launch) -> Log:
    path = folder.events(launch.global_rank)
    earlier = [logged.event for logged in read_events(path)] if path.exists() else []
    incarnation = sum(isinstance(event, WorkerStarted) for event in earlier)
    # a start after a finished run, with more iterations, has survived no fault
    faults = incarnation - sum(isinstance(event, RunFinished) for event in earlier)
    evaluated = [event for event in earlier if isinstance(event, Evaluated)]
    opened: list[EventLog] = []  # all ranks raise if one cannot open its file, or the others would wait for it
    origin = folder.clock_origin_unix_s
    gather_results(
        TorchRanks(),
        lambda: opened.append(EventLog(path, global_rank=launch.global_rank, clock_origin_unix_s=origin)),
        ConfigError,
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    opened[0].append(WorkerStarted(pid=os.getpid(), host=socket.gethostname(), incarnation=incarnation, device=device))
    return Log(
        events=opened[0],
        incarnation=incarnation,
        faults=faults,
        global_rank=launch.global_rank,
        evaluated=evaluated[-1] if evaluated else None,
    )


def _open_source_everywhere(settings: Settings, folder: RunFolder) -> TokenSource:
    opened: list[TokenSource] = []
    wanted = settings.model.vocab_size

    def vocab_size_of_mine() -> int:  # not the source itself: that is the whole text
        source = open_source(
            settings.data, settings.train, None if wanted == AUTO else int(wanted), folder.path / "cache"
        )
        if wanted != AUTO and source.vocab_size > int(wanted):
            raise DataError(f"model.vocab_size: got {wanted}, wanted at least the data's {source.vocab_size}")
        opened.append(source)
        return source.vocab_size

    sizes = gather_results(TorchRanks(), vocab_size_of_mine, DataError)
    require(len(set(sizes)) == 1, "data.path: vocabulary size on each rank", sizes, "the same everywhere")
    return opened[0]


def _vocab_size(settings: Settings, source: TokenSource, layout: ParallelLayout) -> int:
    wanted = settings.model.vocab_size
    return padded_vocab_size(source.vocab_size if wanted == AUTO else int(wanted), layout)


def _fingerprint(settings: Settings, source: TokenSource) -> str:
    """Return a short hash over everything that shapes the saved state, at whatever layout, and a format of its own."""
    # without tensor parallelism, whose padding differs: a checkpoint may be loaded at another layout
    vocab_size = _vocab_size(settings, source, ParallelLayout(pp=1, dp=1, ep=1, tp=1))
    shaping = {
        "model": {**asdict(settings.model), "vocab_size": vocab_size},
        "dtype": settings.precision.dtype,
        "optimizer": settings.train.optimizer,
        "distributed_optimizer": settings.train.distributed_optimizer,
        "sequence_length": settings.train.sequence_length,
    }
    fingerprint = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]
    stored = settings.precision.state_format
    precision = settings.precision
    if not precision.fp8:
        return fingerprint if stored.is_plain else f"{fingerprint} in {stored}"
    recipe = "" if precision.fp8_recipe == "tensorwise" else f", FP8 with {precision.fp8_recipe} scaling"
    return f"{fingerprint} in {stored}{recipe}{', FP8 parameters' if precision.fp8_param_gather else ''}"


def _resume(session: Session, settings: Settings, folder: RunFolder, *, is_first: bool) -> int:
    """Return the iteration that the state is at; an own checkpoint is newer than one that `train.resume` names.

    `never` is about what was there before the job: later starts (not `is_first`) continue from what it saved itself.
    """
    wanted = settings.train.resume
    if wanted == _NEVER and is_first:
        saved = broadcast_result(TorchRanks(), CheckpointFolder(folder.checkpoints).committed, DataError)
        newest = saved[0].directory if saved else None
        require(not saved, "train.resume", wanted, f"auto, or a new run.dir: this one holds {newest}")
        limit = "auto, or a new run.dir: there are snapshots of this run on disk"
        require(not session.has_snapshots_on_disk(), "train.resume", wanted, limit)
        return 0
    done = session.resume(None)
    if done == 0 and wanted not in (AUTO, _NEVER):
        done = session.resume(broadcast_result(TorchRanks(), lambda: _checkpoint_at(Path(wanted)), DataError))
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


def _result(
    training: TrainingJob, state: TrainingState, settings: Settings, folder: RunFolder, faults: int
) -> dict[str, Any]:
    """Write result.json; return what it holds. Collective over all ranks."""
    digest, digests = job_digest(state)
    result = {
        "iteration": settings.train.iterations,
        "loss": training.loss,
        "eval_loss": training.eval_loss,
        "wall_s": round(time.time() - folder.clock_origin_unix_s, 3),
        "faults_survived": faults,
        "digest": digest,
        "digest_per_rank": digests,
    }
    if dist.get_rank() == 0:
        folder.write_result(result)
    return result


def _say_done(result: dict[str, Any], log: Log) -> None:
    iteration, digest = result["iteration"], result["digest"]
    log.events.append(RunFinished(iteration=iteration, digest=digest))
    log.events.close()
    if log.global_rank == 0:
        print(f"done: iteration {iteration}, evaluation loss {result['eval_loss']:.4f}, digest {digest}")
