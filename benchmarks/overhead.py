"""What a checkpoint policy costs while nothing fails, measured in pairs within one run.

    torchrun --nproc-per-node=4 benchmarks/overhead.py [--pairs 6] [--json FILE] [OVERRIDES]

Unless overridden: model=small ckpt=moevement. Blocks of iterations with and without checkpointing alternate in the same
job, with the guards, copies and disks that the policy has; the first iteration of a block is not counted. Printed: the
ratio of iteration times, in all and pair by pair; the stall; what was moved and what is held. Absolute times mean
nothing on a laptop, the ratio does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launcher.config import Settings, compose_settings
from launcher.elastic import RankPlace, guard_rank, wants_guard
from launcher.launch import read_launch
from launcher.run import run, run_guarded
from moe_ckpt.events import (
    CheckpointSaved,
    Event,
    GradientsSent,
    HostMemoryUsed,
    IntervalChosen,
    IterationCommitted,
    SnapshotTaken,
    WindowChosen,
    WindowPersisted,
    read_events,
)
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.types import ReadyGradients

_BLOCK_ITERS = 8
_MIB = 1 << 20


class AlternatingHooks:
    """Checkpoints in every other block of iterations; notes when each iteration began.

    The policy counts only those that it sees, as if there were no others: its intervals stay what they are.
    """

    def __init__(self, inner: TrainingHooks) -> None:
        self._inner = inner
        self.began_s: list[float] = []

    def iteration_started(self, iteration: int) -> None:
        dist.barrier()
        self.began_s.append(time.monotonic())
        if is_on(iteration):
            self._inner.iteration_started(seen(iteration))

    def loss_known(self, iteration: int, loss: float) -> None:
        if is_on(iteration):
            self._inner.loss_known(seen(iteration), loss)

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        return self._inner.gradients_ready(seen(iteration), gradients) if is_on(iteration) else True

    def update_applied(self, iteration: int) -> None:
        if is_on(iteration):
            self._inner.update_applied(seen(iteration))

    def step_committed(self, iteration: int) -> None:
        if is_on(iteration):
            self._inner.step_committed(seen(iteration))


def is_on(iteration: int) -> bool:
    return ((iteration - 1) // _BLOCK_ITERS) % 2 == 1


def seen(iteration: int) -> int:
    """Return which of the iterations with checkpoints this is, from 1."""
    pairs, rest = divmod(iteration - 1, 2 * _BLOCK_ITERS)
    return pairs * _BLOCK_ITERS + rest - _BLOCK_ITERS + 1


def measure(folder: Path, began_s: list[float], replicas: int) -> dict[str, Any]:
    """Return what rank 0 has seen, without the first pair of blocks, which warms up."""
    seconds = [after - before for before, after in itertools.pairwise(began_s)]
    blocks = [seconds[first + 1 : first + _BLOCK_ITERS] for first in range(0, len(seconds), _BLOCK_ITERS)][2:]
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    ratios = [statistics.mean(on) / statistics.mean(off) for off, on in pairs]
    events = [entry.event for entry in read_events(folder / "events" / "rank0000.jsonl")]
    committed = [e for e in _of(events, IterationCommitted) if is_on(e.iteration)][_BLOCK_ITERS:]
    snapshots, num_on = _of(events, SnapshotTaken), len(pairs) * _BLOCK_ITERS + _BLOCK_ITERS
    size_bytes = {taken.window_start: 0 for taken in snapshots}
    for taken in snapshots:
        size_bytes[taken.window_start] += taken.size_bytes
    moved_bytes = sum(size_bytes.values()) + sum(sent.size_bytes for sent in _of(events, GradientsSent))
    durable_bytes = sum(saved.size_bytes for saved in _of(events, CheckpointSaved)) / int(os.environ["WORLD_SIZE"])
    disk_bytes = sum(size_bytes.get(e.window_start, 0) for e in _of(events, WindowPersisted)) + durable_bytes
    memory, windows, intervals = _of(events, HostMemoryUsed), _of(events, WindowChosen), _of(events, IntervalChosen)
    return {
        "iteration_s": statistics.median(second for off, _ in pairs for second in off),
        "ratio": sum(sum(on) for _, on in pairs) / sum(sum(off) for off, _ in pairs),
        "ratio_of_pairs": ratios,
        "stall": sum(e.stall_s for e in committed) / sum(e.seconds for e in committed),
        "window": windows[-1].num_slots if windows else None,
        "every_iters": intervals[-1].every_iters if intervals else None,
        "snapshots": len(snapshots),
        "memory_bytes_per_iter": moved_bytes / num_on,
        "peer_bytes_per_iter": replicas * moved_bytes / num_on,
        "disk_bytes_per_iter": disk_bytes / num_on,
        "host_bytes": memory[-1].allocated_bytes * (1 + replicas) if memory else 0,
        "dense_bytes": snapshots[-1].dense_bytes if snapshots else None,
    }


def _of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def show(found: dict[str, Any]) -> None:
    ratios = found["ratio_of_pairs"]
    print(f"pairs of blocks                  {len(ratios)}, {_BLOCK_ITERS - 1} iterations each")
    print(f"iteration time, with / without   {found['ratio']:.3f}  (pairs: {min(ratios):.3f} to {max(ratios):.3f})")
    print(f"stall, share of the iteration    {100 * found['stall']:.2f} %")
    print(f"window, interval                 {found['window'] or '-'}, {found['every_iters'] or '-'}")
    for key, name in (
        ("memory_bytes_per_iter", "to host memory, an iteration"),
        ("peer_bytes_per_iter", "to peers, an iteration"),
        ("disk_bytes_per_iter", "to disk, an iteration"),
        ("host_bytes", "host memory, with others' copies"),
    ):
        print(f"{name:<32} {found[key] / _MIB:.1f} MiB a rank")
    if found["dense_bytes"]:
        print(f"{'a dense snapshot, to compare':<32} {found['dense_bytes'] / _MIB:.1f} MiB a rank")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of blocks, beside one that warms up")
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    iterations = 2 * _BLOCK_ITERS * (options.pairs + 1) + 1
    quiet = ("run.progress=none", "run.tensorboard=false", "train.eval_every_iters=0", "train.eval_batches=1")
    defaults = (f"train.iterations={iterations}", "run.name=overhead", *quiet)
    chosen = [] if any(override.lstrip("+").startswith("ckpt=") for override in overrides) else ["ckpt=moevement"]
    model = [] if any(override.startswith("model=") for override in overrides) else ["model=small"]
    settings = compose_settings([*defaults, *chosen, *model, *overrides])
    if not wants_guard(settings):
        _train(settings, options.json, 0, lambda around: run(settings, around_hooks=around))
        return 0

    def train(place: RankPlace, life: int) -> int:
        _train(
            settings,
            options.json,
            place.replicas,
            lambda around: run_guarded(settings, place, life, around_hooks=around),
        )
        return 0

    return guard_rank(settings, read_launch(), train)


def _train(settings: Settings, json_path: Path | None, replicas: int, train: Callable[[Any], object]) -> None:
    made: list[AlternatingHooks] = []

    def alternate(hooks: TrainingHooks) -> TrainingHooks:
        made.append(AlternatingHooks(hooks))
        return made[0]

    train(alternate)
    if os.environ["RANK"] != "0":
        return
    found = measure(Path(settings.run.dir or "outputs/latest"), made[0].began_s, replicas)
    show(found)
    if json_path:
        json_path.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
