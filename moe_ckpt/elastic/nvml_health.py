"""A health command for the GPU of a rank, by NVML: `runtime.health='python -m
moe_ckpt.elastic.nvml_health'`.

It needs the extra `nvml` (nvidia-ml-py), and fails with each sign that a replacement
would die like its forerunner. It was written against NVML's documentation and
stand-ins, and has not run on a GPU yet. Imports no torch: it has `runtime.health_s`
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
"""Xids that an error of a program causes, as NVIDIA's list of them says: a memory fault
of a kernel, say.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuHealth:
    """Signs of one GPU; None: it does not report this one.

    `uncorrected`: ECC errors since the driver was loaded. `remap_failed`,
    `remap_pending`: a row of memory could not be replaced, or is replaced at the next
    reset. `xids` came while the command watched.
    """

    uncorrected: int | None = None
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    xids: tuple[int, ...] = ()


def signs_of_sickness(health: GpuHealth) -> list[str]:
    """Return the signs, in words; none for a GPU that is well. Xids of programs are no
    sign.
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
    """Return the number or the UUID of this rank's GPU among all of the machine, which
    NVML counts.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[local_rank] if local_rank < len(names) else str(local_rank)


def read_health(nvml: Any, gpu: str) -> GpuHealth:
    """Read the signs of a GPU. Raises NVMLError for a GPU that cannot be asked: it has
    fallen off the bus, say.
    """
    find = (
        nvml.nvmlDeviceGetHandleByIndex
        if gpu.isdigit()
        else nvml.nvmlDeviceGetHandleByUUID
    )
    handle = find(int(gpu) if gpu.isdigit() else gpu)
    rows = _if_supported(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    # not the aggregate counts: these outlive reboots, and would condemn a GPU for good
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
    """Return the Xids that come until none has come for a second: NVML keeps no earlier
    ones.
    """
    events = nvml.nvmlEventSetCreate()
    found: list[int] = []
    try:
        nvml.nvmlDeviceRegisterEvents(
            handle, nvml.nvmlEventTypeXidCriticalError, events
        )
        # bounded: a GPU that reports without a pause would keep the command until
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
    """Return 0 for a GPU that is well, and 1 otherwise, or without the means to know:
    then `say` the reason.
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
