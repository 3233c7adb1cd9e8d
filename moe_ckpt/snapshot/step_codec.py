"""Form of an iteration's record and start as bytes: a safetensors file in memory.

The facts of the record are the metadata of the file. Owns: writing and strict reading.
Must not: form keys of blobs, or store or send the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot.host_transfers import bytes_of
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.types import ReadyGradients

_START = "start-"
"""In front of the names of tensors that belong to the start of the iteration."""

_AFTER = "after-"
"""In front of the names of tensors of the state between pass and step."""

_TIED = "tied_gradient"
_GRADIENTS, _BATCHES, _BRANCHES, _CHECKSUM = (
    "gradients",
    "batches",
    "branches",
    "gradients_checksum",
)
_METADATA = "__metadata__"
_FACTS = tuple(field.name for field in fields(ReadyGradients))
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""All dtypes that the safetensors library reads. All are needed, since the state of a
user's iterator is part of a start.
"""


def start_to_bytes(start: Mapping[str, torch.Tensor]) -> bytes:
    """Return the bytes of a start.

    Args:
        start: Tensors on the host, by name.

    Raises:
        KeyError: A tensor has a dtype that no start has.
    """
    return _pack(start, {})


def step_to_bytes(
    record: StepRecord, start: Mapping[str, torch.Tensor] | None
) -> bytes:
    """Return the bytes of a record and, if given, of the start of its iteration.

    Args:
        record: The record, with its tensors on the host.
        start: Tensors on the host, by name; None for no start.

    Raises:
        KeyError: A tensor has a dtype that no step has.
    """
    tensors = {f"{_START}{name}": tensor for name, tensor in (start or {}).items()}
    for name, tensor in (record.after_pass or {}).items():
        tensors[f"{_AFTER}{name}"] = tensor
    if record.tied_gradient is not None:
        tensors[_TIED] = record.tied_gradient
    # not `asdict`, which makes deep copies: each iteration waits for these bytes
    gradients = {name: getattr(record.gradients, name) for name in _FACTS}
    facts = {_GRADIENTS: json.dumps(gradients)}
    if record.batches is not None:
        facts[_BATCHES] = record.batches
    if record.after_pass is not None:
        facts[_BRANCHES] = json.dumps([record.branch, record.follows])
    if record.gradients_checksum is not None:
        facts[_CHECKSUM] = json.dumps(record.gradients_checksum)
    return _pack(tensors, facts)


def start_from_bytes(data: bytes) -> dict[str, torch.Tensor]:
    """Return the start that `start_to_bytes` wrote.

    Raises:
        CheckpointLoadError: The bytes are anything else.
    """
    return _unpack(data)[0]


def step_from_bytes(
    iteration: int, data: bytes
) -> tuple[StepRecord, dict[str, torch.Tensor]]:
    """Return the record and the start that `step_to_bytes` wrote.

    Args:
        iteration: The iteration of the record, which the bytes do not hold.
        data: The bytes.

    Returns:
        The record, and the start of its iteration. The start is empty if the written
        start was None.

    Raises:
        CheckpointLoadError: The bytes are anything else.
    """
    tensors, facts = _unpack(data)
    try:
        values = json.loads(facts[_GRADIENTS])
        overflows = tuple(values["overflows"])
        gradients = ReadyGradients(**{**values, "overflows": overflows})
        branch, follows = map(int, json.loads(facts.get(_BRANCHES, "[0, 0]")))
        checksum = json.loads(facts.get(_CHECKSUM, "null"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointLoadError(
            f"step record: got {facts} ({error!r}), wanted gradients as JSON"
        ) from error
    record = StepRecord(
        iteration=iteration,
        gradients=gradients,
        tied_gradient=tensors.get(_TIED),
        batches=facts.get(_BATCHES),
        after_pass=under(_AFTER, tensors) or None,
        gradients_checksum=checksum,
        branch=branch,
        follows=follows,
    )
    return record, under(_START, tensors)


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with a prefix, without the prefix."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _pack(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> bytes:
    """Return a safetensors file with the facts as metadata.

    Written by hand: the library's `save` takes four times as long for a dozen small
    tensors, and training waits for the file in every iteration.
    """
    head: dict[str, object] = {_METADATA: facts} if facts else {}
    parts = []
    begin = 0
    for name, tensor in tensors.items():
        parts.append(bytes_of(tensor).numpy())
        end = begin + tensor.nbytes
        head[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def _unpack(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the facts of a safetensors file.

    Raises:
        CheckpointLoadError: The bytes are no safetensors file.
    """
    try:
        tensors = load(data)  # first: the library checks the form of the JSON
        (length,) = _LENGTH.unpack_from(data)
        head = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    except (SafetensorError, ValueError) as error:
        raise CheckpointLoadError(f"step log: {error}") from error
    return tensors, head.get(_METADATA, {})
