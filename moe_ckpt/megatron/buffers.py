"""Module buffers under names that hold at every parallel layout: global layers and
experts in place of local ones.

Owns: those names, and merging the values of several ranks. Megatron saves the
persistent buffers itself; the others (the routers' counters of an iteration) are in no
rank's sharded state dict. Must not: write files or communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.megatron.transformer_engine import named_scaling

# of rotary embeddings with YaRN: functions of the length, which a first pass may
# replace by buffers of another shape
_DERIVED = ("cos_cached", "sin_cached")


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's buffers, and the scales of its FP8 layers, in place; without
    those that follow from settings.
    """
    return buffers_of(list(model.named_modules()))


def buffers_of(
    modules: Sequence[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what `named_buffers` yields of the model with these modules.

    Each call looks the buffers up again, so `modules` may be older than a buffer.
    """
    found: set[int] = set()  # by id: a buffer that two modules share has one name
    for prefix, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in found or key.endswith(_DERIVED):
                continue
            found.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, buffer
    yield from named_scaling(modules)


def buffers_by_name(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return copies, on the host, of all buffers of a rank's model chunks, persistent
    or not.
    """
    return merge_buffers(
        {name: buffer.detach().cpu().clone()} for name, buffer in _named(chunks)
    )


def restore_buffers_by_name(
    chunks: Sequence[torch.nn.Module], saved: Mapping[str, torch.Tensor]
) -> None:
    """Restore the result of `buffers_by_name`, on the ranks that have the layers now.

    Raises CheckpointLoadError for a buffer that was not saved.
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

    Raises CheckpointLoadError for a buffer that differs between parts: it belongs to a
    rank and not to the model, and a rank of another layout could not continue with it.
    Megatron's buffers are equal, or zero, at the end of an iteration.
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
    """Return `decoder.layers.2.x` for `module.decoder.layers.0.x` of a stage whose
    first layer is global layer 2.
    """
    parts: list[str] = []
    inner: Any = chunk
    experts: Sequence[int] = ()
    for part in name.split("."):
        numbered = isinstance(inner, torch.nn.ModuleList)
        inner = getattr(inner, part, None)  # scales of FP8 layers are in no attribute
        experts = getattr(inner, "local_expert_indices", experts)
        if numbered and hasattr(inner, "layer_number"):
            parts.append(str(inner.layer_number - 1))
        elif numbered and experts:
            parts.append(str(experts[int(part)]))
        elif part != "module":
            parts.append(part)
    return ".".join(parts)
