"""Ranks policies and their parameters for a job on a cluster, by simulated ETTR.

The module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher.simulator.config import Simulation, compose_simulation
from launcher.simulator.runner import Result, latest, run_simulation
from moe_ckpt.config import FlowcheckConfig, require
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.checkpoint_interval import best_interval
from moe_ckpt.sim.saving import Setup

WINDOWS = (1, 2, 4, 8, 16)
"""Numbers of slots of a window that are tried, besides `auto`."""

SHARES = (16, 8, 4, 2)
"""Shares of experts in a partial snapshot that are tried: one expert of so many."""

# torchrun restarts for lost nodes, unless spare nodes take their ranks; supervisors
# replace workers without restarts
_MAX_RESTARTS = 10
_PORT = 29500


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A policy with its parameters."""

    overrides: tuple[str, ...]
    """Settings of the policy, as overrides."""

    result: Result | None
    """Result of the simulation; None if the candidate is impossible."""

    refusal: str = ""
    """Reason why the candidate is impossible; else empty."""

    @property
    def is_lossless(self) -> bool:
        """Whether the candidate is possible and loses no tokens."""
        return (
            self.result is not None and not self.result.simulation.policy.loses_tokens
        )


def rank_policies(
    arguments: Sequence[str], report: Callable[[str], object]
) -> list[Candidate]:
    """Return all candidates, the best first, impossible candidates last.

    Args:
        arguments: The overrides of the command line.
        report: A function that gets a line before each simulation. A simulation can
            take seconds.

    Raises:
        ConfigError: There is no MTBF, or a setting is wrong.
    """
    base = compose_simulation(arguments)
    require(
        base.general.mtbf_s is not None,
        "mtbf_s",
        None,
        "a number of seconds where plan=true",
    )
    tried, candidates = list[Candidate](), list(_candidates(base))
    for number, overrides in enumerate(candidates, 1):
        report(f"{number} of {len(candidates)}: {' '.join(overrides)}")
        tried.append(_try(arguments, overrides))
    return sorted(
        tried,
        key=lambda candidate: (
            -candidate.result.prediction.ettr if candidate.result else 1.0
        ),
    )


def command_of(candidate: Candidate, arguments: Sequence[str]) -> list[str]:
    """Return the words of the command that trains with a candidate, for each node.

    The user sets the variables $HOST, $JOB, $NODE_RANK and $MIRROR.

    Args:
        candidate: A candidate with a result.
        arguments: The overrides of the command line, of which those of the model are
            kept.
    """
    assert candidate.result is not None
    simulation = candidate.result.simulation
    layout, cluster, batch = (
        simulation.setup.job.layout,
        simulation.setup.cluster,
        simulation.setup.job.batch,
    )
    policy = simulation.policy
    mirrors = isinstance(policy, FlowcheckConfig) and policy.mirrors
    spares = num_spares(candidate)
    return [
        "torchrun",
        *_agent_options(cluster.nodes, spares),
        f"--nproc-per-node={cluster.gpus_per_node}",
        "launcher/train.py",
        # $PWD must be on a file system that all nodes see
        *(["run.dir=$PWD/outputs/$JOB"] if cluster.nodes > 1 else []),
        *([f"runtime.spare_nodes={spares}"] if spares else []),
        f"model={simulation.model.name}",
        *(argument for argument in arguments if argument.startswith("model.")),
        *(
            f"parallel.{degree}={getattr(layout, degree)}"
            for degree in ("pp", "dp", "ep", "tp")
        ),
        *(
            f"train.{name}={getattr(batch, name)}"
            for name in batch.__dataclass_fields__
        ),
        *(["train.distributed_optimizer=false"] if mirrors else []),
        *candidate.overrides,
    ]


def num_spares(candidate: Candidate) -> int:
    """Return the number of spare nodes that the job of a candidate starts with.

    Only supervisors let a spare node take the ranks of a lost one. Without supervisors
    torchrun starts all ranks again, and spare agents may come at any time.
    """
    assert candidate.result is not None
    simulation = candidate.result.simulation
    cluster = simulation.setup.cluster
    is_supervised = simulation.policy.in_memory is not None
    return cluster.spares if is_supervised and cluster.nodes > 1 else 0


