"""The settings of one job that every training loop has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.config import (
    AUTO,
    NO_CHECKS,
    CheckConfig,
    CkptConfig,
    InMemoryConfig,
    RunFolderConfig,
    RuntimeConfig,
    require,
    require_auto,
    require_switch,
    wants_supervisor,
)
from moe_ckpt.errors import ConfigError
from moe_ckpt.exactness import BITWISE, require_kept, require_valid, with_recovery
from moe_ckpt.faults.schedule import StateLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Settings of a job: policy, runtime, run folder and checks.

    The launcher, `moe_ckpt.own_loop` and `moe_ckpt.run` each convert their own settings
    into these; `moe_ckpt.loop` and `run_elastic` read no other settings.

    Raises:
        ConfigError: A setting is out of its range.
    """

    ckpt: CkptConfig
    """The checkpoint policy."""

    runtime: RuntimeConfig
    """How the job survives the death of processes."""

    folder: RunFolderConfig
    """The run folder."""

    ranks_per_node: int | str = AUTO
    """Number of ranks that fail together.

    auto: the ranks that torchrun starts on a node; on a single machine each rank counts
    alone.
    """

    checks: CheckConfig = NO_CHECKS
    """Digests of the state, and the ingredient that a control run leaves out."""

    losses: Sequence[StateLoss] = ()
    """Losses of state in living processes, on purpose."""

    exactness: str = BITWISE
    """Promise of recoveries, `bitwise` or `state`.

    auto: the promise that the settings of a loop that is not ours allow.
    """

    check_determinism: bool | str = AUTO
    """Whether a pass is run twice at the start to compare gradients.

    auto: on a GPU whose kernels have to repeat results.
    """

    def __post_init__(self) -> None:
        require_valid(self.exactness, may_be_auto=True)
        ckpt = with_recovery(self.ckpt, self.exactness)
        require_kept(self.exactness, ckpt, self.losses, self.check_determinism)
        require_switch("check_determinism", self.check_determinism)
        require_auto("parallel.ranks_per_node", self.ranks_per_node, 1, "a number")

    @property
    def in_memory(self) -> InMemoryConfig:
        """The policy of a supervised job.

        Raises:
            ConfigError: The policy keeps no snapshots in host memory.
        """
        if (ckpt := self.ckpt.in_memory) is not None:
            return ckpt
        wanted = "one with snapshots in memory"
        raise ConfigError(f"ckpt.policy: got {self.ckpt.policy!r}, wanted {wanted}")

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor replaces a rank's worker.

        Raises:
            ConfigError: `runtime.guard` and the policy exclude each other, or another
                setting needs a supervisor.
        """
        guard, in_memory = self.runtime.guard, self.ckpt.in_memory
        spare_nodes = self.runtime.spare_nodes
        if wants_supervisor(self.ckpt, self.runtime):
            others = "a ckpt other than dense and none (those: torchrun --max-restarts)"
            wanted = f"false, or {others}"
            require(in_memory is not None, "runtime.guard", guard, wanted)
            return True
        is_pointless = in_memory is not None and not self.ckpt.recovers_locally
        wanted = f"auto or true with ckpt={self.ckpt.policy}"
        require(not is_pointless, "runtime.guard", guard, wanted)
        wanted = "0 without supervisors: a spare node takes snapshots from memory"
        require(not spare_nodes, "runtime.spare_nodes", spare_nodes, wanted)
        standby = self.runtime.standby
        wanted = "auto or false without supervisors"
        require(standby is not True, "runtime.standby", standby, wanted)
        return False
