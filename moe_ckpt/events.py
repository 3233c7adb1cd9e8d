"""The events of a run: typed, one JSON line each, in one file per rank.

Owns: the event types and their file format. All processes of a rank append to one file,
so the log survives restarts. When a file is opened again, a last line that a dying
process left half-written is cut off. All ranks and all restarts of a run share one
clock origin.
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
"""The event classes, by the names that lines of a file use."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Event:
    """Base class of all events.

    Each subclass becomes a frozen dataclass. The lines of a file name the subclass.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        # no slots: with slots, `dataclass` would create another class
        kind = dataclass(frozen=True, kw_only=True)(cls)
        if not cls.__name__.startswith("_"):
            KINDS[cls.__name__] = kind


class _IterationEvent(Event):
    """Base class of events about an iteration, which is the first field of the line."""

    iteration: int
    """Number of optimizer steps, counted from the start of the run."""


class WorkerStarted(Event):
    """A worker process has started."""

    pid: int
    """Process id of the worker."""

    host: str
    """Name of the machine."""

    incarnation: int
    """Number of earlier processes of this rank in the run; 0 for the first."""

    device: str
    """Name of the GPU, or `cpu`."""

    launch_s: float | None = None
    """Seconds from the start of the rank's first process to this event, mostly imports.

    None for a later process of the rank.
    """


class StateResumed(_IterationEvent):
    """Training continues after `iteration`, from a state on disk."""

    source: str
    """The checkpoint's folder, or the local disk."""

    seconds: float
    """Time to load the state."""

    passed_over: list[str]
    """Better sources that were not used, each with the reason."""


class CourseChanged(_IterationEvent):
    """The settings of this start differ from those that trained the loaded state."""

    changed: list[str]
    """Settings that take effect after `iteration`, in words."""

    kept: list[str]
    """Lengths of the learning-rate schedule that stay as the run began."""


class StateResharded(_IterationEvent):
    """Training continues from a checkpoint that was saved at another parallel layout.

    The whole state is restored except the states of random generators. From here on the
    run differs from the one that saved the checkpoint, and is not bit for bit the same.
    """

    saved_at: str
    """Parallel layout of the run that saved the checkpoint."""

    loaded_at: str
    """Parallel layout of this run."""


class CheckpointSkipped(Event):
    """A checkpoint or window could not be used."""

    source: str
    """The checkpoint or window."""

    reason: str
    """The error."""


class LossNotFinite(_IterationEvent):
    """The loss is NaN or infinite soon after a load."""

    loss: str
    """The loss, as text: JSON has neither NaN nor infinity."""

    source: str
    """The state that was loaded."""

    action: str
    """The reaction: all ranks go back to an older source, or training continues
    unchanged.
    """


class StateAudited(_IterationEvent):
    """A rank has rebuilt its state from a window and gradients, and compared both."""

    window_start: int | None
    """Iteration of the window's first snapshot; None: this rank has no intact window
    and gradients that lead to the iteration, and its state was not audited.
    """

    differing: list[str]
    """Operators of which this rank's state was another one."""

    seconds: float
    """Time of the audit, on all ranks together."""


class CorruptionFound(_IterationEvent):
    """An audit has found a state that its window and gradients do not lead to."""

    where: list[str]
    """For each such rank, the rank and its operators, in words."""

    action: str
    """The source from which all ranks go on."""


class IterationCommitted(_IterationEvent):
    """All ranks have finished one optimizer step."""

    loss: float
    """Mean loss of the iteration's batch."""

    grad_norm: float | None
    """Norm of all gradients before clipping; None after an FP16 overflow."""

    loss_scale: float
    """Scale of the loss under FP16; 1 without scaling."""

    learning_rate: float
    """Learning rate of this step."""

    skipped: bool
    """Whether an FP16 overflow made the optimizer skip the update."""

    seconds: float
    """Time from the start of the iteration to its commit, stalls included."""

    stall_s: float
    """Part of `seconds` that checkpointing took from training."""

    sent_activation_bytes: int
    """Bytes of activations that this rank sent to other stages."""

    sent_gradient_bytes: int
    """Bytes of gradients that this rank sent to other stages."""


