"""One run of one process, from settings to result.

Owns: the parts of the launcher that `moe_ckpt.loop` runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe.router import TopKRouter

from launcher.config import AUTO, Settings
from launcher.data import Batches, CorpusSize, TokenSource, open_source
from launcher.job_checks import lay_out
from launcher.loop import NEVER, LauncherLoop, checkpoint_at
from launcher.memory import require_room, state_bytes
from launcher.model import build_training
from launcher.parameters import padded_vocab_size
from moe_ckpt.collectives import TorchRanks, gather_results
from moe_ckpt.config import require
from moe_ckpt.durable.checkpoint_folder import read_manifest
from moe_ckpt.durable.course import RunCourse, Setting, read_course
from moe_ckpt.elastic.torchrun_variables import is_set_by_user, read_launch
from moe_ckpt.errors import ConfigError, DataError
from moe_ckpt.loop import JoinedWorker, Training, WorkerProcess, run_worker
from moe_ckpt.megatron.capacity_boost import BoostedRouter
from moe_ckpt.plain_worker import PlainWorker
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.run_folder import RunFolder
from moe_ckpt.standins import gpu
from moe_ckpt.types import ParallelLayout

_UNSPLIT = ParallelLayout(pp=1, dp=1, ep=1, tp=1)
_BLOCK = "data.path: samples shuffled together"
_OF_COURSE = (
    *(
        "global_batch_size",
        "sequence_length",
        "seed",
        "optimizer",
        "distributed_optimizer",
    ),
    *(
        "lr",
        "min_lr",
        "lr_schedule",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "clip_grad",
    ),
)
AroundHooks = Callable[[TrainingHooks], TrainingHooks]


def run(
    settings: Settings,
    *,
    store: dist.Store | None = None,
    around_hooks: AroundHooks = lambda hooks: hooks,
) -> dict[str, Any]:
    """Train without a supervisor, in ranks that torchrun need not have started.

    Args:
        settings: The settings of the run.
        store: The store in which the ranks meet; None: torchrun's store.
        around_hooks: May wrap the hooks that the iteration calls, for example to inject
            faults.

    Returns:
        The contents of result.json.

    Raises:
        MoeCkptError: An error that a user can correct, on all ranks.
    """
    result = run_in(
        PlainWorker(settings.job, read_launch(), store),
        settings,
        around_hooks=around_hooks,
    )
    parallel_state.destroy_model_parallel()
    return result


def run_in(
    worker: WorkerProcess,
    settings: Settings,
    *,
    around_hooks: AroundHooks = lambda hooks: hooks,
) -> dict[str, Any]:
    """Train in one process of a rank, supervised or not.

    Args:
        worker: This process.
        settings: The settings of the run.
        around_hooks: As in `run`.

    Returns:
        The contents of result.json.

    Raises:
        MoeCkptError: As in `run`.
    """
    layout = lay_out(
        settings, worker.launch.world_size, is_supervised=worker.is_supervised
    )
    build = functools.partial(_build, settings, layout)
    result = run_worker(worker, build, use_cpu=use_cpu, around_hooks=around_hooks)
    if worker.launch.global_rank == 0:
        eval_loss, digest = result["eval_loss"], result["digest"]
        print(
            f"done: iteration {result['iteration']}, evaluation loss {eval_loss:.4f},"
            f" digest {digest}"
        )
    return result


def use_cpu() -> bool:
    """Let Megatron-Core run on CPUs if there is no GPU.

    Returns:
        Whether there is no GPU.
    """
    if not gpu.enable():
        return False
    if not is_set_by_user("OMP_NUM_THREADS", "1"):
        # a share that does not depend on the load: results of sums depend on the number
        # of threads
        num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_processes))
    return True


def form_groups(layout: ParallelLayout, seed: int) -> None:
    """Form Megatron's process groups, and seed its generators.

    As in Megatron, the seed differs from stage to stage.

    Args:
        layout: The degrees of parallelism.
        seed: The seed of the run.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,
    )
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def _build(
    settings: Settings, layout: ParallelLayout, joined: JoinedWorker[Any]
) -> Training:
    """Return this rank's training. A supervised rank waits for no other rank here."""
    train = settings.train
    if torch.cuda.is_available():
        _, there_bytes = torch.cuda.mem_get_info()
        needed_bytes = state_bytes(settings, layout, joined.worker.launch.global_rank)
        require_room(settings, needed_bytes, there_bytes, "memory of its GPU")
    form_groups(layout, train.seed)
    size = _corpus_size(settings, joined.folder)
    source = _open_source_everywhere(settings, joined.folder, size)
    router = BoostedRouter if settings.ckpt.capacity_boost else TopKRouter
    state = build_training(
        settings, layout, _vocab_size(settings, source, layout), router
    )
    dp_rank = parallel_state.get_data_parallel_rank()
    course = RunCourse(
        joined.folder.path,
        _course(settings, source, size),
        TorchRanks(),
        settings_of_replays={"train.micro_batch_size": train.micro_batch_size},
        samples_an_iteration=train.global_batch_size,
    )
    batches = Batches(
        source=source,
        train=train,
        dp=layout.dp,
        dp_rank=dp_rank,
        consumed=lambda done: course.course.consumed(done),
    )
    loop = LauncherLoop(settings, joined, state, batches)
    return loop.training(layout, _fingerprint(settings, source), course)


