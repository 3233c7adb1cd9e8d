"""The events of a run: typed, one JSON line each, one file per rank.

Owns: the event types and their file format. All incarnations of a rank append to one
file, so the log survives restarts; a line that a dying process left half-written is cut
off when the file is opened again. All ranks and all restarts of a run share one clock
origin.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from moe_ckpt.private_files import make_private, open_private, write_private
from moe_ckpt.types import IntervalChoice, WindowChoice

_log = logging.getLogger(__name__)
KINDS: dict[str, type[Any]] = {}
"""The kinds of events, by the names that lines of a file have for them."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Event:
    """A kind of event: a subclass is a frozen dataclass, and its name is that of its
    lines in a file.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        # no slots: they would make another class
        kind = dataclass(frozen=True, kw_only=True)(cls)
        if not cls.__name__.startswith("_"):
            KINDS[cls.__name__] = kind


class _IterationEvent(Event):
    """An event of an iteration, which comes first in its line."""

    iteration: int


class WorkerStarted(Event):
    """A worker process came up. `incarnation` counts this rank's processes, from 0."""

    pid: int
    host: str
    incarnation: int
    device: str
    launch_s: float | None = None
    """Time from the start of the rank's first process to this event, which is mostly
    imports.

    None for a later process of the rank.
    """


class StateResumed(_IterationEvent):
    """Training continues after `iteration`, from a source on disk; `passed_over`:
    better ones, and why not those.
    """

    source: str
    seconds: float
    passed_over: list[str]


class CourseChanged(_IterationEvent):
    """This start's settings are not those with which the loaded state was trained.

    `changed` take effect from this iteration on; `kept` are lengths of the schedule
    that stay as the run began.
    """

    changed: list[str]
    kept: list[str]


class StateResharded(_IterationEvent):
    """The checkpoint that training continues from was saved at another parallel layout.

    All of it was carried over but the states of generators: from here on the run is not
    bit for bit the one that saved.
    """

    saved_at: str
    loaded_at: str


class CheckpointSkipped(Event):
    """A checkpoint that could not be used, and why."""

    source: str
    reason: str


class LossNotFinite(_IterationEvent):
    """Soon after a load of `source` the loss is NaN or infinite; `action`: what is done
    about it.
    """

    loss: str
    source: str
    action: str


class IterationCommitted(_IterationEvent):
    """One optimizer step. `skipped` is fp16 overflow; `stall_s` is what checkpointing
    took from training.
    """

    loss: float
    grad_norm: float | None
    loss_scale: float
    learning_rate: float
    skipped: bool
    seconds: float
    stall_s: float
    sent_activation_bytes: int
    sent_gradient_bytes: int


class StateDigest(_IterationEvent):
    """SHA-256 of this rank's whole training state after `iteration`; a rank logs it
    again after a recovery.
    """

    digest: str


class TensorDigests(_IterationEvent):
    """The first 64 bits of a SHA-256, in hex, of each tensor of this rank's state after
    `iteration`, by its name.
    """

    digests: dict[str, str]


class Evaluated(_IterationEvent):
    """Mean cross-entropy, nats per token, over the held-out batches."""

    loss: float


class CheckpointSaved(_IterationEvent):
    """A checkpoint was committed. `seconds` from start to commit, `stall_s` of it on
    the training thread.
    """

    directory: str
    size_bytes: int
    seconds: float
    stall_s: float


class CheckpointFailed(_IterationEvent):
    """A checkpoint could not be saved; training went on unless `ckpt.strict` forbids
    it.
    """

    reason: str


class WindowChosen(WindowChoice, _IterationEvent):
    """A sparse window begins with the snapshot of `iteration`: the choice with its
    terms.
    """


class IntervalChosen(IntervalChoice, _IterationEvent):
    """From `iteration` on whole snapshots are `every_iters` iterations apart: the
    choice with its measurements.
    """


class ExpertsChosen(_IterationEvent):
    """The contents of an iteration's partial snapshot: experts of each MoE layer of the
    stage, by destination.

    `on_peers` and `on_disk` are some of those in `memory`, or none where the snapshot
    does not go there. Peers are sent the gradients of those in `by_gradient`, all
    others whole.
    """

    memory: list[list[int]]
    on_peers: list[list[int]]
    on_disk: list[list[int]]
    by_gradient: list[list[int]]


class TokensLost(_IterationEvent):
    """Going back to a partial checkpoint, experts have lost what they were trained with
    since they were saved.

    Of this rank's stage, by its MoE `layers`; `lost_by_expert` [layers][experts]. `plt`
    and `mlt` are of the whole job and all faults so far, as shares of the tokens up to
    `iteration`. MoC, equation (7); MoEtion, equation (6).
    """

    layers: list[int]
    lost_by_layer: list[int]
    lost_by_expert: list[list[int]]
    plt: float
    mlt: float


