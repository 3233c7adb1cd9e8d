"""A campaign: one job that survives many faults, each with its own expectation.

Each fault strikes at an exact point. All ranks have all points before the job starts,
so nothing depends on how fast the test reads or writes. There are two kinds of faults:

    Fault(at=[Point(2, BACKWARD, 5)], ...)                rank 2 sends itself SIGKILL
                                                          there
    Fault(at=[Point(2, REDUCE, 5)], kills=[2, 3], ...)    rank 2 stands still there,
                                                          then the test kills both ranks

A fault with several points is a death during a recovery: ranks reach the points after
the first in generations that earlier points have begun. After the job, each fault is
checked separately: the `Rejoined` event of every rank, the ranks that replayed, and
each loss and each digest of the state up to the next fault. A failure names the fault.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher import entry
from launcher.proc import stands_still
from moe_ckpt.elastic import status_page
from moe_ckpt.elastic.status_page import (
    ANY_ITERATION,
    StatusPage,
    signal_this_process,
)
from moe_ckpt.engine.in_memory_tier import InMemoryTier
from moe_ckpt.engine.survey import CopySurvey
from moe_ckpt.errors import CheckpointSaveError
from moe_ckpt.events import (
    Event,
    GenerationEnded,
    IterationCommitted,
    LossNotFinite,
    Rejoined,
    StageRecovered,
    StateDigest,
    StateResumed,
    TokensLost,
    WorkerStarted,
    read_events,
)
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.messages import Address
from moe_ckpt.replication.sender import Replicator
from moe_ckpt.replication.update_work import UpdateWork
from moe_ckpt.types import Phase, ReadyGradients
from tests.harness.jobs.elastic_job import ElasticJob, JobFailedError
from tests.harness.jobs.references import Outcome, uninterrupted
from tests.harness.jobs.run_files import (
    EVENTS_OF_EVERY_RUN,
    RESULT_KEYS,
    kinds_of_events,
)
from tests.harness.jobs.training import events_of

HANGS_END_SOON = "runtime.heartbeat_s=5"
"""Setting of campaigns in which ranks hang.

A rank that stands still for the test counts as alive nevertheless (`_hold`).
"""

# longer than the test needs to carry out a fault, under any load of the machine
_HOLD_NS = 120 * 10**9


class Moment(Enum):
    """Points that no phase marks."""

    VOTE = "vote"
    """The rank is about to vote on its gradients: all ranks have its last snapshot."""

    COPYING = "copying"
    """After a recovery, the rank has begun to send copies, and has not trained yet."""


@dataclass(frozen=True)
class Point:
    """A point at which a rank receives a signal."""

    rank: int
    """Global rank."""

    phase: Phase | Moment
    """The phase that the rank enters at this point."""

    iteration: int = ANY_ITERATION
    """Iteration of the phase.

    Not set for phases of a recovery (JOIN, RECOVERY) and for BUILD, which begins with
    the process.
    """

    skip: int = 0
    """Number of times that the rank first enters the phase without a signal."""

    number: signal.Signals = signal.SIGKILL
    """The signal, which the rank sends to itself."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the expected recovery from the fault."""

    name: str
    """Name of the fault, for messages."""

    at: Sequence[Point]
    """Points at which ranks die, or stand still with `kills`, in order."""

    back_to: int | Collection[int]
    """Iteration from which all ranks go on.

    Several iterations where the timing of copies decides between these iterations.
    """

    replaying: Collection[int] | None
    """Ranks that load a snapshot. None: depends on timing, and is not checked."""

    executed: int | Mapping[int, int] | None
    """Number of iterations that each rank of `replaying` runs again.

    One number, or a number for each rank. All other ranks run none again. None: depends
    on timing, and is not checked.
    """

    fetched: bool = False
    """Whether any rank reads a peer's copies."""

    resumed: str = ""
    """Source on disk that all ranks load: `local disk` or the name of a checkpoint."""

    steps_down: Sequence[tuple[int, str]] = ()
    """States that ranks load after `resumed` and that turn out to be corrupt.

    Each as (iteration of the loss, source). State and losses are compared from the load
    of the last source on.
    """

    diverges: Collection[int] = ()
    """Iterations in which the test makes the loss NaN."""

    kills: Sequence[int] | None = None
    """Ranks that `then` kills while the rank of the last point stands still there.

    That rank goes on afterwards if it is alive. None: the rank of the last point dies
    by its own signal.
    """

    then: Callable[[ElasticJob, Sequence[int]], object] = lambda job, ranks: job.kill(
        *ranks
    )
    """Strikes the job; called with the job and `kills`."""

    @property
    def may_go_back_to(self) -> Collection[int]:
        return (self.back_to,) if isinstance(self.back_to, int) else self.back_to

    @property
    def is_held(self) -> bool:
        return self.kills is not None

    @property
    def dead(self) -> list[int]:
        """Ranks that die; a rank that dies several times is listed several times."""
        points = self.at[:-1] if self.is_held else self.at
        return [*(point.rank for point in points), *(self.kills or ())]

    @property
    def num_generations(self) -> int:
        """Number of generations that the fault ends.

        A process that dies while it builds its model is not in a generation yet.
        """
        return sum(point.phase is not Phase.BUILD for point in self.at)


