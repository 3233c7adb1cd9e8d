"""Inner groups that a rank forms in a generation, and the seconds to form them.

    python benchmarks/communicators.py [--ranks 4 8 16] [--generations 5] [--write]

Compares inner groups that are shared by membership with one inner group for each group.
The last column is a generation that continues with all groups of the generation before,
after a vote on each group.

Ranks are processes of this machine that make Megatron's groups with gloo, form the
groups over a store in a file, and do nothing else. A communicator of NCCL costs more,
so its gain is larger. That gain was not measured, for lack of a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.marks import rewrite
from benchmarks.runs import current_commit, hardware
from moe_ckpt.elastic.backends import GlooBackend
from moe_ckpt.elastic.process_groups import ELASTIC, ElasticGroups, GroupTimeouts

LAYOUTS = {4: (2, 2), 8: (2, 2), 16: (4, 2)}
"""Pipeline stages and expert-parallel degree by number of ranks."""

_LIMIT_S = 120.0
_MARKS = (
    "<!-- communicators: written by benchmarks/communicators.py -->",
    "<!-- end of communicators -->",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS)
    )
    parser.add_argument("--generations", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help="write the table into benchmarks/README.md"
    )
    options = parser.parse_args()
    lines = [
        "| ranks | PP, EP | groups of a rank | inner groups, one a group | seconds "
        "| shared by membership | seconds | all kept, seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for num_ranks in options.ranks:
        lines.append(_row(num_ranks, options.generations))
        print(lines[-1], flush=True)
    lines += [
        "",
        (
            f"Medians of {options.generations} generations, the slowest rank of each;"
            " the most groups of any rank."
        ),
    ]
    lines += [f"{hardware()}; gloo; commit {current_commit()}."]
    if options.write:
        rewrite(
            Path(__file__).with_name("README.md"), _MARKS, lambda _: "\n".join(lines)
        )
    return 0


def _row(num_ranks: int, generations: int) -> str:
    """Return the table's line for a number of ranks."""
    before, after = (
        _measure(num_ranks, generations, shares=shares, are_idle=False)
        for shares in (False, True)
    )
    _, kept_s = _measure(num_ranks, 1 + generations, shares=True, are_idle=True)
    pp, ep = LAYOUTS[num_ranks]
    cells = [
        num_ranks,
        f"{pp}, {ep}",
        before[0],
        before[0],
        f"{before[1]:.3f}",
        after[0],
        f"{after[1]:.3f}",
    ]
    cells.append(f"{kept_s:.3f}")
    return f"| {' | '.join(map(str, cells))} |"


def _measure(
    num_ranks: int, generations: int, *, shares: bool, are_idle: bool
) -> tuple[int, float]:
    """Form the groups of all ranks in each of some generations.

    Args:
        num_ranks: The ranks.
        generations: The generations.
        shares: Whether groups with the same members share an inner group.
        are_idle: Whether all groups continue as a generation ends. The first generation
            then forms the groups, and is left out.

    Returns:
        The most inner groups of any rank, and the median over generations of the
        slowest rank's seconds.
    """
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [forks.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            forks.Process(
                target=_be_rank,
                args=(
                    rank,
                    num_ranks,
                    generations,
                    shares,
                    are_idle,
                    folder,
                    pipes[rank][1],
                ),
            )
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        try:
            found = [receiver.recv() for receiver, _ in pipes]
        finally:
            for rank in ranks:
                rank.kill()
    slowest = [
        max(seconds) for seconds in zip(*(seconds for _, seconds in found), strict=True)
    ]
    return max(count for count, _ in found), statistics.median(
        slowest[1:] if are_idle else slowest
    )


def _be_rank(
    rank: int,
    size: int,
    generations: int,
    shares: bool,
    are_idle: bool,
    folder: str,
    sender: Any,
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    timeouts = GroupTimeouts(form_s=_LIMIT_S, operation_s=_LIMIT_S, abort_s=_LIMIT_S)
    groups = ElasticGroups(GlooBackend(), timeouts, lambda _: None, shares=shares)
    groups.register()
    dist.init_process_group(ELASTIC, store=dist.HashStore(), rank=rank, world_size=size)
    pp, ep = LAYOUTS[size]
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=False,
    )
    store = dist.FileStore(f"{folder}/store", -1)
    store.set_timeout(timedelta(seconds=_LIMIT_S))
    seconds, count = [], 0
    for generation in range(1, generations + 1):
        _meet(store, f"start of {generation}", size)
        begun_s = time.monotonic()
        groups.form(dist.FileStore(f"{folder}/store", -1), generation)
        seconds.append(time.monotonic() - begun_s)
        count = len(groups.insides)
        _meet(store, f"end of {generation}", size)
        if not are_idle:
            for inner in groups.inners.values():
                # as after an operation that a lost rank left unfinished
                inner.is_broken = True
        groups.leave()
    sender.send((count, seconds))
    _meet(store, "all have sent", size)


def _meet(store: dist.Store, name: str, size: int) -> None:
    if store.add(name, 1) == size:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"], timedelta(seconds=_LIMIT_S))


if __name__ == "__main__":
    sys.exit(main())
