"""A process that trains one rank without a supervisor.

After a death torchrun restarts all ranks. Owns: the meeting of such a process with the
other ranks. Must not: survive the loss of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.config import NCCL, STAGED
from moe_ckpt.elastic.backend_choice import backend_kind
from moe_ckpt.elastic.job_store import agent_store
from moe_ckpt.elastic.staged import register_staged
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.engine.session import Session
from moe_ckpt.engine.worker_loop import TrainingRun
from moe_ckpt.events import EventLog
from moe_ckpt.job_config import JobConfig
from moe_ckpt.run_folder import RunFolder, open_run_folder
from moe_ckpt.types import ParallelLayout, Phase


class PlainWorker:
    """A rank's process that nothing replaces; implements `loop.WorkerProcess`."""

    is_supervised = False

    def __init__(
        self, job: JobConfig, launch: Launch, store: dist.Store | None = None
    ) -> None:
        """Begin the process of a rank.

        Args:
            job: The settings.
            launch: This rank's position in the job.
            store: The store in which the ranks meet; None: torchrun's store.
        """
        self.job = job
        self.launch = launch
        self._store = store

    @property
    def is_first_start(self) -> bool:
        """Whether no attempt of this job came before this one."""
        return self.launch.attempt == 0

    def join_world(self, *, on_gpu: bool) -> None:
        """Form the world of all ranks.

        Args:
            on_gpu: Whether ranks train on GPUs.

        Raises:
            ConfigError: `runtime.backend` does not fit the devices.
        """
        # torchrun's store survives a restart of its workers and keeps the addresses of
        # the dead ones: each attempt uses a part of its own
        store = self._store or agent_store(f"attempt-{self.launch.attempt}")
        world: dict[str, Any] = {}
        if store:
            world = {
                "store": store,
                "rank": self.launch.global_rank,
                "world_size": self.launch.world_size,
            }
        kind = backend_kind(
            self.job.runtime.backend,
            on_gpu=on_gpu,
            share_gpus=self.job.runtime.share_gpus,
        )
        if kind == STAGED:
            register_staged()
        if kind == NCCL:
            world["device_id"] = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(kind, **world)

    def open_folder(self) -> RunFolder:
        """Return the run folder, the same on all ranks. Collective."""
        return open_run_folder(self.job.folder, self.launch)

    def context(self, layout: ParallelLayout) -> None:  # noqa: ARG002
        """Return no means to survive the loss of ranks."""
        return

    def enter_phase(self, phase: Phase) -> None:
        """Show nothing: no supervisor reads the phase."""

    def run(
        self,
        session: Session,
        training: TrainingRun,
        events: EventLog,  # noqa: ARG002
        *,
        start: Callable[[], int],
        finish: Callable[[int], dict[str, Any]],
    ) -> dict[str, Any]:
        """Train to the end, and return the result of `finish`, with 0 deaths."""
        training.run(start(), session.notes)
        session.wait_for_saves()
        return finish(0)

    def retire(self, folder: RunFolder) -> None:  # noqa: ARG002
        """Leave the world."""
        dist.destroy_process_group()
