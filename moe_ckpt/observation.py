"""The order that `moe-ckpt prove` passes to each process of a command.

The order is in an environment variable. Pure: a process of the command reads the order
at the start of its interpreter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "MOE_CKPT_PROVE"
"""The environment variable with the order, in JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Orders to the ranks of one run, beside training."""

    run: str
    """The folder for the digests of the run."""

    kill_rank: int | None = None
    """The rank that kills its own process, once in the run; None: no rank does."""

    kill_iteration: int = 0
    """The iteration after which that rank does so, once its digests are logged."""

    spoil_after_resume: bool = False
    """Whether restarted ranks damage their state after their first iteration.

    For the control, which must differ.
    """

    @property
    def killed(self) -> Path:
        """The file that exists once the rank has killed itself."""
        return Path(self.run) / "killed"

    def environment(self) -> dict[str, str]:
        """Return the variable for the processes of the command."""
        return {VARIABLE: json.dumps(asdict(self))}


def read_order(environment: Mapping[str, str] = os.environ) -> Order | None:
    """Return the order of this process; None if the process is not observed."""
    text = environment.get(VARIABLE)
    return Order(**json.loads(text)) if text else None
