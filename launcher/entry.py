"""What a process that torchrun starts is: a trainer, or the guard of a rank whose trainers it forks.

Everything slow is imported here, once: a guard's trainers share it, and a replacement is there in milliseconds.
"""

from __future__ import annotations

import gc

from launcher.config import Settings
from launcher.elastic import RankPlace, guard_rank, wants_guard
from launcher.launch import read_launch, say_once
from launcher.parallel import require_forkable
from launcher.run import run, run_guarded
from launcher.run_folder import require_lasting
from launcher.servers import require_servable
from moe_ckpt.config import InMemoryConfig, require
from moe_ckpt.errors import MoeCkptError


def start(settings: Settings) -> int:
    """Train, or guard what trains; return the exit status. Raises MoeCkptError where a user can mend the cause."""
    gc.freeze()  # what was imported stays: nobody is to look through it for garbage
    require_servable(settings)
    if wants_guard(settings):
        launch = read_launch()
        require_lasting(settings.run)
        require_forkable()
        return guard_rank(settings, launch, lambda place, life: _train(settings, place, life))
    wanted = (
        "none or state_loss where no guard replaces who is killed (ckpt=moevement, gemini and checkfreq have guards)"
    )
    is_pointless = isinstance(settings.ckpt, InMemoryConfig) and not settings.ckpt.recovers_locally
    require(not is_pointless, "runtime.guard", settings.runtime.guard, f"auto or true with ckpt={settings.ckpt.policy}")
    require(settings.fault.kind in ("none", "state_loss"), "fault.kind", settings.fault.kind, wanted)
    run(settings)
    return 0


def _train(settings: Settings, place: RankPlace, life: int) -> int:
    """Be one of a rank's trainers."""
    try:
        run_guarded(settings, place, life)
    except MoeCkptError as error:
        say_once(str(error))
        return 1
    return 0
