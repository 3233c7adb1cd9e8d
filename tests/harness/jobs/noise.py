"""A layer that never repeats its output, for tests of `run.exactness=state`.

The layer stands for kernels that are not deterministic.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)

_SCALE = 1e-2


def add_noise() -> None:
    """Make embeddings add noise from a generator that the clock seeds.

    The generators of training draw as before. All other stages receive the noise with
    their activations, and so have noise in their gradients.
    """
    plain = LanguageModelEmbedding.forward

    @functools.wraps(plain)
    def noisy(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        output = plain(self, *arguments, **options)
        clocked = torch.Generator(output.device).manual_seed(time.time_ns())
        noise = torch.randn(
            output.shape, generator=clocked, device=output.device, dtype=output.dtype
        )
        return output + _SCALE * noise

    LanguageModelEmbedding.forward = noisy