@dataclass(frozen=True)
class Order:
    """A point in a generation of the job."""

    generation: int
    """Generation of the job, from 1."""

    incarnation: int
    """Number of earlier processes of the rank."""

    point: Point
    """The point."""

    holds: bool
    """Whether the rank stands still at the point, in place of the point's signal."""

    def is_due(self, page: StatusPage, phase: Phase | Moment) -> bool:
        """Return whether the calling process is at the point, regardless of `skip`."""
        here = (self.generation, self.point.rank, self.point.phase) == (
            page.generation,
            _own_rank(),
            phase,
        )
        return here and self.point.iteration in (ANY_ITERATION, page.iteration)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A rank's events from one generation that trained to the next."""

    global_rank: int
    """The rank."""

    recovery: list[Event]
    """Events of the recovery before `rejoined`."""

    rejoined: Rejoined | None
    """End of the recovery; None for the stretch from the start of the job."""

    events: list[Event]
    """Events after `rejoined`."""

    @property
    def generation(self) -> int:
        return self.rejoined.generation if self.rejoined else 1

    @property
    def dead(self) -> list[int]:
        """Ranks that the previous generation has lost."""
        deaths = self.rejoined.deaths if self.rejoined else []
        return [
            int(found[1])
            for death in deaths
            if (found := re.match(r"rank (\d+) \(pid \d+\)", death))
        ]

    @property
    def loaded(self) -> bool:
        """Whether the rank has loaded a snapshot in the recovery."""
        return any(
            isinstance(event, StageRecovered | TokensLost) for event in self.recovery
        )

    @property
    def resumed(self) -> list[str]:
        """The sources on disk that the rank has loaded in the recovery."""
        return [
            Path(event.source).name
            for event in self.recovery
            if isinstance(event, StateResumed)
        ]

    @property
    def stepped_down(self) -> list[tuple[int, str]]:
        """Sources that the rank has left after a loss that was not finite.

        Each with the iteration of the loss.
        """
        return [
            (event.iteration, event.source)
            for event in self.events
            if isinstance(event, LossNotFinite)
        ]

    @property
    def stepped_down_to(self) -> int:
        """Iteration of the source that the rank has loaded last in this generation.

        0 if the rank has loaded none after `rejoined`.
        """
        return next(
            (
                event.iteration
                for event in reversed(self.events)
                if isinstance(event, StateResumed)
            ),
            0,
        )

    @property
    def trusted_events(self) -> list[Event]:
        """Events from the last load of a source on."""
        loads = [
            index
            for index, event in enumerate(self.events)
            if isinstance(event, StateResumed)
        ]
        return self.events[loads[-1] :] if loads else self.events


def lose_nodes(job: ElasticJob, ranks: Sequence[int]) -> None:
    """Kill ranks and delete their host memory; `Fault.then` of lost nodes."""
    job.lose_nodes(*ranks)


def kill_a_daemon(job: ElasticJob, ranks: Sequence[int]) -> None:
    """Kill rank 3's daemon, and ranks once rank 2 has left the generation.

    The wait keeps a rank that stands still from going on in the generation.
    """
    generation = job.page(2).generation
    os.kill(job.daemon_pid(3), signal.SIGKILL)
    job.wait_for(
        lambda: job.page(2).generation > generation or None, "the end of the generation"
    )
    job.kill(*ranks)


