"""Digests of two runs, iteration by iteration and tensor by tensor, and the first place at which they differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moe_ckpt.elastic.live_workers import read_world_size
from moe_ckpt.events import StateDigest, TensorDigests, read_events


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """The digests of a run by (iteration, rank), over all incarnations: of whole states, and of their tensors."""

    num_ranks: int
    states: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    tensors: dict[tuple[int, int], list[dict[str, str]]] = field(default_factory=dict)

    @property
    def iterations(self) -> list[int]:
        return sorted({iteration for iteration, _ in self.states})


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first state of a run that is not the other's; `tensor` is the first in it that differs."""

    iteration: int
    rank: int
    tensor: str

    def __str__(self) -> str:
        return f"after iteration {self.iteration}, rank {self.rank}: {self.tensor}"


def read_digests(run: Path) -> Digests:
    """Return the digests in a run's event files. Raises FileNotFoundError where there is no run."""
    found = Digests(num_ranks=read_world_size(run))
    for rank in range(found.num_ranks):
        for logged in read_events(run / "events" / f"rank{rank:04d}.jsonl"):
            event = logged.event
            if isinstance(event, StateDigest):
                # all, not the last: a wrong state that a later recovery has left would go unnoticed
                found.states.setdefault((event.iteration, rank), set()).add(event.digest)
            if isinstance(event, TensorDigests):
                found.tensors.setdefault((event.iteration, rank), []).append(event.digests)
    return found


def first_difference(wanted: Digests, got: Digests) -> Difference | None:
    """Return the first place, by iteration and then by rank, at which a run lacks a digest or has another one."""
    for iteration, rank in sorted({*wanted.states, *got.states}):
        if wanted.states.get((iteration, rank)) != got.states.get((iteration, rank)):
            tensor = _first_tensor(wanted, got, iteration, rank)
            return Difference(iteration=iteration, rank=rank, tensor=tensor)
    return None


def _first_tensor(wanted: Digests, got: Digests, iteration: int, rank: int) -> str:
    for name, run in (("plain run", wanted), ("run under faults", got)):
        if (iteration, rank) not in run.tensors:
            return f"no digest in the {name}"
    first, *others = [*wanted.tensors[iteration, rank], *got.tensors[iteration, rank]]
    for other in others:
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            return names[0]
    return "no tensor, but the digest of the whole"
