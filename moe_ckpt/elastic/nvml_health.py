"""A health command for the GPU of a rank, by NVML.

Set `runtime.health='python -m moe_ckpt.elastic.nvml_health'`. The command needs the
extra `nvml` (nvidia-ml-py), and fails with each sign that a replacement would die like
its forerunner. The command was written against NVML's documentation and stand-ins, and
has not run on a GPU yet. Must not: import torch, as the command has `runtime.health_s`
seconds.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_WATCH_MS = 1000
_MOST_XIDS = 100
_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that an error of a program causes, according to NVIDIA's list, such as a memory
fault of a kernel.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuHealth:
    """Signs of one GPU. None: the GPU does not report this sign."""

    uncorrected: int | None = None
    """Number of uncorrected ECC errors since the driver was loaded."""

    remap_failed: bool | None = None
    """Whether a row of memory could not be remapped."""

    remap_pending: bool | None = None
    """Whether a row of memory will be remapped at the next reset."""

    xids: tuple[int, ...] = ()
    """Xids that came while the command watched."""


def signs_of_sickness(health: GpuHealth) -> list[str]:
    """Describe the signs of sickness of a GPU.

    Args:
        health: The signs of the GPU. Xids of programs do not count.

    Returns:
        One text for each sign; none for a healthy GPU.
    """
    signs = [f"Xid {xid}" for xid in health.xids if xid not in _OF_PROGRAMS]
    if health.uncorrected:
        signs.append(f"{health.uncorrected} ECC errors that were not corrected")
    if health.remap_failed:
        signs.append("a row of memory could not be remapped")
    if health.remap_pending:
        signs.append("a row of memory waits to be remapped, for a reset")
    return signs


def name_of_gpu(environment: Mapping[str, str]) -> str:
    """Return the number or the UUID of this rank's GPU.

    NVML numbers all GPUs of the machine.

    Args:
        environment: The environment of the rank.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[local_rank] if local_rank < len(names) else str(local_rank)


def read_health(nvml: Any, gpu: str) -> GpuHealth:
    """Read the signs of a GPU.

    Args:
        nvml: The module pynvml.
        gpu: The number or the UUID of the GPU.

    Raises:
        NVMLError: The GPU does not answer, because it has fallen off the bus, for
            example.
    """
    find = (
        nvml.nvmlDeviceGetHandleByIndex
        if gpu.isdigit()
        else nvml.nvmlDeviceGetHandleByUUID
    )
    handle = find(int(gpu) if gpu.isdigit() else gpu)
    rows = _if_supported(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    # volatile and not aggregate counts: aggregate counts outlive reboots, and would
    # condemn a GPU for good
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return GpuHealth(
        uncorrected=_if_supported(
            nvml, lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
        ),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        xids=_if_supported(nvml, lambda: _watch_xids(nvml, handle)) or (),
    )


def _watch_xids(nvml: Any, handle: Any) -> tuple[int, ...]:
    """Return the Xids that come until no Xid has come for a second.

    NVML keeps no earlier Xids.
    """
    events = nvml.nvmlEventSetCreate()
    found: list[int] = []
    try:
        nvml.nvmlDeviceRegisterEvents(
            handle, nvml.nvmlEventTypeXidCriticalError, events
        )
        # bounded: a GPU that reports without pause would keep the command until
        # runtime.health_s
        while len(found) < _MOST_XIDS:
            found.append(int(nvml.nvmlEventSetWait_v2(events, _WATCH_MS).eventData))
    except nvml.NVMLError_Timeout:
        pass
    finally:
        nvml.nvmlEventSetFree(events)
    return tuple(found)


def _if_supported(nvml: Any, ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except nvml.NVMLError_NotSupported:
        return None


def main(environment: Mapping[str, str], say: Callable[[str], object]) -> int:
    """Check the GPU of this rank.

    Args:
        environment: The environment of the rank.
        say: Receives the reason for a status of 1.

    Returns:
        The exit status: 0 for a healthy GPU; 1 for a sick GPU, or if the health cannot
        be found out.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        say(
            "runtime.health: got no module pynvml, wanted the extra `nvml` (pip install"
            " 'moe-ckpt[nvml]')"
        )
        return 1
    gpu = name_of_gpu(environment)
    try:
        nvml.nvmlInit()
        signs: Sequence[str] = signs_of_sickness(read_health(nvml, gpu))
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        signs = [f"NVML says: {error}"]
    if signs:
        say(f"GPU {gpu}: {'; '.join(signs)}")
    return 1 if signs else 0


if __name__ == "__main__":
    sys.exit(main(os.environ, lambda text: print(text, file=sys.stderr)))
