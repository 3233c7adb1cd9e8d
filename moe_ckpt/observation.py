"""What `moe-ckpt prove` tells the processes of a training command to do.

`moe-ckpt prove` runs the command several times: without a fault, with a kill, and with
a kill and a damaged state (`launcher/prove/resumed.py`). In each of these runs an
environment variable tells every process of the command where to log digests. In a run
with a kill, the variable also tells which rank kills itself when, and whether the ranks
damage their state afterwards. Imports nothing slow: a process reads the variable as its
interpreter starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "MOE_CKPT_PROVE"
"""The environment variable with an `Order`, in JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Actions of the ranks, beside training, in one run of the command."""

    run: str
    """Folder of the run, in which each rank logs digests of its state."""

    kill_rank: int | None = None
    """Rank that kills its own process, once in the run; None: no rank does."""

    kill_iteration: int = 0
    """Iteration after which `kill_rank` kills itself, once the digests of that
    iteration are logged.
    """

    spoil_after_resume: bool = False
    """Whether each rank that starts after the kill damages its own state, after its
    first iteration.

    Set in the run `control`, which the comparison must report as different: a
    comparison that misses this damage proves nothing.
    """

    @property
    def killed(self) -> Path:
        """File that exists once `kill_rank` has killed itself."""
        return Path(self.run) / "killed"

    def environment(self) -> dict[str, str]:
        """Return `VARIABLE` and its value, for the processes of the command."""
        return {VARIABLE: json.dumps(asdict(self))}


def read_order(environment: Mapping[str, str] = os.environ) -> Order | None:
    """Return what this process is told to do; None outside of `moe-ckpt prove`."""
    text = environment.get(VARIABLE)
    return Order(**json.loads(text)) if text else None