class StateDigest(_IterationEvent):
    """A digest of this rank's training state after `iteration`.

    A rank logs the digest again after a recovery to the iteration.
    """

    digest: str
    """SHA-256 of the whole state, in hex."""


class TensorDigests(_IterationEvent):
    """Digests of the single tensors of this rank's state after `iteration`."""

    digests: dict[str, str]
    """The first 64 bits of a SHA-256, in hex, by the tensor's name."""


class Evaluated(_IterationEvent):
    """An evaluation over the held-out batches."""

    loss: float
    """Mean cross-entropy, in nats per token."""


class CheckpointSaved(_IterationEvent):
    """A checkpoint was committed."""

    directory: str
    """Path of the checkpoint."""

    size_bytes: int
    """Size of the checkpoint of all ranks."""

    seconds: float
    """Time from the start of the save to its commit."""

    stall_s: float
    """Part of `seconds` in which training was stopped."""


class CheckpointFailed(_IterationEvent):
    """A checkpoint or snapshot could not be saved.

    Training continues unless `ckpt.strict` forbids that.
    """

    reason: str
    """The error."""


class WindowChosen(WindowChoice, _IterationEvent):
    """A sparse window begins with the snapshot of `iteration`.

    The fields are the choice and its terms.
    """


class IntervalChosen(IntervalChoice, _IterationEvent):
    """From `iteration` on, whole snapshots are `every_iters` iterations apart.

    The other fields are the measurements behind the choice.
    """


class ExpertsChosen(_IterationEvent):
    """Experts in the partial snapshot of an iteration, by destination.

    Each field has one list of experts for each MoE layer of the stage.
    """

    memory: list[list[int]]
    """Experts copied to host memory."""

    on_peers: list[list[int]]
    """Experts of `memory` that peers receive; none if the snapshot does not go to
    peers.
    """

    on_disk: list[list[int]]
    """Experts of `memory` written to disk; none if the snapshot does not go to disk."""

    by_gradient: list[list[int]]
    """Experts of `on_peers` of which peers receive only the gradients, not the whole
    state.
    """


class TokensLost(_IterationEvent):
    """A rollback to a partial checkpoint has cost experts part of their training.

    The experts are those of this rank's stage. Each expert loses the tokens since it
    was last saved. MoC, equation (7); MoEtion, equation (6).
    """

    layers: list[int]
    """Numbers of the stage's MoE layers."""

    lost_by_layer: list[int]
    """Tokens lost in each layer."""

    lost_by_expert: list[list[int]]
    """Tokens lost, [layers][experts]."""

    plt: float
    """PLT: share of the tokens up to `iteration` that all faults so far have cost.

    The mean over all MoE layers of the job.
    """

    mlt: float
    """MLT: as `plt`, but the sum over all MoE layers of the job; may exceed 1."""


class SnapshotTaken(_IterationEvent):
    """A snapshot of one slot has reached host memory."""

    window_start: int
    """Iteration of the window's first snapshot."""

    slot: int
    """Position of the snapshot in the window, from 0."""

    num_slots: int
    """Number of snapshots in the window."""

    size_bytes: int
    """Size of the snapshot on this rank."""

    dense_bytes: int
    """Size of a snapshot of this rank's whole state."""

    copy_s: float
    """Time of the copy to host memory, in seconds."""

    bubble_bytes: int = 0
    """Bytes copied while the rank waited for other stages.

    Some policies let copies wait for such times.
    """


class GradientsSent(_IterationEvent):
    """This rank's gradients of `iteration` are on the way to its checkpoint servers."""

    size_bytes: int
    """Size of the gradients and module buffers."""

    tap_s: float
    """Time for which the copy of the gradients stopped training, in seconds."""

    lag_iters: int
    """Iterations that the slowest server still had to complete."""


