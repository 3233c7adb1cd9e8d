"""Checks before anything is built that a model fits into the memory of a machine.

Must not: refuse a model that would fit. The needed memory is therefore a lower limit:
gradients, activations, snapshots and embeddings of an unknown vocabulary are left out,
and weights that tensor parallelism does not split count as split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.config import AUTO, Settings
from launcher.parameters import operator_parameters, padded_vocab_size
from moe_ckpt.config import require
from moe_ckpt.state_format import BYTES
from moe_ckpt.types import OperatorKind, ParallelLayout

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GPU_DRIVER = Path("/proc/driver/nvidia")
_GB = 1e9


def require_host_memory(
    settings: Settings, layout: ParallelLayout, ranks: Iterable[int], *, is_idle: bool
) -> None:
    """Require that a model fits into the memory of this machine.

    Does nothing on a machine with a GPU.

    Args:
        settings: The settings of the job.
        layout: The layout of the job.
        ranks: The ranks on this machine.
        is_idle: Whether no rank has begun to build. Then the free memory counts,
            otherwise all memory of the machine.

    Raises:
        ConfigError: The model does not fit.
    """
    if _GPU_DRIVER.exists():
        return
    needed_bytes = sum(state_bytes(settings, layout, rank) for rank in ranks)
    require_room(
        settings,
        needed_bytes,
        host_memory_bytes(is_idle=is_idle),
        "memory of this machine",
    )


def require_room(
    settings: Settings, needed_bytes: float, there_bytes: float, where: str
) -> None:
    """Require that weights and optimizer states fit.

    Args:
        settings: The settings of the job.
        needed_bytes: The bytes of weights and optimizer states.
        there_bytes: The bytes that the memory has.
        where: The name of the memory, for the error.

    Raises:
        ConfigError: The weights and optimizer states do not fit.
    """
    got = (
        f"{settings.model.name}, {needed_bytes / _GB:.3g} GB of weights and optimizer"
        " states"
    )
    wanted = (
        f"at most {there_bytes / _GB:.3g} GB, the {where}: fewer or smaller layers and"
        " experts"
    )
    require(needed_bytes <= there_bytes, "model", got, wanted)


def state_bytes(settings: Settings, layout: ParallelLayout, rank: int) -> float:
    """Return the least bytes of a rank's weights, master weights and moments.

    Example: `tiny` in BF16 on one rank, with FP32 states of Adam, has 14 bytes per
    parameter.

    Args:
        settings: The settings of the job.
        layout: The layout of the job.
        rank: The global rank.
    """
    model, formats = settings.model, settings.precision.state_format
    vocab_size = (
        0
        if model.vocab_size == AUTO
        else padded_vocab_size(int(model.vocab_size), layout)
    )
    layers_a_stage = model.num_layers // layout.pp
    stage = rank // layout.ranks_per_stage
    experts = others = 0
    for operator, count in operator_parameters(model, vocab_size):
        if operator.layer is not None:
            home = operator.layer // layers_a_stage
        else:
            home = 0 if operator.kind is OperatorKind.EMBEDDING else layout.pp - 1
        if home != stage:
            continue
        if operator.kind is OperatorKind.EXPERT:
            experts += count
        else:
            others += count
    held = (experts / layout.ep + others) / layout.tp
    stepped = (
        (experts + others) / (layout.dp * layout.tp)
        if settings.train.distributed_optimizer
        else held
    )
    # the weights of an FP32 model are their own masters
    masters = BYTES[formats.master] if settings.precision.dtype != "fp32" else 0
    moments = BYTES[formats.exp_avg] + BYTES[formats.exp_avg_sq]
    return held * formats.compute_bytes + stepped * (masters + moments)


def host_memory_bytes(*, is_idle: bool) -> float:
    """Return the memory and swap of this machine, in bytes.

    The limit of a container applies, if that is lower.

    Args:
        is_idle: Whether only free memory and swap count.
    """
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    kilobytes = {name.rstrip(":"): int(value) for name, value, *_ in lines}
    there_bytes = 1024 * _sum(
        kilobytes,
        ("MemAvailable", "SwapFree") if is_idle else ("MemTotal", "SwapTotal"),
    )
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return min(there_bytes, int(limit)) if limit.isdecimal() else there_bytes


def _sum(numbers: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(numbers[name] for name in names)
