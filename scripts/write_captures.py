"""Write the captures for tests of the mirror's parser.

    python scripts/write_captures.py           needs root

Three ranks on three hosts (scripts/hosts.py) reduce a mark, then two buckets of
gradients and a norm in each of two iterations, as training steps do, and end with a
barrier. The frames of the mirror port are written to
tests/flowcheck/captures/ring.pcap.
Gradients are functions of (iteration, bucket, rank, element), so that tests can compute
the sums.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_ckpt.flowcheck.mirror.marks import mark_of
from scripts import hosts

GROUP = b"the captured set"
NUM_RANKS, ITERATIONS, BUCKETS = 3, 2, (1500, 700)
CAPTURES = Path(__file__).resolve().parent.parent / "tests" / "mirror" / "captures"
_PORT = 29555
_ALL_PROTOCOLS, _SO_RCVBUFFORCE = 3, 33
_READY, _DONE = b"ready\n", b"done\n"


def gradient(iteration: int, bucket: int, rank: int, size: int) -> torch.Tensor:
    """Return a gradient of small whole numbers, whose sums are exact in any order."""
    return (
        torch.arange(size, dtype=torch.float32) % 1000
        + 1000 * bucket
        + 10_000 * iteration
        + rank
    )


def be_rank(rank: int) -> None:
    """Run the collective operations of all iterations on one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.INTERFACE
    store = dist.TCPStore(hosts.address_of(0), _PORT, NUM_RANKS, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    mark = bytearray(mark_of(GROUP, NUM_RANKS, rank))
    dist.all_reduce(torch.frombuffer(mark, dtype=torch.uint8), dist.ReduceOp.MAX)
    for iteration in range(ITERATIONS):
        for bucket, size in enumerate(BUCKETS):
            dist.all_reduce(gradient(iteration, bucket, rank, size))
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def be_mirror(path: Path) -> None:
    """Capture all frames until a line of standard input, and write a pcap file."""
    with socket.socket(
        socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)
    ) as port:
        port.bind((hosts.INTERFACE, 0))
        port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 26)
        sys.stdout.buffer.write(_READY)
        sys.stdout.flush()
        sys.stdin.buffer.readline()
        port.setblocking(False)
        write_pcap(path, _frames(port))


def _frames(port: socket.socket) -> list[bytes]:
    frames = []
    while True:
        try:
            frames.append(port.recv(1 << 17))
        except BlockingIOError:
            return frames


def write_pcap(path: Path, frames: Sequence[bytes]) -> None:
    """Write frames in the classic little-endian pcap format, link type Ethernet."""
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 18, 1))
        for number, frame in enumerate(frames):
            file.write(struct.pack("<IIII", 0, number, len(frame), len(frame)) + frame)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # run as this rank
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    # run as the process that captures into this file
    parser.add_argument("--mirror", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options.rank)
        return 0
    if options.mirror is not None:
        be_mirror(options.mirror)
        return 0
    CAPTURES.mkdir(parents=True, exist_ok=True)
    hosts.up(NUM_RANKS)
    try:
        capture(CAPTURES / "ring.pcap")
    finally:
        hosts.down()
    return 0


def capture(path: Path) -> None:
    """Run the capturing process and the ranks, each in its network namespace."""
    inside = lambda namespace, *arguments: [  # noqa: E731
        *("ip", "netns", "exec", namespace, sys.executable, __file__, *arguments)
    ]
    mirror = subprocess.Popen(
        inside(hosts.mirror_namespace(), "--mirror", str(path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert mirror.stdin is not None
    assert mirror.stdout is not None
    assert mirror.stdout.readline() == _READY
    ranks = [
        subprocess.Popen(inside(hosts.name_of(rank), "--rank", str(rank)))
        for rank in range(NUM_RANKS)
    ]
    statuses = [rank.wait(60) for rank in ranks]
    assert statuses == [0] * NUM_RANKS, statuses
    mirror.communicate(_DONE)
    assert mirror.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