class ServersWorked(_IterationEvent):
    """All of this rank's checkpoint servers have computed the state of `iteration`."""

    busy_s: float
    """Working time of the slowest server, in seconds."""

    after_s: float
    """Working time of the slowest server after the last byte arrived, in seconds."""

    iteration_s: float
    """Time of an iteration, from gradients to gradients, when this rank received the
    report.

    This is the servers' deadline (FlowCheck, section 3.1).
    """


class ServersChanged(Event):
    """The job uses other checkpoint servers on hosts from now on."""

    addresses: str
    """Addresses of the servers; empty: the training nodes have taken over."""


class GradientsLost(_IterationEvent):
    """Checkpoint servers of some rank lack gradients up to `iteration`.

    All ranks take a whole snapshot after the iteration.
    """

    reason: str
    """The gap in this rank's own stream, or that another rank has one."""


class WindowReplicated(Event):
    """All peers hold this rank's window that starts at `window_start`."""

    window_start: int
    """Iteration of the window's first snapshot."""

    size_bytes: int
    """Size of the window that each peer holds."""

    num_peers: int
    """Number of peers."""

    seconds: float
    """Part of `span_s` in which the window was being sent or waited behind other
    copies.
    """

    span_s: float
    """Time from the first send request to the arrival of the last byte, in seconds."""

    ago_s: float
    """Time from the arrival of the last byte to this event, in seconds."""


class CopiesRestored(Event):
    """All peers hold again the windows and logs with which a recovery left this rank.

    From now on the rank is protected as before the loss. A window that is taken later
    may be replicated first.
    """

    num_peers: int
    """Number of peers."""


class ExpertPopularity(_IterationEvent):
    """Popularity of experts when the policy chose a window.

    The window begins with the snapshot of `iteration`. The experts are those of the
    rank's whole stage. One rank of each stage logs the event, and in a long run only
    for some windows.
    """

    layers: list[str]
    """The stage's MoE layers, by name."""

    tokens: list[list[float]]
    """Popularity since the last window, [layers][experts], as `ckpt.popularity` counts.
    """


class ExpertsOrdered(_IterationEvent):
    """Order in which a window takes experts.

    The window begins with the snapshot of `iteration`. The experts are those of the
    rank's stage. One rank of each stage logs the event if the order is new, and in a
    long run only for some windows.
    """

    num_slots: int
    """Number of slots of the window."""

    layers: list[str]
    """The stage's MoE layers, by name."""

    slots: list[list[int]]
    """Slot that takes the whole state of each expert, [layers][experts]."""


class WindowPersisted(Event):
    """This rank's window that starts at `window_start` is on its local disk."""

    window_start: int
    """Iteration of the window's first snapshot."""

    seconds: float
    """Time since the write was requested."""


class LastSaveDone(_IterationEvent):
    """A window that leads to `iteration` is on this rank's local disk.

    The supervisor saved the window because the job was asked to stop.
    """


class HostMemoryUsed(Event):
    """Host memory of a rank when a window is complete, by part."""

    full_bytes: int
    """Master weights and moments of operators taken in full."""

    compute_bytes: int
    """Compute weights of operators not yet taken in full."""

    buffer_bytes: int
    """Module buffers."""

    boundary_log_bytes: int
    """Logged tensors that crossed stage boundaries."""

    step_log_bytes: int
    """Logged starts of iterations, and numbers that crossed stages."""

    allocated_bytes: int
    """All allocated memory, including buffers for reuse."""

    double_buffered_dense_bytes: int
    """Two dense snapshots of this rank's state, for comparison."""

    gradient_log_bytes: int = 0
    """Logged gradients."""


class StateLost(_IterationEvent):
    """This rank's training state was lost on purpose during `iteration`."""

    phase: str
    """Phase of the iteration."""


class StageRecovered(_IterationEvent):
    """Stages have rebuilt the state after `iteration` from a window.

    With `ckpt.recovery=gradients` this rank alone has rebuilt its state.
    """

    window_start: int
    """Iteration of the window's first snapshot."""

    first_stage: int
    """First pipeline stage that replayed."""

    last_stage: int
    """Last pipeline stage that replayed."""

    replayed_iters: int
    """Number of iterations run again."""

    fetched_bytes: int
    """Bytes that this rank fetched from the logs of neighbouring stages."""

    seconds: float
    """Time of the replay, or of the steps."""

    gradient_steps: int = 0
    """Number of steps taken again with logged gradients, without any pass."""


