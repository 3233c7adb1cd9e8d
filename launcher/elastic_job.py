"""A guarded trainer's way through generations: join, get to one state, train, and do it again when ranks are lost.

The one place that tells the loss of other ranks from an error of one's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from launcher.training import Training
from moe_ckpt.events import EventLog, GenerationEnded, Rejoined
from moe_ckpt.runtime.membership import Membership
from moe_ckpt.runtime.session import Session
from moe_ckpt.types import Phase


class ElasticJob:
    """Runs one rank's training until all ranks have finished."""

    def __init__(self, membership: Membership, session: Session, training: Training, events: EventLog) -> None:
        self._membership = membership
        self._session = session
        self._training = training
        self._events = events
        self._reason = ""

    def run(self, start: Callable[[], int], finish: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        """Return what `finish(deaths)` does, once all have; `start` begins a run that nothing is left of.

        Both are collective and may be called again. Raises what training raises, unless the loss of others explains it.
        """
        while True:
            generation = self._membership.join()
            joined_unix_s = time.time()
            try:
                done, notes = self._enter(generation, joined_unix_s, start)
                self._training.run(done, notes)
                self._membership.page.enter(Phase.DONE)
                self._session.wait_for_saves()
                result = finish(self._membership.num_deaths())
                self._membership.finish()
            except Exception as error:
                if not self._membership.lost(error):
                    raise
                self._reason = self._membership.leave()
                ended = GenerationEnded(generation=generation, reason=self._reason, left_unix_s=time.time())
                self._events.append(ended)
            else:
                return result

    def _enter(self, generation: int, joined_unix_s: float, start: Callable[[], int]) -> tuple[int, Sequence[str]]:
        """Return the iteration that all ranks are at, and what a person may want to know."""
        started_s = time.monotonic()
        self._session.enter()
        rejoined = self._session.rejoin()
        done = start() if rejoined.iteration is None else rejoined.iteration
        self._session.begin_at(done)
        deaths = self._membership.deaths()
        self._membership.entered()
        if generation == 1:
            return done, self._session.notes
        event = Rejoined(
            generation=generation,
            iteration=done,
            joined_unix_s=joined_unix_s,
            deaths=[str(death) for death in deaths],
            detect_s=max((death.detect_s for death in deaths), default=0.0),
            rebuild_s=joined_unix_s - max((death.found_unix_s for death in deaths), default=joined_unix_s),
            fetch_s=rejoined.fetch_s,
            replay_s=time.monotonic() - started_s - rejoined.fetch_s,
            fetched_bytes=rejoined.fetched_bytes,
            executed_iters=rejoined.executed_iters,
        )
        self._events.append(event)
        return done, [_paragraph(event, self._reason, rejoined.lines)]


def _paragraph(event: Rejoined, reason: str, plan: Sequence[str]) -> str:
    """Return what a person wants to know of a fault. `reason`: why this process left; empty in one that is new."""
    died = "; ".join(event.deaths) or reason or "Started again"
    seconds = (
        f"detect {event.detect_s:.2f} s, rebuild {event.rebuild_s:.2f} s, fetch {event.fetch_s:.2f} s, "
        f"replay {event.replay_s:.2f} s"
    )
    recovered = ". ".join(line[:1].upper() + line[1:] for line in plan) or "Nothing had to be replayed"
    return f"{died}. {recovered}. Back at iteration {event.iteration}: {seconds}."
