"""The start of a process of torchrun: a worker, or the supervisor of a rank.

Everything slow is imported here, once: the workers that a supervisor forks share the
imports, and a replacement starts within milliseconds.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from launcher.config import Settings
from launcher.faults.carry_out import carry_out

# these imports include Megatron, which took 3 s of every replacement when a worker
# imported it after the fork
from launcher.run import run_in, use_cpu
from moe_ckpt.elastic.supervisor import complain, start_beside
from moe_ckpt.elastic.torchrun_variables import read_launch
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.loop import start_rank
from moe_ckpt.supervised_rank import SupervisedRank


def start(settings: Settings) -> int:
    """Train in this process, or supervise a rank's workers.

    Args:
        settings: The settings of the run.

    Returns:
        The exit status.

    Raises:
        MoeCkptError: An error that a user can correct.
    """
    # for files that other libraries write into the run folder: event files of
    # TensorBoard, checkpoints of torch
    os.umask(0o077)
    # Megatron calls `gc.collect()` twice at every save, which takes 0.3 s over all
    # objects that torch and Megatron import
    gc.freeze()
    return start_rank(
        settings.job,
        read_launch(),
        lambda worker: run_in(worker, settings),
        beside=lambda supervised: _start_faults(settings, supervised),
        use_cpu=use_cpu,
    )


def _start_faults(settings: Settings, supervised: SupervisedRank) -> None:
    """Start a process beside the job that kills workers of this node as ordered.

    The machines on which the job begins have such a process. The plan has no record of
    what was carried out, by which a spare node could go on.
    """
    launch = supervised.launch
    planned = settings.fault.kills(launch.world_size)
    if planned and launch.global_rank == 0 and settings.runtime.spare_nodes:
        complain(
            f"fault.kind={settings.fault.kind}: kills are carried out on the nodes on"
            " which the job begins, and not on a spare node that takes their ranks"
            " (runtime.spare_nodes)"
        )
    kills = [kill for kill in planned if kill.rank in launch.local_ranks]
    if launch.local_rank == 0 and kills:
        start_beside(lambda: _inflict(kills, supervised))


def _inflict(kills: Sequence[Kill], supervised: SupervisedRank) -> int:
    done = carry_out(
        kills,
        supervised.folder.path,
        ranks_per_node=supervised.ranks_per_node,
        say=lambda text: print(text, file=sys.stderr),
    )
    return 0 if done else 1
