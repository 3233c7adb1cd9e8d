"""Seconds and bytes with which ranks enter a generation, without a model.

    python benchmarks/control_plane.py [--ranks 64 256 1024] [--model deepseek_671b]
    python benchmarks/control_plane.py --only-plan --ranks 4 32 128 1024 4096 16384

Ranks are threads of this process with the real protocol (`Membership`, over torch's
HashStore), profiles (`share_profiles`) and reports. Only process groups are not formed.
Each number of ranks has a row. Bytes are bytes that one rank receives or keeps:

    join    from the arrival of the first rank to the go for the last rank: operations
            in the store, and bytes of keys and values
    table   operators of the own stage, gathered from its 64 ranks
    agree   profiles of all stages: bytes of reductions, as a ring receives them
    report  contents of each rank's memory, gathered from all ranks, as torch's
            all_gather_object receives them
    plan    one rank's choice of a window from these profiles, in seconds of CPU: at
            first, and after a fault
    tables  contents that a rank keeps: the operators of the own stage, profiles of all
            stages, and bytes of windows

All threads share the interpreter, so seconds are the seconds of all ranks' work one
after the other. `ms a rank` is the computing time of one rank in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.counted_store import CountedStore, Traffic  # noqa: E402
from launcher.config import compose_settings  # noqa: E402
from launcher.simulator.config import compose_simulation  # noqa: E402
from moe_ckpt.collectives import Ranks, Reduction  # noqa: E402
from moe_ckpt.config import MoevementConfig  # noqa: E402
from moe_ckpt.elastic.generations import Member, Membership  # noqa: E402
from moe_ckpt.elastic.status_page import StatusPage  # noqa: E402
from moe_ckpt.engine.interfaces import RankPosition  # noqa: E402
from moe_ckpt.engine.stage_profiles import SharedProfiles, share_profiles  # noqa: E402
from moe_ckpt.packed import IntArray, pack_rows  # noqa: E402
from moe_ckpt.policies.moevement import SparseWindows  # noqa: E402
from moe_ckpt.policies.stage_profile import StageProfile  # noqa: E402
from moe_ckpt.snapshot.codec import ShardIdentity  # noqa: E402
from moe_ckpt.types import Measured, OperatorTable, ParallelLayout, RunIdentity  # noqa: E402

GPUS_A_NODE, LEAST_RANKS_A_STAGE, LEAST_STAGES, MOST_STAGES = 8, 64, 2, 16
JOIN_S = 300.0


class SharedGroup:
    """Collectives of threads. The contributions are reduced once, in place."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock, self._barrier = threading.Lock(), threading.Barrier(size)
        self._total: torch.Tensor | None = None

    def reduce(self, tensor: torch.Tensor, operation: Reduction) -> None:
        with self._lock:
            if self._total is None:
                self._total = tensor.clone()
            else:
                self._total = (
                    self._total + tensor
                    if operation == "sum"
                    else torch.maximum(self._total, tensor)
                )
        self._barrier.wait()
        assert self._total is not None
        tensor.copy_(self._total)
        if self._barrier.wait() == 0:
            self._total = None
        self._barrier.wait()


class CountedRanks:
    """The part of `Ranks` that `share_profiles` uses.

    Counts the bytes that a rank of a ring receives.
    """

    def __init__(self, rank: int, group: SharedGroup, traffic: Traffic) -> None:
        self.rank, self.size = rank, group.size
        self._group, self._traffic = group, traffic

    def reduce(self, tensor: torch.Tensor, operation: Reduction) -> None:
        self._traffic.nbytes += 2 * tensor.nbytes * (self.size - 1) // self.size
        self._group.reduce(tensor, operation)


class NoGroups:
    """Process groups that are not formed."""

    def form(self, store: object, generation: int, *callbacks: object) -> None: ...

    def cut(self) -> None: ...

    def abandon(self) -> None: ...

    def leave(self) -> None: ...


