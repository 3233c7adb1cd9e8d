"""The part of docs/simulator.md that compares checkpoint servers with sparse windows.

Must not: choose rows by their result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from launcher.markdown_table import table_lines
from launcher.simulator.config import compose_simulation
from launcher.simulator.runner import Result, latest, run_simulation
from moe_ckpt.errors import ConfigError

JOB = (
    "model=deepseek_moe",
    "cluster=h200",
    "cluster.nodes=14",
    "cluster.spares=99",
    "parallel.pp=14",
    "parallel.ep=4",
)
"""Overrides of all simulations: the model, the machines and the layout."""

_MIRROR = ("ckpt.capture=mirror", "ckpt.mirror_interface=e0")
POLICIES: Mapping[str, tuple[str, ...]] = {
    "sparse windows": ("ckpt=moevement", "ckpt.mtbf_s=$mtbf_s"),
    "whole snapshots": ("ckpt=gemini", "ckpt.mtbf_s=$mtbf_s"),
    "servers, tap": ("ckpt=flowcheck",),
    "servers, mirror": ("ckpt=flowcheck", *_MIRROR),
}
"""Overrides of each column, by the column's head."""

_SLOW = ("cluster.copy_bytes_per_s=1e9", "cluster.whole_copy_bytes_per_s=1e9")
CASES: Mapping[str, tuple[str, ...]] = {
    "25 GB/s a GPU": (),
    "4 GB/s": ("cluster.copy_bytes_per_s=4e9", "cluster.whole_copy_bytes_per_s=4e9"),
    "1 GB/s": _SLOW,
    "1 GB/s, EP = DP": (*_SLOW, "parallel.ep=8"),
    "1 GB/s, 1e-9 of frames lost": (*_SLOW, "ckpt.capture_loss=1e-9"),
    "1 GB/s, a quarter of the processors": (*_SLOW, "cluster.server_bytes_per_s=2e9"),
    "25 GB/s, PP=1 DP=112": (
        "parallel.pp=1",
        "parallel.ep=8",
        "batch.global_batch_size=448",
    ),
}
"""Overrides of each case, by name."""

MTBFS_S = (600, 7200)
"""Mean times between failures of each case, in seconds."""


def server_lines(
    arguments: Sequence[str], cases: Collection[str] = tuple(CASES)
) -> list[str]:
    """Return a table of ETTRs, a row for each case and MTBF.

    Args:
        arguments: The overrides of each simulation.
        cases: The names of the cases.
    """
    rows = (
        [
            case,
            str(mtbf_s),
            *(_cell(case, policy, mtbf_s, arguments) for policy in POLICIES),
        ]
        for case in cases
        for mtbf_s in MTBFS_S
    )
    return table_lines(["copies to host memory", "MTBF, s", *POLICIES], rows)


def simulate_case(
    case: str, policy: str, mtbf_s: float, arguments: Sequence[str] = ()
) -> Result:
    """Return the result of a policy in a case.

    Args:
        case: The name of the case.
        policy: The head of the policy's column.
        mtbf_s: The mean time between failures, in seconds.
        arguments: Further overrides.

    Raises:
        ConfigError: The policy is impossible in this case.
    """
    mirrors = set(_MIRROR) <= set(POLICIES[policy])
    changes = [
        each
        for each in CASES[case]
        if mirrors or not each.startswith("ckpt.capture_loss=")
    ]
    overrides = latest(
        [*JOB, f"mtbf_s={mtbf_s:g}", *POLICIES[policy], *changes, *arguments]
    )
    return run_simulation(compose_simulation(overrides))


def _cell(case: str, policy: str, mtbf_s: float, arguments: Sequence[str]) -> str:
    try:
        result = simulate_case(case, policy, mtbf_s, arguments)
    except ConfigError as error:
        return f"`{str(error).partition(':')[0]}` too small"
    snapshot = result.saving.settled.repeat[0]
    slots = f" (W={snapshot.num_slots})" if policy == "sparse windows" else ""
    return f"{result.prediction.ettr:.4f}{slots}"
