"""Facts about a machine: versions, and rates of copies and hashes.

Also checks whether a forked process can use the machine's GPU.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COPIED_BYTES = 1 << 30
_ON_CPU_BYTES = 1 << 27
_ROUNDS = 3


def measure(*, on_gpu: bool) -> str:
    """Return one line of facts, including rates of copies and hashes.

    Args:
        on_gpu: Whether the machine must have a GPU.

    Raises:
        AssertionError: The device is not the wanted one, or a forked process cannot
            compute on the device.
    """
    # as in launcher/train.py, so that the search for a GPU does not start CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch  # noqa: PLC0415
    import xxhash  # noqa: PLC0415

    assert torch.cuda.is_available() == on_gpu, (
        f"a GPU: got {torch.cuda.is_available()}, wanted {on_gpu} (--cpu)"
    )
    assert not torch.cuda.is_initialized(), (
        "the question for a GPU has started CUDA: workers cannot be forked"
    )
    _compute_in_a_fork("cuda" if on_gpu else "cpu")
    nbytes = _COPIED_BYTES if on_gpu else _ON_CPU_BYTES
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    facts = [
        *(
            f"{name} {_version(name)}"
            for name in ("torch", "megatron-core", "transformer-engine")
        ),
        f"/dev/shm {shutil.disk_usage('/dev/shm').free / 1e9:.0f} GB free",
        f"XXH3 {_rate(nbytes, lambda: xxhash.xxh3_128(payload.numpy().data)):.1f} GB/s",
        *(
            _rates_of_a_gpu(nbytes)
            if on_gpu
            else [f"host to host {_rate(nbytes, payload.clone):.1f} GB/s"]
        ),
    ]
    return ", ".join(facts)


def scaled_matmul(*, on_gpu: bool) -> str:
    """Multiply FP8 matrices on the device, with a product that is exact.

    Raises:
        AssertionError: The product is wrong.
    """
    import torch  # noqa: PLC0415

    device = torch.device("cuda" if on_gpu else "cpu")
    ones = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    product = torch._scaled_mm(ones, ones.t(), one, one, out_dtype=torch.bfloat16)
    assert bool((product == 16.0).all()), (
        f"_scaled_mm on {device}: got {product}, wanted 16"
    )
    return f"_scaled_mm on {device} is exact for ones"


def _compute_in_a_fork(device: str) -> None:
    import torch  # noqa: PLC0415

    pid = os.fork()
    if pid == 0:
        try:
            total = torch.ones(1000, device=device).sum().item()
            os._exit(0 if total == 1000.0 else 1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"a forked process on {device}: got status {status}, wanted 0"


def _rates_of_a_gpu(nbytes: int) -> list[str]:
    import torch  # noqa: PLC0415

    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    path = Path("/dev/shm") / f"moe_ckpt-acceptance-{os.getpid()}"
    with path.open("w+b") as file:
        path.unlink()
        file.truncate(nbytes)
        shared = mmap.mmap(file.fileno(), nbytes)
        registered = torch.frombuffer(shared, dtype=torch.uint8)
        begun_s = time.monotonic()
        address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, 0)))
        register_s = time.monotonic() - begun_s
        targets = {
            "pageable": torch.empty(nbytes, dtype=torch.uint8),
            "pinned": torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
            "registered /dev/shm": registered,
        }
        rates = [
            f"device to {name} {_copy_rate(source, target):.1f} GB/s"
            for name, target in targets.items()
        ]
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))  # pyright: ignore
    from torch.cuda import nccl  # noqa: PLC0415

    version = ".".join(map(str, nccl.version()))
    return [
        torch.cuda.get_device_name(),
        f"NCCL {version}",
        f"registering 1 GiB {register_s:.2f} s",
        *rates,
    ]


def _copy_rate(source: object, target: object) -> float:
    import torch  # noqa: PLC0415

    def copy() -> None:
        target.copy_(source, non_blocking=True)  # type: ignore[attr-defined]
        torch.cuda.synchronize()

    return _rate(source.nbytes, copy)  # type: ignore[attr-defined]


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    """Return the rate of the fastest of several rounds, in GB/s."""
    seconds = []
    for _ in range(_ROUNDS):
        begun_s = time.monotonic()
        work()
        seconds.append(time.monotonic() - begun_s)
    return nbytes / min(seconds) / 1e9


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
