"""A layer that never repeats itself, as kernels that are not deterministic: for tests
of `run.exactness=state`.
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
    """Let embeddings add noise, drawn from a generator that the clock seeds; training's
    own generators draw as before.

    All other stages get the noise with their activations, and their gradients with it.
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