def all_go_back(
    name: str, to: int | Collection[int], *at: Point, world_size: int = 4, **more: Any
) -> Fault:
    """Return a fault after which all ranks load a snapshot.

    Args:
        name: Name of the fault.
        to: Iteration of the snapshot; of several iterations, one must be the right one.
        at: Points of the fault.
        world_size: Number of ranks.
        more: Further fields of `Fault`.
    """
    options: dict[str, Any] = {"replaying": range(world_size)} | more
    return Fault(name=name, at=at, back_to=to, executed=0, **options)


def call_is_a_point(
    owner: type | ModuleType,
    name: str,
    phase: Phase,
    *,
    when: Callable[..., bool] = lambda *_: True,
) -> None:
    """Make a rank enter `phase` whenever the rank is about to call a function.

    To be called in a setup.

    Args:
        owner: The class or module of the function.
        name: The name of the function.
        phase: The phase to enter.
        when: Returns, for the arguments of a call, whether the rank enters the phase.
    """
    pages: list[StatusPage] = []
    join, call = StatusPage.join, getattr(owner, name)

    def remember(self: StatusPage, generation: int) -> None:
        pages[:] = [self]
        join(self, generation)

    def enter_and_call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            pages[0].enter(phase)
        return call(*arguments, **options)

    StatusPage.join = remember  # type: ignore[method-assign]
    setattr(owner, name, enter_and_call)


def copies_fail(*beginnings: str) -> None:
    """Let no blob whose key has one of these beginnings reach a peer; for a setup."""
    copy = Replicator.copy

    def copy_others(self: Replicator, keys: Sequence[str]) -> Future[UpdateWork]:
        others = [key for key in keys if not key.startswith(beginnings)]
        if len(others) == len(keys):
            return copy(self, keys)
        if others:
            copy(self, others)
        failed = Future[UpdateWork]()
        failed.set_exception(CheckpointSaveError("a test lets this copy fail"))
        return failed

    Replicator.copy = copy_others  # type: ignore[method-assign]


class CampaignError(AssertionError):
    """A fault did not go as expected; the message names it."""


def survive(
    folder: Path,
    faults: Sequence[Fault],
    *training: str,
    world_size: int = 4,
    ckpt: str = "moevement",
    settings: Sequence[str] = (),
    setup: Callable[[], None] | None = None,
    is_exact: bool = True,
) -> ElasticJob:
    """Run a job through all faults and check each of the faults.

    Args:
        folder: Folder of the job.
        faults: The faults, in order.
        training: Overrides of the job and of the uninterrupted run.
        world_size: Number of ranks.
        ckpt: The policy.
        settings: Overrides of the job alone, which do not change the training.
        setup: Called in the agent before any process of the job is forked.
        is_exact: Whether to compare with the uninterrupted run. Not possible with a
            policy that may lose something.

    Returns:
        The job, which has ended.

    Raises:
        CampaignError: A fault or the job did not go as expected.
    """
    prepare = functools.partial(_prepare, list(_orders(faults)), setup)
    overrides = (*training, *settings, "run.digest_every_iters=1")
    with ElasticJob(world_size, folder, *overrides, ckpt=ckpt, setup=prepare) as job:
        try:
            _carry_out(job, faults)
            result = job.wait()
        except JobFailedError as error:
            raise CampaignError(
                f"the job failed {_last_fault(job, faults)}: {error}"
            ) from error
    stretches = [stretches_of(job.run, rank) for rank in range(world_size)]
    reference = uninterrupted(world_size, *training) if is_exact else None
    _check_legs(faults, stretches, reference)
    _check_whole_run(job, result, faults, reference)
    return job


