"""Shows the activity of the ranks of a run, from their status pages and events.

    python -m launcher.status [RUN]

Status pages are in the memory of this machine; of ranks on other machines only events
tell (`launcher.job_state`). Must not: change anything.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launcher.fault_classes import count_faults_in
from launcher.job_state import JobState, Recovery, read_job_state
from launcher.promise import read_exactness
from moe_ckpt.arguments import Parser
from moe_ckpt.elastic.live_workers import (
    LATEST,
    LiveWorker,
    read_world_size,
    read_written,
)
from moe_ckpt.elastic.process_failure import ranks_in_words
from moe_ckpt.errors import ConfigError, exit_status

_WORDS = ("host", "phase", "state")
"""Columns that are words and no numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """The contents of a worker's status page."""

    generation: int
    """The generation that the worker belongs to."""

    iteration: int
    """The iteration of the worker."""

    phase: str
    """The phase (`moe_ckpt.types.Phase`), in lower case."""

    waiting: bool
    """Whether the worker waits for ranks, daemons or storage."""

    heartbeat_age_s: float
    """Seconds since the last heartbeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The status of a rank."""

    rank: int
    """Global rank."""

    node: int
    """Number of the node."""

    host: str
    """Name of the host."""

    pid: int
    """Process id of the newest worker."""

    incarnation: int
    """Number of workers of this rank before the newest one."""

    state: str
    """`waiting`, `computing`, `elsewhere` (on another machine), `being replaced` or
    `dead`.
    """

    doing: Doing | None
    """The status page; None if the worker is dead or on another machine."""


def read_status(run: Path) -> list[RankStatus]:
    """Return the status of the ranks that have not finished, by rank.

    Args:
        run: The run folder.
    """
    return [_status_of(worker) for worker in read_written(run)]


def main(arguments: Sequence[str]) -> int:
    """Print the status of a run.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status.
    """
    parser = Parser(
        prog="python -m launcher.status",
        description="Show what a run's ranks are doing.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        default=LATEST,
        help="the run's folder (default: outputs/latest, the newest)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")

    def show() -> None:
        options = parser.parse_args(arguments)
        _show(Path(options.run).resolve(), as_json=options.json)

    return exit_status(show)


def _show(run: Path, *, as_json: bool) -> None:
    try:
        world_size = read_world_size(run)
    except FileNotFoundError:
        raise ConfigError(
            f"no run in {run}: start one, or name another's folder"
        ) from None
    ranks, faults, path = read_status(run), count_faults_in(run), run / "result.json"
    result = json.loads(path.read_text()) if path.exists() else None
    exactness, state = read_exactness(run), read_job_state(run, world_size)
    if as_json:
        recovery = state.recovery
        record = {
            "run": str(run),
            "ended": _has_ended(ranks),
            "result": result,
            "faults": faults,
            "recovery": asdict(recovery) if recovery else None,
            "ranks_without_copies": state.without_copies,
        }
        print(
            json.dumps(
                {
                    **record,
                    "exactness": exactness,
                    "ranks": [asdict(rank) for rank in ranks],
                },
                indent=1,
            )
        )
    else:
        _print(run, world_size, ranks, result)
        if not _has_ended(ranks):
            _print_state(ranks, state)
        counts = ", ".join(f"{count} {name}" for name, count in faults.items())
        print(f"faults so far: {counts or 'none'}")
        if exactness:
            print(f"recoveries keep run.exactness={exactness}")


def _status_of(worker: LiveWorker) -> RankStatus:
    doing = _doing(worker)
    if doing is not None:
        state = "waiting" if doing.waiting else "computing"
    elif not worker.is_here:
        state = "elsewhere"
    else:
        state = "being replaced" if worker.is_supervised else "dead"
    return RankStatus(
        rank=worker.global_rank,
        node=worker.node,
        host=worker.host,
        pid=worker.pid,
        incarnation=worker.incarnation,
        state=state,
        doing=doing,
    )


def _doing(worker: LiveWorker) -> Doing | None:
    if not worker.is_alive:
        return None
    try:
        page = worker.open_page()
    except FileNotFoundError:  # the worker has ended in the meantime
        return None
    return Doing(
        generation=page.generation,
        iteration=page.iteration,
        phase=page.phase.name.lower(),
        waiting=page.waiting,
        heartbeat_age_s=round(time.monotonic() - page.heartbeat_s, 3),
    )


def _has_ended(ranks: Sequence[RankStatus]) -> bool:
    """Return whether no rank is left; ranks on other machines count as live."""
    return all(rank.state == "dead" for rank in ranks)


def _print(
    run: Path,
    world_size: int,
    ranks: Sequence[RankStatus],
    result: dict[str, Any] | None,
) -> None:
    console = Console(highlight=False)
    console.print(f"{run}: {world_size} ranks", soft_wrap=True)
    if ranks:
        console.print(_table(ranks))
    if not _has_ended(ranks):
        return
    if result is None:
        console.print("ended without a result")
    else:
        facts = [
            f"iteration {result['iteration']}",
            *_loss(result),
            f"digest {result['digest']}",
        ]
        console.print(f"ended: {', '.join(facts)}", soft_wrap=True)


def _print_state(ranks: Sequence[RankStatus], state: JobState) -> None:
    """Print where ranks are, which are missing, and whether peers hold copies."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(rank.rank)
    if len(by_host) > 1:
        of_hosts = (f"{host}: {ranks_in_words(own)}" for host, own in by_host.items())
        print(f"hosts: {'; '.join(of_hosts)}")
    if any(rank.state == "elsewhere" for rank in ranks):
        print("elsewhere: whether these workers live cannot be seen from here")
    if state.recovery:
        print(_recovery_in_words(state.recovery))
    if state.without_copies:
        print(
            "copies: not all on peers since the last loss or start:"
            f" {ranks_in_words(state.without_copies)}"
        )
    elif state.without_copies is not None:
        print("copies: the snapshots of all ranks are on peers, by their last events")


def _recovery_in_words(recovery: Recovery) -> str:
    groups = (
        (recovery.left, "left the generation that ended"),
        (recovery.started, "with a new process"),
        (recovery.missing, "missing or being replaced"),
    )
    said = ", ".join(f"{ranks_in_words(ranks)} {how}" for ranks, how in groups if ranks)
    return f"recovering for {recovery.seconds:.0f} s: {said}"


def _loss(result: dict[str, Any]) -> list[str]:
    """Return the loss of the last evaluation, else of the last iteration, else nothing.

    Only the launcher evaluates.
    """
    for key, name in (("eval_loss", "evaluation loss"), ("loss", "loss")):
        if result.get(key) is not None:
            return [f"{name} {result[key]:.4f}"]
    return []


def _table(ranks: Sequence[RankStatus]) -> Table:
    """Return a table with a row for each rank.

    The table fits into 80 columns; long names of hosts are folded.
    """
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    heads = (
        "rank",
        "node",
        "host",
        "pid",
        "incar-\nnation",
        "gener-\nation",
        "iter-\nation",
        "phase",
        "state",
        "heart-\nbeat",
    )
    for head in heads:
        table.add_column(
            head, overflow="fold", justify="left" if head in _WORDS else "right"
        )
    for rank in ranks:
        known = [rank.rank, rank.node, rank.host, rank.pid, rank.incarnation]
        doing = rank.doing
        if doing is None:
            seen = ["-", "-", "-", rank.state, "-"]
        else:
            seen = [
                doing.generation,
                doing.iteration,
                doing.phase,
                rank.state,
                f"{1e3 * doing.heartbeat_age_s:.0f} ms",
            ]
        table.add_row(*map(str, [*known, *seen]))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
