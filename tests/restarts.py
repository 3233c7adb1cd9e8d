"""A run that is started again and again: all its processes die at once, files are damaged, and the next start goes on.

Each start is checked by itself: every loss and every digest of the state from its load on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moe_ckpt.durable.checkpoint_folder import is_committed
from moe_ckpt.events import Event, IterationCommitted, StateDigest, StateResumed, WindowPersisted, read_events
from tests.elastic_job import ElasticJob
from tests.references import Outcome, uninterrupted
from tests.training import events_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the run: the events of each rank, what its processes wrote, and its result if it came to its end."""

    events: Sequence[Sequence[Event]]
    said: str
    result: dict[str, Any] | None

    def of(self, kind: type[T], global_rank: int = 0) -> list[T]:
        """Return a rank's events of a kind."""
        return [event for event in self.events[global_rank] if isinstance(event, kind)]

    @property
    def resumed(self) -> tuple[str, int] | None:
        """The source on disk that all ranks went on from, and the iteration of its state."""
        (of_all,) = {
            tuple((Path(event.source).name, event.iteration) for event in self.of(StateResumed, rank))
            for rank in range(len(self.events))
        }
        assert len(of_all) < 2, of_all
        return of_all[0] if of_all else None


class Restarts:
    """The run in `folder`/run, which every start goes on with. `settings` do not change the training."""

    def __init__(self, folder: Path, *training: str, ckpt: str, settings: Sequence[str] = ()) -> None:
        self.run = folder / "run"
        self._folder = folder
        self._training = training
        self._ckpt = ckpt
        self._settings = settings
        self._num_starts = 0

    def start(
        self,
        *settings: str,
        until: Callable[[ElasticJob], object] | None = None,
        setup: Callable[[], None] | None = None,
        world_size: int = 4,
        is_exact: bool = True,
    ) -> Start:
        """Start the run and let it come to its end, or kill all its processes at once when `until` returns."""
        before = [_num_events(self.run, rank) for rank in range(world_size)]
        result = None
        with self._job(*settings, setup=setup, world_size=world_size) as job:
            if until:
                until(job)
                os.kill(job.agent_pid, signal.SIGKILL)
                job.wait_for_failure()
            else:
                result = job.wait()
        events = [_events(self.run, rank)[before[rank] :] for rank in range(world_size)]
        start = Start(events=events, said=job.said(), result=result)
        if is_exact:
            _check(start, uninterrupted(world_size, *self._training))
        return start

    def fail(self, *settings: str, world_size: int = 4) -> str:
        """Start the run, which fails; return what its processes wrote."""
        with self._job(*settings, world_size=world_size) as job:
            said = job.wait_for_failure()
        assert said.count("error: ") == 1, said
        return said

    def checkpoint(self, iteration: int) -> Path:
        return self.run / "checkpoints" / checkpoint_name(iteration)

    def snapshots(self, global_rank: int) -> Path:
        return self.run / "snapshots" / f"rank{global_rank:04d}"

    def _job(self, *settings: str, world_size: int, setup: Callable[[], None] | None = None) -> ElasticJob:
        self._num_starts += 1
        overrides = (*self._training, *self._settings, *settings, f"run.dir={self.run}", "run.digest_every_iters=1")
        folder = self._folder / f"start{self._num_starts}"
        job = ElasticJob(world_size, folder, *overrides, ckpt=self._ckpt, setup=setup, timeout_s=150.0)
        job.run = self.run
        return job


def checkpoint_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def checkpoint_of(iteration: int) -> Callable[[ElasticJob], object]:
    """Return what waits until a whole checkpoint is committed."""

    def wait(job: ElasticJob) -> None:
        directory = job.run / "checkpoints" / checkpoint_name(iteration)
        job.wait_for(lambda: is_committed(directory) or None, f"the checkpoint of iteration {iteration}")

    return wait


def on_disks(iteration: int, world_size: int = 4) -> Callable[[ElasticJob], object]:
    """Return what waits until all ranks have written a snapshot of this iteration or a later one to their disks."""

    def newest(run: Path, rank: int) -> int:
        return max((event.window_start for event in events_of(run, WindowPersisted, rank)), default=-1)

    def wait(job: ElasticJob) -> None:
        for rank in range(world_size):
            job.wait_until(rank, 1)
            job.wait_for(lambda rank=rank: newest(job.run, rank) >= iteration or None, f"snapshots of rank {rank}")

    return wait


def _check(start: Start, reference: Outcome) -> None:
    for rank, events in enumerate(start.events):
        loads = [index for index, event in enumerate(events) if isinstance(event, StateResumed)]
        for event in events[loads[-1] if loads else 0 :]:
            if isinstance(event, IterationCommitted):
                assert event.loss == reference.losses[event.iteration], (rank, event.iteration)
            if isinstance(event, StateDigest):
                assert event.digest == reference.digests[event.iteration][rank], (rank, event.iteration)
        assert loads == [] or any(isinstance(event, StateDigest) for event in events), rank
    if start.result:
        got = (start.result["digest_per_rank"], start.result["eval_loss"])
        assert got == (reference.digest_per_rank, reference.eval_loss)


def _events(run: Path, global_rank: int) -> list[Event]:
    path = run / "events" / f"rank{global_rank:04d}.jsonl"
    return [logged.event for logged in read_events(path)] if path.exists() else []


def _num_events(run: Path, global_rank: int) -> int:
    return len(_events(run, global_rank))
