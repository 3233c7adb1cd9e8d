"""Run folders as jobs leave them, written event by event, for tests of readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.report.rank_log import RankLog, read_rank
from moe_ckpt.events import (
    CapacityBoosted,
    Evaluated,
    Event,
    ExpertPopularity,
    ExpertsOrdered,
    GenerationEnded,
    HostMemoryUsed,
    IterationCommitted,
    ModelBuilt,
    Rejoined,
    RunFinished,
    SnapshotTaken,
    StageRecovered,
    TokensLost,
    WindowChosen,
    WindowReplicated,
    WorkerStarted,
)

Timed = tuple[float, Event]
DEATH = (
    "rank 1 (pid 11) died of SIGKILL in backward of iteration 6, found 100 ms after its"
    " last sign of life"
)
LOST_NODE = (
    "node 1 (ranks 2 to 3) is lost: its processes on 10.0.0.2 have ended, found 100 ms"
    " after its last sign of life"
)
ITERATION_S = 0.5
STALL_S = 0.05
FIRST_S = 2.0


def line_of(t_s: float, rank: int, event: object) -> str:
    """Return the line of an event, as the event log writes the line."""
    record = {
        "t_s": round(t_s, 6),
        "global_rank": rank,
        "event": type(event).__name__,
        **asdict(event),  # type: ignore[call-overload]
    }
    return json.dumps(record) + "\n"


def write_events(
    run: Path, rank: int, events: Iterable[Timed], *, tail: str = ""
) -> Path:
    path = run / "events" / f"rank{rank:04d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line_of(t_s, rank, event) for t_s, event in events) + tail)
    return path


def log_of(folder: Path, events: Iterable[Timed], rank: int = 0) -> RankLog:
    """Write one rank's events, and return the log that the report reads."""
    return read_rank(rank, write_events(folder, rank, events))


def committed(
    iteration: int,
    *,
    seconds: float = ITERATION_S,
    stall_s: float = STALL_S,
    loss: float | None = None,
) -> IterationCommitted:
    return IterationCommitted(
        iteration=iteration,
        loss=5.0 / (1 + 0.1 * iteration) if loss is None else loss,
        grad_norm=1.0,
        loss_scale=1.0,
        learning_rate=1e-3,
        skipped=False,
        seconds=seconds,
        stall_s=stall_s,
        sent_activation_bytes=1 << 16,
        sent_gradient_bytes=0,
    )


