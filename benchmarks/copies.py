"""Speed of copies to a peer's memory, beside a plain send of the same bytes.

    torchrun --nproc-per-node=2 benchmarks/copies.py [--mib 83] [--rounds 10]
        [--interface NAME]

In turn rank 0 sends a tensor to rank 1 with `torch.distributed` (gloo), and copies a
blob of the same size with a replicator to rank 1's copy server. A copy includes
checksums, framing and a file in shared memory. Both run between the same two processes,
and nothing else runs. The ratio is the number that counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_ckpt.elastic.network import interface_addresses
from moe_ckpt.replication.copy_server import CopyServer
from moe_ckpt.replication.messages import Address, Ticket
from moe_ckpt.replication.sender import Replicator
from moe_ckpt.snapshot.blobs import BlobFolder, own_path

_TICKET = Ticket(run_id="benchmark", token="none")
_DEADLINE_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=83)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--interface")
    options = parser.parse_args()
    host = (
        interface_addresses()[options.interface] if options.interface else "127.0.0.1"
    )
    if options.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(
        dir="/dev/shm", prefix="moe_ckpt-copies-"
    ) as folder:
        rank = dist.get_rank()
        server = CopyServer(
            Path(folder), rank, _TICKET, host=host, timeout_s=_DEADLINE_S
        )
        addresses: list[Address] = [server.address] * 2
        dist.all_gather_object(addresses, server.address)
        own = BlobFolder(own_path(Path(folder)))
        replicator = Replicator(
            own, rank, _TICKET, may_send=lambda: True, deadline_s=_DEADLINE_S
        )
        replicator.use_peers([addresses[1 - rank]])
        payload = own.allocate(options.mib << 20)
        payload.random_()
        own.publish("blob", b"header", payload, payload.numel())
        seconds = [
            (_send(payload), _copy(replicator)) for _ in range(options.rounds + 1)
        ][1:]
        replicator.close()
        server.close()
    if rank == 0:
        _show(options.mib, seconds)
    dist.destroy_process_group()
    return 0


def _send(payload: torch.Tensor) -> float:
    """Return the seconds until rank 1 has the whole tensor."""
    dist.barrier()
    since_s = time.monotonic()
    if dist.get_rank() == 0:
        dist.send(payload, 1)
    else:
        dist.recv(torch.empty_like(payload), 0)
    dist.barrier()
    return time.monotonic() - since_s


def _copy(replicator: Replicator) -> float:
    dist.barrier()
    since_s = time.monotonic()
    if dist.get_rank() == 0:
        replicator.copy(["blob"]).result()
    dist.barrier()
    return time.monotonic() - since_s


def _show(mib: int, seconds: list[tuple[float, float]]) -> None:
    sent, copied = (
        statistics.median(pair[kind] for pair in seconds) for kind in (0, 1)
    )
    ratios = [send / copy for send, copy in seconds]
    print(f"{mib} MiB, {len(seconds)} rounds, medians")
    print(f"plain send            {mib / 1024 / sent:.2f} GiB/s")
    print(f"copy, with checksums  {mib / 1024 / copied:.2f} GiB/s")
    print(
        f"copy beside send      {statistics.median(ratios):.2f}  ({min(ratios):.2f} to"
        f" {max(ratios):.2f})"
    )


if __name__ == "__main__":
    sys.exit(main())
