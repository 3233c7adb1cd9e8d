"""Completes tensors of which each rank of a group has loaded one range.

Merging works in chunks. Merging all weights of a stage at once would take the size of
the weights again, on a device that training fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

CHUNK_BYTES = 256 << 20


def merge(
    pieces: list[tuple[torch.Tensor, int, int]],
    group: dist.ProcessGroup,
    limit_bytes: int = CHUNK_BYTES,
) -> int:
    """Merge tensors of which each rank holds one range. Collective in the group.

    The merge is a sum of bytes, which are zero outside a rank's own range.

    Args:
        pieces: Flattened tensors, which are completed in place, each with start and end
            of this rank's range.
        group: The ranks that hold the ranges.
        limit_bytes: The most bytes of a chunk.

    Returns:
        The number of chunks.
    """
    num_chunks = 0
    for tensor, start, end in pieces:
        tensor[:start].zero_()
        tensor[end:].zero_()
    # sum bytes and not numbers: -0.0 + 0.0 is 0.0, and a NaN may come back with other
    # bits
    for chunk in chunks_of(
        [tensor.view(torch.uint8) for tensor, _, _ in pieces], limit_bytes
    ):
        num_chunks += 1
        merged = torch.cat(chunk)
        dist.all_reduce(merged, group=group)
        for part, whole in zip(
            chunk, merged.split([part.numel() for part in chunk]), strict=True
        ):
            part.copy_(whole)
    return num_chunks


def chunks_of(
    tensors: Sequence[torch.Tensor], limit_bytes: int
) -> Iterator[list[torch.Tensor]]:
    """Yield chunks of flat uint8 tensors, in order, as lists of views.

    Each chunk has at most `limit_bytes`, and every byte is in one chunk.
    """
    chunk: list[torch.Tensor] = []
    room = limit_bytes
    for tensor in tensors:
        start = 0
        while start < tensor.numel():
            part = tensor[start : start + room]
            chunk.append(part)
            start, room = start + part.numel(), room - part.numel()
            if not room:
                yield chunk
                chunk, room = [], limit_bytes
    if chunk:
        yield chunk
