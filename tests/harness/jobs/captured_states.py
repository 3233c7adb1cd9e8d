"""A witness of checkpoint servers: digests of the states of ranks and of servers.

Each digest belongs to an iteration. `note_states` is a setup: called before the ranks
of a job are forked.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash

from moe_ckpt.flowcheck.server_states import ServerStates
from moe_ckpt.snapshot.adam_update import update_from_bytes
from moe_ckpt.snapshot.arriving_update import ArrivingUpdate
from moe_ckpt.snapshot.capture import SnapshotRequest
from moe_ckpt.snapshot.codec import PartKey, Snapshot, header_from_json

UNSHARDED = "train.distributed_optimizer=false"


def mirror_of(interface: str) -> tuple[str, ...]:
    """Return settings of servers that read a mirror port, for which training waits.

    Args:
        interface: The network interface of the mirror port.
    """
    return (
        "ckpt.capture=mirror",
        f"ckpt.mirror_interface={interface}",
        "ckpt.max_lag_iters=0",
    )


def note_states(folder: Path) -> None:
    """Make ranks and checkpoint servers write digests of states into a folder.

    A rank writes the digest of its state when the rank hands gradients over, a server
    that of each state that the server makes.
    """
    hand_over, keep = ServerStates.hand_over, ArrivingUpdate.keep

    def noted_hand_over(
        self: ServerStates, wanted: SnapshotRequest, base: Snapshot | None
    ) -> None:
        parts = [
            (key, tensor) for key, tensor, _ in (*wanted.pieces(), *wanted.changing)
        ]
        _write(
            folder,
            "trained",
            [wanted.header.shard.global_rank, wanted.header.iteration, _digest(parts)],
        )
        hand_over(self, wanted, base)

    def noted_keep(self: ArrivingUpdate) -> None:
        keep(self)
        blob = self._folder.get(update_from_bytes(self._head).target)
        assert blob.payload is not None
        state = Snapshot(header=header_from_json(blob.header), payload=blob.payload)
        digest = _digest((part.key, state.part(part)) for part in state.header.parts)
        _write(
            folder,
            "captured",
            [state.header.shard.global_rank, state.header.iteration, digest],
        )

    ServerStates.hand_over = noted_hand_over  # type: ignore[method-assign]
    ArrivingUpdate.keep = noted_keep  # type: ignore[method-assign]


def compare_states(
    folder: Path, iterations: Iterable[int], world_size: int, num_servers: int
) -> None:
    """Compare the states of all ranks with those of all their servers.

    Args:
        folder: The folder of `note_states`.
        iterations: The iterations to compare.
        world_size: The number of ranks.
        num_servers: The number of servers that make each state.
    """
    trained, captured = _read(folder, "trained"), _read(folder, "captured")
    for iteration in iterations:
        for rank in range(world_size):
            (digest,) = trained[rank, iteration]
            assert captured[rank, iteration] == Counter({digest: num_servers}), (
                rank,
                iteration,
            )


def _digest(parts: Iterable[tuple[PartKey, torch.Tensor]]) -> str:
    total = xxhash.xxh3_128()
    for key, tensor in sorted(parts, key=lambda part: str(part[0])):
        total.update(str(key).encode())
        total.update(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        )
    return total.hexdigest()


def _write(folder: Path, name: str, row: list[Any]) -> None:
    with (folder / f"{name}{os.getpid()}").open("a") as file:
        file.write(json.dumps(row) + "\n")


def _read(folder: Path, name: str) -> dict[tuple[int, int], Counter[str]]:
    """Return how often each digest was noted, by rank and iteration."""
    found: dict[tuple[int, int], Counter[str]] = {}
    for path in folder.glob(f"{name}*"):
        for line in path.read_text().splitlines():
            rank, iteration, digest = json.loads(line)
            found.setdefault((rank, iteration), Counter())[digest] += 1
    return found
