"""The event log: what is appended is read again, over lives, half-written lines and files that cannot be written."""

from __future__ import annotations

import contextlib
import logging
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.events import (
    CapacityBoosted,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Event,
    EventLog,
    EventsLost,
    ExpertPopularity,
    ExpertsChosen,
    ExpertsOrdered,
    GenerationEnded,
    GradientsLost,
    GradientsSent,
    HostMemoryUsed,
    IntervalChosen,
    IterationCommitted,
    LossNotFinite,
    ModelBuilt,
    Rejoined,
    ReplayDiffered,
    RunFinished,
    SnapshotTaken,
    StageRecovered,
    StateDigest,
    StateLost,
    StateResharded,
    StateResumed,
    TokensLost,
    TrainerStarted,
    WindowChosen,
    WindowPersisted,
    WindowReplicated,
    read_events,
)

COMMITTED = IterationCommitted(
    iteration=7,
    loss=1.0 / 3.0,
    grad_norm=2.5,
    loss_scale=65536.0,
    learning_rate=1e-4,
    skipped=False,
    seconds=0.125,
    stall_s=0.0,
    sent_activation_bytes=1 << 40,
    sent_gradient_bytes=0,
)
OVERFLOWED = IterationCommitted(
    iteration=8,
    loss=float("inf"),
    grad_norm=None,
    loss_scale=32768.0,
    learning_rate=0.0,
    skipped=True,
    seconds=1e-9,
    stall_s=3.5,
    sent_activation_bytes=0,
    sent_gradient_bytes=12,
)
EVENTS: tuple[Event, ...] = (
    TrainerStarted(pid=12, host="node-3", life=0, device="NVIDIA H100"),
    StateResumed(iteration=50, source="/run/iter_0000050", seconds=1.5, passed_over=["local disk: damaged"]),
    StateResharded(iteration=50, saved_at="PP=2 DP=2 EP=2 TP=1", loaded_at="PP=1 DP=4 EP=4 TP=1"),
    CheckpointSkipped(source="/run/iter_0000100", reason="got 3 bytes\nwanted 4 \u2028 bytes"),
    LossNotFinite(iteration=51, loss="nan", source="/run/iter_0000050", action="goes on"),
    COMMITTED,
    OVERFLOWED,
    Evaluated(iteration=50, loss=2.25),
    CheckpointSaved(iteration=50, directory="/run/iter_0000050", size_bytes=1 << 40, seconds=3.0, stall_s=0.5),
    CheckpointFailed(iteration=60, reason='No space left on "/run"'),
    ExpertsChosen(iteration=4, memory=[[0, 3], [1]], on_peers=[[3], []], on_disk=[[], []], by_gradient=[[3], []]),
    TokensLost(iteration=4, layers=[1], lost_by_layer=[30], lost_by_expert=[[10, 20]], plt=0.01, mlt=0.02),
    IntervalChosen(iteration=4, every_iters=3, best=2, iteration_s=0.5, copy_bytes_per_s=2.5e9, snapshot_cost_s=0.1),
    WindowPersisted(window_start=4, seconds=0.5),
    GradientsSent(iteration=4, size_bytes=400, tap_s=0.001, lag_iters=1),
    GradientsLost(iteration=4, reason="a server lags"),
    WindowReplicated(window_start=4, size_bytes=1200, num_peers=1, seconds=0.5, span_s=2.0, ago_s=0.125),
    ExpertPopularity(iteration=4, layers=["layer 1"], tokens=[[10, 0.5]]),
    ExpertsOrdered(iteration=4, num_slots=3, layers=["layer 1"], slots=[[2, 0]]),
    WindowChosen(iteration=4, num_slots=3, fitting=2, iteration_s=0.5, copy_bytes_per_s=2.5e9, reordered=True),
    SnapshotTaken(iteration=5, window_start=4, slot=1, num_slots=3, size_bytes=400, dense_bytes=1200, copy_s=0.001),
    HostMemoryUsed(
        full_bytes=1200,
        compute_bytes=200,
        buffer_bytes=8,
        boundary_log_bytes=64,
        step_log_bytes=32,
        allocated_bytes=3000,
        double_buffered_dense_bytes=2400,
    ),
    StateLost(iteration=8, phase="backward"),
    StageRecovered(
        iteration=7, window_start=4, first_stage=1, last_stage=2, replayed_iters=3, fetched_bytes=96, seconds=0.25
    ),
    ReplayDiffered(iteration=7, operators=["layer 1 expert 2"]),
    CapacityBoosted(iteration=9, layers=["layer 1"], capacity=[[110, 100, 100]], deficit=[[30, 0, 0]]),
    GenerationEnded(generation=2, reason="rank 1 (pid 5) died of SIGKILL", left_unix_s=1.5),
    Rejoined(
        generation=3,
        iteration=7,
        joined_unix_s=2.5,
        deaths=["rank 1 (pid 5) died of SIGKILL"],
        detect_s=0.25,
        rebuild_s=0.5,
        fetch_s=0.0,
        replay_s=0.75,
        fetched_bytes=0,
        executed_iters=2,
    ),
    ModelBuilt(seconds=0.125),
    StateDigest(iteration=7, digest="00ff"),
    EventsLost(count=3),
    RunFinished(iteration=200, digest="00ff"),
)


