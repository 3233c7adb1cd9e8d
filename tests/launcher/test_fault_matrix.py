"""Every pair of a fault's class, its phase and the policy: in campaigns of `make test`, or else in rows here, `--full`.

A campaign's list of faults is read by calling its test up to `survive`, which then starts no job.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest

from moe_ckpt.elastic.status_page import RAISE_NUMBER
from moe_ckpt.types import Phase
from tests.campaign import Fault, Point, kill_a_daemon, lose_nodes, survive

SIGNAL, HANG, EXCEPTION, NODE, DAEMON = CLASSES = ("signal", "hang", "exception", "node", "daemon")
"""`node`: a host is lost with its memory. Classes that a job meets by its network are those of test_partitions.py."""
REPAIR = (Phase.JOIN, Phase.RECOVERY)
PHASES = (*REPAIR, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.STEP, Phase.SNAPSHOT, Phase.BETWEEN)
POLICIES = ("moevement", "gemini", "checkfreq", "moc", "moetion", "flowcheck")
CAMPAIGNS = ("test_elastic", "test_elastic_whole", "test_elastic_partial", "test_elastic_flowcheck")
NUMBERS = {SIGNAL: SIGKILL, HANG: SIGSTOP, EXCEPTION: RAISE_NUMBER}

Row = tuple[str, Phase, str]
"""A class, a phase and a policy."""
Pair = frozenset[tuple[int, object]]
"""Two values, each with its place in a row."""

ROWS: Mapping[str, Sequence[tuple[str, Phase]]] = {
    "moevement": [
        (HANG, Phase.BACKWARD),
        (HANG, Phase.REDUCE),
        (HANG, Phase.STEP),
        (EXCEPTION, Phase.REDUCE),
        (EXCEPTION, Phase.STEP),
    ],
    "gemini": [(HANG, Phase.JOIN), (EXCEPTION, Phase.SNAPSHOT), (DAEMON, Phase.REDUCE)],
    "checkfreq": [
        (HANG, Phase.RECOVERY),
        (EXCEPTION, Phase.JOIN),
        (DAEMON, Phase.SNAPSHOT),
        (EXCEPTION, Phase.BETWEEN),
        (SIGNAL, Phase.FORWARD),
    ],
    "moc": [
        (HANG, Phase.FORWARD),
        (EXCEPTION, Phase.RECOVERY),
        (DAEMON, Phase.STEP),
        (NODE, Phase.SNAPSHOT),
        (NODE, Phase.BETWEEN),
        (SIGNAL, Phase.JOIN),
    ],
    "moetion": [(HANG, Phase.SNAPSHOT), (EXCEPTION, Phase.FORWARD), (DAEMON, Phase.BETWEEN), (SIGNAL, Phase.JOIN)],
    "flowcheck": [
        (HANG, Phase.BETWEEN),
        (EXCEPTION, Phase.JOIN),
        (SIGNAL, Phase.RECOVERY),
        (SIGNAL, Phase.FORWARD),
        (SIGNAL, Phase.SNAPSHOT),
    ],
}

"""For each policy the classes and phases that make up for pairs without a campaign in `make test`."""

SETTINGS = {
    "moevement": ("ckpt.window=2",),
    "gemini": ("ckpt.every_iters=2",),
    "checkfreq": ("ckpt.every_iters=2",),
    "moc": ("ckpt.every_iters=2", "ckpt.disk_every_iters=2", "ckpt.k_snapshot=4", "ckpt.k_persist=4"),
    "moetion": ("ckpt.experts=4", "ckpt.remote_experts=4", "ckpt.bubble_copies=false"),
    "flowcheck": ("ckpt.max_lag_iters=0",),
}
FIRST, EVERY = 7, 5
"""Iterations of the first fault and between faults: a lost node needs copies, or a disk, with a state."""


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(enumerate(row), 2)}


def can_be(row: Row) -> bool:
    """Whether a campaign can hold such a fault: nodes and daemons are struck from outside, while a rank trains."""
    kind, phase, _ = row
    return kind not in (NODE, DAEMON) or phase not in REPAIR


def possible_pairs() -> set[Pair]:
    return {pair for row in filter(can_be, product(CLASSES, PHASES, POLICIES)) for pair in pairs_of(row)}


def rows_of(fault: Fault, policy: str) -> Iterator[Row]:
    """Yield the class and the phase of each death of a fault."""
    for number, point in enumerate(fault.at, 1):
        if isinstance(point.phase, Phase):
            yield _class_of(fault, point, is_last=number == len(fault.at)), point.phase, policy


def _class_of(fault: Fault, point: Point, *, is_last: bool) -> str:
    if fault.is_held and is_last:
        return {lose_nodes: NODE, kill_a_daemon: DAEMON}.get(fault.then, SIGNAL)  # type: ignore[call-overload]
    return {SIGSTOP: HANG, RAISE_NUMBER: EXCEPTION}.get(point.number, SIGNAL)


class BegunError(Exception):
    """A campaign would start its job now."""


def campaigns(patch: pytest.MonkeyPatch, folder: Path) -> list[tuple[Sequence[Fault], str]]:
    """Return the faults and the policy of each campaign of `make test`."""
    found: list[tuple[Sequence[Fault], str]] = []

    def note(_: Path, faults: Sequence[Fault], *training: str, ckpt: str = "moevement", **options: Any) -> None:
        found.append((faults, ckpt))
        raise BegunError

    for file in CAMPAIGNS:
        module = importlib.import_module(f"tests.launcher.{file}")  # as pytest does, for its tests
        patch.setattr(module, "survive", note)
        for name, test in inspect.getmembers(module, inspect.isfunction):
            is_full = any(mark.name == "full" for mark in getattr(test, "pytestmark", ()))
            if name.startswith("test_") and not is_full and "survive(" in inspect.getsource(test):
                with pytest.raises(BegunError):
                    test(folder)
    return found


def test_every_pair_has_a_campaign_or_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No row is in vain, either: each has a pair that no campaign has."""
    found = campaigns(monkeypatch, tmp_path)
    assert {policy for _, policy in found} == set(POLICIES)
    struck = [row for faults, policy in found for fault in faults for row in rows_of(fault, policy)]
    covered = {pair for row in struck for pair in pairs_of(row)}
    rows: list[Row] = [(kind, phase, policy) for policy, cells in ROWS.items() for kind, phase in cells]
    assert all(map(can_be, rows))
    missing = possible_pairs() - covered
    for row in rows:
        assert pairs_of(row) & missing, f"{row} adds nothing"
        missing -= pairs_of(row)
    assert not missing, "\n".join(sorted(str([str(value) for _, value in sorted(pair)]) for pair in missing))


