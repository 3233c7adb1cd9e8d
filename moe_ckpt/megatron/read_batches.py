"""A hash of the samples that a pass has read.

A replay must read the samples that the iteration has read before: a stage that is replayed
over other samples gets another state, which no checksum of a snapshot shows. Each
iteration's step record therefore holds this hash.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils import _pytree as pytree

from moe_ckpt.snapshot.device_hash import sums_on_device
from moe_ckpt.snapshot.host_transfers import TRANSFERS, bytes_of

_PLAIN = (str, bytes, bool, int, float, type(None))


class ReadBatches:
    """Hashes all micro-batches that one rank's forward steps read, pass by pass."""

    def __init__(self) -> None:
        self._host = xxhash.xxh3_128()
        self._on_devices: list[torch.Tensor] = []

    def begin(self) -> None:
        """An iteration, or its replay, begins: forget the micro-batches of earlier ones, and of evaluations."""
        self._host = xxhash.xxh3_128()
        self._on_devices = []

    def hash(self) -> str:
        """Return the hash of the micro-batches since `begin`, 32 hex digits."""
        total = self._host.copy()
        for sums in TRANSFERS.fetch(self._on_devices):
            total.update(bytes_of(sums).numpy().data)
        return total.hexdigest()

    def observed(self, argument: Any) -> Any:
        """Return an iterator that hashes the micro-batches it yields; anything else is returned unchanged."""
        return _Observed(argument, self) if hasattr(argument, "__next__") else argument

    def add(self, batch: Any) -> None:
        """Add a micro-batch: a nest of dictionaries, lists and tuples.

        Of leaves that are neither tensors, arrays nor plain values, only the type counts.
        """
        leaves, shape = pytree.tree_flatten(batch)
        self._host.update(str(shape).encode())
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor | np.ndarray):
                self._host.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
                self._host.update(leaf.tobytes())
            elif not isinstance(leaf, torch.Tensor):
                self._host.update(repr(leaf if isinstance(leaf, _PLAIN) else type(leaf)).encode())
            elif leaf.device.type == "cpu":
                self._host.update(bytes_of(leaf).numpy().data)
            else:  # a sum, for which nobody waits now
                self._on_devices.append(sums_on_device([leaf], leaf.device))


class _Observed:
    """An iterator, with all other attributes of the one that it observes."""

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
