"""Effective training time under faults: policies under the same random kills.

    python benchmarks/under_faults.py [--regime capped] [--policy moevement ...]
        [--mtbf-s 20 60] [--runs 8 5] [--seconds 100] [--cap-bytes-per-s 28e6]
        [--spare-nodes 6] [-o outputs/under_faults] [--write benchmarks/README.md]
        [OVERRIDES]

Unless changed: `model=small`, 4 ranks. Policies run at several MTBFs, in interleaved
order. A run is measured for `--seconds` from the end of its first iteration. Random
workers are killed at exponential times; run n of every policy has the same seed.
`--runs` has a number for all MTBFs or one for each: long MTBFs need more runs for as
many faults.

ETTR is the share of the measured time which plain training (`ckpt=none`, no supervisor,
no faults) needs for the same new iterations. Other iterations would not do, because the
time of an iteration depends on how a router spreads its tokens: early iterations may
take half as long as later ones. Plain training runs in each round, at each MTBF, among
the other runs.

With `--spare-nodes`, hosts are lost instead of workers: each rank has a host of its
own, a network namespace, and a spare host replaces a lost one. Needs root. The host of
the job's store is never lost, and no lost host comes back, so a run loses at most as
many hosts as there are spare ones.

In the regime `plain` copies are as fast as the machine. In `capped` each rank copies at
most `--cap-bytes-per-s` to host memory, to peers and to disk. The cap should make a
copy of a rank's whole state (87 MB with `small`) take four to five iterations of this
machine: the regime of the MoEvement paper, section 2, in which a dense snapshot stops
training. Each slot of a window has compute weights of the operators that the window has
not taken in full yet, with BF16 up to a sixth of the state. So at six iterations no
number of slots is enough.

Predictions use constants of the runs at the other MTBFs. From the predicted run a
prediction takes the faults, each at its point of training and not at its time, the
number of new iterations, and the time that the end cut off after the last new
iteration. From plain training in the same round a prediction takes the seconds of each
iteration.

Finished runs in the folder are not run again, so a call with more runs continues there.
So does a call after one that was cut off, if the folder of the unfinished run has been
removed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import lost_hosts  # noqa: E402
from benchmarks.lossy.figure import Line, Panel, draw  # noqa: E402
from benchmarks.marks import rewrite  # noqa: E402
from benchmarks.overhead import QUIET, student  # noqa: E402
from benchmarks.runs import current_commit, default_model, hardware, packages  # noqa: E402
from launcher.cluster_profile import constants_of  # noqa: E402
from launcher.compare import plan_variants, run_job  # noqa: E402
from launcher.config import compose_settings  # noqa: E402
from launcher.overrides import last_values  # noqa: E402
from launcher.simulator.comparison import predict_events  # noqa: E402
from launcher.simulator.real_run import (  # noqa: E402
    MeasuredRecovery,
    RealRun,
    events_of,
    first_commits,
    read_run,
    recoveries_of,
    setup_of,
)
from moe_ckpt.errors import MoeCkptError  # noqa: E402
from moe_ckpt.events import (  # noqa: E402
    HostMemoryUsed,
    IntervalChosen,
    IterationCommitted,
    SnapshotTaken,
    WindowChosen,
)
from moe_ckpt.faults.schedule import (  # noqa: E402
    TimedFault,
    plan_faults,
    poisson_kills,
)
from moe_ckpt.sim.hardware import ClusterConfig  # noqa: E402
from moe_ckpt.sim.pace import Pace  # noqa: E402
from scripts import hosts  # noqa: E402

RANKS = 4
PLAIN = "plain"
POLICIES = ("moevement", "gemini", "checkfreq", "moc", "none")
_WITHOUT_COPIES = ("checkfreq", "moc")  # policies without copies on peers by default
_START_S = 180.0  # limit until the first iteration has ended
_MANY = 100_000
_MIB = 1 << 20
_STYLES = ("moevement", "gemini", "first", "second", "third", "none")
_OF_WORKERS = (
    "<!-- under faults: written by benchmarks/under_faults.py -->",
    "<!-- end of under faults -->",
)
_OF_HOSTS = (
    "<!-- lost hosts: written by benchmarks/under_faults.py -->",
    "<!-- end of lost hosts -->",
)
_COLUMNS = (
    *(
        "MTBF, s",
        "policy",
        "ETTR",
        "less that of the first, pairs",
        "predicted",
        "less the ETTR, pairs",
    ),
    *("a fault, s", "predicted", "faults", "beside plain between faults"),
    *("window, pause or interval", "MiB an iteration", "host memory, MiB"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to make."""

    policy: str
    """Policy with its settings, or `PLAIN`."""

    mtbf_s: float
    """Mean time between faults, in seconds."""

    number: int
    """Number of the run among the runs of this policy and MTBF, from 0."""

    @property
    def name(self) -> str:
        return f"{self.policy.partition(':')[0]}-{self.mtbf_s:g}-{self.number}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measurements of a run after its first iteration.

    The last `tail_s` seconds have no new iteration: an iteration or a recovery that the
    end cut off.
    """

    seconds: float
    """Measured time from the end of the first iteration, in seconds."""

    ended_s: tuple[float, ...]
    """Ends of the new iterations from the second one on.

    In seconds from the end of the first iteration.
    """

    recoveries: tuple[MeasuredRecovery, ...]
    """Recoveries that ended within the measured time."""

    cadence: str
    """Last window and pause, or last interval, in iterations, as text."""

    snapshot_bytes: float
    """Bytes of rank 0's snapshots per iteration."""

    host_bytes: int
    """Most allocated host memory of any rank, in bytes."""

    @property
    def last(self) -> int:
        """Newest iteration."""
        return 1 + len(self.ended_s)

    @property
    def tail_s(self) -> float:
        """Time after the last new iteration, in seconds."""
        return self.seconds - (self.ended_s[-1] if self.ended_s else 0.0)

    @property
    def spent_s(self) -> list[float]:
        """Seconds from one new iteration to the next, from the second iteration on."""
        return [end_s - begin_s for begin_s, end_s in pairwise((0.0, *self.ended_s))]

    def ettr(self, plain: PlainTraining) -> float:
        """Return the share of time that plain training needs for new iterations."""
        return plain.between(1, self.last) / self.seconds

    def quiet_s(self) -> dict[int, float]:
        """Return the seconds of new iterations without a fault, by iteration.

        No fault came between such an iteration and the iteration before.
        """
        hit = {each.before + 1 for each in self.recoveries}
        return {
            number: seconds
            for number, seconds in enumerate(self.spent_s, start=2)
            if number not in hit
        }


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """The times of plain training."""

    iteration_s: float
    """Mean time of an iteration, in seconds."""

    pace: Pace
    """Lengths of single iterations relative to the mean."""

    def between(self, done: int, reached: int) -> float:
        """Return the seconds of the iterations `done` + 1 to `reached`."""
        return self.pace.between(done, reached) * self.iteration_s

    def fault_s(self, recoveries: Sequence[MeasuredRecovery]) -> list[float]:
        """Return the price of each fault, in seconds.

        The price is the time to the next new iteration beyond the time of a plain
        iteration.

        Args:
            recoveries: Recoveries that were measured with an iteration time of 0.
        """
        return [
            each.cost_s - self.between(each.before, each.before + 1)
            for each in recoveries
        ]


