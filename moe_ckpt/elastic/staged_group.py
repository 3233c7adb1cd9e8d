"""gloo for the tensors of a GPU, through host memory.

Several ranks can share one GPU in this way, which NCCL refuses. Plain gloo has no
transfers of CUDA tensors, and no reduce-scatter.

Owns: the copies. An operation works on host copies of its tensors. The thread that
waits for the operation brings the results to the tensors, in `copy_back`. So an
operation that was cut off never writes to a tensor. On CPU tensors the copy is a clone.
Must not: be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.config import STAGED
from moe_ckpt.elastic.operations import (
    OPERATIONS,
    WITHOUT_RESULT,
    WORKS_IN_PLACE,
    BackendAbilities,
)

_HOST = torch.device("cpu")


class StagedWork(dist.Work):
    """An operation on host copies."""

    def __init__(
        self, host_work: Any, results: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Wrap an operation.

        Args:
            host_work: gloo's operation on host copies.
            results: Pairs of a tensor and the host copy of the tensor's result.
        """
        super().__init__()
        self.host_work = host_work
        self._results = results

    # operations have a time limit of their own
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        self.host_work.wait()
        self.copy_back()
        return True

    def is_completed(self) -> bool:
        return self.host_work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return [tensor for tensor, _ in self._results]

    def copy_back(self) -> None:
        """Copy the results to the tensors, in the order of the current stream.

        Call once the host's work has ended.
        """
        results, self._results = self._results, ()
        for tensor, host in results:
            # pageable memory: the host copy may be dropped at once
            tensor.detach().copy_(host)


class StagedGroup(dist.ProcessGroup):
    """A gloo group that works on host copies of tensors on any device."""

    def __init__(self, host_group: Any) -> None:
        # torch's stubs describe another constructor
        super().__init__(host_group.rank(), host_group.size())  # pyright: ignore[reportCallIssue]
        self._host_group = host_group

    @property
    def _device_types(self) -> list[torch.device]:
        return [_HOST]  # for objects, which then need no copy

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return STAGED

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002 - of any device
        return BackendAbilities(supports_coalescing=False)

    def _get_sequence_number_for_group(self) -> int:
        return self._host_group._get_sequence_number_for_group()

    def run(self, name: str, /, *arguments: Any, **options: Any) -> StagedWork:
        """Begin an operation on host copies of its tensors.

        Args:
            name: The name of the operation, one of `OPERATIONS`.
            arguments: The positional arguments of the operation.
            options: The keyword arguments of the operation.
        """
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
        # only the first argument has results: sources may be views of it, and copying
        # sources back would overwrite the results
        first = _host_copy if name in WITHOUT_RESULT else as_result
        staged = [
            _mapped(_host_copy if index else first, value)
            for index, value in enumerate(arguments)
        ]
        return StagedWork(getattr(self._host_group, name)(*staged, **options), results)


for _name in OPERATIONS:
    setattr(StagedGroup, _name, partialmethod(StagedGroup.run, _name))


def _mapped(copy: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value` with a copy of each tensor; other values stay as they are."""
    if isinstance(value, torch.Tensor):
        return copy(value)
    return (
        [_mapped(copy, each) for each in value]
        if isinstance(value, list | tuple)
        else value
    )


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    # copy=True: otherwise a CPU tensor would be its own copy, and an operation that was
    # cut off would write to the tensor
    return tensor.detach().to(_HOST, copy=True).contiguous()
