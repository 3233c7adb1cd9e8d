"""What ckpt=moevement costs while nothing fails, measured in pairs within one run.

    torchrun --nproc-per-node=4 benchmarks/overhead.py [OVERRIDES]        # model=small unless overridden

Blocks of iterations with and without checkpointing alternate in the same job; the first iteration of a block is not
counted. Printed: the ratio of iteration times, pair by pair; the stall; host memory and snapshot bytes. Absolute times
mean nothing on a laptop, the ratio does.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launcher.config import compose_settings
from launcher.run import run
from moe_ckpt.events import HostMemoryUsed, IterationCommitted, SnapshotTaken, WindowChosen, read_events
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.types import ReadyGradients

_BLOCK_ITERS = 8
_NUM_PAIRS = 6
_MIB = 1 << 20


class AlternatingHooks:
    """Checkpoints in every other block of iterations; notes when each iteration began."""

    def __init__(self, inner: TrainingHooks) -> None:
        self._inner = inner
        self.began_s: list[float] = []

    def iteration_started(self, iteration: int) -> None:
        dist.barrier()
        self.began_s.append(time.monotonic())
        if is_on(iteration):
            self._inner.iteration_started(iteration)

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        return self._inner.gradients_ready(iteration, gradients) if is_on(iteration) else True

    def update_applied(self, iteration: int) -> None:
        if is_on(iteration):
            self._inner.update_applied(iteration)

    def step_committed(self, iteration: int) -> None:
        if is_on(iteration):
            self._inner.step_committed(iteration)


def is_on(iteration: int) -> bool:
    return ((iteration - 1) // _BLOCK_ITERS) % 2 == 1


def pair_ratios(began_s: list[float]) -> list[float]:
    """Return, for every block with checkpoints, its mean iteration time over that of the block before it."""
    seconds = [after - before for before, after in itertools.pairwise(began_s)]
    blocks = [seconds[first + 1 : first + _BLOCK_ITERS] for first in range(0, len(seconds), _BLOCK_ITERS)]
    blocks = blocks[2:]  # the first pair warms up: caches, host buffers
    return [statistics.mean(on) / statistics.mean(off) for off, on in zip(blocks[::2], blocks[1::2], strict=True)]


def report(folder: Path, hooks: AlternatingHooks) -> None:
    events = [entry.event for entry in read_events(folder / "events" / "rank0000.jsonl")]
    ratios = pair_ratios(hooks.began_s)
    committed = [e for e in events if isinstance(e, IterationCommitted) and is_on(e.iteration)][_BLOCK_ITERS:]
    stall = sum(e.stall_s for e in committed) / sum(e.seconds for e in committed)
    window = [e for e in events if isinstance(e, WindowChosen)][-1]
    taken = [e for e in events if isinstance(e, SnapshotTaken)][-1]
    memory = [e for e in events if isinstance(e, HostMemoryUsed)][-1]
    print(f"pairs of blocks                  {len(ratios)}, {_BLOCK_ITERS - 1} iterations each")
    print(f"iteration time, with / without   {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"stall, share of the iteration    {100 * stall:.2f} %")
    print(f"window                           {window.num_slots} (fits: {window.fitting})")
    print(
        f"snapshot, dense snapshot         {taken.size_bytes / _MIB:.1f} MiB, {taken.dense_bytes / _MIB:.1f} MiB a rank"
    )
    persisted = memory.full_bytes + memory.compute_bytes + memory.buffer_bytes
    print(f"persisted window                 {persisted / _MIB:.1f} MiB a rank")
    logs = f"{memory.boundary_log_bytes / _MIB:.1f} MiB, {memory.step_log_bytes / _MIB:.2f} MiB"
    print(f"boundary log, step log           {logs}")
    print(f"host memory allocated            {memory.allocated_bytes / _MIB:.1f} MiB")
    print(f"two dense copies, to compare     {memory.double_buffered_dense_bytes / _MIB:.1f} MiB")


def main() -> None:
    iterations = 2 * _BLOCK_ITERS * (_NUM_PAIRS + 1) + 1
    quiet = ("run.progress=none", "run.tensorboard=false", "train.eval_every_iters=0", "train.eval_batches=1")
    defaults = ("model=small", "ckpt=moevement", f"train.iterations={iterations}", "run.name=overhead", *quiet)
    settings = compose_settings([*defaults, *sys.argv[1:]])
    made: list[AlternatingHooks] = []

    def alternate(hooks: TrainingHooks) -> TrainingHooks:
        made.append(AlternatingHooks(hooks))
        return made[0]

    run(settings, around_hooks=alternate)
    if os.environ["RANK"] == "0":
        report(Path(settings.run.dir or "outputs/latest"), made[0])


if __name__ == "__main__":
    main()
