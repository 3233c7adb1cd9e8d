"""Probe NCCL between processes that share one GPU, with torch alone.

    python scripts/gpu/nccl_probe.py [--ranks 4] [--same-host | --cpu]

The probe measures times of operations, and of aborts after one process is killed. Each
line of output is a fact in JSON. The exit status is 0 if ranks form groups, and end as
wanted in all generations without ncclCommRevoke. If the probe fails, no job of the
project gives more information. --same-host: ranks of one host share a GPU, which NCCL
2.30 and newer allow (LD_PRELOAD), so that transports are CUDA's and shared memory.
--cpu: the same with gloo, without an abort, to rehearse the flow.

    generation 0   form, measure, kill the last rank, abort on the others
    generation 1   the same, with ncclCommRevoke before the abort
    generation 2   form, measure, end
    launch         a first transfer to a dead peer: does ncclCommRevoke end its launch?
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# ranks are forks, so torch's search for a GPU must not start CUDA
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch.distributed as dist
from torch.cuda import nccl

from moe_ckpt.agent import die_with_parent
from moe_ckpt.elastic.backend_choice import environment_of_shared_gpus

_ABORT, _REVOKE, _NOTHING = "abort", "revoke", "nothing"
_GENERATIONS = (_ABORT, _REVOKE, _NOTHING)
_RANKS_LIMIT_S = 25.0
_LAUNCH_LIMIT_S = 15.0
_OPERATION_S = 60.0
_MEASURED = 7
# until a killed peer is gone, and the collective without that peer is under way
_SETTLE_S = 1.5
_SMALL, _LARGE = (1 << 10) // 4, (4 << 20) // 4  # FP32 numbers in 1 KiB and 4 MiB
_ENVIRONMENT = {
    "NCCL_ALGO": "Ring",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_DEBUG": "WARN",
    # survivors end operations themselves, so torch must not
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Settings that all ranks of the probe share."""

    num_ranks: int
    """Number of ranks of a generation."""

    on_gpu: bool
    """Whether to use NCCL on one GPU; otherwise gloo with CPU tensors."""

    same_host: bool
    """Whether NCCL takes the ranks for ranks of one host."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    def prepare(self, rank: int) -> None:
        """Set NCCL's environment of a rank, before the rank's first communicator."""
        shared = environment_of_shared_gpus(f"{socket.gethostname()}-{rank}")
        if self.same_host:
            for name in ("NCCL_HOSTID", "NCCL_NET", "NCCL_IB_DISABLE"):
                del shared[name]
            shared["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ.update(_ENVIRONMENT | shared)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group and its backend."""

    group: Any
    backend: Any


def say(**fact: Any) -> None:
    """Print a fact as one whole line, because several processes print."""
    os.write(sys.stdout.fileno(), (json.dumps(fact) + "\n").encode())


def form(probe: Probe, rank: int, num_ranks: int, store_path: str, name: str) -> Group:
    """Form a process group of ranks that meet in a file.

    Args:
        probe: The settings.
        rank: This rank.
        num_ranks: The number of ranks of the group.
        store_path: The file.
        name: The name of the group, unique in the file.
    """
    store = dist.PrefixStore(name, dist.FileStore(store_path, num_ranks))
    if probe.on_gpu:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_OPERATION_S)
        options.config.blocking = 1
        backend: Any = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        kind = dist.ProcessGroup.BackendType.NCCL
        backend.eager_connect_single_device(probe.device)
    else:
        backend = dist.ProcessGroupGloo(
            store, rank, num_ranks, timedelta(seconds=_OPERATION_S)
        )
        kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, num_ranks)
    group._set_default_backend(kind)
    group._register_backend(probe.device, kind, backend)
    return Group(group=group, backend=backend)


def median_ms(operation: Callable[[], object]) -> float:
    """Return the median milliseconds of an operation, with its work on the device."""
    seconds = []
    for _ in range(_MEASURED):
        begun_s = time.monotonic()
        operation()
        _synchronize()
        seconds.append(time.monotonic() - begun_s)
    return round(1e3 * statistics.median(seconds), 2)


