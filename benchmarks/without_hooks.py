"""A supervised job without hooks: the price of supervisors and replica daemons alone.

    torchrun --nproc-per-node=4 benchmarks/without_hooks.py +ckpt=moevement [OVERRIDES]

The job has the supervisors, replica daemons and process groups of its policy. No hook
of the training loop reaches the policy. benchmarks/overhead.py runs this program.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launcher.config import compose_settings
from launcher.run import run_in
from moe_ckpt.elastic.torchrun_variables import read_launch
from moe_ckpt.elastic_worker import Worker
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.run_elastic import run_elastic
from moe_ckpt.types import ReadyGradients


class NoHooks:
    """Implements `ports.TrainingHooks`: training continues, and nothing is saved."""

    def iteration_started(self, iteration: int) -> None:
        pass

    def loss_known(self, iteration: int, loss: float) -> None:
        pass

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:  # noqa: ARG002
        return True

    def update_applied(self, iteration: int) -> None:
        pass

    def step_committed(self, iteration: int) -> None:
        pass


def _without(hooks: TrainingHooks) -> TrainingHooks:  # noqa: ARG001
    return NoHooks()


def main() -> int:
    settings = compose_settings(sys.argv[1:])

    def train(worker: Worker) -> int:
        run_in(worker, settings, around_hooks=_without)
        return 0

    return run_elastic(settings.job, read_launch(), train)


if __name__ == "__main__":
    sys.exit(main())
