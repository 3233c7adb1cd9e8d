"""Elastic groups and memberships of workers without a model, for tests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_ckpt.elastic.backends import GlooBackend
from moe_ckpt.elastic.generations import Member, Membership
from moe_ckpt.elastic.process_groups import ELASTIC, ElasticGroups, GroupTimeouts
from moe_ckpt.elastic.status_page import StatusPage
from tests.waits import WAIT_S

GRACE_S = 0.05
PATIENT = GroupTimeouts(form_s=WAIT_S, operation_s=WAIT_S, abort_s=WAIT_S)


def own_rank() -> int:
    """Return the rank that `run_ranks` gave this process."""
    return int(os.environ["RANK"])


def open_store(folder: str) -> dist.Store:
    """Return the store in which a test's processes meet.

    The store is a file: a connection over TCP now and then takes seconds.
    """
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    store.set_timeout(timedelta(seconds=WAIT_S))
    return store


def meet(store: dist.Store, name: str, size: int) -> None:
    """Wait, inside a rank, until `size` ranks have called this with the same name."""
    if store.add(name, 1) == size:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"], timedelta(seconds=WAIT_S))


def open_groups(
    global_rank: int,
    world_size: int,
    *,
    form_s: float = WAIT_S,
    operation_s: float = WAIT_S,
    on_wait: Callable[..., None] = lambda waiting: None,
    backend: Any = None,
    world: str = ELASTIC,
) -> ElasticGroups:
    """Make the world a group that outlives generations.

    Until the groups are formed, the world has only this rank's contribution.

    Args:
        global_rank: This rank.
        world_size: The number of ranks.
        form_s: The time limit for forming all groups, in seconds.
        operation_s: The time limit of one operation, in seconds.
        on_wait: Called with True as a wait for other ranks begins, and with False as it
            ends.
        backend: The backend of the groups; None: gloo.
        world: The name of the world's backend.
    """
    timeouts = GroupTimeouts(form_s=form_s, operation_s=operation_s, abort_s=WAIT_S)
    groups = ElasticGroups(backend or GlooBackend(), timeouts, on_wait)
    groups.register()
    dist.init_process_group(
        world, store=dist.HashStore(), rank=global_rank, world_size=world_size
    )
    return groups


def open_membership(
    folder: str,
    global_rank: int,
    world_size: int,
    *,
    incarnation: int = 0,
    join_s: float = WAIT_S,
    grace_s: float = GRACE_S,
    connect: Callable[[str], dist.Store] = open_store,
    watched: dist.Store | None = None,
    backend: Any = None,
) -> Membership:
    """Make this process an incarnation of a rank.

    Args:
        folder: The folder of the status page and of the store.
        global_rank: The rank.
        world_size: The number of ranks.
        incarnation: The incarnation.
        join_s: The time limit for the arrival of all ranks, in seconds.
        grace_s: Seconds after the end of a generation until waiting threads are woken.
        connect: Opens a connection to the store in a folder.
        watched: The connection of the thread that watches a generation; None: another
            one from `connect`.
        backend: The backend of the groups; None: gloo.
    """
    page = StatusPage(Path(folder) / f"page{global_rank}")
    groups = open_groups(global_rank, world_size, on_wait=page.wait, backend=backend)
    member = Member(
        global_rank=global_rank, world_size=world_size, incarnation=incarnation
    )
    watched = watched or connect(folder)
    return Membership(
        member, connect(folder), watched, groups, page, join_s=join_s, grace_s=grace_s
    )


def count_held() -> tuple[int, int]:
    """Return the numbers of open files and of threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def holds_no_more(last: tuple[int, int], first: tuple[int, int]) -> bool:
    """Return whether a process has no more files and threads than before."""
    return all(now <= then for now, then in zip(last, first, strict=True))


def caused(error: Exception, cause: Exception) -> Exception:
    """Return `error` as if it was raised from `cause`."""
    error.__cause__ = cause
    return error


def wait_until(look: Callable[[], bool]) -> bool:
    """Poll for a condition; return whether the condition holds within WAIT_S seconds.

    For conditions that no process announces.
    """
    deadline_s = time.monotonic() + WAIT_S
    while not look():  # one call per round: the call may change the condition
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.001)
    return True


class NotingStore(dist.HashStore):
    """A store that records whether the worker counts as waiting during a request.

    `seen` has each request of the main thread, and whether the worker with this page
    then counts as waiting.
    """

    def __init__(self, page: StatusPage) -> None:
        super().__init__()
        self._page = page
        self.seen: list[tuple[str, bool]] = []

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self._note("compare_set")
        return super().compare_set(key, expected_value, desired_value)

    def add(self, key: str, value: int) -> int:
        self._note("add")
        return super().add(key, value)

    def wait(
        self, keys: list[str], timeout: timedelta = timedelta(seconds=WAIT_S)
    ) -> None:
        self._note("wait")
        super().wait(keys, timeout)

    def _note(self, request: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self.seen.append((request, self._page.waiting))


class DevicePoint:
    """A point in the work of a device, which the test lets the device reach."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.query = self.reached.is_set