def be_rank(probe: Probe, rank: int, store_path: str, generation: int) -> None:
    """Run a rank of a generation.

    The rank forms groups, measures operations, and survives the last rank's death.

    Args:
        probe: The settings.
        rank: This rank.
        store_path: The file in which ranks meet.
        generation: Index in `_GENERATIONS`.
    """
    probe.prepare(rank)
    end_by = _GENERATIONS[generation]
    begun_s = time.monotonic()
    small = torch.ones(_SMALL, device=probe.device)
    _synchronize()
    context_s = time.monotonic() - begun_s
    met = dist.PrefixStore(
        f"{generation}-met", dist.FileStore(store_path, probe.num_ranks)
    )
    # the memory of all ranks' CUDA contexts must not count as communicators' memory
    _meet(met, "started", rank, probe.num_ranks)
    free_bytes = torch.cuda.mem_get_info()[0] if probe.on_gpu else 0
    begun_s = time.monotonic()
    first, *others = (
        form(probe, rank, probe.num_ranks, store_path, f"{generation}-{n}")
        for n in range(3)
    )
    formed_s = time.monotonic() - begun_s
    _meet(met, "formed", rank, probe.num_ranks)
    if rank == 0:
        taken_bytes = free_bytes - torch.cuda.mem_get_info()[0] if probe.on_gpu else 0
        say(
            step=f"generation {generation}: 3 groups formed",
            seconds=round(formed_s, 2),
            context_s=round(context_s, 2),
            mib_of_all_ranks=round(taken_bytes / 2**20),
            **({"nccl": ".".join(map(str, nccl.version()))} if probe.on_gpu else {}),
        )
    large = torch.ones(_LARGE, device=probe.device)
    measured = _measure(probe, rank, first, small, large)
    total = torch.full_like(small, float(rank + 1))
    first.group.allreduce([total]).wait()
    is_right = bool((total == probe.num_ranks * (probe.num_ranks + 1) / 2).all())
    if rank == 0:
        say(
            step=f"generation {generation}: milliseconds",
            sum_is_right=is_right,
            **measured,
        )
    assert is_right, f"a sum over ranks: got {total[0].item()}"
    if end_by == _NOTHING:
        return
    # a sum that is complete on this rank may be incomplete on other ranks
    _meet(met, "measured", rank, probe.num_ranks)
    if rank == probe.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _survive(probe, rank, first, others, large, end_by)


def _meet(store: dist.Store, point: str, rank: int, num_ranks: int) -> None:
    """Return once all ranks are at this point."""
    store.set(f"{point}/{rank}", "")
    store.wait([f"{point}/{other}" for other in range(num_ranks)])


def _measure(
    probe: Probe, rank: int, first: Group, small: torch.Tensor, large: torch.Tensor
) -> dict[str, float]:
    group, backend = first.group, first.backend
    found = {
        "allreduce 1 KiB": median_ms(lambda: group.allreduce([small]).wait()),
        "allreduce 4 MiB": median_ms(lambda: group.allreduce([large]).wait()),
    }
    if not probe.on_gpu or probe.num_ranks % 2:
        return found
    received = torch.empty_like(large)
    found["all-to-all 4 MiB"] = median_ms(
        lambda: group.alltoall_base(received, large, [], []).wait()
    )
    quarter, peer = large[: large.numel() // 4].clone(), rank ^ 1

    def exchange() -> None:
        backend._start_coalescing(probe.device)
        group.send([quarter], peer, 0)
        group.recv([received[: quarter.numel()]], peer, 0)
        backend._end_coalescing(probe.device).wait()

    exchange()  # the first exchange connects the ranks
    found["send and receive 1 MiB"] = median_ms(exchange)
    return found


def _survive(
    probe: Probe,
    rank: int,
    first: Group,
    others: Sequence[Group],
    large: torch.Tensor,
    end_by: str,
) -> None:
    """End a collective that a dead peer misses; check that the device still works."""
    with contextlib.suppress(RuntimeError):  # gloo may find the death at once
        first.group.allreduce([large])
    time.sleep(_SETTLE_S)
    if not probe.on_gpu:
        say(step=f"rank {rank}: gloo has no abort")
        os._exit(0)
    begun_s = time.monotonic()
    if end_by == _REVOKE:
        status = _revoke(first)
        torch.cuda.synchronize()
        say(
            step=f"rank {rank}: ncclCommRevoke",
            status=status,
            seconds=round(time.monotonic() - begun_s, 3),
        )
    for each in others:
        threading.Thread(target=each.group.abort, daemon=True).start()
    first.group.abort()
    torch.cuda.synchronize()
    seconds = round(time.monotonic() - begun_s, 3)
    say(
        step=f"rank {rank}: aborted",
        after=end_by,
        seconds=seconds,
        error=str(first.backend.get_error()),
    )
    doubled = (2 * torch.ones(1, device=probe.device)).item()
    assert doubled == 2.0, f"the device after an abort: got {doubled}, wanted 2"


def be_launching_rank(probe: Probe, rank: int, store_path: str) -> None:
    """Run a rank that launches the first transfer to a dead peer.

    The launch itself waits for a connection.
    """
    probe.prepare(rank)
    tensor = torch.ones(_SMALL, device=probe.device)
    group = form(probe, rank, 2, store_path, "launch")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_SETTLE_S)
    has_ended = threading.Event()

    def launch() -> None:
        torch.cuda.set_device(probe.device)
        try:
            group.group.send([tensor], 1, 0)
            outcome = "returned"
        except Exception as error:  # any outcome is a fact
            outcome = type(error).__name__
        say(step="launch of a first send to a dead peer", outcome=outcome)
        has_ended.set()

    threading.Thread(target=launch, daemon=True).start()
    by_itself = has_ended.wait(2)
    say(
        step="launch of a first send to a dead peer: ends by itself in 2 s",
        ends=by_itself,
    )
    if not by_itself:
        begun_s = time.monotonic()
        threading.Thread(target=_revoke, args=(group,), daemon=True).start()
        ends = has_ended.wait(5)
        say(
            step="the same after ncclCommRevoke",
            ends=ends,
            seconds=round(time.monotonic() - begun_s, 3),
        )
    os._exit(0)


