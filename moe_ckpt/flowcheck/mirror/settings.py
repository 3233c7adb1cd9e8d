"""The settings of a checkpoint server's mirror port, and the begin of its capture."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.flowcheck.mirror.capture import MirrorCapture
from moe_ckpt.flowcheck.mirror.port import MirrorPort
from moe_ckpt.flowcheck.mirror.watcher import Watcher


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


def open_mirror(mirror: MirrorSettings, seed: int) -> MirrorCapture:
    """Begin to read the mirror port.

    Args:
        mirror: Settings of the port.
        seed: Seed for the choice of frames to drop.

    Raises:
        ConfigError: The port cannot be opened.
    """
    watcher = Watcher(mirror.captures, loss=mirror.loss, seed=seed)
    return MirrorCapture(
        MirrorPort(mirror.interface), watcher, keep_iters=mirror.keep_iters
    )
