"""Measurements of partial checkpoints from a run folder: losses, lost tokens, bytes of
snapshots.
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
    """One that `struck` in this iteration; all went on after `back_to`. `who`: a rank,
    or a node with its memory.
    """

    struck: int
    back_to: int
    who: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run. Losses in nats per token, by iteration, of the last time that it was
    trained.

    `plt` and `mlt` are shares of all tokens of the run, `plt_of_first` what the first
    fault has cost of them. `snapshot_bytes`: the mean over snapshots, of all ranks
    together; None without any. `experts`: experts of each layer in the last one.
    `boost_left`: lost tokens that have not been made up by more capacity, None where
    there was no such thing.
    """

    evaluated: Mapping[int, float]
    losses: Mapping[int, float]
    faults: tuple[Fault, ...]
    plt: float
    mlt: float
    plt_of_first: float
    lost_tokens: int
    boost_left: int | None
    experts: int | None
    snapshot_bytes: float | None
    digests: tuple[str, ...]

    @property
    def last_evaluation(self) -> float:
        return self.evaluated[max(self.evaluated)]


def read_measured(path: Path) -> Measured:
    """Return what a finished run has measured."""
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
    """Return a recovery as the fault that was inflicted nearest to it."""
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
    """Return what a recovery told as a share of the tokens until then as one of the
    whole run; without any, 0.
    """
    return sum(getattr(event, share) * event.iteration / iterations for event in told)


def _boost_left(of_ranks: list[list]) -> int | None:
    """Return what is left of the deficits that ranks tell last, each stage once."""
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
