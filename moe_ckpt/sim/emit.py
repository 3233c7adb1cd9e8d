"""A simulated run as the events that a real run would have logged, rank by rank.

The clock of the events begins at 0. Values that a simulation lacks are NaN (losses) or
the word "simulated".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from moe_ckpt.elastic.process_failure import FaultClass
from moe_ckpt.events import (
    CheckpointSaved,
    Event,
    ExpertsChosen,
    GenerationEnded,
    HostMemoryUsed,
    IntervalChosen,
    IterationCommitted,
    LoggedEvent,
    Rejoined,
    RunFinished,
    SnapshotTaken,
    StageRecovered,
    StateResumed,
    TokensLost,
    WindowChosen,
    WorkerStarted,
)
from moe_ckpt.faults.schedule import TimedFault
from moe_ckpt.sim.generation import Generation
from moe_ckpt.sim.partial import Lost
from moe_ckpt.sim.saving import Recovery, Saving, Setup
from moe_ckpt.sim.snapshot_pattern import PlannedSnapshot
from moe_ckpt.sim.timeline import HOST_MEMORY, Outcome, Recovered, Trained
from moe_ckpt.types import ExpertChoice, WindowChoice

SIMULATED = "simulated"
Timed = tuple[float, Event]


def rank_events(
    setup: Setup, saving: Saving, outcome: Outcome, global_rank: int
) -> list[LoggedEvent]:
    """Return the events of one rank, by time."""
    rank = _Rank(setup, saving, global_rank)
    timed = sorted(rank.story(outcome), key=lambda entry: entry[0])
    return [
        LoggedEvent(t_s=t_s, global_rank=global_rank, event=event)
        for t_s, event in timed
    ]


class _Rank:
    """The events of one rank of a simulated run."""

    def __init__(self, setup: Setup, saving: Saving, global_rank: int) -> None:
        self._setup, self._saving, self._rank = setup, saving, global_rank
        self._stage = setup.job.stage_of_rank(global_rank)
        self._incarnation = 0
        self._generation = 1

    def story(self, outcome: Outcome) -> Iterator[Timed]:
        """Yield the events of each stretch; times in a stretch need not ascend."""
        yield 0.0, self._started()
        for stretch in outcome.timeline:
            yield from (
                self._trained(stretch)
                if isinstance(stretch, Trained)
                else self._recovered(stretch)
            )
        yield (
            outcome.ledger.wall_s,
            RunFinished(iteration=outcome.iterations, digest=SIMULATED),
        )

    def _started(self) -> WorkerStarted:
        return WorkerStarted(
            pid=0, host=SIMULATED, incarnation=self._incarnation, device=SIMULATED
        )

    def _trained(self, stretch: Trained) -> Iterator[Timed]:
        generation = stretch.generation
        for number in range(1, stretch.iterations + 1):
            yield (
                generation.since_s + generation.elapsed_s(number),
                self._committed(generation, number),
            )
        for snapshot in generation.pattern.snapshots(0, stretch.iterations):
            yield from self._saved(generation, snapshot, stretch.iterations)
        durable = self._saving.durable
        if durable is not None:
            first = generation.start // durable.every_iters + 1
            last = (generation.start + stretch.iterations) // durable.every_iters
            for iteration in (
                count * durable.every_iters for count in range(first, last + 1)
            ):
                yield self._checkpoint(generation, iteration)

    def _committed(self, generation: Generation, number: int) -> IterationCommitted:
        job = self._setup.job
        num_neighbours = (self._stage > 0) + (self._stage < job.layout.pp - 1)
        one_way = job.boundary_log_bytes(self._stage) // max(1, num_neighbours)
        return IterationCommitted(
            iteration=generation.start + number,
            loss=math.nan,
            grad_norm=None,
            loss_scale=1.0,
            learning_rate=0.0,
            skipped=False,
            seconds=generation.iteration_s(number),
            stall_s=generation.added_s(number),
            sent_activation_bytes=one_way if self._stage < job.layout.pp - 1 else 0,
            sent_gradient_bytes=one_way if self._stage > 0 else 0,
        )

    def _saved(
        self, generation: Generation, snapshot: PlannedSnapshot, iterations: int
    ) -> Iterator[Timed]:
        iteration = generation.start + snapshot.offset
        taken_s = generation.since_s + generation.elapsed_s(snapshot.offset)
        if snapshot.choice is not None:
            kind = (
                WindowChosen
                if isinstance(snapshot.choice, WindowChoice)
                else IntervalChosen
            )
            fields = {
                name: getattr(snapshot.choice, name)
                for name in snapshot.choice.__slots__
            }
            yield taken_s, kind(iteration=iteration, **fields)
        if snapshot.experts is not None:
            yield taken_s, self._chosen(iteration, snapshot.experts.choice)
        if snapshot.offset >= iterations:
            return  # the snapshot was being copied when the generation ended
        size_bytes, copy_s = (
            self._share(snapshot.size_bytes),
            snapshot.size_bytes / self._saving.host_bytes_per_s,
        )
        done_s = generation.since_s + generation.elapsed_s(snapshot.offset + 1)
        yield (
            done_s,
            SnapshotTaken(
                iteration=iteration,
                window_start=iteration - snapshot.slot,
                slot=snapshot.slot,
                num_slots=snapshot.num_slots,
                size_bytes=size_bytes,
                dense_bytes=self._share(self._saving.whole_bytes),
                copy_s=copy_s,
            ),
        )
        if snapshot.slot == snapshot.num_slots - 1 and self._saving.memory is not None:
            yield done_s, self._memory()

    def _chosen(self, iteration: int, choice: ExpertChoice) -> ExpertsChosen:
        assert self._saving.partial is not None
        rows = self._saving.partial.tokens.rows_of_stage(
            self._stage, len(choice.memory)
        )
        levels = {name: getattr(choice, name) for name in choice.__slots__}
        return ExpertsChosen(
            iteration=iteration,
            **{
                name: [list(of_layer[row]) for row in rows]
                for name, of_layer in levels.items()
            },
        )

    def _memory(self) -> HostMemoryUsed:
        memory = self._saving.memory
        assert memory is not None
        return HostMemoryUsed(
            full_bytes=self._share(memory.snapshots_bytes),
            compute_bytes=0,
            buffer_bytes=0,
            boundary_log_bytes=self._share(memory.boundary_log_bytes),
            step_log_bytes=self._share(memory.step_log_bytes),
            allocated_bytes=self._share(memory.total_bytes - memory.copies_bytes),
            double_buffered_dense_bytes=self._share(memory.double_buffered_dense_bytes),
        )

    def _share(self, num_bytes: float) -> int:
        """Return this rank's part of bytes that belong to the whole job.

        Bytes belong to the whole job if all ranks share one link. All other bytes stay
        unchanged.
        """
        return int(
            num_bytes / self._setup.job.layout.world_size
            if self._saving.sizes_are_of_job
            else num_bytes
        )

    def _checkpoint(self, generation: Generation, iteration: int) -> Timed:
        durable = self._saving.durable
        assert durable is not None
        begun_s = (
            generation.since_s
            + generation.elapsed_s(iteration - generation.start)
            - durable.stall_s
        )
        saved = CheckpointSaved(
            iteration=iteration,
            directory=SIMULATED,
            size_bytes=int(self._setup.total_full_bytes),
            seconds=durable.done_s,
            stall_s=durable.stall_s,
        )
        return begun_s + durable.done_s, saved

    def _recovered(self, stretch: Recovered) -> Iterator[Timed]:
        faults = {
            death: fault_class
            for fault in stretch.faults
            for death, fault_class in self._deaths(fault)
        }
        deaths = list(faults)
        back_s, restarts = (
            stretch.since_s + stretch.seconds,
            self._saving.recovery is Recovery.RESTART,
        )
        is_dead = any(self._rank in fault.ranks for fault in stretch.faults)
        if not (is_dead or restarts):
            ended = GenerationEnded(
                generation=self._generation,
                reason="; ".join(deaths),
                left_unix_s=stretch.since_s + stretch.detect_s,
            )
            yield stretch.since_s + stretch.detect_s, ended
        self._generation += 1
        joined_s = stretch.since_s + stretch.detect_s + stretch.rebuild_s
        if is_dead or restarts:
            self._incarnation += 1
            yield joined_s, self._started()
        if stretch.source != HOST_MEMORY:
            seconds = stretch.fetch_s + stretch.replay_s
            resumed = StateResumed(
                iteration=stretch.iteration,
                source=stretch.source,
                seconds=seconds,
                passed_over=[],
            )
            yield back_s, resumed
        if stretch.lost is not None:
            yield back_s, self._lost(stretch.iteration, stretch.lost)
        if not restarts:
            yield from self._replayed(stretch, back_s)
            yield back_s, self._rejoined(stretch, faults, joined_s)

    def _deaths(self, fault: TimedFault) -> Iterator[tuple[str, FaultClass]]:
        """Yield the deaths of a fault, in words, with their classes."""
        cluster = self._setup.cluster
        # without spare nodes, nodes stand for single ranks of one machine
        if fault.scope == "node" and cluster.spares:
            for node in sorted({rank // cluster.gpus_per_node for rank in fault.ranks}):
                yield f"node {node} is lost", FaultClass.NODE
        else:
            for rank in fault.ranks:
                yield f"rank {rank} died", FaultClass.SIGNAL

    def _lost(self, iteration: int, lost: Lost) -> TokensLost:
        assert self._saving.partial is not None
        own = lost.by_stage[self._stage]
        return TokensLost(
            iteration=iteration,
            layers=self._saving.partial.tokens.layers_of_stage[self._stage],
            lost_by_layer=own.sum(axis=1).tolist(),
            lost_by_expert=own.tolist(),
            plt=lost.plt,
            mlt=lost.mlt,
        )

    def _replayed(self, stretch: Recovered, back_s: float) -> Iterator[Timed]:
        for rollback in stretch.plan.rollbacks if stretch.plan else ():
            if self._stage in rollback.stages:
                recovered = StageRecovered(
                    iteration=stretch.iteration,
                    window_start=rollback.window_start,
                    first_stage=rollback.stages[0],
                    last_stage=rollback.stages[-1],
                    replayed_iters=stretch.iteration - rollback.starts_from,
                    fetched_bytes=0,
                    seconds=stretch.replay_s,
                )
                yield back_s, recovered

    def _rejoined(
        self, stretch: Recovered, faults: Mapping[str, FaultClass], joined_s: float
    ) -> Rejoined:
        rollbacks = stretch.plan.rollbacks if stretch.plan else ()
        starts = [
            rollback.starts_from
            for rollback in rollbacks
            if self._stage in rollback.stages
        ]
        return Rejoined(
            generation=self._generation,
            iteration=stretch.iteration,
            joined_unix_s=joined_s,
            deaths=list(faults),
            detect_s=stretch.detect_s,
            rebuild_s=stretch.rebuild_s,
            fetch_s=stretch.fetch_s,
            replay_s=stretch.replay_s,
            fetched_bytes=0,
            executed_iters=stretch.iteration - starts[0] if starts else 0,
            classes=list(faults.values()),
        )