@dataclass(frozen=True)
class Row:
    """The cost of entering a generation at one number of ranks.

    Operations and bytes are those of the rank with the most.
    """

    ranks: int
    """Number of ranks."""

    join_s: float
    """Time in which all ranks join, in seconds."""

    join_operations: int
    """Operations in the store to join."""

    join_bytes: int
    """Bytes of keys and values in these operations."""

    agree_s: float
    """Time in which all ranks share their profiles, in seconds."""

    agree_bytes: int
    """Bytes of reductions to share the profiles."""

    table_bytes: int
    """Bytes of the own stage's operators, gathered from its ranks."""

    report_bytes: int
    """Bytes of reports, gathered from all ranks."""

    @property
    def total_bytes(self) -> int:
        return self.join_bytes + self.agree_bytes + self.table_bytes + self.report_bytes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--model", default="deepseek_671b")
    parser.add_argument(
        "--only-plan",
        action="store_true",
        help="the last table, which needs no threads",
    )
    arguments = parser.parse_args()
    if not arguments.only_plan:
        print_costs_of_entering(arguments.ranks, arguments.model)
    print("ranks  stages  kinds  plan CPU s  after a fault  slots  tables MB")
    for num_ranks in arguments.ranks:
        profiles = profiles_of(arguments.model, num_ranks)
        shared = shared_by_stages(profiles)
        first_s, policy, num_slots = plan(shared.stages, None)
        again_s, _, _ = plan(shared.stages, policy)
        kinds = len(policy.sizes.kinds)
        tables_mb = kept_bytes(profiles[1].table, shared, policy.sizes) / 1e6
        print(
            f"{num_ranks:5d} {len(profiles):7d} {kinds:6d} {first_s:11.3f}"
            f" {again_s:14.4f} {num_slots:6d} {tables_mb:10.2f}",
            flush=True,
        )
    return 0


def print_costs_of_entering(numbers_of_ranks: Sequence[int], model: str) -> None:
    """Print a row for each number of ranks."""
    print(
        "ranks  join s  store ops  agree s  ms a rank |    store   table  profiles "
        " reports  all B    limit"
    )
    for num_ranks in numbers_of_ranks:
        row = measure(num_ranks, model)
        print(
            f"{row.ranks:5d} {row.join_s:7.2f} {row.join_operations:10d}"
            f" {row.agree_s:8.2f} {1000 * row.agree_s / row.ranks:10.1f} |"
            f" {row.join_bytes:8d} {row.table_bytes:7d} {row.agree_bytes:9d}"
            f" {row.report_bytes:8d} {row.total_bytes:8d} {65536 + 100 * row.ranks:8d}",
            flush=True,
        )


def plan(
    profiles: Sequence[StageProfile], earlier: SparseWindows | None
) -> tuple[float, SparseWindows, int]:
    """Let a rank choose a window.

    Args:
        profiles: The profiles of all stages.
        earlier: The policy of the generation before a fault.

    Returns:
        The seconds of CPU, the rank's policy, and the slots of the window.
    """
    config = compose_settings(["ckpt=moevement"]).ckpt
    assert isinstance(config, MoevementConfig)
    started_s = time.process_time()
    policy = SparseWindows(
        config, profiles, 1, 1, sizes=earlier.sizes if earlier else None
    )
    measured = _measured(profiles[1])
    plans = (
        policy.plan(iteration, lambda: measured) for iteration in itertools.count()
    )
    choice = next(each.window for each in plans if each.window)
    return time.process_time() - started_s, policy, choice.num_slots


def shared_by_stages(profiles: Sequence[StageProfile]) -> SharedProfiles:
    """Return the profiles as a rank has them after the exchange.

    One rank of each stage takes part in this exchange.
    """
    everyone, found = SharedGroup(len(profiles)), dict[int, SharedProfiles]()

    def share(stage: int) -> None:
        ranks = cast("Ranks", CountedRanks(stage, everyone, Traffic()))
        of_stage = cast("Ranks", CountedRanks(0, SharedGroup(1), Traffic()))
        position = _position(stage, len(profiles), ranks, of_stage)
        found[stage] = share_profiles(position, profiles[stage])

    _run(len(profiles), share)
    return found[0]


