"""The profiles of all stages, on every rank, as a generation starts.

Owns: the exchange over the network. One rank of each stage describes the stage; stages
that differ only in their first layer are described once. So the bytes that a rank
receives grow with the kinds of stages (mostly three) and by 24 bytes a stage, and not
with ranks x operators. Must not: decide anything.

    in each stage   logs: the maximum over the ranks
    all ranks       24 bytes a stage: kind, length, first layer
                    (a sum, to which one rank of each stage adds)
    all ranks       one description of each kind
                    (a sum, to which one rank adds)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from moe_ckpt.engine.interfaces import RankPosition
from moe_ckpt.packed import first_layer, pack_rows, shifted, unpack_rows
from moe_ckpt.policies.stage_profile import StageProfile
from moe_ckpt.types import OperatorTable


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedProfiles:
    """The profiles of all stages, equal on all ranks."""

    description: bytes
    """The bytes of the exchange. Generations with equal bytes have equal profiles."""

    stages: Sequence[StageProfile]
    """The profile of each stage. Stages of one kind share one set of byte counts."""


def share_profiles(
    position: RankPosition, mine: StageProfile, known: SharedProfiles | None = None
) -> SharedProfiles:
    """Exchange the profiles of all stages. Collective over all ranks.

    Args:
        position: This rank's position in the job.
        mine: The profile of this rank's stage, with the log sizes of this rank.
        known: The profiles of an earlier generation.

    Returns:
        The profile of every stage, with the log sizes of the rank that logs most.
        `known` itself if the profiles have not changed.
    """
    logs = torch.tensor(
        [mine.boundary_log_bytes, mine.step_log_bytes, mine.gradient_bytes],
        dtype=torch.int64,
        device=position.device,
    )
    position.stage_ranks.reduce(logs, "max")
    describes = position.stage_ranks.rank == 0
    origin = first_layer(mine.table.operators)
    packed = _pack(mine.table, origin, logs.tolist()) if describes else b""
    heads = torch.zeros((position.num_stages, 3), dtype=torch.int64)
    if describes:
        heads[position.stage] = torch.tensor([_kind(packed), len(packed), origin])
    stages = _summed(position, heads).tolist()
    lengths = {kind: length for kind, length, _ in stages}
    starts = dict(
        zip(lengths, itertools.accumulate(lengths.values(), initial=0), strict=False)
    )
    content = torch.zeros(sum(lengths.values()), dtype=torch.uint8)
    # only the first stage of a kind adds: the sum of two equal descriptions describes
    # nothing
    if describes and _kind(packed) not in [
        kind for kind, _, _ in stages[: position.stage]
    ]:
        start = starts[_kind(packed)]
        content[start : start + len(packed)] = torch.frombuffer(
            bytearray(packed), dtype=torch.uint8
        )
    received = _summed(position, content).numpy().tobytes()
    description = np.array(stages, np.int64).tobytes() + received
    if known is not None and known.description == description:
        return known
    # unpack once for each kind: a table of a large stage takes 25 MB during unpacking
    kinds = {
        kind: _unpack(received[start : start + lengths[kind]])
        for kind, start in starts.items()
    }
    profiles = [_with_layers_shifted(kinds[kind], layer) for kind, _, layer in stages]
    return SharedProfiles(description=description, stages=profiles)


def _kind(packed: bytes) -> int:
    """Return a hash of the description that fits into int64 and is not 0.

    Ranks that describe no stage add 0.
    """
    return (xxhash.xxh3_64_intdigest(packed) >> 1) or 1


def _summed(position: RankPosition, tensor: torch.Tensor) -> torch.Tensor:
    there = tensor.to(position.device)
    position.ranks.reduce(there, "sum")
    return there.cpu()


def _pack(table: OperatorTable, origin: int, logs: list[int]) -> bytes:
    """Return a table with layers counted from `origin`, and log sizes, as bytes.

    The columns are ranks, once for each kind of bytes.
    """
    kinds = [table.full_bytes, table.compute_bytes]
    if table.moment_bytes is not None:
        kinds.append(table.moment_bytes)
    facts = np.tile(np.array([[*logs, len(kinds)]], np.int64).T, len(table.operators))
    return pack_rows(shifted(table.operators, -origin), np.concatenate([facts, *kinds]))


def _with_layers_shifted(stage: StageProfile, by: int) -> StageProfile:
    """Return the stage with `by` added to the layer numbers that `packed` shifts."""
    operators = shifted(stage.table.operators, by)
    return replace(stage, table=stage.table.with_operators(operators))


def _unpack(packed: bytes) -> StageProfile:
    operators, columns = unpack_rows(packed)
    *log_bytes, num_kinds = columns[:4, 0].tolist()
    boundary_log_bytes, step_log_bytes, gradient_bytes = log_bytes
    kinds = np.split(columns[4:], num_kinds)
    table = OperatorTable(
        operators=operators,
        full_bytes=kinds[0],
        compute_bytes=kinds[1],
        moment_bytes=kinds[2] if num_kinds == 3 else None,
    )
    return StageProfile(
        table=table,
        boundary_log_bytes=boundary_log_bytes,
        step_log_bytes=step_log_bytes,
        gradient_bytes=gradient_bytes,
    )
