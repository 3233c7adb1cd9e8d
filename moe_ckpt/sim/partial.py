"""The contents of a simulated run's partial snapshots, between recoveries.

The choices are those of the real policy. The module owns the querying of a policy until
every expert has had its turn, and the age of experts. The module must not know faults
or costs. The stage whose ranks copy most stands for all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from moe_ckpt.policies.lost_tokens import (
    IntArray,
    moementary_lost_tokens,
    proportion_of_lost_tokens,
)
from moe_ckpt.policies.moc import PartialExperts
from moe_ckpt.policies.moetion import PopularExperts
from moe_ckpt.policies.partial import marked
from moe_ckpt.sim.job import Job
from moe_ckpt.sim.snapshot_pattern import (
    ChosenExperts,
    PlannedSnapshot,
    SnapshotPattern,
    Where,
)
from moe_ckpt.types import ExpertChoice, Measured, OperatorKind

MOST_SNAPSHOTS = 512
Policy = PartialExperts | PopularExperts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Account:
    """The tokens that a run has lost to all faults, and its policy's facts."""

    lost: IntArray
    """Lost tokens of each MoE layer of the job, int64 [MoE layers]."""

    facts: tuple[float, ...]
    """The facts of the policy, which a recovery restores."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lost:
    """The losses of one recovery."""

    by_stage: Sequence[IntArray]
    """Lost tokens of each stage's experts, int64 [MoE layers of the stage, experts] per
    stage.
    """

    plt: float
    """PLT of all faults so far, as a share of all tokens."""

    mlt: float
    """MLT of all faults so far, as a share of all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Epoch:
    """The partial checkpoints from the state after `start` to the next recovery."""

    number: int
    """Number of the epoch, from 0."""

    start: int
    """Iteration of the state from which the epoch starts."""

    pattern: SnapshotPattern
    """The snapshots of the epoch."""

    account: Account
    """The account at the start of the epoch."""

    def versions(self, iteration: int, where: Where) -> IntArray:
        """Return the iteration of each expert in a checkpoint, int64 [layers, experts].

        Experts that a whole round of the pattern does not contain count as old as the
        round.

        Args:
            iteration: The iteration of the checkpoint.
            where: The level of the checkpoint's parts.
        """
        offset = iteration - self.start
        first = max(0, offset - self.pattern.period)
        found: IntArray | None = None
        for snapshot in self.pattern.snapshots(first, offset):
            assert snapshot.experts is not None, snapshot
            found = (
                np.full(snapshot.experts.masks.shape[1:], first, np.int64)
                if found is None
                else found
            )
            found[snapshot.experts.masks[where]] = snapshot.offset
        assert found is not None, (self.start, iteration)
        return found + self.start


class Tokens:
    """The tokens that experts are trained with, and the shares that a run has lost.

    MoC, equation 7; MoEtion, equation 6.
    """

    def __init__(self, job: Job) -> None:
        self.an_iteration = job.batch.global_batch_size * job.batch.sequence_length
        """Tokens of an iteration."""
        self._topk = job.shape.topk
        self.by_expert: IntArray = np.rint(
            job.shape.popularity * self._topk * self.an_iteration
        ).astype(np.int64)
        """Tokens of each expert of a layer in an iteration, int64 [experts]."""
        gates = [
            number
            for number, op in enumerate(job.shape.operators)
            if op.kind is OperatorKind.GATE
        ]
        stages = job.stage_of[gates]
        self.layers_of_stage = [
            np.flatnonzero(stages == stage).tolist() for stage in range(job.layout.pp)
        ]
        self.num_layers = len(gates)

    def rows_of_stage(self, stage: int, num_rows: int) -> list[int]:
        """Return the layers that stand for those of a stage.

        A policy was asked about `num_rows` layers: those of the whole job if all ranks
        share one link, otherwise those of one stage. The result contains positions
        among these layers.
        """
        return [layer % num_rows for layer in self.layers_of_stage[stage]]

    def shares(self, lost: IntArray, iteration: int) -> tuple[float, float]:
        """Return PLT and MLT: lost tokens as shares of all tokens up to an iteration.

        Args:
            lost: The lost tokens of each MoE layer.
            iteration: The last iteration that counts.
        """
        if not iteration:
            return 0.0, 0.0
        so_far = np.full(self.num_layers, iteration * self.an_iteration, np.int64)
        plt = proportion_of_lost_tokens(lost, so_far, self._topk)
        return plt, moementary_lost_tokens(lost, so_far, self._topk)