class ReplayDiffered(_IterationEvent):
    """A replay on a healthy rank led to another state than the rank had.

    Either the rank's memory was corrupt or a kernel is not deterministic.
    """

    operators: list[str]
    """Names of the operators that differ."""

    verdict: str = ""
    """Result of a second replay; empty if the job ended."""


class CapacityBoosted(_IterationEvent):
    """Experts of this rank's stage make up lost tokens from capacity others leave."""

    layers: list[str]
    """The MoE layers with such experts, by name."""

    capacity: list[list[int]]
    """Tokens of this rank's batch that each expert could take, [layers][experts]."""

    deficit: list[list[int]]
    """Lost tokens left after `iteration`, over all ranks, [layers][experts]."""


class GenerationEnded(Event):
    """Ranks were lost, and all survivors have left the generation."""

    generation: int
    """Number of the generation."""

    reason: str
    """The cause, in words."""

    left_unix_s: float
    """Time on this rank's clock, in seconds since the epoch."""


class Rejoined(Event):
    """A new generation continues from the state after `iteration`.

    All times are measured on this rank.
    """

    generation: int
    """Number of the new generation."""

    iteration: int
    joined_unix_s: float
    """Time at which all ranks were together again, in seconds since the epoch."""

    deaths: list[str]
    """Deaths that ended the generation before, in words.

    A lost node counts as one death.
    """

    detect_s: float
    """Seconds from the last sign of life to the supervisor's detection.

    The longest of all deaths.
    """

    rebuild_s: float
    """Seconds from the detection until all ranks were together again."""

    fetch_s: float
    """Seconds to fetch windows from the memory of other ranks."""

    replay_s: float
    """Seconds of the rest of the recovery."""

    fetched_bytes: int
    """Bytes fetched from peers: by all ranks, where windows are fetched; by this rank,
    where units are fetched.
    """

    executed_iters: int
    """Iterations that this rank ran again."""

    classes: list[str] = field(default_factory=list[str])
    """`FaultClass` of each death, or of the fault if no worker died.

    `node`: a spare node has taken the ranks of a lost one.
    """

    formed_groups: int = 0
    """Process groups of this rank that were formed anew."""

    kept_groups: int = 0
    """Process groups of this rank that were idle and continue."""


class TrainingFailed(_IterationEvent):
    """An exception has ended this rank's worker.

    The job ends unless the worker is replaced.
    """

    error: str
    """Type and message of the exception."""


class ModelBuilt(Event):
    """A worker has built its model."""

    seconds: float
    """Time since the worker began."""

    exactness: str = "bitwise"
    """Promise of recoveries, `bitwise` or `state`.

    Events of earlier versions lack the field: `bitwise` was the only promise then.
    """


class EventsLost(Event):
    """Events before this one are missing: for a while the file could not be written.

    A full disk is one cause.
    """

    count: int
    """Number of missing events."""


class RunFinished(_IterationEvent):
    """All iterations are done. A fault never writes this event."""

    digest: str
    """SHA-256 over the state digests of all ranks, in hex."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedEvent:
    """An event with its time and rank."""

    t_s: float
    """Seconds since the run's clock origin."""

    global_rank: int
    """The rank that logged the event."""

    event: Event
    """The event."""


