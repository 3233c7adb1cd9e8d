"""States of all ranks of a job, to check recoveries from partial checkpoints.

Owns: the states after all iterations, and the choice of the partial checkpoint that a
recovery must have loaded. The events about experts in snapshots give the age of each
expert, and the model itself counts tokens. Must not: use the plan or the token account
of a recovery.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from moe_ckpt.events import ExpertsChosen, Rejoined, TokensLost, read_events
from moe_ckpt.snapshot.blobs import BlobFolder, held_path
from moe_ckpt.snapshot.codec import COMPUTE, MASTER, MOMENTS
from moe_ckpt.snapshot.folder_contents import read_kept
from moe_ckpt.types import OperatorKind
from tests.harness.threads.job import ThreadJob
from tests.harness.threads.model import (
    MICRO_BATCHES,
    TOKENS,
    Model,
    Weight,
    bytes_of,
    hash_of,
)

ROLES = {
    "both": (MASTER, COMPUTE, *MOMENTS),
    "weights": (MASTER, COMPUTE),
    "moments": MOMENTS,
}
"""Parts of an expert that are as old as the expert's unit, by the setting `partial`."""

LevelOf = Callable[[int, int], str]
"""Maps a stage and an expert to a field of `ExpertsChosen`.

The field is named after the level from which the expert's unit was loaded.
"""


def from_memory(_stage: int, _expert: int) -> str:
    return "memory"


@dataclass(frozen=True, kw_only=True)
class State:
    """One rank's state after an iteration."""

    iteration: int

    experts: Mapping[tuple[int, str], str]
    """Hashes by expert and role."""

    others: str
    """Hash of the state without experts."""

    tokens: Sequence[int]
    """Tokens that the rank's router sent to each expert in `iteration`."""


class History:
    """Records the states of each rank in each epoch.

    An epoch's first state is the state from which the rank continued.
    """

    def __init__(self, job: ThreadJob) -> None:
        self._job = job
        self.epochs: dict[int, list[list[State]]] = {rank: [] for rank in job.ranks}
        self._lost: dict[int, int] = defaultdict(int)
        job.observers.append(self)

    def started(self, iteration: int, rank: int, model: Model) -> None:
        self.epochs[rank].append([_state(iteration, model)])

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        self.epochs[rank][-1].append(_state(iteration, model))

    def check_recovery(
        self, epoch: int = 1, level_of: LevelOf = from_memory, partial: str = "both"
    ) -> int:
        """Compare an epoch's first state, and the lost tokens, with the epoch before.

        Epochs must be checked in order, because losses add up.

        Args:
            epoch: The epoch that the recovery began.
            level_of: Levels from which units were loaded.
            partial: The job's setting `partial`, a key of `ROLES`.

        Returns:
            The number of experts that are older than the rest, over all stages.
        """
        shape, num_old, back_to = self._job.shape, 0, self.epochs[0][epoch][0].iteration
        lost: dict[int, list[int]] = {}
        for stage in range(shape.pp):
            ranks = [rank for rank in self._job.ranks if shape.stage_of(rank) == stage]
            versions = {
                expert: self._saved_at(
                    ranks[0], expert, level_of(stage, expert), epoch - 1, back_to
                )
                for expert in range(shape.experts)
            }
            self._check_states(ranks, epoch, versions, ROLES[partial])
            states = [self._by_iteration(rank, epoch - 1) for rank in ranks]
            lost[stage] = [
                sum(
                    state[i].tokens[expert]
                    for state in states
                    for i in range(version + 1, back_to + 1)
                )
                for expert, version in versions.items()
            ]
            num_old += sum(version < back_to for version in versions.values())
        self._check_account(epoch, back_to, lost)
        return num_old

    def _check_states(
        self,
        ranks: Iterable[int],
        epoch: int,
        versions: Mapping[int, int],
        roles: Sequence[str],
    ) -> None:
        for rank in ranks:
            first, before = (
                self.epochs[rank][epoch][0],
                self._by_iteration(rank, epoch - 1),
            )
            assert first.others == before[first.iteration].others, (
                f"rank {rank}: all but experts"
            )
            for (expert, role), digest in first.experts.items():
                iteration = versions[expert] if role in roles else first.iteration
                assert digest == before[iteration].experts[expert, role], (
                    f"rank {rank}: {role} of expert {expert}"
                )

    def _check_account(
        self, epoch: int, back_to: int, lost: Mapping[int, list[int]]
    ) -> None:
        shape = self._job.shape
        for stage, of_experts in lost.items():
            self._lost[stage] += sum(of_experts)
        given = back_to * MICRO_BATCHES * TOKENS * shape.dp
        shares = [self._lost[stage] / given if given else 0.0 for stage in lost]
        for rank in self._job.ranks:
            (told,) = (
                event
                for event in self._events(rank, epoch - 1)
                if isinstance(event, TokensLost)
            )
            of_stage = lost[shape.stage_of(rank)]
            assert (told.iteration, told.lost_by_expert, told.lost_by_layer) == (
                back_to,
                [of_stage],
                [sum(of_stage)],
            )
            assert (told.plt, told.mlt) == pytest.approx(
                (sum(shares) / len(shares), sum(shares)), rel=1e-12
            )

    def _saved_at(
        self, rank: int, expert: int, level: str, epoch: int, back_to: int
    ) -> int:
        """Return the last iteration up to `back_to` that saved an expert on a level."""
        chosen = [
            event
            for event in self._events(rank, epoch)
            if isinstance(event, ExpertsChosen)
        ]
        return max(
            each.iteration
            for each in chosen
            if each.iteration <= back_to and expert in getattr(each, level)[0]
        )

    def _by_iteration(self, rank: int, epoch: int) -> dict[int, State]:
        return {state.iteration: state for state in self.epochs[rank][epoch]}

    def _events(self, rank: int, epoch: int) -> list[object]:
        """Return a rank's events of an epoch, up to the recovery at the epoch's end."""
        epochs: list[list[object]] = [[]]
        for entry in read_events(self._job.event_path(rank)):
            epochs[-1].append(entry.event)
            if isinstance(entry.event, Rejoined):
                epochs.append([])
        return epochs[epoch]


