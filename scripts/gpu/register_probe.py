"""Measure registration of host memory with CUDA, and gaps in kernel launches (A16).

    python scripts/gpu/register_probe.py [--gib 2] [--cpu]

The output has a line of JSON for each kind of pages and each size of a call: seconds
per GiB to touch and to register memory, and the longest gap between launches of a tiny
kernel by another thread. The last line has the gaps of another process, on the same
clock. --cpu: mlock in place of cudaHostRegister, and a clock in place of the kernel, to
rehearse the flow.

The probe changes settings of huge pages if permitted, and restores the settings.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_ckpt.agent import die_with_parent

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MFD_HUGETLB = 0x0004
_HUGE_BYTES = 2 << 20
_SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
_CALLS_BYTES = (256 << 20, 64 << 20, 16 << 20)
_TOUCHING_THREADS = 8
_PAUSE_S = 0.0002  # between launches
_LONG_GAP_S = 0.02
_NEIGHBOUR_LIMIT_S = 120.0

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Operations of a device, or of the stand-ins without a GPU."""

    register: Callable[[int, int], int]
    """Register memory, given as address and size in bytes.

    Returns a status, 0 for success.
    """

    unregister: Callable[[int, int], int]
    """Undo `register`, with the same arguments."""

    launch: Callable[[], object]
    """Launch a tiny kernel."""


def open_device(*, on_gpu: bool) -> Device:
    """Start CUDA in this process, or return stand-ins."""
    if not on_gpu:
        size = ctypes.c_size_t
        return Device(
            register=lambda at, nbytes: libc.mlock(ctypes.c_void_p(at), size(nbytes)),
            unregister=lambda at, nbytes: libc.munlock(
                ctypes.c_void_p(at), size(nbytes)
            ),
            launch=time.monotonic,
        )
    # imported here, after the fork of the neighbour
    import torch  # noqa: PLC0415

    one = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    cuda: Any = torch.cuda.cudart()
    return Device(
        register=lambda at, nbytes: int(cuda.cudaHostRegister(at, nbytes, 0)),
        unregister=lambda at, _nbytes: int(cuda.cudaHostUnregister(at)),
        launch=lambda: one.add_(0),
    )


class LongestGap:
    """A thread that launches work until `end`, and measures the longest gap."""

    def __init__(self, launch: Callable[[], object]) -> None:
        self._launch = launch
        self._longest_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """End the thread, and return the longest time between launches, in seconds."""
        self._is_over.set()
        self._thread.join()
        return self._longest_s

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._is_over.wait(_PAUSE_S):
            self._launch()
            now_s = time.monotonic()
            self._longest_s = max(self._longest_s, now_s - last_s)
            last_s = now_s


