"""The generations of one worker: join, reach one state with all ranks, train.

After each loss of ranks the worker joins the next generation. This module is the one
place that separates the loss of other ranks from an error of this rank. Must not: know
how ranks meet (`Rendezvous`), or how they train (`TrainingRun`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from moe_ckpt.elastic.failures import text_of
from moe_ckpt.elastic.generations import fault_of_end
from moe_ckpt.elastic.process_failure import Death, classes_of
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.engine.session import Session
from moe_ckpt.events import EventLog, GenerationEnded, Rejoined, TrainingFailed
from moe_ckpt.types import Phase


class Rendezvous(Protocol):
    """How the ranks of a job meet, generation by generation.

    All methods belong to the thread that trains.
    """

    page: StatusPage
    """The status page of this worker."""

    @property
    def num_formed_groups(self) -> int:
        """Process groups of this rank that the generation has formed."""
        ...

    @property
    def num_kept_groups(self) -> int:
        """Process groups of this rank that an earlier generation has formed."""
        ...

    def join(self) -> int:
        """Wait for all ranks, and return the generation that begins."""
        ...

    def entered(self) -> None:
        """Note that all ranks have reached one state in this generation."""
        ...

    def deaths(self) -> Sequence[Death]:
        """Return the deaths since the last generation that all ranks entered."""
        ...

    def num_deaths(self) -> int:
        """Return the number of workers of the job that have died so far."""
        ...

    def lost(self, error: BaseException) -> bool:
        """Return whether an error means that the generation has ended."""
        ...

    def leave(self) -> str:
        """Leave a generation that has ended; return the reason for its end."""
        ...

    def finish(self) -> None:
        """Wait until all ranks have finished.

        Raises:
            PeersLostError: A rank is lost meanwhile.
        """
        ...


class TrainingRun(Protocol):
    """The training of one rank. `run` may be called again."""

    def run(self, done: int, notes: Sequence[str]) -> None:
        """Train up to the last iteration.

        Args:
            done: Number of iterations in the present state.
            notes: Lines that go to the log first.
        """
        ...


class GenerationLoop:
    """Runs one rank's training until all ranks have finished."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        session: Session,
        training: TrainingRun,
        events: EventLog,
    ) -> None:
        self._rendezvous = rendezvous
        self._session = session
        self._training = training
        self._events = events
        self._reason = ""

    def run(
        self, start: Callable[[], int], finish: Callable[[int], dict[str, Any]]
    ) -> dict[str, Any]:
        """Train, through all generations, until all ranks have finished.

        An error of training is raised, unless the loss of ranks caused the error.

        Args:
            start: Begins a run without a saved state, and returns the iteration of the
                state. Collective; may be called again.
            finish: Receives the number of deaths, and returns the result. Collective;
                may be called again.

        Returns:
            The result of `finish`.
        """
        while True:
            generation = self._rendezvous.join()
            joined_unix_s = time.time()
            try:
                done, notes = self._enter(generation, joined_unix_s, start)
                self._training.run(done, notes)
                # once all ranks have finished, the supervisor counts the death of a
                # worker in this phase as success
                self._rendezvous.page.enter(Phase.DONE)
                # within the generation: saves are collective, and a rank that is lost
                # here is still replaced
                self._session.wait_for_saves()
                result = finish(self._rendezvous.num_deaths())
                self._rendezvous.finish()
            except Exception as error:
                # errors of any type: tensors of an interrupted operation may hold
                # anything
                if not self._rendezvous.lost(error):
                    iteration = self._rendezvous.page.iteration
                    self._events.append(
                        TrainingFailed(iteration=iteration, error=text_of(error))
                    )
                    raise
                self._reason = self._rendezvous.leave()
                ended = GenerationEnded(
                    generation=generation, reason=self._reason, left_unix_s=time.time()
                )
                self._events.append(ended)
            else:
                return result

    def _enter(
        self, generation: int, joined_unix_s: float, start: Callable[[], int]
    ) -> tuple[int, Sequence[str]]:
        """Return the iteration that all ranks have reached, and notes for the log."""
        started_s = time.monotonic()
        self._session.enter()
        recovered = self._session.recover()
        done = start() if recovered.iteration is None else recovered.iteration
        self._session.begin_at(done)
        # before `entered`: from then on the deaths count as reported
        deaths = self._rendezvous.deaths()
        self._rendezvous.entered()
        if generation == 1:
            return done, self._session.notes
        faults = classes_of(deaths)
        event = Rejoined(
            generation=generation,
            iteration=done,
            joined_unix_s=joined_unix_s,
            deaths=list(faults),
            detect_s=max((death.detect_s for death in deaths), default=0.0),
            rebuild_s=joined_unix_s
            - max((death.found_unix_s for death in deaths), default=joined_unix_s),
            fetch_s=recovered.fetch_s,
            replay_s=time.monotonic() - started_s - recovered.fetch_s,
            fetched_bytes=recovered.fetched_bytes,
            executed_iters=recovered.executed_iters,
            classes=list(faults.values()) or [fault_of_end(self._reason)],
            formed_groups=self._rendezvous.num_formed_groups,
            kept_groups=self._rendezvous.num_kept_groups,
        )
        self._events.append(event)
        return done, [_paragraph(event, self._reason, recovered.lines)]


def _paragraph(event: Rejoined, reason: str, plan: Sequence[str]) -> str:
    """Describe a fault for the log.

    Args:
        event: The facts of the fault and the recovery.
        reason: Why this worker left the generation. Empty in a new worker.
        plan: Lines that describe the recovery.
    """
    died = "; ".join(event.deaths) or reason or "Started again"
    seconds = (
        f"detect {event.detect_s:.2f} s, rebuild {event.rebuild_s:.2f} s, fetch"
        f" {event.fetch_s:.2f} s, replay {event.replay_s:.2f} s"
    )
    sentences = [died, *(line[:1].upper() + line[1:] for line in plan)]
    return f"{'. '.join(sentences)}. Back at iteration {event.iteration}: {seconds}."
