"""The backend `staged`: gloo's connections and end, around groups that copy tensors through host memory.

Owns: how such groups are formed, for ranks that outlive each other and for ranks that do not. Must not: copy
(`staged_group` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.elastic.backends import GlooBackend, Mark, group_of
from moe_ckpt.elastic.staged_group import STAGED, StagedGroup


class StagedBackend:
    """Implements `Backend` for tensors on `device`, which several ranks may share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gloo = GlooBackend()
        self.can_forget = self._gloo.can_forget
        self.closing_s = self._gloo.closing_s

    def begin(self) -> None:
        self._gloo.begin()

    def mark(self) -> Mark | None:
        return None  # the host waits, and then brings the results

    def make(self, store: dist.Store, rank: int, size: int, *, form_s: float, operation_s: float) -> StagedGroup:
        return StagedGroup(self._gloo.make(store, rank, size, form_s=form_s, operation_s=operation_s))

    def formed(self) -> None:
        self._gloo.formed()

    def settle(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        pass  # the results of an awaited operation are in the order of the stream, and can be lost no more

    def cut(self, insides: Sequence[Any]) -> None:
        self._gloo.cut(insides)

    def is_quiet(self) -> bool:
        return self._gloo.is_quiet()


def register_staged() -> None:
    """Make `staged` a backend of `torch.distributed`, for a job whose ranks do not outlive each other."""
    if STAGED not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> StagedGroup:
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return StagedGroup(group_of(gloo, options.store, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO))