def plain_training(outcome: Outcome) -> PlainTraining:
    """Return the times of plain training, as one run measured them.

    Raises:
        MoeCkptError: The run has only one iteration.
    """
    seconds = outcome.spent_s
    if not seconds:
        raise MoeCkptError(
            "under_faults: got plain training of one iteration, wanted more within"
            " --seconds"
        )
    mean_s = statistics.fmean(seconds)
    # the first iteration does not count: a first iteration is slow by itself
    return PlainTraining(
        iteration_s=mean_s, pace=Pace([1.0, *(each / mean_s for each in seconds)])
    )


def plan_cells(policies: Sequence[str], runs: Mapping[float, int]) -> Iterator[Cell]:
    """Yield all runs, round by round.

    Plain training is one of the policies. Each round begins with another policy.

    Args:
        policies: The policies with their settings.
        runs: The number of runs, by MTBF in seconds.
    """
    order = [PLAIN, *policies]
    for number in range(max(runs.values())):
        first = number % len(order)
        for mtbf_s in [each for each, count in runs.items() if number < count]:
            for policy in [*order[first:], *order[:first]]:
                yield Cell(policy=policy, mtbf_s=mtbf_s, number=number)


def arguments_of(
    cell: Cell,
    *,
    cap_bytes_per_s: float | None,
    seconds: float,
    common: Sequence[str],
    spare_nodes: int = 0,
) -> list[str]:
    """Return the words with which `launcher.compare` describes a run.

    Args:
        cell: The run.
        cap_bytes_per_s: The cap of each link; None: copies are as fast as the machine.
        seconds: The seconds to measure.
        common: Settings of all runs.
        spare_nodes: The number of spare nodes. The job injects no fault by itself if
            there are any.
    """
    words = last_values([*QUIET, f"train.iterations={_MANY}", *common])
    if cell.policy == PLAIN:
        return ["none", *words, "fault=none", "runtime.guard=false"]
    policy, _, own = cell.policy.partition(":")
    settings = own.split(",") if own else []
    if policy in ("moevement", "gemini"):
        settings.append(f"ckpt.mtbf_s={cell.mtbf_s:g}")
    if cap_bytes_per_s is not None and policy != "none":
        links = (
            ("host", "disk") if policy in _WITHOUT_COPIES else ("host", "peers", "disk")
        )
        settings += [
            f"ckpt.max_bytes_per_s.{link}={cap_bytes_per_s:.0f}" for link in links
        ]
    if spare_nodes:
        settings.append(f"runtime.spare_nodes={spare_nodes}")
        return [f"{policy}:{','.join(settings)}", *words, "fault=none"]
    count = math.ceil(4 * (seconds + _START_S) / cell.mtbf_s)
    faults = [
        "fault=poisson",
        f"fault.mtbf_s={cell.mtbf_s:g}",
        f"fault.count={count}",
        f"fault.seed={cell.number}",
    ]
    return [f"{policy}:{','.join(settings)}" if settings else policy, *words, *faults]


