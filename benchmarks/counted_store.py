"""A client of the job's store that counts requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch.distributed as dist


@dataclass
class Traffic:
    """Requests of one rank, and the bytes in these requests."""

    operations: int = 0
    """Requests so far."""

    nbytes: int = 0
    """Bytes of keys, values and answers so far."""


class CountedStore(dist.Store):
    """torch's store as one rank sees the store.

    Args:
        store: The client that answers.
        traffic: Requests and bytes are added to these counts.
    """

    def __init__(self, store: dist.Store, traffic: Traffic) -> None:
        super().__init__()
        self._store, self._traffic = store, traffic

    def ask(self, request: str, /, *arguments: Any) -> Any:
        """Send one request, count the request, and return the answer."""
        answer = getattr(self._store, request)(*arguments)
        self._traffic.operations += 1
        self._traffic.nbytes += sum(
            len(str(each)) for each in (*arguments, answer) if each is not None
        )
        return answer


for _name in ("set", "get", "add", "compare_set", "check", "delete_key", "wait"):
    setattr(CountedStore, _name, partialmethod(CountedStore.ask, _name))
