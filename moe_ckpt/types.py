"""Values that every layer above may use. No behaviour beyond what derives from the fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """How many ways each axis of parallelism splits the job.

    `ep` (expert parallel) divides `dp` (data parallel): experts spread over ranks that see different tokens.
    """

    pp: int
    dp: int
    ep: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return f"PP={self.pp} DP={self.dp} EP={self.ep} TP={self.tp}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """What a checkpoint must agree on with the run that loads it.

    `run_id` tells runs apart; `model` fingerprints everything that shapes the saved tensors (architecture, precision,
    optimizer), so that equal fingerprints and layouts mean interchangeable state.
    """

    run_id: str
    model: str
    layout: ParallelLayout

    def as_json(self) -> dict[str, object]:
        return {"run_id": self.run_id, "model": self.model, "layout": asdict(self.layout)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlan:
    """What a policy wants saved after an iteration; the session carries it out."""

    durable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """A committed checkpoint on disk: the state after `iteration` optimizer steps."""

    iteration: int
    directory: str