def stretches_of(run: Path, global_rank: int) -> list[Stretch]:
    """Return a rank's events, cut where a generation began to train.

    Events of interrupted recoveries are left out.
    """
    stretches = [
        Stretch(global_rank=global_rank, recovery=[], rejoined=None, events=[])
    ]
    recovery: list[Event] = []
    for logged in read_events(run / "events" / f"rank{global_rank:04d}.jsonl"):
        event = logged.event
        if isinstance(event, Rejoined):
            stretches.append(
                Stretch(
                    global_rank=global_rank,
                    recovery=recovery,
                    rejoined=event,
                    events=[],
                )
            )
            recovery = stretches[-1].events
        elif isinstance(event, GenerationEnded | WorkerStarted):
            recovery = [] if stretches[0].events else stretches[0].events
        recovery.append(event)
    return stretches


def _orders(faults: Sequence[Fault]) -> Iterator[Order]:
    dead: list[int] = []
    for generation, fault in _numbered(faults):
        before = list(dead)
        for position, point in enumerate(fault.at):
            holds = fault.is_held and position == len(fault.at) - 1
            yield Order(generation, before.count(point.rank), point, holds)
            before.append(point.rank)
            generation += point.phase is not Phase.BUILD
        dead += fault.dead


def _prepare(orders: Sequence[Order], setup: Callable[[], None] | None) -> None:
    """Make every process that the agent forks obey the orders for its rank."""
    if setup:
        setup()
    skips = {order: order.point.skip for order in orders}
    # of the worker that runs in this process
    pages: list[StatusPage] = []
    daemons: list[DaemonClient] = []
    enter, ready, use_peers, resume, train = (
        StatusPage.enter,
        InMemoryTier.ready,
        DaemonClient.use_peers,
        CopySurvey.resume_copying,
        entry.run_in,
    )

    def obey(page: StatusPage, due: Sequence[Order]) -> None:
        for order in due:
            skips[order] -= 1
            if skips[order] == -1:
                if order.holds:
                    _hold(page)
                else:
                    signal_this_process(order.point.number)

    def enter_and_obey(
        page: StatusPage, phase: Phase, iteration: int | None = None
    ) -> None:
        pages[:] = [page]
        enter(page, phase, iteration)
        obey(page, [order for order in orders if order.is_due(page, phase)])

    def be_ready_and_obey(
        tier: InMemoryTier, iteration: int, gradients: ReadyGradients
    ) -> None:
        ready(tier, iteration, gradients)
        [page] = pages
        obey(page, [order for order in orders if order.is_due(page, Moment.VOTE)])

    def remember(daemon: DaemonClient, addresses: Sequence[Address]) -> None:
        daemons[:] = [daemon]
        use_peers(daemon, addresses)

    def resume_and_obey(copies: CopySurvey) -> None:
        resume(copies)
        [page] = pages
        due = [order for order in orders if order.is_due(page, Moment.COPYING)]
        if due:
            # without keys, the copy ends once all earlier copies to peers have ended
            [daemon] = daemons
            daemon.copy([]).result()
        obey(page, due)

    def obey_and_train(worker: Any, settings: Any) -> Any:
        building = [order for order in orders if order.point.phase is Phase.BUILD]
        here = (_own_rank(), worker.incarnation)
        obey(
            worker.page,
            [
                order
                for order in building
                if (order.point.rank, order.incarnation) == here
            ],
        )
        return train(worker, settings)

    StatusPage.enter = enter_and_obey  # type: ignore[method-assign]
    InMemoryTier.ready = be_ready_and_obey  # type: ignore[method-assign]
    DaemonClient.use_peers = remember  # type: ignore[method-assign]
    CopySurvey.resume_copying = resume_and_obey  # type: ignore[method-assign]
    entry.run_in = obey_and_train


def _hold(page: StatusPage) -> None:
    """Stand still until the test lets this process go on.

    The process does not count as hung, because its last heartbeat is dated `_HOLD_NS`
    into the future.
    """
    beat = StatusPage.beat
    StatusPage.beat = lambda _: None  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        later = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + _HOLD_NS)
        patch.setattr(status_page, "time", later)
        beat(page)
    signal_this_process(signal.SIGSTOP)
    StatusPage.beat = beat  # type: ignore[method-assign]


def _own_rank() -> int:
    return int(os.environ["RANK"])


def _numbered(faults: Sequence[Fault]) -> Iterator[tuple[int, Fault]]:
    """Yield each fault with the first generation that the fault ends, from 1."""
    generation = 1
    for fault in faults:
        yield generation, fault
        generation += fault.num_generations


