"""The start of a process of torchrun: a worker, or the supervisor of a rank, which forks workers.

Everything slow is imported here, once: a supervisor's workers share it, and a replacement is there in milliseconds.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from launcher.config import Settings
from launcher.faults.carry_out import carry_out

# Megatron is among these imports: imported after the fork, it took 3 s of every replacement
from launcher.run import run, run_supervised
from launcher.servers import require_servable
from moe_ckpt.config import require, wants_supervisor
from moe_ckpt.elastic.job_store import say_once
from moe_ckpt.elastic.supervisor import start_beside
from moe_ckpt.elastic.torchrun import read_launch
from moe_ckpt.errors import ConfigError, MoeCkptError
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.run_elastic import ElasticConfig, RankPlace, Worker, run_elastic
from moe_ckpt.run_folder import require_lasting, wait_for_run_folder


def start(settings: Settings) -> int:
    """Train, or supervise a rank's workers; return the exit status. Raises MoeCkptError for errors of the user's."""
    os.umask(0o077)  # of files that other libraries write into the run folder: TensorBoard's, torch's checkpoints
    # Megatron calls `gc.collect()` twice at every save, which takes 0.3 s over all that torch and Megatron import
    gc.freeze()
    require_servable(settings)
    if wants_supervisor(settings.ckpt, settings.runtime):
        require_lasting(settings.folder)
        return run_elastic(
            elastic_config(settings),
            read_launch(),
            lambda worker: _train(settings, worker),
            beside=lambda place: _start_faults(settings, place),
        )
    wanted = "none or state_loss: no supervisor replaces a killed worker with this policy"
    is_pointless = settings.ckpt.in_memory is not None and not settings.ckpt.recovers_locally
    require(not is_pointless, "runtime.guard", settings.runtime.guard, f"auto or true with ckpt={settings.ckpt.policy}")
    require(settings.fault.kind in ("none", "state_loss"), "fault.kind", settings.fault.kind, wanted)
    run(settings)
    return 0


def elastic_config(settings: Settings) -> ElasticConfig:
    """Return the settings of the library's elastic half. Raises ConfigError for a policy that it cannot serve."""
    wanted = "a ckpt other than dense and none (those: torchrun --max-restarts)"
    ckpt, runtime = settings.ckpt.in_memory, settings.runtime
    if ckpt is None:
        raise ConfigError(f"runtime.guard: got {runtime.guard!r}, wanted false, or {wanted}")
    return ElasticConfig(ckpt=ckpt, runtime=runtime, ranks_per_node=settings.parallel.ranks_per_node)


def _train(settings: Settings, worker: Worker) -> int:
    """Be one of a rank's workers."""
    try:
        run_supervised(settings, worker)
    except MoeCkptError as error:
        say_once(str(error))
        return 1
    return 0


def _start_faults(settings: Settings, place: RankPlace) -> None:
    """Let a process beside the job inflict what the settings ask for on this node's workers."""
    launch = place.launch
    first = launch.global_rank - launch.local_rank
    here = range(first, first + launch.local_world_size)
    kills = [kill for kill in settings.fault.kills(launch.world_size) if kill.rank in here]
    if launch.local_rank == 0 and kills:
        start_beside(lambda: _inflict(kills, place, settings.runtime.join_s))


def _inflict(kills: Sequence[Kill], place: RankPlace, join_s: float) -> int:
    run = wait_for_run_folder(join_s)
    done = carry_out(kills, run, ranks_per_node=place.ranks_per_node, say=lambda text: print(text, file=sys.stderr))
    return 0 if done else 1
