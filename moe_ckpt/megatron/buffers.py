"""Module buffers under names that do not depend on the parallel layout.

The names count global layers and global experts in place of local ones.

Owns: the names, and merging the values of several ranks. Megatron saves persistent
buffers itself. The other buffers, such as the routers' counters of an iteration, are in
no rank's sharded state dict. Must not: write files or communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.megatron.transformer_engine import named_scaling

# Caches of rotary embeddings with YaRN. The values are functions of the length; the
# first pass may replace the caches by buffers of another shape
_DERIVED = ("cos_cached", "sin_cached")


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's buffers and the scales of its FP8 layers, in place.

    Buffers that follow from settings are left out.
    """
    return buffers_of(list(model.named_modules()))


def buffers_of(
    modules: Sequence[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the result of `named_buffers` for the model with these modules.

    Each call looks the buffers up again, so `modules` may be older than a buffer.

    Args:
        modules: Names and modules, as `named_modules` yields them.
    """
    found: set[int] = set()  # ids: a buffer that two modules share gets one name
    for prefix, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in found or key.endswith(_DERIVED):
                continue
            found.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, buffer
    yield from named_scaling(modules)


def buffers_by_name(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return copies of all buffers of a rank's model chunks, on the host.

    Names do not depend on the layout. Buffers that are not persistent are included.

    Raises:
        CheckpointLoadError: Two buffers of one name differ.
    """
    return merge_buffers(
        {name: buffer.detach().cpu().clone()} for name, buffer in _named(chunks)
    )


def restore_buffers_by_name(
    chunks: Sequence[torch.nn.Module], saved: Mapping[str, torch.Tensor]
) -> None:
    """Restore the result of `buffers_by_name` into this rank's layers.

    Args:
        chunks: This rank's model chunks, in the current layout.
        saved: Buffers by name; names of other ranks' layers are ignored.

    Raises:
        CheckpointLoadError: A buffer of this rank was not saved.
    """
    for name, buffer in _named(chunks):
        if name not in saved:
            raise CheckpointLoadError(
                f"buffer {name}: got none, wanted one as it is in the model"
            )
        buffer.copy_(saved[name])


def merge_buffers(
    parts: Iterable[Mapping[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return the buffers of all parts together.

    Megatron's buffers are equal on all ranks, or zero, at the end of an iteration.

    Raises:
        CheckpointLoadError: A buffer differs between parts. Such a buffer belongs to a
            rank and not to the model, and a rank of another layout could not continue
            with the value.
    """
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, buffer in part.items():
            first = merged.setdefault(name, buffer)
            if first.dtype != buffer.dtype or not torch.equal(first, buffer):
                raise CheckpointLoadError(
                    f"buffer {name}: got another on each rank, wanted one for another"
                    " layout"
                )
    return merged


def _named(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        for name, buffer in named_buffers(chunk):
            yield _global_name(chunk, name), buffer


def _global_name(chunk: torch.nn.Module, name: str) -> str:
    """Return the layout-independent name of a chunk's buffer.

    In a stage whose first layer is global layer 2, `module.decoder.layers.0.x` becomes
    `decoder.layers.2.x`.
    """
    parts: list[str] = []
    inner: Any = chunk
    experts: Sequence[int] = ()
    for part in name.split("."):
        numbered = isinstance(inner, torch.nn.ModuleList)
        inner = getattr(inner, part, None)  # None for FP8 scales: no attribute
        experts = getattr(inner, "local_expert_indices", experts)
        if numbered and hasattr(inner, "layer_number"):
            parts.append(str(inner.layer_number - 1))
        elif numbered and experts:
            parts.append(str(experts[int(part)]))
        elif part != "module":
            parts.append(part)
    return ".".join(parts)