def fault_of(kind: str, phase: Phase, policy: str, iteration: int) -> Fault:
    """Return a fault of a class in a phase, from which ranks go back to any earlier state of theirs."""
    options: dict[str, Any] = {"back_to": range(iteration + 1), "replaying": None, "executed": None}
    if kind == NODE:
        from_disk = policy == "checkfreq"
        options |= {"kills": [2], "then": lose_nodes, "resumed": "local disk" * from_disk}
        options["fetched"] = policy in ("moevement", "gemini", "moetion", "flowcheck")
    if kind == DAEMON:
        options |= {"kills": [], "then": kill_a_daemon}
    number = NUMBERS.get(kind, SIGKILL)
    if phase in REPAIR:
        at = [Point(2, Phase.BACKWARD, iteration), Point(3, phase, number=Signals(number))]
    else:
        at = [Point(0 if options.get("kills") is not None else 2, phase, iteration, number=Signals(number))]
    return Fault(name=f"{kind} in {phase.name} of {iteration}", at=at, **options)


@pytest.mark.full
@pytest.mark.timeout(330)
@pytest.mark.parametrize("policy", ROWS)
def test_a_job_ends_exactly_after_the_other_pairs(policy: str, tmp_path: Path) -> None:
    iterations = range(FIRST, FIRST + EVERY * len(ROWS[policy]), EVERY)
    faults = [
        fault_of(kind, phase, policy, iteration)
        for (kind, phase), iteration in zip(ROWS[policy], iterations, strict=True)
    ]
    training = (f"train.iterations={iterations[-1] + 3}", *(("precision=fp32",) if policy == "moetion" else ()))
    settings = (*SETTINGS[policy], "runtime.heartbeat_s=5")
    survive(tmp_path, faults, *training, ckpt=policy, settings=settings)
