"""Digests of named tensors, for a bit-for-bit comparison of the states of two runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Tensors with names."""

_HEX_DIGITS = 16
"""Length of a tensor's digest in hex digits.

64 bits suffice where each digest is compared with one other.
"""


def whole_digest(named: NamedTensors) -> str:
    """Return a SHA-256, in hex, over names, types, shapes and bytes of all tensors."""
    total = hashlib.sha256()
    for name, tensor in named:
        _add_to(total, name, tensor)
    return total.hexdigest()


def digests_by_name(named: NamedTensors) -> dict[str, str]:
    """Return the start of a SHA-256, in hex, of each tensor, by the tensor's name."""
    found: dict[str, str] = {}
    for name, tensor in named:
        alone = hashlib.sha256()
        _add_to(alone, name, tensor)
        found[name] = alone.hexdigest()[:_HEX_DIGITS]
    return found


def _add_to(hashed: Any, name: str, tensor: torch.Tensor) -> None:
    hashed.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    # bytes, as NumPy has no bfloat16 and no FP8; flat, as torch cannot view a
    # zero-dimensional tensor in another type
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    hashed.update(flat.view(torch.uint8).numpy().tobytes())
