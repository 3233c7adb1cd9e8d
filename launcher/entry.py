"""The start of a process of torchrun: a worker, or the supervisor of a rank, which forks workers.

Everything slow is imported here, once: a supervisor's workers share it, and a replacement is there in milliseconds.
"""

from __future__ import annotations

import gc

from launcher.config import Settings
from launcher.elastic import RankPlace, supervise_rank, wants_supervisor
from launcher.job_store import say_once
from launcher.parallel import require_forkable
from launcher.run import run, run_supervised
from launcher.run_folder import require_lasting
from launcher.servers import require_servable
from launcher.torchrun import read_launch
from moe_ckpt.config import InMemoryConfig, require
from moe_ckpt.errors import MoeCkptError


def start(settings: Settings) -> int:
    """Train, or supervise a rank's workers; return the exit status. Raises MoeCkptError for errors of the user's."""
    gc.freeze()  # imported objects stay: the garbage collector must not visit them
    require_servable(settings)
    if wants_supervisor(settings):
        launch = read_launch()
        require_lasting(settings.run)
        require_forkable()
        return supervise_rank(settings, launch, lambda place, life: _train(settings, place, life))
    wanted = "none or state_loss: no supervisor replaces a killed worker with this policy"
    is_pointless = isinstance(settings.ckpt, InMemoryConfig) and not settings.ckpt.recovers_locally
    require(not is_pointless, "runtime.guard", settings.runtime.guard, f"auto or true with ckpt={settings.ckpt.policy}")
    require(settings.fault.kind in ("none", "state_loss"), "fault.kind", settings.fault.kind, wanted)
    run(settings)
    return 0


def _train(settings: Settings, place: RankPlace, life: int) -> int:
    """Be one of a rank's workers."""
    try:
        run_supervised(settings, place, life)
    except MoeCkptError as error:
        say_once(str(error))
        return 1
    return 0