@dataclass
class Follower:
    """Compares the states on servers with the models' states of the same iterations."""

    job: ThreadJob

    states: dict[tuple[int, int], dict[str, bytes]] = field(default_factory=dict)
    """Bytes of each part of a model's state, by rank and iteration."""

    compared: int = 0
    """Number of states on servers that were compared."""

    def started(self, iteration: int, rank: int, model: Model) -> None:
        self.committed(iteration, rank, model)

    def committed(self, iteration: int, rank: int, model: Model) -> None:
        pieces = model.pieces(range(len(model.operators)), ())
        pieces += model.buffer_pieces(range(len(model.operators)))
        self.states[rank, iteration] = {
            str(key): bytes_of(tensor) for key, tensor, _ in pieces
        }

    def compare(self) -> None:
        for holder in self.job.ranks:
            for owner in self.job.ranks:
                for state in read_kept(
                    BlobFolder(held_path(self.job.memory(holder), owner))
                ).snapshots:
                    wanted = self.states[owner, state.header.iteration]
                    assert {
                        str(p.key): bytes_of(state.part(p)) for p in state.header.parts
                    } == wanted
                    self.compared += 1


def _state(iteration: int, model: Model) -> State:
    is_expert = {
        weight: weight.operator.kind is OperatorKind.EXPERT
        for weight in model.weights.values()
    }
    experts = {
        (weight.operator.expert or 0, role): hash_of([tensor])
        for weight, is_one in is_expert.items()
        if is_one
        for role, tensor in _tensors(model, weight).items()
    }
    others = [
        t
        for weight, is_one in is_expert.items()
        if not is_one
        for t in _tensors(model, weight).values()
    ]
    steps = [model.adam.state[weight.master]["step"] for weight in model.owned]
    others += [
        *steps,
        *model.buffers.values(),
        model.loss_scale,
        model.schedule,
        model.generator.get_state(),
    ]
    tokens = [int(count) for count in model.counts().hard]
    return State(
        iteration=iteration, experts=experts, others=hash_of(others), tokens=tokens
    )


def _tensors(model: Model, weight: Weight) -> dict[str, torch.Tensor]:
    moments = model.adam.state.get(weight.master, {})
    return {
        MASTER: weight.master,
        COMPUTE: weight.values,
        **{role: moments[role] for role in MOMENTS if moments},
    }
