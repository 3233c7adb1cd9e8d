"""Measurements of partial checkpoints from a run folder.

Owns: losses, lost tokens and bytes of snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.faults.log import InjectedFault, read_faults
from launcher.report.episodes import Episode
from launcher.report.facts import gather
from launcher.report.read import read_run
from moe_ckpt.events import (
    CapacityBoosted,
    ExpertsChosen,
    SnapshotTaken,
    TokensLost,
    read_events,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault of a run."""

    struck: int
    """Iteration that the fault fell into."""

    back_to: int
    """Iteration after which all ranks continued."""

    who: str
    """Rank that was hit, or the node of a rank with its memory, as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of a run.

    Where an iteration ran more than once, the last loss counts.
    """

    evaluated: Mapping[int, float]
    """Evaluation losses by iteration, in nats per token."""

    losses: Mapping[int, float]
    """Training losses by iteration, in nats per token."""

    faults: tuple[Fault, ...]
    """Faults, in order."""

    plt: float
    """Lost tokens as a share of all tokens of the run, mean over MoE layers."""

    mlt: float
    """As `plt`, but the sum over MoE layers."""

    plt_of_first: float
    """As `plt`, lost by the first fault alone."""

    lost_tokens: int
    """Lost tokens of all faults and MoE layers."""

    boost_left: int | None
    """Lost tokens that more capacity has not made up yet; None without a boost."""

    experts: int | None
    """Experts of a layer in the last partial snapshot; None without such snapshots."""

    snapshot_bytes: float | None
    """Mean size of a snapshot, all ranks together; None without snapshots."""

    digests: tuple[str, ...]
    """Digest of the final state, by rank."""

    @property
    def last_evaluation(self) -> float:
        return self.evaluated[max(self.evaluated)]


def read_measured(path: Path) -> Measured:
    """Return the measurements of a finished run, from its folder."""
    facts = gather(read_run(path))
    result = json.loads((path / "result.json").read_text())
    of_ranks = [
        [logged.event for logged in read_events(file)]
        for file in sorted((path / "events").glob("*.jsonl"))
    ]
    injected = read_faults(path)
    return Measured(
        evaluated={event.iteration: event.loss for event in facts.evaluated},
        losses=dict(
            zip(
                facts.series.iteration.tolist(), facts.series.loss.tolist(), strict=True
            )
        ),
        faults=tuple(_fault(episode, injected) for episode in facts.episodes),
        plt=_of_whole_run(facts.lost[-1:], "plt", result["iteration"]),
        mlt=_of_whole_run(facts.lost[-1:], "mlt", result["iteration"]),
        plt_of_first=_of_whole_run(facts.lost[:1], "plt", result["iteration"]),
        lost_tokens=sum(sum(event.lost_by_layer) for event in facts.lost),
        boost_left=_boost_left(of_ranks),
        experts=_experts(of_ranks),
        snapshot_bytes=_snapshot_bytes(of_ranks),
        digests=tuple(result["digest_per_rank"]),
    )


def _fault(episode: Episode, injected: list[InjectedFault]) -> Fault:
    """Return the fault of a recovery, from the injected fault nearest to it."""
    assert episode.iteration is not None, episode
    nearest = min(
        injected, key=lambda fault: abs((fault.iteration or 0) - episode.struck)
    )
    who = (
        f"rank {nearest.rank}"
        if nearest.scope == "process"
        else f"node of rank {nearest.rank}"
    )
    return Fault(struck=episode.struck, back_to=episode.iteration, who=who)


def _of_whole_run(told: Sequence[TokensLost], share: str, iterations: int) -> float:
    """Return a share of lost tokens relative to the whole run; 0 without recoveries.

    A recovery reports the share relative to the tokens until the recovery.
    """
    return sum(getattr(event, share) * event.iteration / iterations for event in told)


def _boost_left(of_ranks: list[list]) -> int | None:
    """Return the sum of the last reported deficits, each stage once."""
    last = {}
    for event in (
        event
        for events in of_ranks
        for event in events
        if isinstance(event, CapacityBoosted)
    ):
        last[tuple(event.layers)] = sum(map(sum, event.deficit))
    return sum(last.values()) if last else None


def _experts(of_ranks: list[list]) -> int | None:
    chosen = [event for event in of_ranks[0] if isinstance(event, ExpertsChosen)]
    return max(map(len, chosen[-1].memory)) if chosen else None


def _snapshot_bytes(of_ranks: list[list]) -> float | None:
    """Return the sum over ranks of the mean size of their snapshots."""
    sizes = [
        [event.size_bytes for event in events if isinstance(event, SnapshotTaken)]
        for events in of_ranks
    ]
    return (
        sum(sum(of_rank) / len(of_rank) for of_rank in sizes if of_rank)
        if any(sizes)
        else None
    )
