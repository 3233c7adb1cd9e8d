"""Hashes of live state, computed on the device that holds the state.

On a GPU a hash is two sums of integers modulo 2^64. Copies to the host and a hash on
one core would take seconds per recovery. A sum runs at the speed of device memory, and
is exact and the same in any order, since addition of integers is associative. Each
32-bit word has an odd weight by its position: one word that differs always changes a
sum. State on a host is hashed by XXH3, at the speed of host memory. Must not: guard
payloads against damage in transit; payloads have checksums of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from moe_ckpt.snapshot.host_transfers import TRANSFERS, bytes_of

# 2^64 divided by the golden ratio, and twice that number: neighbouring positions get
# weights that share few bits
_MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0x3C6EF372FE94F82A)
# 32 MiB of 64-bit words at a time: during a recovery device memory is nearly full
_CHUNK_WORDS = 1 << 22


def hashes_of(state: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, str]:
    """Return a hash for the tensors of each name: sums on a GPU, XXH3 on a host.

    Returns:
        32 hex digits for each name.
    """
    devices = {tensor.device for tensors in state.values() for tensor in tensors}
    device = next((device for device in devices if device.type != "cpu"), None)
    if device is not None:
        return sums_of(state, device)
    hashes = {name: xxhash.xxh3_128() for name in state}
    for name, tensors in state.items():
        for tensor in tensors:
            hashes[name].update(bytes_of(tensor).numpy().data)
    return {name: total.hexdigest() for name, total in hashes.items()}


def sums_of(
    state: Mapping[str, Sequence[torch.Tensor]], device: torch.device
) -> dict[str, str]:
    """Return a hash by sums for the tensors of each name.

    All hashes come to the host in one transfer.

    Returns:
        32 hex digits for each name.
    """
    if not state:
        return {}
    sums = [sums_on_device(tensors, device) for tensors in state.values()]
    (on_host,) = TRANSFERS.fetch([torch.stack(sums)])
    hexadecimal = (
        "".join(f"{word & (1 << 64) - 1:016x}" for word in row)
        for row in on_host.tolist()
    )
    return dict(zip(state, hexadecimal, strict=True))


def sums_on_device(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return two sums over the words of all tensors, in the order of the tensors.

    Returns:
        int64 [2], on `device`.
    """
    total, position = torch.zeros(2, dtype=torch.int64, device=device), 1
    for tensor in tensors:
        flat = bytes_of(tensor)
        # views as int32 need whole, aligned words, which a parameter with an odd number
        # of bf16 values lacks
        if flat.numel() % 4 or flat.storage_offset() % 4:
            flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
        words = flat.view(torch.int32)
        # sizes count: tensors that differ only by zeros at the end get different sums
        total += tensor.nbytes * position
        for start in range(0, words.numel(), _CHUNK_WORDS):
            chunk = words[start : start + _CHUNK_WORDS].to(torch.int64)
            positions = torch.arange(
                position, position + chunk.numel(), device=words.device
            )
            for index, multiplier in enumerate(_MULTIPLIERS):
                total[index] += (
                    (chunk * (positions * multiplier).bitwise_or_(1)).sum().to(device)
                )
            position += chunk.numel()
        position += 1
    return total
