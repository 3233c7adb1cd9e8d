"""The settings of a checkpoint server's mirror port, and the begin of a capture."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.flowcheck.mirror.capture import MirrorCapture
from moe_ckpt.flowcheck.mirror.captured_gradients import from_sums
from moe_ckpt.flowcheck.mirror.port import MirrorPort
from moe_ckpt.flowcheck.mirror.watcher import Watcher
from moe_ckpt.snapshot.arriving_update import OpenGradients, observes_nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorSettings:
    """The mirror port of a checkpoint server."""

    interface: str
    """Network interface of the port."""

    captures: int
    """Number of ranks to watch in each ring."""

    loss: float
    """Share of its frames that each capture drops on purpose."""

    keep_iters: int
    """Number of iterations whose captured gradients stay."""


def observe_gradients(mirror: MirrorSettings | None, seed: int) -> OpenGradients:
    """Begin to capture gradients in this process, and return their opener.

    Args:
        mirror: Settings of the port. None: this process observes no gradients.
        seed: Seed for the choice of frames to drop.

    Raises:
        ConfigError: The port cannot be opened.
    """
    if mirror is None:
        return observes_nothing
    watcher = Watcher(mirror.captures, loss=mirror.loss, seed=seed)
    capture = MirrorCapture(
        MirrorPort(mirror.interface), watcher, keep_iters=mirror.keep_iters
    )
    return from_sums(capture.sums)
