"""A training that `beside_lost_node.py` runs under other tools, by their public API.

    python benchmarks/beside_training.py TOOL FOLDER    # TOOL: see `main`

Two ranks train the same layers on gloo, each on its half of a batch that follows from
the iteration's number. Each process writes a line for each iteration to FOLDER, with a
digest of the parameters. `reference` is one process that adds both halves itself, and
needs no tool. The tool's environment runs this file, which imports nothing of this
project, and of the tools only the one that runs.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HIDDEN, LAYERS, BATCH = 512, 6, 384
RANKS = 2
CHECKPOINT_EVERY = 20
REFERENCE_STEPS = 250
STEPS = 1_000_000


class Training:
    """The model, its optimizer and the log of this process.

    Args:
        folder: The folder of logs and of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        layers = [nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self.model = nn.Sequential(*(nn.Sequential(each, nn.GELU()) for each in layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0
        self._checkpoint = folder / "checkpoint.pt"
        self._log = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._began_unix_s = 0.0
        self._write()

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Return the loss of a rank's half of an iteration's batch."""
        self._began_unix_s = time.time()
        generator = torch.Generator().manual_seed(RANKS * step + rank)
        batch = torch.randn(BATCH, HIDDEN, generator=generator)
        return (model(batch) - batch.flip(1)).square().mean()

    def committed(self, step: int, participants: int = RANKS) -> None:
        """Log that iterations up to `step` are done."""
        self.step = step
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        self._write(
            step=step,
            began_unix_s=self._began_unix_s,
            participants=participants,
            digest=digest.hexdigest(),
        )

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])

    def save_checkpoint(self) -> None:
        partial = self._checkpoint.with_suffix(".partial")
        torch.save({**self.state(), "step": self.step}, partial)
        partial.replace(self._checkpoint)

    def load_checkpoint(self) -> None:
        """Go to the state of the checkpoint, if there is one."""
        if self._checkpoint.exists():
            state = torch.load(self._checkpoint)
            self.load(state)
            self.step = state["step"]

    def _write(self, **fields: object) -> None:
        process = {"node": int(os.environ["BESIDE_NODE"]), "pid": os.getpid()}
        line = {"unix_s": time.time(), **process, **fields}
        self._log.write(json.dumps(line) + "\n")


def train_reference(training: Training) -> None:
    for step in range(REFERENCE_STEPS):
        training.optimizer.zero_grad()
        for rank in range(RANKS):
            # each rank's gradients count for a half, which is exact with two ranks
            (training.loss(training.model, step, rank) / RANKS).backward()
        training.optimizer.step()
        training.committed(step + 1)


def train_torchft(training: Training, *, has_spare: bool) -> None:
    """Train in a replica group of one rank.

    Args:
        training: The training.
        has_spare: Whether a third group contributes nothing until a group is lost. Else
            all groups contribute, and one group alone goes on.
    """
    import torchft  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from torchft.manager import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        WorldSizeMode,
    )

    fixed, dynamic = WorldSizeMode.FIXED_WITH_SPARES, WorldSizeMode.DYNAMIC
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=RANKS if has_spare else 1,
        world_size_mode=fixed if has_spare else dynamic,
        load_state_dict=training.load,
        state_dict=training.state,
        replica_id=f"group_{os.environ['REPLICA_GROUP_ID']}",
        timeout=timedelta(seconds=30),
        init_sync=False,  # all groups start from the same seed
    )
    model = torchft.DistributedDataParallel(manager, training.model)
    optimizer = torchft.Optimizer(manager, training.optimizer)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        step, rank = manager.current_step(), manager.participating_rank()
        training.loss(model, step, rank or 0).backward()
        participants = manager.num_participants()
        optimizer.step()
        if manager.current_step() > step:
            training.committed(manager.current_step(), participants)


def train_ft_launcher(training: Training) -> None:
    """Train in a worker of `ft_launcher`, from the last checkpoint on."""
    from nvidia_resiliency_ext import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        fault_tolerance,
    )

    dist.init_process_group("gloo")
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    training.load_checkpoint()
    _train_ddp(training, dist.get_rank(), client.send_heartbeat)


def train_in_process(training: Training, folder: Path) -> None:
    """Train in a function that is called again in the same process after a fault."""
    from nvidia_resiliency_ext import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        inprocess,
    )

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["TRAINING_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
        multi_tenant=True,
    )

    # the wrapper finds this argument by its annotation, which must be no string: this
    # file has no `from __future__ import annotations`
    def train(call: inprocess.CallWrapper = None) -> None:
        # the wrapper sets RANK and WORLD_SIZE before each call
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=10),
        )
        training.load_checkpoint()
        _train_ddp(training, rank, call.ping, call.atomic)

    assignment = inprocess.rank_assignment
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": int(os.environ["WRAPPER_PORT"])},
        rank_assignment=inprocess.Compose(
            assignment.MaxActiveWorldSize(RANKS), assignment.ShiftRanks()
        ),
        monitor_process_pidfile=str(folder / "monitor_{rank}.pid"),
    )
    wrapper(train)()


def _train_ddp(
    training: Training,
    rank: int,
    report_progress: Callable[[], None],
    atomic: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Train with torch's own data parallelism, and write checkpoints."""
    model = DistributedDataParallel(training.model)
    while training.step < STEPS:
        training.optimizer.zero_grad()
        training.loss(model, training.step, rank).backward()
        report_progress()
        training.optimizer.step()
        training.committed(training.step + 1)
        if training.step % CHECKPOINT_EVERY == 0:
            if rank == 0:
                with atomic():
                    training.save_checkpoint()
            dist.barrier()


def main() -> None:
    tool, folder = sys.argv[1], Path(sys.argv[2])
    training = Training(folder)
    match tool:
        case "reference":
            train_reference(training)
        case "torchft" | "torchft-spare":
            train_torchft(training, has_spare=tool == "torchft-spare")
        case "ft_launcher":
            train_ft_launcher(training)
        case "in-process":
            train_in_process(training, folder)
        case _:
            sys.exit(f"no tool {tool}")


if __name__ == "__main__":
    main()
