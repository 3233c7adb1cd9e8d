"""A model of a job: it trains, loses ranks at any moment, recovery included, and carries out the plans of recovery.

A rank's state is a number that each iteration makes from the states of its stage and from what its neighbours send: one
wrong input anywhere, and it never again equals that of the job without faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from moe_ckpt.recovery.inventory import Inventory, ReplayedState, WindowRef
from moe_ckpt.recovery.plan import RecoveryPlan, Rollback, plan_recovery
from moe_ckpt.recovery.target import Standing, Target, plan_target
from moe_ckpt.replication.placement import copy_holders, num_nodes

Sent = tuple[int, int]
"""The activation and the gradient that a rank sends in an iteration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Ranks `stage` * `width` to `stage` * `width` + `width` - 1 are the stage's; each talks to that in its place."""

    num_stages: int
    width: int

    @property
    def world_size(self) -> int:
        return self.num_stages * self.width

    def ranks(self, stages: range) -> range:
        return range(stages[0] * self.width, (stages[-1] + 1) * self.width)


def iterate(
    iteration: int, shape: Shape, stages: range, states: Mapping[int, int], logs: Mapping[int, Sent]
) -> tuple[dict[int, int], dict[int, Sent]]:
    """Train some stages: return their new states, and what they sent. `logs`: what the ranks next to them sent."""
    inside, width = shape.ranks(stages), shape.width
    activations, gradients = ({rank: sent[end] for rank, sent in logs.items()} for end in (0, 1))
    for rank in inside:
        activations[rank] = hash((iteration, states[rank], activations.get(rank - width, 0)))
    for rank in reversed(inside):
        gradients[rank] = hash((iteration, states[rank], activations[rank], gradients.get(rank + width, 0)))
    inputs = {rank: (states[rank], activations.get(rank - width, 0), gradients.get(rank + width, 0)) for rank in inside}
    peers = {stage: tuple(inputs[rank] for rank in shape.ranks(range(stage, stage + 1))) for stage in stages}
    new = {rank: hash((iteration, rank, peers[rank // width])) for rank in inside}
    return new, {rank: (activations[rank], gradients[rank]) for rank in inside}


@cache
def without_faults(shape: Shape, iteration: int) -> dict[int, int]:
    if iteration == 0:
        return {rank: hash((0, rank)) for rank in range(shape.world_size)}
    everything = range(shape.num_stages)
    return iterate(iteration, shape, everything, without_faults(shape, iteration - 1), {})[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A window in some memory: the state that it begins with stands for what its snapshots hold."""

    ref: WindowRef
    state: int


@dataclass(kw_only=True, slots=True)
class Rank:
    """A process, and its host memory: its own windows by their start, and those held for others by owner and start.

    `replayed`: `state` is that of a replay which was cut off.
    """

    reached: int | None = 0
    state: int = 0
    replayed: ReplayedState | None = None
    next_state: int | None = None  # what the gradients that it holds lead to
    whole: bool = True
    logs: dict[int, Sent] = field(default_factory=dict)
    windows: dict[int, Kept] = field(default_factory=dict)
    held: dict[int, dict[int, Kept]] = field(default_factory=dict)

    def die(self) -> None:
        self.reached, self.next_state, self.whole, self.replayed = None, None, False, None
        self.logs.clear()

    def step(self, *, whole: bool) -> None:
        """Take the step for which it is prepared."""
        assert self.reached is not None
        assert self.next_state is not None
        self.reached, self.state, self.next_state, self.whole = self.reached + 1, self.next_state, None, whole


class Job:
    """A job of a random shape, with random faults."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.shape = Shape(num_stages=random.randint(1, 6), width=random.randint(1, 2))
        world_size = self.shape.world_size
        self.ranks_per_node = random.choice([n for n in range(1, world_size + 1) if world_size % n == 0])
        places = {"world_size": world_size, "ranks_per_node": self.ranks_per_node}
        replicas = min(random.randint(0, 2), num_nodes(**places) - 1)
        self.holders = [copy_holders(rank, replicas=replicas, **places) for rank in range(world_size)]
        self.num_slots = random.randint(1, 3)
        self.boundary_log = random.random() < 0.9
        self.log_fails = random.choice([0, 0.02, 0.1])
        self.at = 0
        self.ranks = [Rank(state=state) for state in without_faults(self.shape, 0).values()]
        self.begun: tuple[int, list[int]] | None = None
        self.take_window(start=0, num_slots=1, states=[rank.state for rank in self.ranks], torn=False)

    def stage(self, global_rank: int) -> int:
        return global_rank // self.shape.width

    # Training

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            new, sent = self.compute()
            for global_rank, rank in enumerate(self.ranks):
                self.prepare(global_rank, new, sent)
                rank.step(whole=True)
            self.at += 1
            self.snapshot(torn=False)

    def compute(self) -> tuple[dict[int, int], dict[int, Sent]]:
        states = {global_rank: rank.state for global_rank, rank in enumerate(self.ranks)}
        return iterate(self.at + 1, self.shape, range(self.shape.num_stages), states, {})

    def prepare(self, global_rank: int, new: Mapping[int, int], sent: Mapping[int, Sent], late: float = 0) -> None:
        """Have complete gradients: log what was sent, and the iteration's facts, of which some copies are late."""
        rank = self.ranks[global_rank]
        rank.next_state = new[global_rank]
        if self.boundary_log and self.random.random() >= self.log_fails:
            rank.logs[self.at + 1] = sent[global_rank]
        memories = [other.held.get(global_rank, {}) for other in self.ranks]
        for windows in [rank.windows, *(memory for memory in memories if self.random.random() >= late)]:
            for start, kept in windows.items():
                if kept.ref.steps_to == self.at:
                    windows[start] = replace(kept, ref=replace(kept.ref, steps_to=self.at + 1))

    def snapshot(self, *, torn: bool) -> None:
        if self.begun is None:
            self.begun = self.at, [rank.state for rank in self.ranks]
        start, states = self.begun
        if self.at == start + self.num_slots - 1:
            self.take_window(start=start, num_slots=self.num_slots, states=states, torn=torn)
            self.begun = None

    def take_window(self, *, start: int, num_slots: int, states: list[int], torn: bool) -> None:
        """Keep a window, then drop what is older; `torn`: a fault comes before all ranks have done so."""
        all_have = not torn or self.random.random() < 0.5
        for global_rank, rank in enumerate(self.ranks):
            if all_have or self.random.random() < 0.5:
                cut = f"{self.stage(global_rank)} at {start}"
                ref = WindowRef(start=start, num_slots=num_slots, steps_to=start + num_slots - 1, cut=cut)
                kept = Kept(ref=ref, state=states[global_rank])
                rank.windows[start] = kept
                for holder in self.holders[global_rank]:
                    self.ranks[holder].held.setdefault(global_rank, {})[start] = kept
        for rank in self.ranks if all_have else []:
            if not torn or self.random.random() < 0.5:
                self.drop_before(rank, start)

    def drop_before(self, rank: Rank, start: int) -> None:
        for windows in [rank.windows, *rank.held.values()]:
            for old in [other for other in windows if other < start]:
                del windows[old]
        rank.logs = {iteration: sent for iteration, sent in rank.logs.items() if iteration > start}

    # Faults

    def stop(self) -> None:
        """Stop somewhere in an iteration: before the vote, amid the steps, or amid what is done with a whole window."""
        where = self.random.choice(["before the vote", "in the step", "at a window's end"])
        new, sent = self.compute()
        late = self.random.choice([0, 0.5])
        for global_rank in range(len(self.ranks)):
            if where != "before the vote" or self.random.random() < 0.5:
                self.prepare(global_rank, new, sent, late)
        for stage in range(self.shape.num_stages if where != "before the vote" else 0):
            self.stop_step(self.shape.ranks(range(stage, stage + 1)), done=where == "at a window's end")
        if where == "at a window's end":
            self.at += 1
            self.snapshot(torn=True)
        self.begun = None

    def stop_step(self, ranks: range, *, done: bool) -> None:
        """Let some ranks of a stage take the step, and some gather their weights if all have taken it."""
        all_stepped = done or self.random.random() < 0.4
        for global_rank in ranks:
            if all_stepped or self.random.random() < 0.5:
                self.ranks[global_rank].step(whole=done or (all_stepped and self.random.random() < 0.5))

    def kill(self) -> None:
        """End some processes; or some machines, with what their memory held."""
        for _ in range(self.random.choice([1, 1, 1, 2, 3, len(self.ranks)])):
            victim = self.random.randrange(len(self.ranks))
            self.ranks[victim].die()
            if self.random.random() < 0.3:
                node = victim // self.ranks_per_node
                for global_rank in range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node):
                    self.ranks[global_rank] = Rank()
                    self.ranks[global_rank].die()

    # Recovery

    def inventory(self, global_rank: int) -> Inventory:
        rank = self.ranks[global_rank]
        last = max(rank.logs, default=0)
        first = last + 1
        while first - 1 in rank.logs:
            first -= 1
        return Inventory(
            global_rank=global_rank,
            stage=self.stage(global_rank),
            windows=tuple(kept.ref for kept in rank.windows.values()),
            held={owner: tuple(kept.ref for kept in windows.values()) for owner, windows in rank.held.items()},
            logged_from=first,
            logged_to=last,
            replayed=rank.replayed,
        )

    def plan(self) -> tuple[Target | None, RecoveryPlan]:
        standings = [
            Standing(
                stage=self.stage(global_rank),
                reached=rank.reached,
                prepared=rank.next_state is not None,
                whole=rank.whole,
            )
            for global_rank, rank in enumerate(self.ranks)
        ]
        target = plan_target(standings)
        if target is not None:
            lost = {standing.stage for standing in standings if standing.reached is None}
            assert target.lost_stages == lost, "a stage is lost whose ranks all have their state"
        return target, plan_recovery(
            target.lost_stages if target else range(self.shape.num_stages),
            [self.inventory(global_rank) for global_rank in range(len(self.ranks))],
            target_iteration=target.iteration if target else None,
            boundary_log=self.boundary_log,
        )

    def recover(self, target: Target | None, plan: RecoveryPlan, *, torn: bool) -> None:
        """Carry out a plan, and be ready to train; if `torn`, some stop on the way."""
        for fetch in plan.fetches:
            kept = self.ranks[fetch.source_rank].held[fetch.global_rank][fetch.window_start]
            self.ranks[fetch.global_rank].windows[fetch.window_start] = kept
        rolling = {stage for rollback in plan.rollbacks for stage in rollback.segment.stages}
        for stage in sorted(target.finishing_stages - rolling) if target else []:
            self.finish(stage, plan.target_iteration, torn=torn and self.random.random() < 0.5)
        for rollback in plan.rollbacks:
            self.roll_back(rollback, plan.target_iteration, torn=torn and self.random.random() < 0.7)
        if not torn:
            self.at, self.num_slots = plan.target_iteration, self.random.randint(1, 3)
            for rank in self.ranks:
                rank.next_state = None

    def finish(self, stage: int, target: int, *, torn: bool) -> None:
        ranks = [self.ranks[global_rank] for global_rank in self.shape.ranks(range(stage, stage + 1))]
        for rank in ranks:
            if rank.reached == target - 1 and not (torn and self.random.random() < 0.5):
                rank.step(whole=False)
        for rank in ranks if not torn else []:
            assert rank.reached == target
            rank.whole = True

    def roll_back(self, rollback: Rollback, target: int, *, torn: bool) -> None:
        stages, width = rollback.segment.stages, self.shape.width
        inside = self.shape.ranks(stages)
        kept = {global_rank: self.ranks[global_rank].windows[rollback.window_start] for global_rank in inside}
        assert all(window.ref.num_slots == rollback.num_slots for window in kept.values())
        states = {global_rank: window.state for global_rank, window in kept.items()}
        first = rollback.starts_from
        if rollback.resumed_at is not None:
            states = {global_rank: self.ranks[global_rank].state for global_rank in inside}
        for rank in (self.ranks[global_rank] for global_rank in inside):
            rank.reached, rank.next_state, rank.replayed = None, None, None
        last = self.random.randint(first, target - 1) if torn and target > first else target
        for iteration in range(first + 1, last + 1):
            assert all(window.ref.steps_to >= iteration for window in kept.values()), "no step log"
            next_to = [*range(inside[0] - width, inside[0]), *range(inside[-1] + 1, inside[-1] + 1 + width)]
            logs = {rank: self.ranks[rank].logs[iteration] for rank in next_to if 0 <= rank < len(self.ranks)}
            states, sent = iterate(iteration, self.shape, stages, states, logs)
            for global_rank in inside if self.boundary_log else ():
                self.ranks[global_rank].logs[iteration] = sent[global_rank]
        late = self.random.choice([0, 0, 0.3])  # ranks that are cut off in their update
        for global_rank in inside:
            rank = self.ranks[global_rank]
            if last == target:
                rank.reached, rank.state, rank.whole = target, states[global_rank], True
            elif self.random.random() >= late:
                rank.state = states[global_rank]
                rank.replayed = ReplayedState(states=rollback.states, cut=kept[global_rank].ref.cut, iteration=last)

    def assert_as_without_faults(self) -> None:
        assert [rank.reached for rank in self.ranks] == [self.at] * len(self.ranks)
        assert [rank.state for rank in self.ranks] == list(without_faults(self.shape, self.at).values())
        assert all(rank.whole for rank in self.ranks)

    def has_nothing_left(self) -> bool:
        """Whether there is no window that all ranks have, each in some memory."""
        found = []
        for global_rank, rank in enumerate(self.ranks):
            memories = [rank.windows, *(other.held.get(global_rank, {}) for other in self.ranks)]
            found.append({(k.ref.start, k.ref.num_slots) for windows in memories for k in windows.values()})
        return not set.intersection(*found)