class EventLog:
    """Appends the events of one rank to its file.

    Each line reaches the kernel before `append` returns. A file that cannot be written
    never stops training: the loss is logged once, and the file later counts the lost
    events.

    Example:
        log = EventLog(path, global_rank=0, clock_origin_unix_s=time.time())
        log.append(Evaluated(iteration=100, loss=2.5))
        log.close()
    """

    def __init__(
        self, path: Path, *, global_rank: int, clock_origin_unix_s: float
    ) -> None:
        """Open the file, and create the file and its folder if missing.

        Args:
            path: The file.
            global_rank: The rank that logs.
            clock_origin_unix_s: Clock origin of the run, in seconds since the epoch.

        Raises:
            OSError: The file cannot be opened.
        """
        make_private(path.parent)
        self._fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        # an earlier process of this rank may have died in the middle of a line
        os.ftruncate(self._fd, _complete_length(path.read_bytes()))
        self._path = path
        self._global_rank = global_rank
        self._origin = clock_origin_unix_s
        self._num_lost = 0

    def append(self, event: Event) -> None:
        """Append one event, preceded by a count of events lost before."""
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
        """Close the file."""
        os.close(self._fd)

    def _write_whole(self, lines: bytes) -> bool:
        try:
            # one unbuffered write: a worker killed right after the write loses no
            # event, and no reader sees half a line
            written = os.write(self._fd, lines)
            if written < len(lines):
                # half a line would make the next line unreadable, too
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
    """Write the events of one rank, in order, as a run would.

    For simulated runs.
    """
    make_private(path.parent)
    write_private(path, b"".join(map(_encode, events)))


def _encode(logged: LoggedEvent) -> bytes:
    event = logged.event
    record = {
        "t_s": round(logged.t_s, 6),
        "global_rank": logged.global_rank,
        "event": type(event).__name__,
        # not `asdict`, which copies each list in depth: training waits for this line
        **{each.name: getattr(event, each.name) for each in fields(event)},
    }
    return (json.dumps(record) + "\n").encode()


def read_events(path: Path, *, only: Collection[str] = ()) -> Iterator[LoggedEvent]:
    """Yield the complete events of one rank's file, in order.

    A half-written last line is left out. A line that is not an event of this version
    (damaged, or from another version) is skipped with a warning.

    Args:
        path: The file.
        only: Names of the event kinds to read; lines of other kinds are not parsed.
            Empty: all kinds.

    Raises:
        OSError: The file cannot be read.

    Example:
        for logged in read_events(Path("RUN/events/rank0000.jsonl")):
            print(logged.t_s, logged.event)
    """
    content = path.read_bytes()
    named = [f'"event": "{kind}"'.encode() for kind in only]
    for number, line in enumerate(
        content[: _complete_length(content)].splitlines(), start=1
    ):
        if named and not any(name in line for name in named):
            continue
        try:
            logged = _decode(line)
        except _NO_EVENT as error:
            _log.warning("%s:%d: skipped, not an event (%r)", path, number, error)
            continue
        yield logged


def last_events(path: Path, *choices: Collection[str]) -> list[LoggedEvent | None]:
    """Return the last complete event of each choice of kinds in one rank's file.

    The file is read once, and no other line is parsed: the call is fast in long files.

    Args:
        path: The file.
        choices: Collections of names of event kinds.

    Returns:
        An event for each collection. None if the file has no such event, or if the
        line is not an event of this version.

    Raises:
        OSError: The file cannot be read.
    """
    content = path.read_bytes()
    content = content[: _complete_length(content)]
    return [_last_event(path, content, only) for only in choices]


def _last_event(
    path: Path, content: bytes, only: Collection[str]
) -> LoggedEvent | None:
    # quotes inside of strings are escaped: these bytes are only in a line's kind
    at = max(content.rfind(f'"event": "{kind}"'.encode()) for kind in only)
    if at < 0:
        return None
    line = content[content.rfind(b"\n", 0, at) + 1 : content.index(b"\n", at)]
    try:
        return _decode(line)
    except _NO_EVENT as error:
        _log.warning("%s: the last line of %s is no event (%r)", path, only, error)
        return None


_NO_EVENT = (ValueError, KeyError, TypeError, AttributeError)


def _decode(line: bytes) -> LoggedEvent:
    record = json.loads(line)
    kind = KINDS[record.pop("event")]
    return LoggedEvent(
        t_s=record.pop("t_s"),
        global_rank=record.pop("global_rank"),
        event=kind(**record),
    )


def _complete_length(content: bytes) -> int:
    return content.rfind(b"\n") + 1