def _corpus_size(settings: Settings, folder: RunFolder) -> CorpusSize:
    """Return the number of samples that the run needs from a corpus.

    The result also has the number of samples that the run's first start shuffled
    together.
    """
    train = settings.train
    of_run = train.iterations * train.global_batch_size
    if settings.data.source != "megatron":
        return CorpusSize(num_samples=of_run, block=of_run)
    course, done = read_course(folder.path), 0
    if (
        course is None
        and train.resume not in (AUTO, NEVER)
        and Path(train.resume).exists()
    ):
        checkpoint = checkpoint_at(Path(train.resume))
        course, done = read_course(checkpoint), read_manifest(checkpoint).iteration
    if course is None:
        return CorpusSize(num_samples=of_run, block=of_run)
    # a state of another run: batches up to its checkpoint have the size of that run,
    # later batches the size of this run
    began = done or course.began_after
    num_samples = (
        course.consumed(began) + (train.iterations - began) * train.global_batch_size
    )
    block = course.settings.get(_BLOCK)
    return CorpusSize(
        num_samples=num_samples, block=block if isinstance(block, int) else of_run
    )


def _course(
    settings: Settings, source: TokenSource, size: CorpusSize
) -> dict[str, Setting]:
    """Return the settings that decide the states of a run.

    Lengths of the schedule are left out, as a part of the state itself.
    """
    train = {f"train.{name}": getattr(settings.train, name) for name in _OF_COURSE}
    data = {
        f"data.{name}": getattr(settings.data, name)
        for name in ("source", "eval_fraction", "seed")
    }
    return {
        **{
            f"model.{name}": value
            for name, value in asdict(settings.model).items()
            if name != "name"
        },
        "model.vocab_size": _vocab_size(settings, source, _UNSPLIT),
        **{
            f"precision.{name}": value
            for name, value in asdict(settings.precision).items()
        },
        **train,
        **data,
        **source.inputs,
        **({_BLOCK: size.block} if settings.data.source == "megatron" else {}),
    }


def _open_source_everywhere(
    settings: Settings, folder: RunFolder, size: CorpusSize
) -> TokenSource:
    opened: list[TokenSource] = []
    wanted = settings.model.vocab_size
    if settings.data.source == "text" and folder.path.is_relative_to(
        Path(settings.data.path or "").resolve()
    ):
        # otherwise events of the run would become a part of its data
        raise ConfigError(
            f"data.path: got {settings.data.path!r}, wanted a folder without the run"
            " folder in it"
        )

    # gathers the size and not the source, which is the whole text
    def vocab_size_of_mine() -> int:
        source = open_source(
            settings.data,
            settings.train,
            None if wanted == AUTO else int(wanted),
            folder.path / "cache",
            size,
        )
        if wanted != AUTO and source.vocab_size > int(wanted):
            raise DataError(
                f"model.vocab_size: got {wanted}, wanted at least the data's"
                f" {source.vocab_size}"
            )
        opened.append(source)
        return source.vocab_size

    sizes = gather_results(TorchRanks(), vocab_size_of_mine, DataError)
    require(
        len(set(sizes)) == 1,
        "data.path: vocabulary size on each rank",
        sizes,
        "the same everywhere",
    )
    return opened[0]


def _vocab_size(settings: Settings, source: TokenSource, layout: ParallelLayout) -> int:
    wanted = settings.model.vocab_size
    return padded_vocab_size(
        source.vocab_size if wanted == AUTO else int(wanted), layout
    )


def _fingerprint(settings: Settings, source: TokenSource) -> str:
    """Return a hash of all settings that shape the saved state.

    The hash does not depend on the layout. If formats differ from the plain ones, the
    hash is followed by a text that names the formats.
    """
    # without the padding for tensor parallelism: a checkpoint may be loaded at another
    # layout
    vocab_size = _vocab_size(settings, source, _UNSPLIT)
    shaping = {
        "model": {**asdict(settings.model), "vocab_size": vocab_size},
        "dtype": settings.precision.dtype,
        "optimizer": settings.train.optimizer,
        "distributed_optimizer": settings.train.distributed_optimizer,
        "sequence_length": settings.train.sequence_length,
    }
    fingerprint = hashlib.sha256(
        json.dumps(shaping, sort_keys=True).encode()
    ).hexdigest()[:16]
    stored = settings.precision.state_format
    precision = settings.precision
    if not precision.fp8:
        return fingerprint if stored.is_plain else f"{fingerprint} in {stored}"
    recipe = (
        ""
        if precision.fp8_recipe == "tensorwise"
        else f", FP8 with {precision.fp8_recipe} scaling"
    )
    return (
        f"{fingerprint} in"
        f" {stored}{recipe}{', FP8 parameters' if precision.fp8_param_gather else ''}"
    )