@dataclass(frozen=True, kw_only=True, eq=False)
class Partial:
    """A policy of partial snapshots."""

    make: Callable[[], Policy]
    """Returns a fresh policy."""

    probe: Callable[[Policy], SnapshotPattern]
    """Returns the snapshots that a policy goes on to choose."""

    tokens: Tokens
    """The tokens of experts."""

    patterns: dict[tuple[float, ...], SnapshotPattern] = field(default_factory=dict)
    """Cached patterns. The key is the first fact of the policy, if the policy has
    facts.
    """

    def first_epoch(self) -> Epoch:
        """Return the epoch of a run that begins."""
        return self._epoch(
            self.make().facts,
            number=0,
            start=0,
            lost=np.zeros(self.tokens.num_layers, np.int64),
        )

    def next_epoch(
        self, before: Epoch, account: Account | None, iteration: int
    ) -> Epoch:
        """Return the epoch after all ranks have gone back to `iteration`.

        Args:
            before: The previous epoch.
            account: The account of the restored state. None: ranks went back to the
                beginning.
            iteration: The iteration of the restored state.
        """
        if account is None:
            return replace(self.first_epoch(), number=before.number + 1)
        plt, _ = self.tokens.shares(account.lost, iteration)
        self._asked.went_back(account.facts, plt=plt, iteration=iteration)
        return self._epoch(
            self._asked.facts,
            number=before.number + 1,
            start=iteration,
            lost=account.lost,
        )

    @cached_property
    def _asked(self) -> Policy:
        """The policy that decides the effect of recoveries.

        The facts of earlier recoveries do not affect the decision.
        """
        return self.make()

    def _epoch(
        self, facts: tuple[float, ...], *, number: int, start: int, lost: IntArray
    ) -> Epoch:
        # the first fact is the number of experts; the losses before it decide only when
        # that number changes
        if facts[:1] not in self.patterns:
            fresh = self.make()
            fresh.went_back(facts, plt=0.0, iteration=0)
            self.patterns[facts[:1]] = self.probe(fresh)
        return Epoch(
            number=number,
            start=start,
            pattern=self.patterns[facts[:1]],
            account=Account(lost=lost, facts=facts),
        )


def probe_turns(
    policy: Policy,
    measured: Measured,
    describe: Callable[[ExpertChoice], tuple[int, float, float]],
    num_experts: int,
) -> SnapshotPattern:
    """Query a fresh policy until each expert of a layer may have had two turns.

    The second round is the part of the pattern that repeats. Turns are the snapshots
    that go to disk, each once the previous one is there, or all snapshots if none go to
    disk. If there are too many, MOST_SNAPSHOTS are queried, and the second half of the
    snapshots repeats.

    Args:
        policy: The policy.
        measured: The measurements, the same at every query.
        describe: Returns the bytes of a snapshot, its stall in seconds, and the seconds
            of its way to disk.
        num_experts: The number of experts of a layer.
    """
    snapshots: list[PlannedSnapshot] = []
    turns: list[int] = []
    offset, now_s, written_s = 0, 0.0, 0.0
    while len(turns) <= 2 * num_experts and len(snapshots) <= MOST_SNAPSHOTS:
        plan = policy.plan(
            offset,
            lambda: replace(measured, is_persisting=now_s < written_s),  # noqa: B023
        )
        if plan.experts is not None:
            size_bytes, stall_s, write_s = describe(plan.experts)
            selections = (
                plan.experts.memory,
                plan.experts.on_peers,
                plan.experts.on_disk,
            )
            masks = np.stack(
                [
                    marked(selection, (len(selection), num_experts))
                    for selection in selections
                ]
            )
            snapshot = PlannedSnapshot(
                offset=offset,
                size_bytes=size_bytes,
                stall_s=stall_s,
                to_disk=plan.to_disk,
            )
            snapshots.append(
                replace(
                    snapshot, experts=ChosenExperts(choice=plan.experts, masks=masks)
                )
            )
            now_s += stall_s
            written_s = now_s + write_s if plan.to_disk else written_s
            if plan.to_disk or not written_s:
                turns.append(len(snapshots) - 1)
        offset, now_s = offset + 1, now_s + measured.iteration_s
    second = len(snapshots) - 1
    first = turns[num_experts] if len(turns) > 2 * num_experts else second // 2
    return SnapshotPattern(
        tuple(snapshots[:first]),
        tuple(snapshots[first:second]),
        snapshots[second].offset - snapshots[first].offset,
    )