def losses_of(cell: Cell, spare_nodes: int) -> tuple[TimedFault, ...]:
    """Return the losses of hosts of a run, in order of time.

    The host of rank 0 has the job's store, and is not lost.
    """
    kills = poisson_kills(
        mtbf_s=cell.mtbf_s,
        count=spare_nodes,
        seed=cell.number,
        world_size=RANKS - 1,
        scope="node",
    )
    losses = plan_faults(kills, RANKS - 1, ranks_per_node=1)
    return tuple(replace(loss, ranks=(loss.ranks[0] + 1,)) for loss in losses)


def carry_out(
    cell: Cell, folder: Path, arguments: Sequence[str], seconds: float
) -> Path:
    """Run a job until the job has been measured for long enough.

    A job with spare nodes runs on hosts, which are lost.

    A finished run is not run again. This process ends if the run fails, or if the run
    folder has an unfinished run, or one of other settings or of another commit.

    Args:
        cell: The run.
        folder: The folder of all runs.
        arguments: The words for `launcher.compare`.
        seconds: The seconds to measure.

    Returns:
        The run folder.
    """
    run, done = folder / cell.name, folder / f"{cell.name}.json"
    about = {
        "arguments": list(arguments),
        "seconds": seconds,
        "commit": current_commit(),
    }
    if done.exists() and json.loads(done.read_text()) == about:
        return run
    if run.exists():
        sys.exit(
            f"{run}: got a run of other settings or of another commit, wanted an empty"
            " folder (-o)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    [variant] = plan_variants(arguments, RANKS)
    clock = _Clock(run / "events" / "rank0000.jsonl", seconds)
    spare_nodes = compose_settings(variant.overrides).runtime.spare_nodes
    if spare_nodes:
        outcome = lost_hosts.run_job(
            variant.overrides,
            run,
            num_hosts=RANKS + spare_nodes,
            losses=losses_of(cell, spare_nodes),
            training_s=clock.training_s,
            goes_on=clock.goes_on,
        )
    else:
        outcome = run_job(variant, run, RANKS, clock.goes_on)
    if not outcome.was_stopped or clock.since_s is None:
        sys.exit(
            f"{cell.name}: ended with status {outcome.status} before it was measured;"
            f" see {run}.log"
        )
    done.write_text(json.dumps(about))
    return run


class _Clock:
    """Ends a run `seconds` after the first iteration in its events.

    The run has one more second for the last write.
    """

    def __init__(self, events: Path, seconds: float) -> None:
        self._events = events
        self._seconds = seconds
        self._begun_s = time.monotonic()
        self.since_s: float | None = None

    def training_s(self) -> float:
        """Return the seconds since the first iteration; -1 before its end."""
        return -1.0 if self.since_s is None else time.monotonic() - self.since_s

    def goes_on(self) -> bool:
        """Return whether the run must go on."""
        now_s = time.monotonic()
        if self.since_s is None:
            if (
                self._events.exists()
                and b"IterationCommitted" in self._events.read_bytes()
            ):
                self.since_s = now_s
            return now_s < self._begun_s + _START_S
        return now_s < self.since_s + self._seconds + 1.0


def measure(run: RealRun, seconds: float) -> Outcome:
    """Return the measurements of a run.

    Raises:
        MoeCkptError: The run has no iteration.
    """
    commits = first_commits(run.ranks)
    if not commits:
        raise MoeCkptError("under_faults: got a run without iterations")
    first = min(commits)
    end_s = commits[first] + seconds
    counted = [
        t_s - commits[first]
        for number, t_s in sorted(commits.items())
        if number > first and t_s <= end_s
    ]
    logged = [each.event for each in run.ranks[0] if each.t_s <= end_s]
    taken = [event.size_bytes for event in logged if isinstance(event, SnapshotTaken)]
    memory = [
        each.event.allocated_bytes
        for rank in run.ranks
        for each in rank
        if isinstance(each.event, HostMemoryUsed)
    ]
    return Outcome(
        seconds=seconds,
        ended_s=tuple(counted),
        recoveries=tuple(
            each for each in recoveries_of(run.ranks, 0.0) if each.until_s <= end_s
        ),
        cadence=_cadence(run),
        snapshot_bytes=sum(taken) / (1 + len(counted)),
        host_bytes=max(memory, default=0),
    )


def _cadence(run: RealRun) -> str:
    chosen = [
        each.event
        for each in run.ranks[0]
        if isinstance(each.event, WindowChosen | IntervalChosen)
    ]
    if not chosen:
        return "-"
    last = chosen[-1]
    return (
        f"{last.num_slots}, {last.pause_iters}"
        if isinstance(last, WindowChosen)
        else str(last.every_iters)
    )


def interval(values: Sequence[float]) -> str:
    """Return the mean with its 95 % interval (Student's t), or the only value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f} (one run)"
    half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})"


def slowdowns(
    runs: Sequence[tuple[RealRun, Outcome, PlainTraining]],
) -> tuple[float, float]:
    """Return how much slower the iterations of runs are than plain training.

    Least squares over iterations, without stalls of snapshots. A profile of runs cannot
    measure the slowdown: only plain training beside the runs does.

    Returns:
        The slowdown as a share of each iteration, the price of supervisors, hooks and
        logs; and as seconds per second of copying.
    """
    rows = [
        row
        for run, outcome, plain in runs
        for row in _slower_iterations(run, outcome, plain)
    ]
    if not rows:
        return 0.0, 0.0
    plain_s, copying_s, slower_s = np.array(rows).T
    share, interference = np.linalg.lstsq(
        np.stack([plain_s, copying_s], axis=1), slower_s
    )[0].tolist()
    if copying_s.any() and interference > 0:
        return share, interference
    return float(slower_s.sum() / plain_s.sum()), 0.0


def _slower_iterations(
    run: RealRun, outcome: Outcome, plain: PlainTraining
) -> Iterator[tuple[float, float, float]]:
    """Yield how much longer each new iteration took than in plain training.

    Iterations that a fault hit are left out: a part of such an iteration has run
    before, and is faster when it runs again.

    Yields:
        Seconds in plain training, seconds of copies in the iteration, and seconds
        beyond plain training.
    """
    rank = run.ranks[0]
    copy_s = {
        event.iteration + 1: event.copy_s for event in events_of([rank], SnapshotTaken)
    }
    stall_s = {
        event.iteration: event.stall_s
        for event in reversed(events_of([rank], IterationCommitted))
    }
    for number, spent_s in outcome.quiet_s().items():
        seconds, plain_s = (
            spent_s - stall_s.get(number, 0.0),
            plain.between(number - 1, number),
        )
        yield plain_s, min(seconds, copy_s.get(number, 0.0)), seconds - plain_s


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """A simulation of a run under the run's faults."""

    ettr: float
    """Share of useful time."""

    fault_s: tuple[float, ...]
    """Price of each fault, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """All finished runs of a regime."""

    runs: dict[Cell, RealRun]
    """Contents of the run folders."""

    measured: dict[Cell, Outcome]
    """Measurements of the runs."""

    def outcomes(self, policy: str, mtbf_s: float) -> list[Outcome]:
        """Return the measurements of all runs of a kind."""
        return [self.measured[cell] for cell in self.cells(policy, mtbf_s)]

    def differences(self, policy: str, first: str, mtbf_s: float) -> list[float]:
        """Return each run's ETTR less the ETTR of the policy `first`.

        The runs of a pair are in the same round, under the same faults.
        """
        return [
            one - other
            for one, other in zip(
                self.ettrs(policy, mtbf_s), self.ettrs(first, mtbf_s), strict=True
            )
        ]

    def ettrs(self, policy: str, mtbf_s: float) -> list[float]:
        """Return each run's ETTR, with plain training of the same round."""
        return [
            self.measured[cell].ettr(self.plain_of(cell))
            for cell in self.cells(policy, mtbf_s)
        ]

    def faults_s(self, policy: str, mtbf_s: float) -> list[float]:
        """Return the price of each fault in all runs of a kind, in seconds."""
        cells = self.cells(policy, mtbf_s)
        return [
            cost_s
            for cell in cells
            for cost_s in self.plain_of(cell).fault_s(self.measured[cell].recoveries)
        ]

    def slowdown(self, policy: str, mtbf_s: float) -> float:
        """Return the time of all iterations without a fault, beside plain training.

        The ratio of the times of the same iterations; NaN if there are none.
        """
        spent_s = plain_s = 0.0
        for cell in self.cells(policy, mtbf_s):
            quiet_s, plain = self.measured[cell].quiet_s(), self.plain_of(cell)
            spent_s += sum(quiet_s.values())
            plain_s += sum(plain.between(number - 1, number) for number in quiet_s)
        return spent_s / plain_s if plain_s else math.nan

    def plain_of(self, cell: Cell) -> PlainTraining:
        """Return plain training of the same round at the same MTBF.

        Other rounds would not do, because a machine's speed changes with the hours.
        """
        return plain_training(self.measured[replace(cell, policy=PLAIN)])

    @cached_property
    def plain_s(self) -> float:
        """Mean time of an iteration of plain training over all rounds, in seconds."""
        return statistics.fmean(
            plain_training(outcome).iteration_s
            for cell, outcome in self.measured.items()
            if cell.policy == PLAIN
        )

    def predictions(self, policy: str, mtbf_s: float) -> list[PredictedRun]:
        """Return the prediction of each run; empty without runs at another MTBF.

        Constants come from the runs at the other MTBFs. `none` has no predictions.
        """
        others = [
            cell
            for cell in self.runs
            if cell.policy == policy and cell.mtbf_s != mtbf_s
        ]
        if not others or policy == "none":
            return []
        beside_plain = [
            (self.runs[cell], self.measured[cell], self.plain_of(cell))
            for cell in others
        ]
        share, interference = slowdowns(beside_plain)
        cluster = replace(
            constants_of([self.runs[cell] for cell in others]),
            interference=interference,
        )
        return [
            self._predict(cell, cluster, 1 + share)
            for cell in self.cells(policy, mtbf_s)
        ]

    def _predict(
        self, cell: Cell, cluster: ClusterConfig, factor: float
    ) -> PredictedRun:
        run, measured, plain = self.runs[cell], self.measured[cell], self.plain_of(cell)
        setup = setup_of(run, cluster, factor * plain.iteration_s, plain.pace)
        ranks = predict_events(run, setup, measured.last)
        commits_s = first_commits(ranks)
        # a prediction ends with the last new iteration: the time that the end cut off
        # is taken from the run
        seconds = commits_s[measured.last] - commits_s[1] + measured.tail_s
        recovered = [
            each for each in recoveries_of(ranks, 0.0) if each.before < measured.last
        ]
        return PredictedRun(
            ettr=plain.between(1, measured.last) / seconds,
            fault_s=tuple(plain.fault_s(recovered)),
        )

    def cells(self, policy: str, mtbf_s: float) -> list[Cell]:
        """Return the runs of a kind."""
        return [
            cell
            for cell in self.measured
            if (cell.policy, cell.mtbf_s) == (policy, mtbf_s)
        ]


def table(
    study: Study, policies: Sequence[str], mtbfs_s: Sequence[float]
) -> Iterator[str]:
    """Yield the lines of a table, a row for each MTBF and policy."""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "| --- " * len(_COLUMNS) + "|"
    for mtbf_s in mtbfs_s:
        for policy in policies:
            yield (
                f"| {mtbf_s:g} |"
                f" {' | '.join([policy, *_row(study, policy, policies[0], mtbf_s)])} |"
            )


def _row(study: Study, policy: str, first: str, mtbf_s: float) -> Iterator[str]:
    outcomes, predicted = (
        study.outcomes(policy, mtbf_s),
        study.predictions(policy, mtbf_s),
    )
    costs, ettrs = study.faults_s(policy, mtbf_s), study.ettrs(policy, mtbf_s)
    yield interval(ettrs)
    yield "-" if policy == first else interval(study.differences(policy, first, mtbf_s))
    yield (
        f"{statistics.fmean(each.ettr for each in predicted):.3f}" if predicted else "-"
    )
    yield (
        interval(
            [each.ettr - ettr for each, ettr in zip(predicted, ettrs, strict=True)]
        )
        if predicted
        else "-"
    )
    yield (
        f"{statistics.fmean(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})"
        if costs
        else "-"
    )
    predicted_s = [cost_s for each in predicted for cost_s in each.fault_s]
    yield f"{statistics.fmean(predicted_s):.2f}" if predicted_s else "-"
    yield str(len(costs))
    yield f"{study.slowdown(policy, mtbf_s):.3f}"
    yield outcomes[-1].cadence
    yield f"{statistics.fmean(each.snapshot_bytes for each in outcomes) / _MIB:.1f}"
    yield f"{max(each.host_bytes for each in outcomes) / _MIB:.0f}"


def figure(
    study: Study, policies: Sequence[str], mtbfs_s: Sequence[float], title: str
) -> str:
    """Return the mean ETTR of each policy against the rate of faults, as SVG."""
    rates = sorted((60.0 / mtbf_s, mtbf_s) for mtbf_s in mtbfs_s)
    lines = [
        Line(
            name=policy,
            style=style,
            points=[
                (rate, _mean_ettr(study, policy, mtbf_s)) for rate, mtbf_s in rates
            ],
        )
        for policy, style in zip(policies, _STYLES, strict=False)
    ]
    panel = Panel(title=title, y="ETTR", lines=lines, marks=(), has_legend=True)
    return draw([[panel]], "faults a minute")


def _mean_ettr(study: Study, policy: str, mtbf_s: float) -> float:
    return statistics.fmean(study.ettrs(policy, mtbf_s))


def notes(
    study: Study,
    regime: str,
    cap_bytes_per_s: float | None,
    folder: Path,
    spare_nodes: int = 0,
) -> Iterator[str]:
    """Yield the conditions of the runs, as lines of text.

    Args:
        study: The runs.
        regime: The name of the regime.
        cap_bytes_per_s: The cap of each link; None: no cap.
        folder: The folder of all runs.
        spare_nodes: The number of spare nodes.
    """
    counts = {cell.mtbf_s: cell.number + 1 for cell in study.runs}
    seconds = next(iter(study.measured.values())).seconds
    commits = sorted(
        {json.loads(path.read_text())["commit"] for path in folder.glob("*.json")}
    )
    run = folder / next(iter(study.runs)).name
    cap = (
        ""
        if cap_bytes_per_s is None
        else f", copies at most {cap_bytes_per_s / 1e6:g} MB/s a link"
    )
    spare = f", {spare_nodes} spare hosts" if spare_nodes else ""
    numbers = ", ".join(str(count) for count in counts.values())
    text = (
        f"Regime `{regime}`{cap}{spare}: {numbers} runs of {seconds:g} s each at MTBFs"
        f" of {', '.join(f'{each:g}' for each in counts)} s, a plain iteration takes"
        f" {study.plain_s:.3f} s. {hardware()}; {packages(run)}; commit"
        f" {', '.join(commits)}."
    )
    yield from textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regime", choices=("plain", "capped"), default="capped")
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--mtbf-s", nargs="+", type=float, default=[20.0, 60.0, 180.0])
    parser.add_argument("--runs", nargs="+", type=int, default=[5])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument(
        "--cap-bytes-per-s",
        type=float,
        default=28e6,
        help="of each rank and link, in `capped`",
    )
    parser.add_argument(
        "--spare-nodes",
        type=int,
        default=0,
        help="lose hosts, and have so many spare ones (default: 0, lose workers)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "outputs" / "under_faults"
    )
    parser.add_argument(
        "--write",
        type=Path,
        help="page with marks around the table; a figure of lost workers is put beside",
    )
    options, overrides = parser.parse_known_args()
    counts = (
        options.runs if len(options.runs) > 1 else options.runs * len(options.mtbf_s)
    )
    if len(counts) != len(options.mtbf_s):
        parser.error(
            f"--runs: got {len(counts)} numbers, wanted one, or one for each --mtbf-s"
        )
    if options.spare_nodes and (reason := hosts.why_impossible()):
        parser.error(reason)
    folder = options.output.resolve() / options.regime
    cap_bytes_per_s = options.cap_bytes_per_s if options.regime == "capped" else None
    # as torchrun would set it, without torchrun's warning
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs: dict[Cell, RealRun] = {}
    measured: dict[Cell, Outcome] = {}
    for cell in plan_cells(
        options.policy, dict(zip(options.mtbf_s, counts, strict=True))
    ):
        common = [*default_model(overrides), *overrides]
        words = arguments_of(
            cell,
            cap_bytes_per_s=cap_bytes_per_s,
            seconds=options.seconds,
            common=common,
            spare_nodes=options.spare_nodes,
        )
        done = carry_out(cell, folder, words, options.seconds)
        measured[cell] = measure(read_run(done), options.seconds)
        # a prediction ends with the last new iteration
        runs[cell] = read_run(done, until=measured[cell].last)
        print(
            f"{cell.name}: {measured[cell].last} iterations",
            file=sys.stderr,
            flush=True,
        )
    study = Study(runs=runs, measured=measured)
    lines = [
        *table(study, options.policy, options.mtbf_s),
        "",
        *notes(study, options.regime, cap_bytes_per_s, folder, options.spare_nodes),
    ]
    print("\n".join(lines))
    if options.write and options.spare_nodes:
        rewrite(options.write, _OF_HOSTS, lambda _: "\n".join(lines))
    elif options.write:
        rewrite(options.write, _OF_WORKERS, lambda _: "\n".join(lines))
        title = f"Effective training time under faults, {options.regime}"
        drawn = figure(study, options.policy, options.mtbf_s, title)
        (options.write.parent / f"under_faults_{options.regime}.svg").write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
