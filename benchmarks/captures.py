"""Iterations that captures cannot complete, beside equation (2) of FlowCheck.

    python benchmarks/captures.py [--ranks 4] [--kib 1024] [--iterations 10]
        [--replays 40] [--loss 1e-3] [--write PAGE]

Ranks reduce one bucket in each iteration over gloo. All frames at the loopback
interface are recorded once, which needs CAP_NET_RAW. The frames are cut into packets as
on a network with an MTU of 1500, and replayed to 1, 2 and 3 captures. Each capture
loses packets at random. An iteration counts as lost if the captures together lack any
byte of the sum. The sum of a complete iteration is compared with the ranks' own sum.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.marks import rewrite  # noqa: E402
from benchmarks.runs import current_commit  # noqa: E402
from moe_ckpt.flowcheck.mirror.frames import TcpSegment, segment_of  # noqa: E402
from moe_ckpt.flowcheck.mirror.marks import find_mark, mark_of  # noqa: E402
from moe_ckpt.flowcheck.mirror.plan import MirroredSums  # noqa: E402
from moe_ckpt.flowcheck.mirror.port import MirrorPort  # noqa: E402
from moe_ckpt.flowcheck.mirror.watcher import Watcher  # noqa: E402
from moe_ckpt.sim.capture_redundancy import PACKET_BYTES, failure_probability  # noqa: E402

MARKS = (
    "<!-- captures: written by benchmarks/captures.py -->",
    "<!-- end of captures -->",
)
GROUP = b"captures' shares"
_PORT = 29556
_CAPTURES = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of iterations that a number of captures loses."""

    captures: int
    """Number of captures."""

    iterations: int
    """Iterations of all replays."""

    lost: int
    """Iterations that were lost."""

    packets: float
    """Packets that carry the sum of one iteration."""


def be_rank(rank: int, num_ranks: int, num_bytes: int, iterations: int) -> None:
    """Run one rank: reduce a mark, then the bucket of each iteration."""
    store = dist.TCPStore("127.0.0.1", _PORT, num_ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    mark = bytearray(mark_of(GROUP, num_ranks, rank))
    dist.all_reduce(torch.frombuffer(mark, dtype=torch.uint8), dist.ReduceOp.MAX)
    for iteration in range(iterations):
        dist.all_reduce(
            torch.arange(num_bytes // 4, dtype=torch.float32) % 1000 + iteration
        )
    dist.barrier()


def record(num_ranks: int, num_bytes: int, iterations: int) -> list[TcpSegment]:
    """Record the frames of a group of ranks at the loopback interface.

    Returns:
        The segments of the group, in order, in packets as on a network.

    Raises:
        ConfigError: The process lacks the privilege CAP_NET_RAW.
    """
    port, frames, is_over = MirrorPort("lo"), list[bytes](), Event()

    def read() -> None:
        while (some := port.read(0.05)) or not is_over.is_set():
            frames.extend(some)

    thread = Thread(target=read)
    thread.start()
    options = [str(value) for value in (num_ranks, num_bytes, iterations)]
    ranks = [
        subprocess.Popen([sys.executable, __file__, "rank", str(rank), *options])
        for rank in range(num_ranks)
    ]
    statuses = [rank.wait(120) for rank in ranks]
    is_over.set()
    thread.join()
    port.close()
    assert statuses == [0] * num_ranks, statuses
    seen = [segment for frame in frames if (segment := segment_of(frame))]
    # the interface carries segments of other processes, too
    streams = {segment.stream for segment in seen if find_mark(segment.payload)}
    return [
        packet
        for segment in seen
        if segment.stream in streams
        for packet in _packets(segment)
    ]


def _packets(segment: TcpSegment) -> Iterator[TcpSegment]:
    for start in range(0, max(1, len(segment.payload)), PACKET_BYTES):
        part = segment.payload[start : start + PACKET_BYTES]
        yield replace(
            segment, sequence=(segment.sequence + start) % 2**32, payload=part
        )


def replay(
    segments: Sequence[TcpSegment],
    wanted: Sequence[MirroredSums],
    captures: int,
    loss: float,
    seed: int,
) -> Share:
    """Replay segments once to captures that lose packets.

    Args:
        segments: The recorded segments.
        wanted: The sums of each iteration.
        captures: The number of captures.
        loss: The probability that a capture loses a packet.
        seed: The seed of the losses.
    """
    watcher = Watcher(captures, loss=loss, seed=seed)
    for segment in segments:
        watcher.see_segment(segment)
    watcher.flush()
    results = [watcher.sums(sums) for sums in wanted]
    for iteration, result in enumerate(results):
        assert result is None or bytes(result[0]) == _sum(wanted[0], iteration), (
            iteration
        )
    size = wanted[0].size
    of_capture = watcher.num_watched / captures / len(wanted)
    packets = of_capture / 2 * size / (size - 1)  # half carry partial sums
    return Share(
        captures=captures,
        iterations=len(wanted),
        lost=sum(each is None for each in results),
        packets=packets,
    )


def _sum(sums: MirroredSums, iteration: int) -> bytes:
    values = np.arange(sums.buckets[0] // 4, dtype=np.float32) % 1000 + np.float32(
        iteration
    )
    # whole numbers below 2**24: their sum is exact in any order
    return (values * np.float32(sums.size)).tobytes()


def measure(
    segments: Sequence[TcpSegment],
    wanted: Sequence[MirroredSums],
    loss: float,
    replays: int,
) -> list[Share]:
    """Replay segments to each number of captures, with a seed for each replay.

    Returns:
        The share of all replays, for each number of captures.
    """
    found = []
    for captures in _CAPTURES:
        shares = [
            replay(segments, wanted, captures, loss, seed) for seed in range(replays)
        ]
        total = sum(share.iterations for share in shares)
        lost = sum(share.lost for share in shares)
        found.append(
            Share(
                captures=captures,
                iterations=total,
                lost=lost,
                packets=shares[0].packets,
            )
        )
    return found


def table(shares: Sequence[Share], size: int, loss: float) -> str:
    lines = [
        "| captures | lost of | measured | equation (2) |",
        "| --- | --- | --- | --- |",
    ]
    for share in shares:
        expected = failure_probability(
            packets=share.packets, ranks=size, captures=share.captures, loss=loss
        )
        measured = share.lost / share.iterations
        lines.append(
            f"| {share.captures} | {share.lost} of {share.iterations} | {measured:.3g}"
            f" | {expected:.3g} |"
        )
    lines += [
        "",
        (
            f"{size} ranks, {shares[0].packets:.0f} packets an iteration, a loss of"
            f" {loss:g} at each capture."
        ),
    ]
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        be_rank(*map(int, sys.argv[2:]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kib", type=int, default=1024, help="size of the bucket")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument("--loss", type=float, default=1e-3)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    num_bytes = options.kib << 10
    wanted = [
        MirroredSums(
            group=GROUP.hex(),
            size=options.ranks,
            buckets=(num_bytes,),
            dtype="float32",
            first=first,
            end=first + 1,
        )
        for first in range(1, 1 + options.iterations)
    ]
    segments = record(options.ranks, num_bytes, options.iterations)
    made = table(
        measure(segments, wanted, options.loss, options.replays),
        options.ranks,
        options.loss,
    )
    print(made)
    if options.write:
        rewrite(options.write, MARKS, lambda _: f"{made} Commit {current_commit()}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