def _carry_out(job: ElasticJob, faults: Sequence[Fault]) -> None:
    """Wait for each fault in which a rank stands still, and strike then."""
    dead: list[int] = []
    for fault in faults:
        points = [point.rank for point in fault.at]
        if fault.kills is not None:
            held = points.pop()
            pid = job.worker(held, incarnation=[*dead, *points].count(held)).pid
            job.wait_for(
                lambda pid=pid: stands_still(pid) or None,
                f"rank {held} to stand still for '{fault.name}'",
            )
            fault.then(job, fault.kills)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        dead += fault.dead


def _last_fault(job: ElasticJob, faults: Sequence[Fault]) -> str:
    """Return in words the last fault that a failed job has reached."""
    reached = 0
    for path in (job.run / "events").glob("*.jsonl"):
        ended = [
            logged.event
            for logged in read_events(path)
            if isinstance(logged.event, GenerationEnded)
        ]
        reached = max([reached, *(event.generation for event in ended)])
    begun = [
        fault.name for generation, fault in _numbered(faults) if generation <= reached
    ]
    return f"in or after '{begun[-1]}'" if begun else "before the first fault"


def _check_legs(
    faults: Sequence[Fault],
    stretches: Sequence[Sequence[Stretch]],
    reference: Outcome | None,
) -> None:
    """Check the recovery of each fault, and the leg up to the next fault.

    Raises:
        CampaignError: Something was not as expected; for the first such fault.
    """
    of_each = [
        {stretch.generation: stretch for stretch in of_rank} for of_rank in stretches
    ]
    generations = [found + fault.num_generations for found, fault in _numbered(faults)]
    gone_on_from = [
        _iteration_of(of_each[0].get(generation)) for generation in generations
    ]
    untils = [*gone_on_from, max(reference.losses) + 1 if reference else 0]
    first = [of_rank.pop(1) for of_rank in of_each]
    _require_none(
        [*_check_leg(first, 1, untils[0], reference)] if reference else [],
        "before the first fault",
    )
    for (found, fault), until in zip(_numbered(faults), untils[1:], strict=True):
        generation = found + fault.num_generations
        cut_off = [
            of_rank.pop(g)
            for of_rank in of_each
            for g in range(found + 1, generation)
            if g in of_rank
        ]
        leg = [of_rank.pop(generation, None) for of_rank in of_each]
        missing = [
            f"rank {rank}: no Rejoined event in generation {generation}"
            for rank, of in enumerate(leg)
            if not of
        ]
        _require_none(missing, f"fault '{fault.name}'")
        whole = [stretch for stretch in leg if stretch]
        wrong = [*_check_recovery(fault, whole, [*cut_off, *whole])]
        if reference:
            for stretch in cut_off:
                wrong += _check_leg([stretch], 0, 0, reference)
            wrong += _check_leg(
                whole, max(1, _iteration_of(whole[0])), until, reference, fault.diverges
            )
        _require_none(wrong, f"fault '{fault.name}'")
    more = [
        f"rank {rank}: generation {g}, and no fault"
        for rank, of in enumerate(of_each)
        for g in of
    ]
    _require_none(more, "after the last fault")


def _iteration_of(stretch: Stretch | None) -> int:
    return stretch.rejoined.iteration if stretch and stretch.rejoined else 0


def _require_none(wrong: Sequence[str], where: str) -> None:
    if wrong:
        raise CampaignError("\n".join([f"{where}:", *wrong]))


