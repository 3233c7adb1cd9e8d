"""gloo for the tensors of a GPU, by way of host memory: several ranks can share one
GPU, which NCCL refuses.

Owns: the copies. An operation works on host copies of its tensors; its results reach
the tensors in `copy_back`, which the thread that waits for the operation calls, so that
an operation that was cut off never writes to a tensor. On CPU tensors the copy is a
clone. Must not: be fast; plain gloo has no transfers of CUDA tensors, nor a
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.elastic.operations import (
    OPERATIONS,
    WITHOUT_RESULT,
    WORKS_IN_PLACE,
    BackendAbilities,
)

STAGED = "staged"
"""The name of the backend of such groups."""

_HOST = torch.device("cpu")


class StagedWork(dist.Work):
    """An operation on host copies; `results` are pairs of a tensor and the host copy of
    its result.
    """

    def __init__(
        self, host_work: Any, results: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__()
        self.host_work = host_work
        self._results = results

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - operations have their own
        self.host_work.wait()
        self.copy_back()
        return True

    def is_completed(self) -> bool:
        return self.host_work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return [tensor for tensor, _ in self._results]

    def copy_back(self) -> None:
        """Bring the results to the tensors, in the order of the current stream; once
        the host's work has ended.
        """
        results, self._results = self._results, ()
        for tensor, host in results:
            # pageable memory: the host copy may be dropped at once
            tensor.detach().copy_(host)


class StagedGroup(dist.ProcessGroup):
    """A group of gloo that works on host copies of tensors on any device."""

    def __init__(self, host_group: Any) -> None:
        super().__init__(host_group.rank(), host_group.size())  # pyright: ignore[reportCallIssue] - other stubs
        self._host_group = host_group

    @property
    def _device_types(self) -> list[torch.device]:
        return [_HOST]  # of objects: they need no copy then

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return STAGED

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002 - of any device
        return BackendAbilities(supports_coalescing=False)

    def _get_sequence_number_for_group(self) -> int:
        return self._host_group._get_sequence_number_for_group()

    def run(self, name: str, /, *arguments: Any, **options: Any) -> StagedWork:
        """Begin an operation on host copies of its tensors."""
        results: list[tuple[torch.Tensor, torch.Tensor]] = []

        def as_result(tensor: torch.Tensor) -> torch.Tensor:
            in_place = name in WORKS_IN_PLACE
            host = (
                _host_copy(tensor)
                if in_place
                else torch.empty(tensor.shape, dtype=tensor.dtype, device=_HOST)
            )
            results.append((tensor, host))
            return host

        for value in (*arguments, *options.values()):
            if isinstance(value, dist.BarrierOptions):
                value.device = _HOST
        # no results but the first argument: sources may be views of it, and to bring
        # them back would overwrite it
        first = _host_copy if name in WITHOUT_RESULT else as_result
        staged = [
            _mapped(_host_copy if place else first, value)
            for place, value in enumerate(arguments)
        ]
        return StagedWork(getattr(self._host_group, name)(*staged, **options), results)


for _name in OPERATIONS:
    setattr(StagedGroup, _name, partialmethod(StagedGroup.run, _name))


def _mapped(copy: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value` with a copy of each tensor; numbers and options stay as they are."""
    if isinstance(value, torch.Tensor):
        return copy(value)
    return (
        [_mapped(copy, each) for each in value]
        if isinstance(value, list | tuple)
        else value
    )


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    # copy=True: a CPU tensor would stand for itself, and an operation that was cut off
    # would write to it
    return tensor.detach().to(_HOST, copy=True).contiguous()