def kept_bytes(*values: object) -> int:
    """Return the bytes of objects and of all objects that they keep alive.

    Code and the contents of modules do not count.
    """
    seen, total, rest = set[int](), 0, list(values)
    while rest:
        each = rest.pop()
        is_code = isinstance(each, type | Enum) or callable(each)
        if is_code or id(each) in seen:
            continue
        seen.add(id(each))
        # the size of an array includes its numbers, unless the array is a view
        total += sys.getsizeof(each)
        rest += gc.get_referents(each)
        if isinstance(each, np.ndarray) and each.base is not None:
            rest.append(each.base)
    return total


def measure(num_ranks: int, model: str) -> Row:
    """Return the cost with which `num_ranks` threads enter a generation."""
    profiles = profiles_of(model, num_ranks)
    join_s, joining = _join(num_ranks)
    agree_s, agreeing = _agree(num_ranks, profiles)
    return Row(
        ranks=num_ranks,
        join_s=join_s,
        join_operations=max(each.operations for each in joining),
        join_bytes=max(each.nbytes for each in joining),
        agree_s=agree_s,
        agree_bytes=max(each.nbytes for each in agreeing),
        table_bytes=num_ranks
        // len(profiles)
        * (max(_own_bytes(each.table) for each in profiles) + 8),
        report_bytes=num_ranks * (len(pickle.dumps((_report(num_ranks), None))) + 8),
    )