def _check_recovery(
    fault: Fault, leg: Sequence[Stretch], all_of_fault: Sequence[Stretch]
) -> Iterator[str]:
    told = [rank for stretch in all_of_fault for rank in stretch.dead]
    if set(told) != set(fault.dead):
        yield f"dead: got {sorted(set(told))}, wanted {sorted(set(fault.dead))}"
    replaying = {rank for rank, stretch in enumerate(leg) if stretch.loaded}
    if fault.replaying is not None and replaying != set(fault.replaying):
        yield (
            f"ranks that load a snapshot: got {sorted(replaying)}, wanted"
            f" {sorted(fault.replaying)}"
        )
    fetched_bytes = sum(
        stretch.rejoined.fetched_bytes for stretch in leg if stretch.rejoined
    )
    if bool(fetched_bytes) != fault.fetched:
        yield (
            f"bytes fetched: got {fetched_bytes}, wanted"
            f" {'some' if fault.fetched else 'none'}"
        )
    for rank, stretch in enumerate(leg):
        rejoined = stretch.rejoined
        assert rejoined is not None
        if (
            rejoined.iteration not in fault.may_go_back_to
            or rejoined.iteration != _iteration_of(leg[0])
        ):
            yield (
                f"rank {rank}: goes on from iteration {rejoined.iteration}, wanted"
                f" {fault.back_to}, as rank 0"
            )
        if stretch.resumed != [fault.resumed] * bool(fault.resumed):
            yield (
                f"rank {rank}: loads {stretch.resumed} from disk, wanted"
                f" {fault.resumed or 'nothing'}"
            )
        if stretch.stepped_down != list(fault.steps_down):
            yield (
                f"rank {rank}: steps down from {stretch.stepped_down}, wanted"
                f" {list(fault.steps_down)}"
            )
        wanted = 0
        if rank in replaying:
            wanted = (
                fault.executed[rank]
                if isinstance(fault.executed, Mapping)
                else fault.executed
            )
        if wanted not in (None, rejoined.executed_iters):
            yield (
                f"rank {rank}: runs {rejoined.executed_iters} iterations again, wanted"
                f" {wanted}"
            )


def _check_leg(
    leg: Sequence[Stretch],
    first: int,
    until: int,
    reference: Outcome,
    diverges: Collection[int] = (),
) -> Iterator[str]:
    """Yield missing iterations, and losses and states that differ from the reference.

    Args:
        leg: The stretches of all ranks.
        first: First iteration that must not be missing.
        until: End of the iterations that must not be missing, exclusive: a rank that
            dies has not logged its last iteration.
        reference: The uninterrupted run.
        diverges: Iterations whose loss must be NaN.
    """
    for stretch in leg:
        seen: set[int] = set()
        for event in stretch.trusted_events:
            if isinstance(event, StateDigest):
                seen.add(event.iteration)
                if (
                    event.digest
                    != reference.digests[event.iteration][stretch.global_rank]
                ):
                    yield (
                        f"rank {stretch.global_rank}: another state after iteration"
                        f" {event.iteration}"
                    )
            if isinstance(event, IterationCommitted):
                wanted = (
                    math.nan
                    if event.iteration in diverges
                    else reference.losses[event.iteration]
                )
                if repr(event.loss) == repr(wanted):
                    continue
                yield (
                    f"rank {stretch.global_rank}: loss {event.loss} in iteration"
                    f" {event.iteration}, wanted {wanted}"
                )
        missing = set(range(max(first, stretch.stepped_down_to), until)) - seen
        if missing:
            yield (
                f"rank {stretch.global_rank}: no digest of iterations {sorted(missing)}"
            )


def _check_whole_run(
    job: ElasticJob,
    result: dict[str, Any],
    faults: Sequence[Fault],
    reference: Outcome | None,
) -> None:
    dead = [rank for fault in faults for rank in fault.dead]
    built = [
        point.rank
        for fault in faults
        for point in fault.at
        if point.phase is Phase.BUILD
    ]
    found = {
        event.generation: event.deaths
        for rank in range(job.world_size)
        for event in events_of(job.run, Rejoined, rank)
    }
    assert result["faults_survived"] == len(dead), (
        f"{result['faults_survived']} deaths, wanted {dead}, found {found}"
    )
    for rank in range(job.world_size):
        started = events_of(job.run, WorkerStarted, rank)
        assert len(started) == 1 + dead.count(rank) - built.count(rank), f"rank {rank}"
        ended = [
            event.generation for event in events_of(job.run, GenerationEnded, rank)
        ]
        assert ended == sorted(set(ended)), f"rank {rank}"
    wanted = EVENTS_OF_EVERY_RUN | ({"Rejoined"} if dead else set())
    assert kinds_of_events(job.run, job.world_size) >= wanted
    assert result.keys() == RESULT_KEYS | {"eval_loss"}
    if reference:
        assert (result["digest_per_rank"], result["eval_loss"]) == (
            reference.digest_per_rank,
            reference.eval_loss,
        )