def rejoined(iteration: int, **fields: Any) -> Rejoined:
    """Return the end of a recovery, of which `fields` replace values.

    By default: detection 0.1 s, rebuild 0.2 s, fetch 0.05 s, replay 0.3 s.
    """
    given = {
        "generation": 2,
        "iteration": iteration,
        "joined_unix_s": 0.0,
        "deaths": [DEATH],
        "detect_s": 0.1,
        "rebuild_s": 0.2,
        "fetch_s": 0.05,
        "replay_s": 0.3,
        "fetched_bytes": 1 << 20,
        "executed_iters": 0,
    }
    return Rejoined(**(given | fields))


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run in which rank 1 dies and its stage, the first half of ranks, replays."""

    ranks: int = 4
    """Number of ranks."""

    iterations: int = 12
    """Number of iterations."""

    fault_after: int | None = 5
    """Last iteration before the death; None for a run without a death."""

    speed: float = 1.0
    """Factor of the time of an iteration, `ITERATION_S`."""

    with_experts: bool = True
    """Whether there are events about experts."""

    death: str = DEATH
    """The death, in words."""

    fault: str = "signal"
    """The class of the death."""

    def events(self, rank: int) -> list[Timed]:
        """Return one rank's events, in order."""
        now_s, found = FIRST_S, self._start(rank)
        for iteration in range(1, self.iterations + 1):
            now_s += ITERATION_S * self.speed
            found += self._iteration(rank, now_s, iteration)
            if iteration == self.fault_after:
                found += self._fault(rank, now_s, iteration)
                now_s += 1.0
        return [*found, (now_s + 0.2, Evaluated(iteration=self.iterations, loss=2.5))]

    def _start(self, rank: int) -> list[Timed]:
        return [
            (
                0.25,
                WorkerStarted(
                    pid=10 + rank,
                    host="here",
                    incarnation=0,
                    device="cpu",
                    launch_s=20.0 + rank,
                ),
            ),
            (1.0, ModelBuilt(seconds=0.7)),
            (FIRST_S, Evaluated(iteration=0, loss=5.0)),
        ]

    def _iteration(self, rank: int, now_s: float, iteration: int) -> list[Timed]:
        memory = HostMemoryUsed(
            full_bytes=(3 << 20) + iteration,
            compute_bytes=1 << 20,
            buffer_bytes=1 << 19,
            boundary_log_bytes=iteration << 16,
            step_log_bytes=1 << 10,
            allocated_bytes=6 << 20,
            double_buffered_dense_bytes=8 << 20,
        )
        snapshot = SnapshotTaken(
            iteration=iteration,
            window_start=iteration,
            slot=0,
            num_slots=1,
            size_bytes=2 << 20,
            dense_bytes=4 << 20,
            copy_s=0.02,
        )
        window = WindowChosen(
            iteration=iteration,
            num_slots=2,
            iteration_s=0.5,
            copy_bytes_per_s=1e9,
            reordered=False,
        )
        copied = WindowReplicated(
            window_start=iteration,
            size_bytes=1 << 20,
            num_peers=2,
            seconds=0.05,
            span_s=0.1,
            ago_s=0.05,
        )
        done: list[Timed] = [
            (now_s, committed(iteration, seconds=ITERATION_S * self.speed))
        ]
        before: list[Timed] = [
            (now_s - 0.3, snapshot),
            (now_s - 0.2, memory),
            (now_s - 0.1, window),
        ]
        after: list[Timed] = [
            *(self._experts(rank, now_s, iteration) if self.with_experts else []),
            (now_s, copied),
        ]
        return [*before, *done, *after]

    def _experts(self, rank: int, now_s: float, iteration: int) -> list[Timed]:
        layer = rank * 2 // self.ranks
        tokens = [[float(10 + (expert * iteration) % 7) for expert in range(8)]]
        slots = [[(expert + iteration // 4) % 2 for expert in range(8)]]
        names = [f"layer {layer}"]
        told = ExpertPopularity(iteration=iteration, layers=names, tokens=tokens)
        ordered = ExpertsOrdered(
            iteration=iteration, num_slots=2, layers=names, slots=slots
        )
        lost = TokensLost(
            iteration=iteration,
            layers=[layer],
            lost_by_layer=[2 + 18 * (1 - layer)],
            lost_by_expert=[[2 + 18 * (1 - layer)]],
            plt=0.01,
            mlt=0.02,
        )
        is_first_of_stage = rank == 0 or (rank - 1) * 2 // self.ranks < layer
        found: list[Timed] = [(now_s, told)] * is_first_of_stage
        found += [(now_s, ordered)] * (is_first_of_stage and iteration % 4 == 1)
        if (
            self.fault_after is not None
            and 0 <= (since := iteration - self.fault_after) <= 4
        ):
            deficit = [[2 * (4 - since) * (1 - layer)] * 8]
            found += [
                (
                    now_s,
                    CapacityBoosted(
                        iteration=iteration,
                        layers=names,
                        capacity=[[9] * 8],
                        deficit=deficit,
                    ),
                )
            ]
        return [*found, *([(now_s, lost)] if iteration == self.fault_after else [])]

    def _fault(self, rank: int, now_s: float, iteration: int) -> list[Timed]:
        replays = rank < self.ranks // 2
        done = StageRecovered(
            iteration=iteration,
            window_start=iteration - 2,
            first_stage=0,
            last_stage=0,
            replayed_iters=2,
            fetched_bytes=1 << 18,
            seconds=0.2,
        )
        left = GenerationEnded(generation=1, reason=self.death, left_unix_s=now_s + 0.4)
        new = WorkerStarted(pid=99, host="here", incarnation=1, device="cpu")
        return [
            (now_s + 0.45, new if rank == 1 else left),
            *([(now_s + 0.95, done)] if replays else []),
            (
                now_s + 1.0,
                rejoined(
                    iteration,
                    deaths=[self.death],
                    executed_iters=2 if replays else 0,
                    classes=[self.fault],
                ),
            ),
        ]


def write_run(
    run: Path,
    story: Story | None = None,
    *,
    policy: str = "moevement",
    ranks: Sequence[int] | None = None,
    ends_well: bool = True,
) -> Path:
    """Write a whole run folder.

    Args:
        run: The path of the folder.
        story: The run; None for the default one.
        policy: The policy in config.yaml.
        ranks: The ranks whose event files are written; None for all ranks.
        ends_well: Whether the run has finished and has a result.json.
    """
    told = story or Story()
    for rank in range(told.ranks) if ranks is None else ranks:
        events = told.events(rank)
        if ends_well:
            events.append(
                (
                    events[-1][0] + 0.1,
                    RunFinished(iteration=told.iterations, digest="d" * 64),
                )
            )
        write_events(run, rank, events)
    described = {"run_id": "1", "clock_origin_unix_s": 1000.0, "world_size": told.ranks}
    (run / "run.json").write_text(json.dumps(described))
    (run / "config.yaml").write_text(
        f"run:\n  name: x\nckpt:\n  replicas: 1\n  policy: {policy}\n"
    )
    if ends_well:
        (run / "result.json").write_text(
            json.dumps(
                {"iteration": told.iterations, "eval_loss": 2.5, "digest": "d" * 64}
            )
        )
    return run