def _agent_options(nodes: int, spares: int) -> list[str]:
    """Return the options of torchrun on a node that say how nodes meet."""
    if spares:
        # static: other agents start all ranks again when a node comes back
        return [
            f"--nnodes={nodes + spares}",
            "--node-rank=$NODE_RANK",
            "--master-addr=$HOST",
            f"--master-port={_PORT}",
        ]
    restarts = f"--max-restarts={_MAX_RESTARTS}"
    if nodes == 1:
        return [restarts]
    return [
        # not fewer nodes, because a spare node takes the place of a lost node
        f"--nnodes={nodes}:{nodes}",
        restarts,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=$HOST:{_PORT}",
        "--rdzv-id=$JOB",
    ]


def _try(arguments: Sequence[str], overrides: tuple[str, ...]) -> Candidate:
    groups = [re.split(r"[.=]", argument.lstrip("+"))[0] for argument in arguments]
    # a candidate has ckpt settings of its own: the section of the candidate may lack
    # keys of the policy that the user chose
    own = [
        argument
        for argument, group in zip(arguments, groups, strict=True)
        if group != "ckpt"
    ]
    try:
        return Candidate(
            overrides=overrides,
            result=run_simulation(compose_simulation(latest([*own, *overrides]))),
        )
    except ConfigError as error:
        return Candidate(overrides=overrides, result=None, refusal=str(error))


def _candidates(base: Simulation) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each policy and its parameters."""
    setup, mtbf_s = base.setup, base.general.mtbf_s
    assert mtbf_s is not None
    yield ("ckpt=none",)
    for asynchronous in ("false", "true"):
        every = _dense_interval(setup, mtbf_s, asynchronous=asynchronous == "true")
        yield (
            "ckpt=dense",
            f"ckpt.every_iters={every}",
            f"ckpt.async_save={asynchronous}",
        )
    yield ("ckpt=checkfreq",)
    copies = [replicas for replicas in (1, 2) if replicas < setup.cluster.nodes] or [0]
    for replicas in copies:
        yield "ckpt=gemini", f"ckpt.replicas={replicas}", f"ckpt.mtbf_s={mtbf_s:g}"
        yield "ckpt=flowcheck", f"ckpt.replicas={replicas}"
        if setup.job.layout.dp > 1:  # else no gradient crosses the network
            yield (
                "ckpt=flowcheck",
                f"ckpt.replicas={replicas}",
                "ckpt.capture=mirror",
                "ckpt.mirror_interface=$MIRROR",
            )
        for window in ("auto", *WINDOWS):
            yield "ckpt=moevement", f"ckpt.replicas={replicas}", f"ckpt.window={window}"
    num_experts = setup.job.shape.num_experts
    for experts in (
        ["auto", *sorted({max(1, num_experts // share) for share in SHARES})]
        if num_experts
        else ()
    ):
        yield "ckpt=moc", f"ckpt.k_snapshot={experts}"
        yield "ckpt=moetion", f"ckpt.experts={experts}"


def _dense_interval(setup: Setup, mtbf_s: float, *, asynchronous: bool) -> int:
    """Return the best number of iterations between whole checkpoints on disk.

    An asynchronous checkpoint may start only when the previous one is on disk.
    """
    cluster, costs, write_s = setup.cluster, setup.costs, setup.write_s
    copied = setup.total_full_bytes / (
        1 if cluster.copies_share == "job" else setup.job.layout.world_size
    )
    stall_s = copied / cluster.whole_copy_bytes_per_s if asynchronous else write_s
    best = best_interval(
        iteration_s=costs.iteration_s, checkpoint_s=stall_s, mtbf_s=mtbf_s
    )
    return max(best, int(write_s / costs.iteration_s) + 1) if asynchronous else best
