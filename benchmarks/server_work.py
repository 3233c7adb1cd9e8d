"""Work of a checkpoint server after the last byte: in one go, and as a pipeline.

    python benchmarks/server_work.py [--layers 24] [--million 1.0]
        [--mbytes-per-s 400] [--iterations 12] [--mib 8]

Tap: a rank of `--layers` layers of `--million` million parameters sends the gradients
of each iteration over TCP at a limited rate to a real server, which works as a
pipeline. "In one go" takes the same steps once all bytes are there, as servers of
earlier versions did.

Mirror: 4 ranks reduce a bucket of `--mib` MiB over gloo. The frames are recorded once
at the loopback interface, which needs CAP_NET_RAW, and go to a watcher. The watcher
puts sums together at the end, or while frames arrive. Adam follows in both cases and is
not measured. All numbers are medians over iterations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.captures import GROUP, record  # noqa: E402
from moe_ckpt.errors import ConfigError  # noqa: E402
from moe_ckpt.flowcheck.mirror.frames import TcpSegment  # noqa: E402
from moe_ckpt.flowcheck.mirror.plan import MirroredSums  # noqa: E402
from moe_ckpt.flowcheck.mirror.watcher import Watcher  # noqa: E402
from moe_ckpt.replication.copy_server import CopyServer, HoldingRules  # noqa: E402
from moe_ckpt.replication.messages import Ticket  # noqa: E402
from moe_ckpt.replication.sender import Replicator  # noqa: E402
from moe_ckpt.snapshot.adam_update import (  # noqa: E402
    AdamStep,
    Update,
    update_to_bytes,
)
from moe_ckpt.snapshot.arriving_update import ArrivingUpdate  # noqa: E402
from moe_ckpt.snapshot.blob_keys import update_key  # noqa: E402
from moe_ckpt.snapshot.blobs import BlobFolder, own_path  # noqa: E402
from moe_ckpt.snapshot.codec import (  # noqa: E402
    MASTER,
    MOMENTS,
    PartKey,
    ShardIdentity,
    SnapshotHeader,
    checksum,
    header_to_json,
    layout_parts,
)
from moe_ckpt.snapshot.token_bucket import Throttle  # noqa: E402
from moe_ckpt.types import ParallelLayout, RunIdentity  # noqa: E402

_TICKET = Ticket(run_id="bench", token="bench")
_RANKS = 4
_RECORDED = 4
_LOOK_EVERY = 4096
_DEADLINE_S = 600.0
_MIB = 1 << 20


class Rank:
    """A rank that sends random gradients for a state that begins at zero."""

    def __init__(self, memory: Path, layers: int, size: int) -> None:
        self.own = BlobFolder(own_path(memory))
        names = [f"layer {number}" for number in range(layers)]
        weight = torch.zeros(size)
        pieces = [
            (PartKey(operator=name, tensor="weight", role=role), weight, (0, size))
            for name in names
            for role in (MASTER, *MOMENTS)
        ]
        parts, payload_bytes = layout_parts(pieces)
        payload = self.own.allocate(payload_bytes)
        payload.zero_()
        self.header = SnapshotHeader(
            identity=RunIdentity(
                run_id="bench",
                model="bench",
                layout=ParallelLayout(pp=1, dp=1, ep=1, tp=1),
            ),
            shard=ShardIdentity(
                global_rank=0, pp_rank=0, tp_rank=0, ep_rank=0, etp_rank=0, dp_rank=0
            ),
            iteration=0,
            window_start=0,
            slot=0,
            num_slots=1,
            full=tuple(names),
            compute=(),
            adam_steps=(0.0,),
            parts=parts,
            payload_bytes=payload_bytes,
            checksum=checksum(payload, payload_bytes),
        )
        self.own.publish(_key(0), header_to_json(self.header), payload, payload_bytes)
        self.gradients = self.own.allocate(4 * layers * size)
        self.gradients.view(torch.float32).normal_()

    def publish(self, iteration: int) -> tuple[str, bytes]:
        """Publish the update to the state of an iteration.

        Returns:
            Key and head of the update.
        """
        step = AdamStep(
            learning_rate=1e-3,
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            weight_decay=0.1,
            decoupled=True,
            steps=iteration - 1.0,
        )
        header = replace(
            self.header, iteration=iteration, window_start=iteration, checksum=0
        )
        update = Update(
            base=_key(iteration - 1),
            target=_key(iteration),
            steps=(step,) * len(header.full),
            header=header,
            seals=True,
        )
        head = update_to_bytes(update)
        self.own.publish(
            update_key(_key(iteration)), head, self.gradients, self.gradients.numel()
        )
        return update_key(_key(iteration)), head


def measure_tap(
    layers: int, size: int, bytes_per_s: float, iterations: int
) -> tuple[float, float, float]:
    """Measure a server that receives a rank's gradients.

    Args:
        layers: The layers of the rank.
        size: The parameters of a layer.
        bytes_per_s: The rate at which gradients are sent.
        iterations: The iterations to measure.

    Returns:
        Median seconds after the last byte in one go, median seconds after the last byte
        as a pipeline, and median seconds of all work of the pipeline.
    """
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ThreadPoolExecutor(max_workers=1) as executor,
    ):
        memory, rules = Path(folder) / "rank", HoldingRules(keeps_own=True)
        rank = Rank(memory, layers, size)
        server = CopyServer(
            Path(folder) / "server",
            -1,
            _TICKET,
            host="127.0.0.1",
            timeout_s=_DEADLINE_S,
            rules=rules,
        )
        throttle = Throttle(bytes_per_s)
        sender = Replicator(
            rank.own,
            0,
            _TICKET,
            may_send=lambda: True,
            deadline_s=_DEADLINE_S,
            throttle=throttle,
        )
        sender.use_peers([server.address])
        sender.copy([_key(0)]).result()
        alone = BlobFolder(Path(folder) / "alone")
        _copy(rank.own, alone, _key(0))
        in_one_go, after, busy = [], [], []
        for iteration in range(1, 1 + iterations):
            key, head = rank.publish(iteration)
            work = sender.copy([key]).result()
            after.append(work.after_us / 1e6)
            busy.append(work.busy_us / 1e6)
            payload = alone.allocate(rank.gradients.numel())
            payload.copy_(rank.gradients)
            began_s = time.monotonic()
            update = ArrivingUpdate(alone, key, head, payload, payload.numel())
            update.arrived(payload.numel())
            update.start(executor)
            update.keep()
            in_one_go.append(time.monotonic() - began_s)
            sender.drop([_key(iteration - 1)])
            alone.discard(_key(iteration - 1))
        sender.close()
        server.close()
    return (
        statistics.median(in_one_go),
        statistics.median(after),
        statistics.median(busy),
    )


def find_ends(
    segments: Sequence[TcpSegment], wanted: Sequence[MirroredSums]
) -> list[int]:
    """Return positions in the frames at which each iteration is complete.

    A position is up to `_LOOK_EVERY` frames late. The result ends early if frames were
    lost.
    """
    watcher, found = Watcher(2), list[int]()
    for position, segment in enumerate(segments):
        watcher.see_segment(segment)
        if position % _LOOK_EVERY == 0 and watcher.sums(wanted[len(found)]) is not None:
            watcher.drop(wanted[len(found)])
            found.append(position)
            if len(found) == len(wanted):
                break
    return found


def measure_mirror(
    segments: Sequence[TcpSegment],
    wanted: Sequence[MirroredSums],
    ends: Sequence[int],
    *,
    merges: bool,
) -> float:
    """Measure a watcher that puts sums together.

    Args:
        segments: The recorded frames.
        wanted: The sums of each iteration.
        ends: Positions in the frames at which each iteration is complete.
        merges: Whether the watcher puts sums together while frames arrive.

    Returns:
        Median seconds from the last frame of an iteration until its sums are together.
    """
    watcher, seconds = Watcher(2), list[float]()
    for position, segment in enumerate(segments[: ends[-1] + 1]):
        watcher.see_segment(segment)
        if merges and position % 64 == 0:
            watcher.merge()
        if position == ends[len(seconds)]:
            sums, began_s = wanted[len(seconds)], time.monotonic()
            assert watcher.sums(sums) is not None
            seconds.append(time.monotonic() - began_s)
            watcher.drop(sums)
    # the first iteration cannot merge: no earlier iteration shows its buckets
    return statistics.median(seconds[1:])


def _sums(num_bytes: int, iteration: int) -> MirroredSums:
    return MirroredSums(
        group=GROUP.hex(),
        size=_RANKS,
        buckets=(num_bytes,),
        dtype="float32",
        first=1 + iteration,
        end=2 + iteration,
    )


def _key(iteration: int) -> str:
    return f"snapshot-{iteration}-0-bench"


def _copy(source: BlobFolder, target: BlobFolder, key: str) -> None:
    blob = source.get(key)
    assert blob.payload is not None
    payload = target.allocate(blob.payload_bytes)
    payload.copy_(blob.payload[: blob.payload_bytes])
    target.deposit(key, blob.header, payload, blob.payload_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument(
        "--million", type=float, default=1.0, help="parameters of a layer"
    )
    parser.add_argument(
        "--mbytes-per-s", type=float, default=400.0, help="rate at which gradients come"
    )
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument(
        "--mib", type=int, default=8, help="size of the mirrored bucket"
    )
    options = parser.parse_args()
    size = int(1e6 * options.million)
    in_one_go, after, busy = measure_tap(
        options.layers, size, 1e6 * options.mbytes_per_s, options.iterations
    )
    print(
        "| capture | after the last byte, in one go, s | as a pipeline, s | work of the"
        " server, s |"
    )
    print("| --- | --- | --- | --- |")
    print(
        f"| tap, {4 * size * options.layers / _MIB:.0f} MiB | {in_one_go:.3f} |"
        f" {after:.3f} | {busy:.3f} |",
        flush=True,
    )
    try:
        segments = record(_RANKS, options.mib * _MIB, _RECORDED)
    except ConfigError as error:
        print(f"mirror: not measured: {error}")
        return 0
    wanted = [_sums(options.mib * _MIB, iteration) for iteration in range(_RECORDED)]
    ends = find_ends(segments, wanted)
    if len(ends) < 2:
        print(
            f"mirror: not measured: the port lost frames of {_RECORDED - len(ends)}"
            " iterations"
        )
        return 0
    together = [
        measure_mirror(segments, wanted[: len(ends)], ends, merges=merges)
        for merges in (False, True)
    ]
    print(
        f"| mirror, {options.mib} MiB, sums only | {together[0]:.3f} |"
        f" {together[1]:.3f} | - |"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