def _revoke(group: Group) -> int:
    """Call ncclCommRevoke of the NCCL that torch has loaded; return the status."""
    library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    return library.ncclCommRevoke(ctypes.c_void_p(group.backend._comm_ptr()), 0)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def fork(target: Callable[..., None], *arguments: Any) -> int:
    """Fork a process that calls a function and ends with its parent; return the pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(signal.SIGKILL, parent=parent)
    status = 1
    try:
        target(*arguments)
        status = 0
    except Exception as error:  # the top of a process
        say(step="FAILED", error=f"{type(error).__name__}: {error}"[:600])
    finally:
        os._exit(status)


def wait_for(pids: Sequence[int], limit_s: float) -> list[int | str]:
    """Wait for processes, and kill those that run after a time limit.

    Returns:
        The exit statuses; `late` for a killed process.
    """
    late: set[int] = set()

    def kill_all() -> None:
        for pid in pids:
            with contextlib.suppress(ChildProcessError):  # the process has been reaped
                if (
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    is None
                ):
                    os.kill(pid, signal.SIGKILL)
                    late.add(pid)

    timer = threading.Timer(limit_s, kill_all)
    timer.start()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    timer.cancel()
    return [
        "late" if pid in late else status
        for pid, status in zip(pids, statuses, strict=True)
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cpu", action="store_true", help="gloo, without a GPU")
    parser.add_argument("--same-host", action="store_true", help="NCCL 2.30 or newer")
    options = parser.parse_args(arguments)
    probe = Probe(
        num_ranks=options.ranks, on_gpu=not options.cpu, same_host=options.same_host
    )
    is_as_wanted = True
    with tempfile.TemporaryDirectory() as folder:
        for generation, end_by in enumerate(_GENERATIONS):
            path = f"{folder}/{generation}"
            pids = [
                fork(be_rank, probe, rank, path, generation)
                for rank in range(probe.num_ranks)
            ]
            got = wait_for(pids, _RANKS_LIMIT_S)
            last = 0 if end_by == _NOTHING else -int(signal.SIGKILL)
            wanted = [0] * (probe.num_ranks - 1) + [last]
            say(step=f"generation {generation}: statuses", got=got, wanted=wanted)
            # nothing of the project uses ncclCommRevoke
            is_as_wanted &= got == wanted or end_by == _REVOKE
        if probe.on_gpu:
            pids = [
                fork(be_launching_rank, probe, rank, f"{folder}/launch")
                for rank in range(2)
            ]
            say(step="launch: statuses", got=wait_for(pids, _LAUNCH_LIMIT_S))
    return 0 if is_as_wanted else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
