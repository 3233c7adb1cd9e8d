"""The copies that a rank holds for another rank, in reused memory.

Memory is reused because new pages cost more than their contents. Owns: the pool of free
memory, which never raises the total above the most memory in use at one time, and the
limit on all payloads. Must not: rely on files of free memory.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.snapshot.blobs import BlobFolder


class ReplicaFolder(BlobFolder):
    """A folder of deposited blobs that keeps the blobs' memory for later blobs."""

    def __init__(self, path: Path, *, most_bytes: int | None = None) -> None:
        """Adopt the files of a folder.

        Args:
            path: The folder.
            most_bytes: Most memory that all payloads of the owner may take, in bytes.
                None: as much as there is.
        """
        super().__init__(path)
        self._most_bytes = most_bytes
        # free memory by the buffer's name; the memory that was freed first comes first
        self._free: dict[str, torch.Tensor] = {}
        adopted = self.adopt().items()
        self._payloads = {
            key: blob.payload for key, blob in adopted if blob.payload is not None
        }

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return shared memory: uint8, [nbytes], of arbitrary contents.

        Raises:
            CheckpointSaveError: The file system has no room, or the owner's limit is
                reached.
        """
        with self._lock:
            for name, tensor in self._free.items():
                # the buffer's file may be gone with the whole folder: an index entry
                # for such a buffer would name nothing
                if tensor.numel() == nbytes and self._buffer_path(name).exists():
                    return self._free.pop(name)
            self._require_allowed(nbytes)
            self._give_back(nbytes)
            return super().allocate(nbytes)

    def free(self, tensor: torch.Tensor) -> None:
        with self._lock:
            assert tensor in self._names, (
                "a tensor that was not allocated in this folder"
            )
            self._free[self._names[tensor]] = tensor

    def deposit(
        self, key: str, header: bytes, payload: torch.Tensor | None, payload_bytes: int
    ) -> str:
        with self._lock:
            # published before the old payload is freed: no entry may name memory that
            # another blob may get
            serial = self.publish(key, header, payload, payload_bytes)
            self._free_payload(key)
            if payload is not None:
                self._payloads[key] = payload
            return serial

    def discard(self, key: str) -> None:
        with self._lock:
            self.withdraw(key)
            self._free_payload(key)

    def clear(self) -> None:
        with self._lock:
            super().clear()
            self._give_back(math.inf)

    def _require_allowed(self, nbytes: int) -> None:
        used_bytes = sum(
            tensor.numel()
            for name, tensor in self._mapped.items()
            if name not in self._free
        )
        if self._most_bytes is not None and used_bytes + nbytes > self._most_bytes:
            reason = f"got {used_bytes} bytes there and {nbytes} more"
            wanted = f"at most ckpt.memory_budget_bytes={self._most_bytes}"
            raise CheckpointSaveError(
                f"copies in {self.path}: {reason}, wanted {wanted}"
            )

    def _free_payload(self, key: str) -> None:
        payload = self._payloads.pop(key, None)
        if payload is not None:
            self.free(payload)

    def _give_back(self, nbytes: float) -> None:
        """Release pooled buffers, the oldest first, until `nbytes` are free.

        The pool then does not grow with the next allocation.
        """
        while self._free and nbytes > 0:
            tensor = self._free.pop(next(iter(self._free)))
            nbytes -= tensor.numel()
            super().free(tensor)
