"""Every pair of fault class, phase and policy is in a campaign of `make test`.

The test reads the faults of a campaign by calling the campaign's test up to `survive`,
which then starts no job.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from signal import SIGSTOP
from typing import Any

import pytest

from moe_ckpt.config import CKPT_CONFIGS, InMemoryConfig
from moe_ckpt.elastic.status_page import RAISE_NUMBER
from moe_ckpt.types import Phase
from tests.harness.jobs.campaign import Fault, Point, kill_a_daemon, lose_nodes

SIGNAL, HANG, EXCEPTION, NODE, DAEMON = CLASSES = (
    "signal",
    "hang",
    "exception",
    "node",
    "daemon",
)
"""Classes of faults.

`node`: a host is lost with its memory. test_partitions.py covers the classes of faults
of the network.
"""
REPAIR = (Phase.JOIN, Phase.RECOVERY)
PHASES = (
    *REPAIR,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.REDUCE,
    Phase.STEP,
    Phase.SNAPSHOT,
    Phase.BETWEEN,
)
POLICIES = tuple(
    name for name, kind in CKPT_CONFIGS.items() if issubclass(kind, InMemoryConfig)
)
CAMPAIGNS = (
    "test_elastic",
    "test_elastic_whole",
    "test_elastic_partial",
    "test_elastic_flowcheck",
)

Row = tuple[str, Phase, str]
"""A class, a phase and a policy."""
Pair = frozenset[tuple[int, object]]
"""Two values, each with its position in a row."""


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(enumerate(row), 2)}


def can_be(row: Row) -> bool:
    """Return whether a campaign can hold such a fault.

    Campaigns strike nodes and daemons only while a rank trains.
    """
    kind, phase, _ = row
    return kind not in (NODE, DAEMON) or phase not in REPAIR


def possible_pairs() -> set[Pair]:
    return {
        pair
        for row in filter(can_be, product(CLASSES, PHASES, POLICIES))
        for pair in pairs_of(row)
    }


def rows_of(fault: Fault, policy: str) -> Iterator[Row]:
    """Yield the class and the phase of each death of a fault."""
    for number, point in enumerate(fault.at, 1):
        if isinstance(point.phase, Phase):
            yield (
                _class_of(fault, point, is_last=number == len(fault.at)),
                point.phase,
                policy,
            )


def _class_of(fault: Fault, point: Point, *, is_last: bool) -> str:
    if fault.is_held and is_last:
        return {lose_nodes: NODE, kill_a_daemon: DAEMON}.get(fault.then, SIGNAL)  # type: ignore[call-overload]
    return {SIGSTOP: HANG, RAISE_NUMBER: EXCEPTION}.get(point.number, SIGNAL)


class BegunError(Exception):
    """Raised where a campaign would start its job."""


def campaigns(
    patch: pytest.MonkeyPatch, folder: Path
) -> list[tuple[Sequence[Fault], str]]:
    """Return the faults and the policy of each campaign of `make test`."""
    found: list[tuple[Sequence[Fault], str]] = []

    def note(
        _: Path,
        faults: Sequence[Fault],
        *training: str,
        ckpt: str = "moevement",
        **options: Any,
    ) -> None:
        found.append((faults, ckpt))
        raise BegunError

    for file in CAMPAIGNS:
        # pytest imports test modules in the same way
        module = importlib.import_module(f"tests.launcher.{file}")
        patch.setattr(module, "survive", note)
        for name, test in inspect.getmembers(module, inspect.isfunction):
            is_full = any(
                mark.name == "full" for mark in getattr(test, "pytestmark", ())
            )
            if (
                name.startswith("test_")
                and not is_full
                and "survive(" in inspect.getsource(test)
            ):
                with pytest.raises(BegunError):
                    test(folder)
    return found


def test_every_pair_has_a_campaign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = campaigns(monkeypatch, tmp_path)
    struck = [
        row
        for faults, policy in found
        for fault in faults
        for row in rows_of(fault, policy)
    ]
    missing = possible_pairs() - {pair for row in struck for pair in pairs_of(row)}
    assert not missing, "\n".join(
        sorted(str([str(value) for _, value in sorted(pair)]) for pair in missing)
    )