class SnapshotTaken(_IterationEvent):
    """A sparse snapshot is in host memory: `size_bytes` on this rank, where a dense one
    has `dense_bytes`.

    Of these, `bubble_bytes` were copied while the rank waited for other stages: some
    policies let copies wait for that.
    """

    window_start: int
    slot: int
    num_slots: int
    size_bytes: int
    dense_bytes: int
    copy_s: float
    bubble_bytes: int = 0


class GradientsSent(_IterationEvent):
    """This rank's gradients of `iteration` are on their way to its checkpoint servers:
    `size_bytes`, buffers included.

    Copying them has stopped training for `tap_s`; the slowest server had `lag_iters`
    iterations to complete then.
    """

    size_bytes: int
    tap_s: float
    lag_iters: int


class ServersWorked(_IterationEvent):
    """All of this rank's checkpoint servers have made the state of `iteration`.

    The slowest worked for `busy_s`, and for `after_s` once the last byte had arrived.
    An iteration, from gradients to gradients, took `iteration_s` when this was found:
    the servers' deadline (FlowCheck, section 3.1).
    """

    busy_s: float
    after_s: float
    iteration_s: float


class ServersChanged(Event):
    """The checkpoint servers on hosts that the job uses from now on, by address; none:
    training nodes took over.
    """

    addresses: str


class GradientsLost(_IterationEvent):
    """Some rank's checkpoint servers lack gradients up to `iteration`: all ranks take a
    whole snapshot after it.
    """

    reason: str


class WindowReplicated(Event):
    """All peers hold this rank's window that starts at `window_start`: each of the
    `num_peers` has `size_bytes` of it.

    `ago_s` before this was written they had it all, `span_s` after it was begun to be
    sent; `seconds` of those it was being sent, and waited behind other copies.
    """

    window_start: int
    size_bytes: int
    num_peers: int
    seconds: float
    span_s: float
    ago_s: float


class ExpertPopularity(_IterationEvent):
    """How popular experts were when the policy asked, for the window that begins with
    the snapshot of `iteration`.

    Of the rank's whole stage, by its MoE `layers`, as `ckpt.popularity` counts:
    `tokens` [layers][experts] since the window before. Told by one rank of a stage, and
    of a long run for some windows only.
    """

    layers: list[str]
    tokens: list[list[float]]


class ExpertsOrdered(_IterationEvent):
    """In which order the window that begins with the snapshot of `iteration` takes the
    experts of the rank's stage.

    `slots` [layers][experts]: whose whole state is taken in which of `num_slots`. Told
    where that is new, by one rank of a stage, and of a long run for some windows only.
    """

    num_slots: int
    layers: list[str]
    slots: list[list[int]]


class WindowPersisted(Event):
    """This rank's window that starts at `window_start` is on its local disk, `seconds`
    after that was asked for.
    """

    window_start: int
    seconds: float


class LastSaveDone(_IterationEvent):
    """As the job was told to stop, a window went to this rank's local disk: it leads to
    the iteration.
    """


class HostMemoryUsed(Event):
    """A rank's host memory once a window is complete, by part; `allocated_bytes`
    includes buffers to reuse.
    """

    full_bytes: int
    compute_bytes: int
    buffer_bytes: int
    boundary_log_bytes: int
    step_log_bytes: int
    allocated_bytes: int
    double_buffered_dense_bytes: int


class StateLost(_IterationEvent):
    """This rank's training state was lost in a phase of `iteration`."""

    phase: str


class StageRecovered(_IterationEvent):
    """The state after `iteration` was rebuilt from the window that starts at
    `window_start`, by replay of stages.

    `replayed_iters` were run again by stages `first_stage` to `last_stage` in
    `seconds`; `fetched_bytes` came from neighbours' logs to this rank.
    """

    window_start: int
    first_stage: int
    last_stage: int
    replayed_iters: int
    fetched_bytes: int
    seconds: float


class ReplayDiffered(_IterationEvent):
    """A healthy rank's replayed state is not the one it had: its memory was corrupt, or
    a kernel is not deterministic.

    `operators` are those that differ, by name. `verdict`: what a second replay has
    shown; empty if the job ended.
    """

    operators: list[str]
    verdict: str = ""


class CapacityBoosted(_IterationEvent):
    """Some experts of this rank's stage make up for lost tokens, out of capacity that
    others leave.

    By layer, for each of its experts: `capacity` are the tokens that it could take of
    this rank's batch of `iteration`, `deficit` the lost ones that are left after it,
    over all ranks.
    """

    layers: list[str]
    capacity: list[list[int]]
    deficit: list[list[int]]


class GenerationEnded(Event):
    """Ranks were lost, and this one has left the generation with all others that live."""

    generation: int
    reason: str
    left_unix_s: float


