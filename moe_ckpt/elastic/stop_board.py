"""The ranks of a job that is being stopped, with the iterations that each has on its
disk.

One rank finds the newest iteration that all have, the last to report or, of those that
report at the same time, the first to see all reports; no rank waits for another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_FOUND = "found"


class StopBoard:
    """The reports of all ranks, in a store that outlives their processes."""

    def __init__(self, store: dist.Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size

    def begin(self, global_rank: int) -> None:
        """A rank is started: its report of an earlier stop is void, and what was found
        then.
        """
        self._store.delete_key(str(global_rank))
        self._store.delete_key(_FOUND)

    def report(self, global_rank: int, iterations: Sequence[int]) -> int | None:
        """Report the iterations on a rank's disk.

        Returns the newest that all ranks have, or None if ranks are still missing, have
        none in common, or another rank was told.
        """
        # before the check: of ranks that report at the same time, at least the last to
        # write sees all reports
        self._store.set(str(global_rank), json.dumps(list(iterations)))
        if not self._store.check(self._keys) or self._store.add(_FOUND, 1) > 1:
            return None
        common = set[int].intersection(
            *(set(json.loads(self._store.get(key))) for key in self._keys)
        )
        return max(common, default=None)

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until all ranks have reported. Raises torch's DistStoreError if that
        takes longer.
        """
        self._store.wait(self._keys, timedelta(seconds=timeout_s))

    @property
    def _keys(self) -> list[str]:
        return [str(rank) for rank in range(self._world_size)]
