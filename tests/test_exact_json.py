"""Typed JSON in several threads that use a type for the first time."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from moe_ckpt.snapshot.codec import SnapshotHeader, header_from_json, header_to_json
from tests.harness.gloo.ranks import run_ranks
from tests.snapshot.samples import HEADER

THREADS = 8


def read_in_threads(data: bytes) -> list[SnapshotHeader]:
    """Read a header in several threads at the same time.

    The interpreter switches between the threads as often as possible.
    """
    sys.setswitchinterval(1e-6)
    together = threading.Barrier(THREADS)

    def read(_: int) -> SnapshotHeader:
        together.wait()
        return header_from_json(data)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(read, range(THREADS)))


def test_a_header_is_first_read_by_several_threads_at_once() -> None:
    """In new processes, such as replica daemons are.

    msgspec crashes only in a process that has made no decoder for the type before.
    """
    assert (
        run_ranks(4, read_in_threads, header_to_json(HEADER))
        == [[HEADER] * THREADS] * 4
    )
