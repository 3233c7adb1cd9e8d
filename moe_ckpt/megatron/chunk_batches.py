"""The micro-batches of a rank's model chunks (virtual stages), each with an iterator of
its own, as one position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moe_ckpt.megatron.kept_batches import KeptBatches


class ChunkBatches:
    """The positions of several `KeptBatches`, in the order of their chunks; at an
    iteration's start all are alike.
    """

    def __init__(self, chunks: Sequence[KeptBatches]) -> None:
        self._chunks = chunks

    def saved(self) -> dict[str, torch.Tensor]:
        """Return all positions, and how a new process gets there."""
        return {
            f"{number}.{name}": tensor
            for number, chunk in enumerate(self._chunks)
            for name, tensor in chunk.saved().items()
        }

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go to the positions of the result of `saved`. Raises ConfigError as
        `KeptBatches.restore` does.
        """
        for number, chunk in enumerate(self._chunks):
            chunk.restore(under(f"{number}.", saved))


def under(prefix: str, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in saved.items()
        if name.startswith(prefix)
    }