@functools.cache
def profiles_of(model: str, num_ranks: int) -> list[StageProfile]:
    """Return the profiles of a job of so many ranks.

    The job has 64 ranks per stage in up to 16 stages. A larger job has more ranks per
    stage, and a smaller job has fewer ranks in 2 stages.
    """
    ranks_a_stage = min(
        max(LEAST_RANKS_A_STAGE, num_ranks // MOST_STAGES), num_ranks // LEAST_STAGES
    )
    stages, gpus_a_node = num_ranks // ranks_a_stage, min(GPUS_A_NODE, num_ranks)
    nodes = (
        f"cluster.nodes={num_ranks // gpus_a_node} cluster.gpus_per_node={gpus_a_node}"
    )
    job = f"model={model} cluster=h100_ib {nodes} parallel.pp={stages}"
    batch = (
        "batch.global_batch_size=1024 batch.micro_batch_size=1"
        " cluster.gpu_memory_bytes=1e15"
    )
    found = compose_simulation([*job.split(), *batch.split()]).setup.job.profiles
    return [
        replace(each, table=_of_all_ranks(each.table, ranks_a_stage)) for each in found
    ]


def _of_all_ranks(table: OperatorTable, ranks_a_stage: int) -> OperatorTable:
    """Return a table as a sharded optimizer has the table.

    Ranks with the same operators own one piece each of all these operators. The
    simulator's table has a row for each expert-parallel rank, with an even share of
    every operator.
    """
    replicas = ranks_a_stage // len(table.full_bytes)
    compute = np.concatenate([_pieces(row, replicas) for row in table.compute_bytes])
    return OperatorTable(
        operators=table.operators,
        full_bytes=6 * compute,
        compute_bytes=compute,
        moment_bytes=4 * compute,
    )


def _own_bytes(table: OperatorTable) -> int:
    """Return the bytes in which a rank describes its operators to its stage.

    Of the rank with the most bytes.
    """
    assert table.moment_bytes is not None
    kinds = np.stack(
        [table.full_bytes, table.compute_bytes, table.moment_bytes], axis=1
    )
    owned = [np.flatnonzero(kind[0]) for kind in kinds]
    rows = [
        ([table.operators[i] for i in own.tolist()], kind[:, own])
        for own, kind in zip(owned, kinds, strict=True)
    ]
    return max(len(pickle.dumps(pack_rows(*row))) for row in rows)


def _pieces(row: IntArray, count: int) -> IntArray:
    """Split operators that lie in a row into equal pieces, one for each rank.

    Args:
        row: A rank's even share of each operator, in bytes.
        count: The ranks that share the operators.

    Returns:
        Bytes of each operator that each rank owns, [ranks][operators].
    """
    ends = count * np.cumsum(row)
    bounds = ends[-1] // count * np.arange(count + 1)
    before = np.clip(ends - count * row, bounds[:-1, None], bounds[1:, None])
    return np.clip(ends, bounds[:-1, None], bounds[1:, None]) - before


def _join(num_ranks: int) -> tuple[float, Sequence[Traffic]]:
    store, traffic = dist.HashStore(), [Traffic() for _ in range(num_ranks)]
    for rank in range(num_ranks):
        store.set(f"incarnation/{rank}", "0")
    with tempfile.TemporaryDirectory() as folder:
        members = [
            _member(Path(folder), rank, num_ranks, store, traffic[rank])
            for rank in range(num_ranks)
        ]
        seconds = _run(num_ranks, lambda rank: members[rank].join())
        assert {member.generation for member in members} == {1}
        cast("Any", members[0])._generations.end(1, "the benchmark is over")
        for member in members:
            member.leave()
    return seconds, traffic


def _member(
    folder: Path, rank: int, num_ranks: int, store: dist.Store, traffic: Traffic
) -> Membership:
    counted = CountedStore(store, traffic)
    member = Member(global_rank=rank, world_size=num_ranks, incarnation=0)
    page = StatusPage(folder / str(rank))
    return Membership(
        member,
        counted,
        store,
        cast("Any", NoGroups()),
        page,
        join_s=JOIN_S,
        grace_s=0.0,
    )


def _agree(
    num_ranks: int, profiles: Sequence[StageProfile]
) -> tuple[float, Sequence[Traffic]]:
    traffic, everyone = [Traffic() for _ in range(num_ranks)], SharedGroup(num_ranks)
    ranks_a_stage = num_ranks // len(profiles)
    of_stages = [SharedGroup(ranks_a_stage) for _ in profiles]

    def agree(rank: int) -> None:
        stage, in_stage = divmod(rank, ranks_a_stage)
        ranks = CountedRanks(rank, everyone, traffic[rank])
        of_stage = CountedRanks(in_stage, of_stages[stage], traffic[rank])
        position = _position(
            stage, len(profiles), cast("Ranks", ranks), cast("Ranks", of_stage)
        )
        assert len(share_profiles(position, profiles[stage]).stages) == len(profiles)

    return _run(num_ranks, agree), traffic


def _position(
    stage: int, num_stages: int, ranks: Ranks, stage_ranks: Ranks
) -> RankPosition:
    layout = ParallelLayout(pp=num_stages, dp=stage_ranks.size, ep=GPUS_A_NODE, tp=1)
    shard = ShardIdentity(
        global_rank=ranks.rank,
        pp_rank=stage,
        tp_rank=0,
        ep_rank=0,
        etp_rank=0,
        dp_rank=0,
    )
    return RankPosition(
        identity=RunIdentity(run_id="run", model="model", layout=layout),
        shard=shard,
        ranks=ranks,
        stage_ranks=stage_ranks,
        host_ranks=ranks,
        previous_rank=None,
        next_rank=None,
        device=torch.device("cpu"),
    )


def _report(num_ranks: int) -> tuple[object, ...]:
    """Return a report of a rank, as a survey gathers the reports.

    A report has the rank's standing, progress, held keys, and gradients.
    """
    return (1, None, False, False), False, {num_ranks - 1: frozenset[str]()}, {}


def _measured(profile: StageProfile) -> Measured:
    num_experts = sum(
        operator.expert is not None for operator in profile.table.operators
    )
    return Measured(
        iteration_s=1.0,
        copy_bytes_per_s=1e9,
        popularity=np.ones(num_experts),
        empty_snapshot_s=0.1,
        dense_snapshot_s=1.0,
    )


def _run(num_ranks: int, act: Callable[[int], object]) -> float:
    """Run an action in one thread per rank, and return the seconds of all threads."""
    threads = [
        threading.Thread(target=act, args=(rank,), daemon=True)
        for rank in range(num_ranks)
    ]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