class Rejoined(Event):
    """A generation goes on from the state after `iteration`. `deaths` tell why the one
    before ended.

    All ranks were together again, on this rank's clock, at `joined_unix_s`. Seconds on
    this rank: `detect_s` from the last sign of life to the supervisor's finding (the
    longest of the deaths), `rebuild_s` from there until all ranks are together again,
    `fetch_s` for windows out of other ranks' memories, `replay_s` for the rest.
    `executed_iters` were run again on this rank. `classes` has the class of each death,
    or that of the fault without a death. Of this rank's process groups, `formed_groups`
    were formed anew, and `kept_groups` were idle and go on.
    """

    generation: int
    iteration: int
    joined_unix_s: float
    deaths: list[str]
    detect_s: float
    rebuild_s: float
    fetch_s: float
    replay_s: float
    fetched_bytes: int
    executed_iters: int
    classes: list[str] = field(default_factory=list[str])
    formed_groups: int = 0
    kept_groups: int = 0


class TrainingFailed(_IterationEvent):
    """An exception has ended this rank's worker: the job ends unless the worker is
    replaced.
    """

    error: str


class ModelBuilt(Event):
    """A worker has built its model, `seconds` after its process began; `exactness`:
    what recoveries promise.
    """

    seconds: float
    exactness: str = "bitwise"
    """The only promise of earlier versions, whose events do not name it."""


class EventsLost(Event):
    """The file could not be written for a while (a full disk, say): `count` events
    before this one are missing.
    """

    count: int


class RunFinished(_IterationEvent):
    """All iterations are done. Never written on a fault."""

    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedEvent:
    """An event with when (seconds since the run's origin) and on which global rank it
    happened.
    """

    t_s: float
    global_rank: int
    event: Event


class EventLog:
    """Appends one rank's events to its file; each line reaches the kernel before
    `append` returns.

    A file that cannot be written never stops training: the loss is logged once and
    counted in the file later.
    """

    def __init__(
        self, path: Path, *, global_rank: int, clock_origin_unix_s: float
    ) -> None:
        make_private(path.parent)
        self._fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        # an earlier incarnation of this rank may have died in the middle of a line
        os.ftruncate(self._fd, _complete_length(path.read_bytes()))
        self._path = path
        self._global_rank = global_rank
        self._origin = clock_origin_unix_s
        self._num_lost = 0

    def append(self, event: Event) -> None:
        lost = [EventsLost(count=self._num_lost)] if self._num_lost else []
        t_s = time.time() - self._origin
        logged = (
            LoggedEvent(t_s=t_s, global_rank=self._global_rank, event=each)
            for each in (*lost, event)
        )
        self._num_lost = (
            0
            if self._write_whole(b"".join(map(_encode, logged)))
            else self._num_lost + 1
        )

    def close(self) -> None:
        os.close(self._fd)

    def _write_whole(self, lines: bytes) -> bool:
        try:
            # one unbuffered write: a worker that is killed right after loses no event,
            # and no reader sees half a line
            written = os.write(self._fd, lines)
            if written < len(lines):
                # half a line would make the next one unreadable, too
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(
                    errno.ENOSPC, f"only {written} of {len(lines)} bytes written"
                )
        except OSError as error:
            if not self._num_lost:
                _log.warning(
                    "%s: %s; events are lost until it can be written again",
                    self._path,
                    error,
                )
            return False
        return True


def write_events(path: Path, events: Iterable[LoggedEvent]) -> None:
    """Write one rank's events, in order, as a run would have: for what has been
    simulated.
    """
    make_private(path.parent)
    write_private(path, b"".join(map(_encode, events)))


def _encode(logged: LoggedEvent) -> bytes:
    event = logged.event
    record = {
        "t_s": round(logged.t_s, 6),
        "global_rank": logged.global_rank,
        "event": type(event).__name__,
        # no `asdict`, which copies each list in depth: training waits for this line
        **{each.name: getattr(event, each.name) for each in fields(event)},
    }
    return (json.dumps(record) + "\n").encode()


def read_events(path: Path, *, only: Collection[str] = ()) -> Iterator[LoggedEvent]:
    """Yield the complete events of one rank's file, in order, without a half-written
    last line.

    `only`: the names of the kinds that are read; lines of others are not parsed.

    A line that is not an event of this version (damaged, or from another one) is
    skipped with a warning.
    """
    content = path.read_bytes()
    named = [f'"event": "{kind}"'.encode() for kind in only]
    for number, line in enumerate(
        content[: _complete_length(content)].splitlines(), start=1
    ):
        if named and not any(name in line for name in named):
            continue
        try:
            record = json.loads(line)
            kind = KINDS[record.pop("event")]
            logged = LoggedEvent(
                t_s=record.pop("t_s"),
                global_rank=record.pop("global_rank"),
                event=kind(**record),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s:%d: skipped, not an event (%r)", path, number, error)
            continue
        yield logged


def _complete_length(content: bytes) -> int:
    return content.rfind(b"\n") + 1