def open_log(path: Path, origin: float = 0.0) -> EventLog:
    return EventLog(path, global_rank=3, clock_origin_unix_s=origin)


def append_all(path: Path, *events: Event) -> None:
    log = open_log(path)
    for event in events:
        log.append(event)
    log.close()


def read(path: Path) -> list[Event]:
    return [logged.event for logged in read_events(path)]


def evaluated(iteration: int) -> Evaluated:
    return Evaluated(iteration=iteration, loss=0.5)


@contextlib.contextmanager
def files_at_most(size_bytes: int) -> Iterator[None]:
    """Let the kernel refuse to grow any file of this process beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_there_is_an_example_of_every_event_type() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_type_is_read_as_it_was_appended(tmp_path: Path, event: Event) -> None:
    append_all(tmp_path / "rank0003.jsonl", event)
    assert read(tmp_path / "rank0003.jsonl") == [event]


@given(reason=st.text())
def test_any_text_stays_in_one_line(reason: str) -> None:
    event = CheckpointFailed(iteration=1, reason=reason)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank.jsonl")
        append_all(path, event, evaluated(2))
        assert read(path) == [event, evaluated(2)]


def test_an_event_carries_its_rank_and_the_seconds_since_the_origin(tmp_path: Path) -> None:
    before_s = time.time()
    log = open_log(tmp_path / "rank.jsonl", origin=before_s - 100.0)
    log.append(evaluated(1))
    log.close()
    (logged,) = read_events(tmp_path / "rank.jsonl")
    assert logged.global_rank == 3
    assert logged.t_s >= 100.0 - 1e-6
    assert logged.t_s <= 100.0 + 1e-6 + time.time() - before_s


def test_an_event_is_in_the_file_before_the_log_is_closed(tmp_path: Path) -> None:
    log = open_log(tmp_path / "rank.jsonl")
    log.append(evaluated(1))
    assert read(tmp_path / "rank.jsonl") == [evaluated(1)]
    log.close()


def test_lives_append_to_one_file_in_a_folder_that_the_first_makes(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank.jsonl"
    for life in range(3):
        append_all(path, evaluated(2 * life), evaluated(2 * life + 1))
    assert read(path) == [evaluated(iteration) for iteration in range(6)]


@given(cut=st.integers(0, 300))  # the three lines have about 290 bytes
def test_a_file_cut_at_any_byte_keeps_its_complete_lines(cut: int) -> None:
    events = [evaluated(1), evaluated(22), evaluated(333)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank.jsonl")
        append_all(path, *events)
        content = path.read_bytes()
        path.write_bytes(content[:cut])
        complete = events[: content[:cut].count(b"\n")]

        assert read(path) == complete
        append_all(path, evaluated(4))
        assert read(path) == [*complete, evaluated(4)]


def test_reopening_cuts_the_half_written_line_off_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    append_all(path, evaluated(1))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t_s": 1.5, "glob')
    open_log(path).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("room_bytes", [0, 1, 40], ids=lambda room: f"{room}_bytes_of_room")
def test_events_that_were_not_written_are_counted_once_writing_works(tmp_path: Path, room_bytes: int) -> None:
    path = tmp_path / "rank.jsonl"
    log = open_log(path)
    log.append(evaluated(1))
    with files_at_most(path.stat().st_size + room_bytes):
        for iteration in (2, 3, 4):
            log.append(evaluated(iteration))
        assert read(path) == [evaluated(1)]
    log.append(evaluated(5))
    log.append(evaluated(6))
    log.close()
    assert read(path) == [evaluated(1), EventsLost(count=3), evaluated(5), evaluated(6)]


def test_a_second_loss_is_counted_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    log = open_log(path)
    for lost in (2, 1):
        with files_at_most(path.stat().st_size):
            for _ in range(lost):
                log.append(evaluated(1))
        log.append(evaluated(2))
    log.close()
    assert read(path) == [EventsLost(count=2), evaluated(2), EventsLost(count=1), evaluated(2)]


@pytest.mark.parametrize("room_bytes", [0, 40], ids=lambda room: f"{room}_bytes_of_room")
def test_a_loss_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, room_bytes: int) -> None:
    path = tmp_path / "rank.jsonl"
    log = open_log(path)
    with caplog.at_level(logging.WARNING), files_at_most(room_bytes):
        log.append(evaluated(1))
        log.append(evaluated(2))
    log.close()
    (message,) = caplog.messages
    assert str(path) in message
    assert "events are lost" in message
