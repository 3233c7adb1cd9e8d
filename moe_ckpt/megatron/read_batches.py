"""A hash of the samples that a pass has read.

A replay must read the samples that the iteration has read before. A stage that is
replayed over other samples gets another state, and no checksum of a snapshot shows the
difference. Each iteration's step record therefore holds this hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from moe_ckpt.snapshot.device_hash import sums_on_device
from moe_ckpt.snapshot.host_transfers import TRANSFERS, bytes_of

_PLAIN = (str, bytes, bool, int, float, type(None))


class ReadBatches:
    """Hashes all micro-batches that one rank's forward steps read, pass by pass."""

    def __init__(self) -> None:
        self._host = xxhash.xxh3_128()
        self._on_devices: list[torch.Tensor] = []

    def begin(self) -> None:
        """Forget all earlier micro-batches, when an iteration or a replay begins.

        Earlier micro-batches are those of other iterations and of evaluations.
        """
        self._host = xxhash.xxh3_128()
        self._on_devices = []

    def hash(self) -> str:
        """Return the hash of the micro-batches since `begin`, 32 hex digits."""
        total = self._host.copy()
        for sums in TRANSFERS.fetch(self._on_devices):
            total.update(bytes_of(sums).numpy().data)
        return total.hexdigest()

    def observed(self, argument: Any) -> Any:
        """Return an iterator that hashes the micro-batches it yields.

        Args:
            argument: The iterator to observe. Any other value is returned unchanged.
        """
        return _Observed(argument, self) if hasattr(argument, "__next__") else argument

    def add(self, batch: Any) -> None:
        """Add a micro-batch to the hash.

        Of leaves that are neither tensors, arrays nor plain values, only the type
        counts.

        Args:
            batch: A nest of mappings, dataclasses, lists and tuples.
        """
        if isinstance(batch, torch.Tensor):
            self._add_tensor(batch)
        elif isinstance(batch, np.ndarray | np.generic) and not batch.dtype.hasobject:
            self._add_text(f"{batch.dtype}{batch.shape}")
            self._host.update(batch.tobytes())
        elif isinstance(batch, _PLAIN):
            self._add_text(repr(batch))
        else:
            parts = _parts_of(batch)
            self._add_text(f"{type(batch).__qualname__} {len(parts)}")
            for name, part in parts:
                self._add_text(repr(name))
                self.add(part)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        self._add_text(f"{tensor.dtype}{tuple(tensor.shape)}")
        if tensor.device.type == "cpu":
            self._host.update(bytes_of(tensor).numpy().data)
        else:  # a sum on the device, fetched in `hash`
            self._on_devices.append(sums_on_device([tensor], tensor.device))

    def _add_text(self, text: str) -> None:
        self._host.update(text.encode())


def _parts_of(nest: Any) -> list[tuple[object, Any]]:
    """Return the parts of a nest by name or number; none for any other value."""
    if isinstance(nest, Mapping):
        return list(nest.items())
    if isinstance(nest, list | tuple):
        return list(enumerate(nest))
    if is_dataclass(nest) and not isinstance(nest, type):
        return [(each.name, getattr(nest, each.name)) for each in fields(nest)]
    return []


class _Observed:
    """Hashes the micro-batches of an iterator, and has all of its other attributes."""

    def __init__(self, batches: Iterator[Any], read: ReadBatches) -> None:
        self._batches = batches
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._read.add(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