def start_neighbour(*, on_gpu: bool) -> tuple[int, int]:
    """Start a process that launches work all the time.

    Returns:
        The pid of the process, and the reading end of a pipe. The process writes a line
        when launches begin, and a line for each long gap: time of the end and length of
        the gap, in seconds.
    """
    gaps, said = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(said)
        return pid, gaps
    die_with_parent(signal.SIGKILL, parent=parent)
    try:
        _launch_and_say_gaps(open_device(on_gpu=on_gpu).launch, said)
    except Exception as error:  # the top of a process
        print(f"neighbour: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _launch_and_say_gaps(launch: Callable[[], object], said: int) -> None:
    launch()
    os.write(said, b"started\n")
    begun_s = last_s = time.monotonic()
    while last_s - begun_s < _NEIGHBOUR_LIMIT_S:
        launch()
        now_s = time.monotonic()
        if now_s - last_s > _LONG_GAP_S:
            os.write(said, f"{now_s:.3f} {now_s - last_s:.3f}\n".encode())
        last_s = now_s
        time.sleep(_PAUSE_S)


@contextlib.contextmanager
def pages_of(kind: str, nbytes: int) -> Iterator[None]:
    """Make a kind of pages available within the block, if this process may do so.

    Args:
        kind: `thp`, `hugetlb`, or another kind, for which nothing is changed.
        nbytes: The memory that the block needs.
    """
    path, value = {
        "thp": (_SHMEM_PAGES, "advise"),
        "hugetlb": (_HUGE_PAGES, str(nbytes // _HUGE_BYTES + 4)),
    }.get(kind, (None, ""))
    if path is None or not os.access(path, os.W_OK):
        yield
        return
    before = path.read_text()
    # the file shows several choices, the current one in brackets
    chosen = before.partition("[")[2].partition("]")[0] or before
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(chosen)


@contextlib.contextmanager
def shared_memory(nbytes: int, kind: str) -> Iterator[int]:
    """Yield the address of shared memory that has a kind of pages.

    Raises:
        OSError: There is no such memory.
    """
    if kind == "hugetlb":
        fd = os.memfd_create("register-probe", _MFD_HUGETLB)
    else:
        path = f"/dev/shm/register-probe-{os.getpid()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    held = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(held)
    if kind == "thp":
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)
    try:
        yield address
    finally:
        del held
        memory.close()


def touch(address: int, nbytes: int) -> float:
    """Create all pages of memory in several threads, and return the seconds for that.

    Raises:
        OSError: The pages cannot be created.
    """
    share = nbytes // _TOUCHING_THREADS

    def make(number: int) -> int:
        at = ctypes.c_void_p(address + number * share)
        return libc.madvise(at, ctypes.c_size_t(share), _MADV_POPULATE_WRITE)

    begun_s = time.monotonic()
    with ThreadPoolExecutor(_TOUCHING_THREADS) as threads:
        statuses = list(threads.map(make, range(_TOUCHING_THREADS)))
    if any(statuses):
        raise OSError(
            f"madvise(MADV_POPULATE_WRITE): got statuses {statuses}, wanted 0"
        )
    return time.monotonic() - begun_s


def measure(device: Device, kind: str, nbytes: int, call_bytes: int) -> dict[str, Any]:
    """Measure the registration of memory.

    Args:
        device: Registers the memory.
        kind: The kind of pages.
        nbytes: The size of the memory.
        call_bytes: The size of each call, in bytes.

    Returns:
        The facts of a line of output.
    """
    with shared_memory(nbytes, kind) as address:
        touched_s = touch(address, nbytes)
        calls = [
            (address + at, min(call_bytes, nbytes - at))
            for at in range(0, nbytes, call_bytes)
        ]
        gap = LongestGap(device.launch)
        begun_s, status = time.monotonic(), 0
        for at, size in calls:
            status |= device.register(at, size)
        ended_s = time.monotonic()
        longest_s = gap.end()
        for at, size in calls:
            device.unregister(at, size)
    gib = nbytes / 2**30
    return {
        "pages": kind,
        "call_mib": call_bytes >> 20,
        "touch_s_per_gib": round(touched_s / gib, 3),
        "register_s_per_gib": round((ended_s - begun_s) / gib, 3),
        "longest_gap_ms": round(1e3 * longest_s, 1),
        "status": status,
        "from_s": round(begun_s, 3),
        "to_s": round(ended_s, 3),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=2.0, help="memory to register at a time"
    )
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    options = parser.parse_args(arguments)
    whole = _HUGE_BYTES * _TOUCHING_THREADS  # each thread touches whole pages
    nbytes = int(options.gib * 2**30) // whole * whole
    pid, gaps = start_neighbour(on_gpu=not options.cpu)  # before CUDA starts here
    device = open_device(on_gpu=not options.cpu)
    num_registered = 0
    with open(gaps) as neighbour:
        if not neighbour.readline():
            return 1  # the neighbour has printed the reason
        for kind in ("4 KiB", "thp", "hugetlb"):
            try:
                with pages_of(kind, nbytes):
                    for call_bytes in (nbytes, *_CALLS_BYTES):
                        found = measure(device, kind, nbytes, call_bytes)
                        num_registered += found["status"] == 0
                        print(json.dumps(found), flush=True)
            except (OSError, ValueError) as error:
                print(json.dumps({"pages": kind, "error": str(error)}), flush=True)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        long = [tuple(map(float, line.split())) for line in neighbour]
    print(
        json.dumps(
            {
                "neighbour's gaps over 20 ms, to_s and seconds": long[:200],
                "number": len(long),
            }
        )
    )
    return (
        0
        if num_registered and os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        else 1
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
