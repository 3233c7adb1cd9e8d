"""The ranks of a job that is being stopped, and the iterations on each rank's disk.

One rank finds the newest iteration that all ranks have: the last rank to report or, of
ranks that report at the same time, the first to see all reports. No rank waits for
another rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_FOUND = "found"


class StopBoard:
    """The reports of all ranks, in a store that outlives the ranks' processes."""

    def __init__(self, store: dist.Store, world_size: int) -> None:
        """Open the board.

        Args:
            store: The part of the job's store for the board.
            world_size: The number of ranks of the job.
        """
        self._store = store
        self._world_size = world_size

    def begin(self, global_rank: int) -> None:
        """Clear a rank's report of an earlier stop, and the result of that stop.

        Call as the rank starts.
        """
        self._store.delete_key(str(global_rank))
        self._store.delete_key(_FOUND)

    def report(self, global_rank: int, iterations: Sequence[int]) -> int | None:
        """Report the iterations on a rank's disk.

        Args:
            global_rank: The rank.
            iterations: The iterations.

        Returns:
            The newest iteration that all ranks have; None if reports are missing, the
            ranks have no iteration in common, or another rank has received the result.
        """
        # before the check: of ranks that report at the same time, at least the last one
        # to write sees all reports
        self._store.set(str(global_rank), json.dumps(list(iterations)))
        if not self._store.check(self._keys) or self._store.add(_FOUND, 1) > 1:
            return None
        common = set[int].intersection(
            *(set(json.loads(self._store.get(key))) for key in self._keys)
        )
        return max(common, default=None)

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until all ranks have reported.

        Args:
            timeout_s: The time limit, in seconds.

        Raises:
            torch.distributed.DistStoreError: The wait takes longer.
        """
        self._store.wait(self._keys, timedelta(seconds=timeout_s))

    @property
    def _keys(self) -> list[str]:
        return [str(rank) for rank in range(self._world_size)]
