"""The health command finds sick GPUs, and the GPU of a rank. NVML is a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moe_ckpt.elastic.nvml_health import (
    GpuHealth,
    main,
    name_of_gpu,
    read_health,
    signs_of_sickness,
)
from tests.scenarios import ROOT


class NVMLError(Exception):
    """The base class of pynvml's errors."""


class NotSupportedError(NVMLError):
    """A GPU does not report the requested sign."""


class NoEventError(NVMLError):
    """No event has come in time."""


class StandInNvml(ModuleType):
    """Stand-in for NVML with one GPU.

    Attributes:
        asked: The numbers and names by which the GPU was requested.
        open: NVML itself, and the set of events, while open.
    """

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupportedError
    NVMLError_Timeout = NoEventError
    (
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        NVML_VOLATILE_ECC,
        nvmlEventTypeXidCriticalError,  # noqa: N815
    ) = 1, 0, 8

    def __init__(
        self,
        *,
        ecc: Any = 0,
        rows: Any = (0, 0, 0, 0),
        xids: Any = (),
        handle: Any = None,
    ) -> None:
        """Make the GPU.

        Args:
            ecc: The number of uncorrected ECC errors; an exception: raised by the
                request.
            rows: The counts of remapped rows, as NVML returns them; an exception:
                raised by the request.
            xids: The Xids that come; an exception: raised by the registration of
                events.
            handle: The handle of the GPU; an exception: raised by the look-up of the
                GPU.
        """
        super().__init__("pynvml")
        self.asked: list[Any] = []
        self.open: set[str] = set()
        self._refused = xids if isinstance(xids, Exception) else None
        self._xids = [] if isinstance(xids, Exception) else list(xids)
        self.nvmlInit = lambda: self.open.add("nvml")
        self.nvmlShutdown = lambda: self.open.remove("nvml")
        self.nvmlDeviceGetHandleByIndex = lambda number: self._of(number, handle)
        self.nvmlDeviceGetHandleByUUID = self.nvmlDeviceGetHandleByIndex
        self.nvmlDeviceGetTotalEccErrors = lambda gpu, kind, since: _result(
            ecc if (kind, since) == (1, 0) else -1
        )
        self.nvmlDeviceGetRemappedRows = lambda gpu: _result(rows)
        self.nvmlEventSetCreate = lambda: self.open.add("events")
        self.nvmlEventSetFree = lambda events: self.open.remove("events")
        self.nvmlDeviceRegisterEvents = lambda gpu, kind, events: _result(self._refused)
        self.nvmlEventSetWait_v2 = lambda events, limit_ms: self._next_event()

    def _of(self, name: Any, handle: Any) -> Any:
        self.asked.append(name)
        return _result(handle)

    def _next_event(self) -> Any:
        if not self._xids:
            raise NoEventError
        return SimpleNamespace(eventData=self._xids.pop(0))


def _result(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


@pytest.mark.parametrize(
    ("health", "signs"),
    [
        (GpuHealth(), []),
        (GpuHealth(uncorrected=0, remap_failed=False, remap_pending=False), []),
        (GpuHealth(uncorrected=3), ["3 ECC errors that were not corrected"]),
        (GpuHealth(remap_failed=True), ["a row of memory could not be remapped"]),
        (
            GpuHealth(remap_pending=True),
            ["a row of memory waits to be remapped, for a reset"],
        ),
        (GpuHealth(xids=(79,)), ["Xid 79"]),
        (GpuHealth(xids=(13, 31, 43, 45, 68, 109)), []),
        (
            GpuHealth(xids=(31, 48), uncorrected=1),
            ["Xid 48", "1 ECC errors that were not corrected"],
        ),
    ],
)
def test_signs(health: GpuHealth, signs: list[str]) -> None:
    assert signs_of_sickness(health) == signs


@pytest.mark.parametrize(
    ("environment", "gpu"),
    [
        ({}, "0"),
        ({"LOCAL_RANK": "3"}, "3"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4, 6"}, "6"),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-ab"}, "GPU-ab"),
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, "2"),
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": ""}, "2"),
    ],
)
def test_the_gpu_of_a_rank(environment: dict[str, str], gpu: str) -> None:
    assert name_of_gpu(environment) == gpu


@pytest.mark.parametrize(
    ("nvml", "health"),
    [
        (
            StandInNvml(),
            GpuHealth(uncorrected=0, remap_failed=False, remap_pending=False),
        ),
        (
            StandInNvml(ecc=2, rows=(5, 6, 0, 1), xids=(79, 63)),
            GpuHealth(
                uncorrected=2, remap_failed=True, remap_pending=False, xids=(79, 63)
            ),
        ),
        (
            StandInNvml(rows=(0, 0, 1, 0)),
            GpuHealth(uncorrected=0, remap_failed=False, remap_pending=True),
        ),
        (
            StandInNvml(
                ecc=NotSupportedError(),
                rows=NotSupportedError(),
                xids=NotSupportedError(),
            ),
            GpuHealth(),
        ),
    ],
    ids=["well", "sick", "reset", "an old one"],
)
def test_signs_are_read(nvml: StandInNvml, health: GpuHealth) -> None:
    assert read_health(nvml, "7") == health
    assert (nvml.asked, nvml.open) == ([7], set())


def test_a_gpu_with_a_name_is_found_by_it() -> None:
    nvml = StandInNvml()
    read_health(nvml, "GPU-ab")
    assert nvml.asked == ["GPU-ab"]


@pytest.mark.parametrize(
    ("nvml", "status", "says"),
    [
        (StandInNvml(), 0, []),
        (
            StandInNvml(ecc=1, xids=(79,)),
            1,
            ["GPU 1: Xid 79; 1 ECC errors that were not corrected"],
        ),
        (
            StandInNvml(handle=NVMLError("GPU is lost")),
            1,
            ["GPU 1: NVML says: GPU is lost"],
        ),
    ],
    ids=["well", "sick", "lost"],
)
def test_the_command(
    nvml: StandInNvml, status: int, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    said: list[str] = []
    assert (main({"LOCAL_RANK": "1"}, said.append), said) == (status, says)


def test_without_pynvml_the_command_says_what_to_install(tmp_path) -> None:
    """The command runs as a supervisor runs the command.

    A module that cannot be imported stands for a module that is not installed.
    """
    (tmp_path / "pynvml.py").write_text("raise ModuleNotFoundError('pynvml')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-X", "importtime", "-m", "moe_ckpt.elastic.nvml_health"]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "wanted the extra `nvml` (pip install 'moe-ckpt[nvml]')" in run.stderr
    assert "| torch" not in run.stderr, "seconds of imports, of runtime.health_s"
