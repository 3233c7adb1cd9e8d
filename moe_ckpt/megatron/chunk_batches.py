"""One data position for all model chunks (virtual stages) of a rank.

Each chunk has an iterator of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moe_ckpt.megatron.kept_batches import KeptBatches
from moe_ckpt.snapshot.step_codec import under


class ChunkBatches:
    """The positions of several `KeptBatches`, in the order of the chunks.

    At the start of an iteration all positions are equal.
    """

    def __init__(self, chunks: Sequence[KeptBatches]) -> None:
        self._chunks = chunks

    def saved(self) -> dict[str, torch.Tensor]:
        """Return all positions, and the data with which a new process reaches them."""
        return {
            f"{number}.{name}": tensor
            for number, chunk in enumerate(self._chunks)
            for name, tensor in chunk.saved().items()
        }

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go to the positions of a result of `saved`.

        Raises:
            ConfigError: As in `KeptBatches.restore`.
        """
        for number, chunk in enumerate(self._chunks):
            chunk.restore(under(f"{number}.", saved))
