"""Updates whose bytes have all arrived before the first step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from moe_ckpt.snapshot.arriving_update import (
    ArrivingUpdate,
    OpenGradients,
    observes_nothing,
)
from moe_ckpt.snapshot.blobs import BlobFolder


def apply_update(
    folder: BlobFolder,
    head: bytes,
    gradients: torch.Tensor,
    nbytes: int,
    open_gradients: OpenGradients = observes_nothing,
) -> None:
    """Compute the copy that an update leads to, and store the copy in `folder`.

    The copy before the step stays in `folder`.
    """
    update = ArrivingUpdate(folder, "update", head, gradients, nbytes, open_gradients)
    update.arrived(nbytes)
    try:
        with ThreadPoolExecutor(max_workers=1) as executor:
            update.start(executor)
            update.keep()
    except BaseException:
        update.abandon()
        raise
