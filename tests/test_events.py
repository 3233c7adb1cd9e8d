"""The event log: appended events are read again, in spite of crashes and full disks.

A crash may leave a half-written line, and several processes append to one file.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.events import (
    KINDS,
    CheckpointFailed,
    Evaluated,
    Event,
    EventLog,
    EventsLost,
    IterationCommitted,
    last_events,
    read_events,
)

VALUES = {
    int: 1 << 40,
    float: 1.0 / 3.0,
    bool: True,
    str: "got 3 bytes\nwanted 4 \u2028 bytes",
}


def value_of(hint: Any) -> Any:
    """Return a value of a field's type; not None if the type allows another value."""
    inner = get_args(hint)
    if not inner:
        return VALUES[hint]
    if get_origin(hint) is dict:
        return {value_of(inner[0]): value_of(inner[1])}
    return [value_of(inner[0])] * 2 if get_origin(hint) is list else value_of(inner[0])


def event_of(kind: type[Any]) -> Event:
    return kind(**{name: value_of(hint) for name, hint in get_type_hints(kind).items()})


EVENTS = [event_of(kind) for kind in KINDS.values()]
OVERFLOWED = replace(event_of(IterationCommitted), loss=float("inf"), grad_norm=None)


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
    """Let the kernel grow no file of this process beyond a size, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_only_the_kinds_that_are_asked_for_are_read(tmp_path: Path) -> None:
    append_all(tmp_path / "rank0003.jsonl", OVERFLOWED, evaluated(7), OVERFLOWED)
    kinds = [
        logged.event
        for logged in read_events(tmp_path / "rank0003.jsonl", only=["Evaluated"])
    ]
    assert kinds == [evaluated(7)]


def test_the_last_event_of_some_kinds_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rank0003.jsonl"
    quoting = CheckpointFailed(iteration=2, reason='"event": "Evaluated"')
    append_all(path, OVERFLOWED, evaluated(7), quoting, event_of(EventsLost))
    with path.open("a") as file:
        file.write('{"event": "Evaluated", ')  # a worker that died in its line

    def last(*kinds: str) -> Event | None:
        [logged] = last_events(path, kinds)
        return logged.event if logged else None

    assert last("Evaluated") == evaluated(7)
    assert last("Evaluated", "IterationCommitted") == evaluated(7)
    assert last("Evaluated", "CheckpointFailed") == quoting
    assert last("RunFinished") is None


def test_a_last_event_of_another_version_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rank0003.jsonl"
    append_all(path, evaluated(7))
    path.write_text(path.read_text().replace("loss", "other"))
    assert last_events(path, ["Evaluated"]) == [None]
    assert "is no event" in caplog.text


@pytest.mark.parametrize(
    "event", [*EVENTS, OVERFLOWED], ids=lambda event: type(event).__name__
)
def test_every_event_type_is_read_as_it_was_appended(
    tmp_path: Path, event: Event
) -> None:
    append_all(tmp_path / "rank0003.jsonl", event)
    assert read(tmp_path / "rank0003.jsonl") == [event]


@given(reason=st.text())
def test_any_text_stays_in_one_line(reason: str) -> None:
    event = CheckpointFailed(iteration=1, reason=reason)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank.jsonl")
        append_all(path, event, evaluated(2))
        assert read(path) == [event, evaluated(2)]


def test_an_event_carries_its_rank_and_the_seconds_since_the_origin(
    tmp_path: Path,
) -> None:
    before_s = time.time()
    log = open_log(tmp_path / "rank.jsonl", origin=before_s - 100.0)
    log.append(evaluated(1))
    log.close()
    (logged,) = read_events(tmp_path / "rank.jsonl")
    assert logged.global_rank == 3
    assert logged.t_s >= 100.0 - 1e-6
    assert logged.t_s <= 100.0 + 1e-6 + time.time() - before_s


def test_lives_append_to_one_file_in_a_folder_that_the_first_makes(
    tmp_path: Path,
) -> None:
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
        open_log(path).close()
        assert path.read_bytes() == content[: content[:cut].rfind(b"\n") + 1], (
            "the half-written line is cut off"
        )
        append_all(path, evaluated(4))
        assert read(path) == [*complete, evaluated(4)]


@pytest.mark.parametrize(
    "room_bytes", [0, 1, 40], ids=lambda room: f"{room}_bytes_of_room"
)
def test_events_that_were_not_written_are_counted_once_writing_works(
    tmp_path: Path, room_bytes: int
) -> None:
    path = tmp_path / "rank.jsonl"
    log = open_log(path)
    log.append(evaluated(1))
    written: list[Event] = [evaluated(1)]
    for lost in (3, 1):  # each loss is counted from zero
        with files_at_most(path.stat().st_size + room_bytes):
            for iteration in range(lost):
                log.append(evaluated(iteration))
            assert read(path) == written
        written += [EventsLost(count=lost), evaluated(5), evaluated(6)]
        log.append(evaluated(5))
        log.append(evaluated(6))
    log.close()
    assert read(path) == written


@pytest.mark.parametrize(
    "room_bytes", [0, 40], ids=lambda room: f"{room}_bytes_of_room"
)
def test_a_loss_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room_bytes: int
) -> None:
    path = tmp_path / "rank.jsonl"
    log = open_log(path)
    with caplog.at_level(logging.WARNING), files_at_most(room_bytes):
        log.append(evaluated(1))
        log.append(evaluated(2))
    log.close()
    (message,) = caplog.messages
    assert str(path) in message
    assert "events are lost" in message
