"""Run time of the simulator, and how the time grows with the size of the job.

    python benchmarks/simulator.py [--quick]

The first figure is a whole command in a process of its own: 671 billion parameters on
16,384 GPUs for 12 hours at an MTBF of 10 minutes. Then single simulations run with more
and more GPUs, and with more and more operators. The column `n log n` has the seconds
that would follow from the first row if the time grew as n log n.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from launcher.simulator.config import compose_simulation  # noqa: E402
from moe_ckpt.faults.schedule import poisson_kills  # noqa: E402
from moe_ckpt.sim.cluster import simulate  # noqa: E402
from moe_ckpt.sim.costs import TimingConfig, estimate  # noqa: E402
from moe_ckpt.sim.job import BatchConfig, FormatsConfig, Job, ModelShape  # noqa: E402
from moe_ckpt.sim.policies import plan_saving  # noqa: E402
from moe_ckpt.sim.saving import Setup  # noqa: E402
from moe_ckpt.types import OperatorId, OperatorKind, ParallelLayout  # noqa: E402

HOURS_12_S = 43200.0
MTBF_S = 600.0
LARGEST = (
    "model=deepseek_671b cluster=h100_ib cluster.nodes=2048 cluster.copies_share=rank"
    " parallel.pp=64"
)
LARGEST += (
    " batch.global_batch_size=8192 batch.micro_batch_size=1 ckpt.replicas=2 mtbf_s=600"
    " runs=1"
)
NODES = (16, 64, 256, 1024, 2048)
OPERATORS = (1_000, 10_000, 100_000, 1_000_000)
EXPERTS = 248


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out the largest of each"
    )
    last = -1 if parser.parse_args().quick else None
    command_s, rss_bytes = whole_command()
    print(
        f"16,384 GPUs, 671B, 12 h, MTBF 10 min, the whole command: {command_s:.2f} s,"
        f" {rss_bytes / 2**20:.0f} MiB\n"
    )
    show("GPUs", [(8 * nodes, with_gpus(nodes)) for nodes in NODES[:last]])
    show("operators", [(count, with_operators(count)) for count in OPERATORS[:last]])
    return 0


def whole_command() -> tuple[float, int]:
    """Run the largest job's command in another process.

    Returns:
        The seconds of the command, and the peak memory of the process in bytes.
    """
    before = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "launcher.simulate", *LARGEST.split()],
        cwd=ROOT,
        check=True,
    )
    return time.perf_counter() - before, 1024 * resource.getrusage(
        resource.RUSAGE_CHILDREN
    ).ru_maxrss


def with_gpus(nodes: int) -> float:
    """Return the seconds of one simulation of so many nodes.

    The batch grows with the number of nodes.
    """
    overrides = [
        "cluster=h200",
        f"cluster.nodes={nodes}",
        "parallel.pp=8",
        "parallel.ep=8",
        "batch.micro_batch_size=1",
    ]
    simulation = compose_simulation(
        [*overrides, f"batch.global_batch_size={32 * nodes}", f"mtbf_s={MTBF_S}"]
    )
    before = time.perf_counter()
    saving = plan_saving(simulation.policy, simulation.setup)
    simulate(simulation.setup, saving, simulation.kills(0), duration_s=HOURS_12_S)
    return time.perf_counter() - before


def with_operators(count: int) -> float:
    """Return the seconds of one simulation of a model with about so many operators."""
    num_layers = max(8, count // (EXPERTS + 2))
    experts = max(8, count // num_layers // 8 * 8)
    base = compose_simulation(["cluster=h200", "parallel.pp=8"])
    shape = synthetic(num_layers, experts)
    before = time.perf_counter()
    layout = ParallelLayout(pp=8, dp=16, ep=8, tp=1)
    batch = BatchConfig(micro_batch_size=4, global_batch_size=512, sequence_length=2048)
    job = Job(shape, layout, batch, FormatsConfig(compute_bytes=2, full_bytes=12))
    costs = estimate(
        job, base.setup.cluster, TimingConfig(iteration_s=3.0, interleave=1)
    )
    setup = Setup(job=job, cluster=base.setup.cluster, costs=costs, mtbf_s=MTBF_S)
    saving = plan_saving(base.policy, setup)
    kills = poisson_kills(
        mtbf_s=MTBF_S, count=200, seed=0, world_size=layout.world_size, scope="node"
    )
    simulate(setup, saving, kills, duration_s=HOURS_12_S)
    return time.perf_counter() - before


def synthetic(num_layers: int, num_experts: int) -> ModelShape:
    """Return a model with equal layers and 16 billion parameters in all.

    The number of operators does not change the number of parameters.
    """
    operators = [OperatorId(kind=OperatorKind.EMBEDDING)]
    for layer in range(num_layers):
        operators += [
            OperatorId(kind=kind, layer=layer)
            for kind in (OperatorKind.BLOCK, OperatorKind.GATE)
        ]
        operators += [
            OperatorId(kind=OperatorKind.EXPERT, layer=layer, expert=expert)
            for expert in range(num_experts)
        ]
    operators += [
        OperatorId(kind=OperatorKind.FINAL_NORM),
        OperatorId(kind=OperatorKind.OUTPUT),
    ]
    return ModelShape(
        operators=tuple(operators),
        parameters=np.full(len(operators), 16 * 10**9 // len(operators), np.int64),
        num_layers=num_layers,
        hidden_size=2048,
        topk=8,
        popularity=np.full(num_experts, 1 / num_experts),
    )


def show(what: str, measured: list[tuple[int, float]]) -> None:
    """Print a table of seconds, beside the seconds of n log n growth.

    Args:
        what: The quantity that grows.
        measured: Pairs of the quantity and the seconds; the first pair is the
            reference.
    """
    first, first_s = measured[0]
    print(f"{what:>10} {'seconds':>10} {'n log n':>10}")
    for count, seconds in measured:
        grown_s = first_s * count * math.log(count) / (first * math.log(first))
        print(f"{count:>10,} {seconds:>10.3f} {grown_s:>10.3f}", flush=True)
    print()


if __name__ == "__main__":
    sys.exit(main())
