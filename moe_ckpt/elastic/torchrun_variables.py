"""The environment variables that torchrun gives a process.

Must not: import torch, so that a missing variable is found before any slow import.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from moe_ckpt.agent import agent_pid
from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import environment_of

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """This process's position in the job."""

    global_rank: int
    """The rank in the job."""

    local_rank: int
    """The rank among the ranks of this node."""

    world_size: int
    """Number of ranks of the job."""

    local_world_size: int
    """Number of ranks of this node."""

    attempt: int
    """Number of torchrun's restarts of the whole job before this one."""

    is_last_attempt: bool = False
    """Whether torchrun starts no process of this node again after one has failed."""

    @property
    def local_ranks(self) -> range:
        """The global ranks of this node."""
        first = self.global_rank - self.local_rank
        return range(first, first + self.local_world_size)

    @property
    def node(self) -> int:
        """Number of this node. All nodes have as many ranks as this one."""
        return self.global_rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""
        return self.world_size // self.local_world_size

    def as_node(self, node: int, num_nodes: int) -> Launch:
        """Return the position of this process if its node had another number.

        Args:
            node: The number of the node.
            num_nodes: The number of nodes of the job.
        """
        return replace(
            self,
            global_rank=node * self.local_world_size + self.local_rank,
            world_size=num_nodes * self.local_world_size,
        )


def require_spares(num_nodes: int, spare_nodes: int) -> None:
    """Check that a job has nodes beside its spare ones.

    Raises:
        ConfigError: All machines would be spare.
    """
    wanted = f"less than torchrun's --nnodes={num_nodes}, which counts spare nodes, too"
    require(spare_nodes < num_nodes, "runtime.spare_nodes", spare_nodes, wanted)


def export_launch(launch: Launch) -> None:
    """Set torchrun's variables of this process to a position in the job.

    Scripts and Megatron read the variables in workers that this process forks.
    """
    ranks = {"RANK": launch.global_rank, "WORLD_SIZE": launch.world_size}
    os.environ.update(
        {
            f"{role}{name}": str(value)
            for role in ("", "ROLE_")
            for name, value in ranks.items()
        }
    )
    os.environ["GROUP_RANK"] = str(launch.node)
    os.environ["GROUP_WORLD_SIZE"] = str(launch.num_nodes)


def is_launched() -> bool:
    """Return whether torchrun has started this process.

    A launcher that sets the same variables counts as torchrun.
    """
    return all(name in os.environ for name in _LAUNCH_VARIABLES)


def read_launch(script: str = "SCRIPT") -> Launch:
    """Return this process's position in the job.

    Args:
        script: The script, for the command in the error.

    Raises:
        ConfigError: torchrun has not started this process. The message has the command
            to use.
    """
    missing = [name for name in _LAUNCH_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this process was not started by torchrun ({', '.join(missing)} not set);"
            f" start it like this:\n  torchrun --nproc-per-node=4 {script}"
        )
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Launch(
        global_rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_world_size=int(
            os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        ),
        attempt=attempt,
        is_last_attempt=attempt
        >= int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", str(attempt + 1))),
    )


def has_agent_store() -> bool:
    """Return whether torchrun keeps a store for its workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def job_name() -> str:
    """Return torchrun's name of this job.

    Returns:
        `none` unless --rdzv-id names the job; empty without torchrun.
    """
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def is_set_by_user(variable: str, torchruns: str) -> bool:
    """Return whether the user has set a variable, and not torchrun.

    torchrun adds variables to its own environment after its start. /proc does not show
    these variables: /proc has the environment with which a process was started.

    Args:
        variable: The name of the variable.
        torchruns: The value that torchrun sets if the user has set none.
    """
    value = os.environ.get(variable)
    if value is None or value != torchruns or not job_name():
        return value is not None
    return variable in environment_of(agent_pid())


def write_error_file(message: str) -> None:
    """Let torchrun's own report end with this error.

    After any process that ends with an error, torchrun prints a traceback of its own
    and then this report, in which a hint about tracebacks would stand otherwise.

    Args:
        message: The error.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        record = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # the error was printed before
            Path(path).write_text(json.dumps({"message": record}))
