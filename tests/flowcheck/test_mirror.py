"""From captured frames to gradients: results are the ranks' sums, or are refused."""

from __future__ import annotations

import errno
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError, ConfigError
from moe_ckpt.flowcheck.mirror.capture import MirrorCapture
from moe_ckpt.flowcheck.mirror.frames import Stream, TcpSegment, segment_of
from moe_ckpt.flowcheck.mirror.framing import (
    PREAMBLE_BYTES,
    UNKNOWN,
    FramedMessage,
    Framing,
)
from moe_ckpt.flowcheck.mirror.gradients import Gradient, Spans
from moe_ckpt.flowcheck.mirror.marks import MAGIC, StreamMark, find_mark, mark_of
from moe_ckpt.flowcheck.mirror.operations import (
    LocatedMessages,
    StreamRecord,
    locate_all,
)
from moe_ckpt.flowcheck.mirror.plan import (
    BucketOffset,
    Mirrored,
)
from moe_ckpt.flowcheck.mirror.port import MirrorPort
from moe_ckpt.flowcheck.mirror.ring import Ring, RingSend
from moe_ckpt.flowcheck.mirror.tcp import Begin, Gap, Reassembly
from moe_ckpt.flowcheck.mirror.watcher import Watcher
from tests.flowcheck.captured import (
    BUCKETS,
    GROUP,
    ITERATIONS,
    NUM_RANKS,
    OPERATIONS,
    frames,
    is_of_store,
    missing_bytes,
    reduced,
    wanted,
    watch,
    watch_frames,
    whole_iterations,
)

CAPTURED = frames()
EVERYTHING = list(range(ITERATIONS))
STREAM = Stream(
    source=b"\x0a\x4d\x00\x01", source_port=1, target=b"\x0a\x4d\x00\x03", target_port=2
)


# --- the committed capture


@pytest.mark.parametrize("captures", [2, 3])
def test_two_captures_have_every_gradient(captures: int) -> None:
    assert whole_iterations(watch_frames(CAPTURED, captures)) == EVERYTHING


def test_one_capture_lacks_a_share_of_each() -> None:
    watcher = watch_frames(CAPTURED, 1)
    assert whole_iterations(watcher) == []
    sends = [
        sent
        for num_bytes in BUCKETS
        for sent in Ring(num_bytes=num_bytes, size=NUM_RANKS).sends(0)
    ]
    assert (
        missing_bytes(watcher, 0)
        == sum(BUCKETS) - sum(sent.num_bytes for sent in sends if sent.is_final)
        == 2928
    )


@given(seed=st.integers(0, 2**32), window=st.integers(2, 12))
def test_frames_may_come_in_another_order_and_twice(seed: int, window: int) -> None:
    generator = random.Random(seed)
    segments = [segment for frame in frames() if (segment := segment_of(frame))]
    again = [
        segment for segment in segments for _ in range(generator.choice((1, 1, 2)))
    ]
    first = 1 + max(
        number for number, segment in enumerate(again) if find_mark(segment.payload)
    )
    # the watcher follows a stream only from the mark on
    marked, others = again[:first], again[first:]
    shuffled = [
        segment
        for start in range(0, len(others), window)
        for segment in generator.sample(
            others[start : start + window], len(others[start : start + window])
        )
    ]
    lasting = [segment for segment in shuffled if not segment.ends]
    assert whole_iterations(watch([*marked, *lasting], 2)) == EVERYTHING


@given(seed=st.integers(0, 2**32), cuts=st.integers(1, 5))
def test_segments_may_be_cut_anywhere(seed: int, cuts: int) -> None:
    """Preambles may come in pieces too; only the mark's own message must come whole."""
    generator = random.Random(seed)
    segments = [segment for frame in frames() if (segment := segment_of(frame))]
    pieces = [
        piece
        for segment in segments
        for piece in (
            [segment] if find_mark(segment.payload) else _cut(segment, cuts, generator)
        )
    ]
    assert whole_iterations(watch(pieces, 2)) == EVERYTHING


def _cut(
    segment: TcpSegment, cuts: int, generator: random.Random
) -> Iterable[TcpSegment]:
    if len(segment.payload) < cuts + 1:
        yield segment
        return
    cut_at = [
        0,
        *sorted(generator.sample(range(1, len(segment.payload)), cuts)),
        len(segment.payload),
    ]
    for start, end in pairwise(cut_at):
        yield replace(
            segment,
            sequence=(segment.sequence + start) % 2**32,
            payload=segment.payload[start:end],
        )


@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.003, 0.02, 0.2]),
    captures=st.sampled_from([2, 3]),
)
def test_lost_frames_leave_a_gap_and_no_wrong_bytes(
    seed: int, loss: float, captures: int
) -> None:
    generator = random.Random(seed)
    watcher = watch_frames(
        [frame for frame in frames() if generator.random() >= loss], captures
    )
    whole_iterations(watcher)
    for iteration in EVERYTHING:
        # asserts that the bytes that are not missing are those of the ranks' sums
        missing_bytes(watcher, iteration)


def _data_frames(rank: int) -> list[int]:
    """Return the numbers of frames that carry sums from a rank to the rank before."""

    def has_sums(segment: TcpSegment | None) -> bool:
        if segment is None or len(segment.payload) <= 400:
            return False
        ends = (segment.stream.source[3] - 1, segment.stream.target[3] - 1)
        return ends == (rank, (rank - 1) % NUM_RANKS) and not is_of_store(segment)

    return [
        number for number, frame in enumerate(CAPTURED) if has_sums(segment_of(frame))
    ]


def test_what_one_capture_has_lost_two_others_have() -> None:
    losses = _data_frames(0)
    assert len(losses) > 30
    for lost in losses[::5]:
        left = [frame for number, frame in enumerate(CAPTURED) if number != lost]
        assert whole_iterations(watch_frames(left, 3)) == EVERYTHING, lost


def test_a_capture_finds_its_position_again_after_a_loss() -> None:
    """Each of two captures has a share of the sums that the other capture lacks.

    Without the position, all bytes after a loss would be missing.
    """
    incomplete = 0
    for lost in _data_frames(0):
        left = [frame for number, frame in enumerate(CAPTURED) if number != lost]
        watcher = watch_frames(left, 2)
        missing = [missing_bytes(watcher, iteration) for iteration in EVERYTHING]
        incomplete += any(missing)
        assert all(each <= 2 * 1048 for each in missing), (lost, missing)
        assert 0 in missing, "the other iteration is whole: operations have numbers"
    assert incomplete


def test_bytes_that_differ_between_captures_are_not_accepted() -> None:
    """Each byte of the sums is in two of the three captures."""
    accepted = []
    for number in _data_frames(1):
        damaged, middle = list(CAPTURED), len(CAPTURED[number]) // 2
        frame = bytearray(CAPTURED[number])
        frame[middle] ^= 1
        damaged[number] = bytes(frame)
        accepted.append(whole_iterations(watch_frames(damaged, 3)))
    assert {0, 1} == {iteration for each in accepted for iteration in each}
    assert accepted.count([0]) >= 3
    assert accepted.count([1]) >= 3


def test_operations_of_another_iteration_are_never_taken() -> None:
    watcher = watch_frames(CAPTURED)
    for first in range(1 + OPERATIONS * ITERATIONS):
        sums = watcher.sums(replace(wanted(0), first=first, end=first + OPERATIONS))
        found = None if sums is None else [bytes(each) for each in sums]
        beginning_before = {0: reduced(0), 1: reduced(0), 3: reduced(1), 4: reduced(1)}
        assert found == beginning_before.get(first), first
    assert watcher.sums(replace(wanted(0), end=1 + 2 * OPERATIONS)) is None, (
        "two iterations in place of one"
    )
    assert (
        watcher.sums(replace(wanted(0), buckets=(BUCKETS[0], BUCKETS[1] + 4))) is None
    )
    assert watcher.sums(replace(wanted(0), group="00" * 16)) is None


def test_dropped_iterations_free_their_bytes() -> None:
    watcher = watch_frames(CAPTURED)
    held = watcher.size_bytes
    watcher.drop(wanted(0))
    assert watcher.sums(wanted(0)) is None
    assert watcher.sums(wanted(1)) is not None
    assert 0 < watcher.size_bytes < 0.6 * held
    watcher.drop(wanted(1))
    assert watcher.size_bytes == 0


def test_a_watcher_forgets_what_overruns_its_memory() -> None:
    watcher = Watcher(2, most_bytes=1000)
    for frame in CAPTURED:
        watcher.see(frame)
    watcher.limit()
    assert not watcher.knows(GROUP)
    assert watcher.size_bytes == 0
    assert watcher.sums(wanted(1)) is None


def test_captures_drop_the_share_of_frames_that_is_asked_for() -> None:
    seen = [watch_frames(CAPTURED, 2, loss) for loss in (0.0, 0.3)]
    assert seen[0].num_watched == seen[1].num_watched > 100
    assert seen[0].num_dropped == 0
    assert 0.15 < seen[1].num_dropped / seen[1].num_watched < 0.45
    assert whole_iterations(seen[1]) == []


# --- frames


def test_other_traffic_is_no_segment() -> None:
    frame = next(
        each for each in CAPTURED if (segment := segment_of(each)) and segment.payload
    )
    assert segment_of(frame[:12] + b"\x81\x00\x00\x07" + frame[12:]) == segment_of(
        frame
    ), "a VLAN tag"
    short = frame[:12] + b"\x08\x06" + frame[14:]
    udp = frame[:23] + b"\x11" + frame[24:]
    fragment = frame[:20] + b"\x20\x00" + frame[22:]
    later_fragment = frame[:20] + b"\x00\x08" + frame[22:]
    version_6 = frame[:14] + b"\x65" + frame[15:]
    for other in (
        short,
        udp,
        fragment,
        later_fragment,
        version_6,
        b"",
        frame[:30],
        frame[:-1],
    ):
        assert segment_of(other) is None


def test_padding_of_a_short_frame_is_no_payload() -> None:
    frame = next(
        each
        for each in CAPTURED
        if (segment := segment_of(each)) and not segment.payload
    )
    assert segment_of(frame + bytes(6)) == segment_of(frame)


@given(data=st.data())
def test_a_damaged_frame_raises_nothing(data: st.DataObject) -> None:
    frame = bytearray(data.draw(st.sampled_from(frames())))
    for index in data.draw(st.lists(st.integers(0, len(frame) - 1), max_size=8)):
        frame[index] = data.draw(st.integers(0, 255))
    segment_of(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


# --- streams


def _segment(sequence: int, payload: bytes, **flags: bool) -> TcpSegment:
    return TcpSegment(
        stream=STREAM, sequence=sequence % 2**32, payload=payload, **flags
    )


@given(
    start=st.sampled_from([0, 2**31 - 3, 2**32 - 4]),
    seed=st.integers(0, 2**32),
    num_bytes=st.integers(1, 60),
)
def test_a_stream_is_put_in_order_across_the_end_of_the_numbers(
    start: int, seed: int, num_bytes: int
) -> None:
    generator = random.Random(seed)
    content = bytes(range(num_bytes))
    reassembly = Reassembly(patience_bytes=10**6)
    assert list(reassembly.feed(_segment(start - 1, b"", begins=True, opens=True))) == [
        Begin(opened=True)
    ]
    found = b""
    starts = [
        *range(0, num_bytes, 3),
        *(generator.randrange(num_bytes) for _ in range(20)),
    ]
    generator.shuffle(starts)
    for first in starts:
        last = max(first + 3, generator.randrange(first, num_bytes + 1))
        for chunk in reassembly.feed(_segment(start + first, content[first:last])):
            assert isinstance(chunk, bytes)
            found += chunk
    assert found == content


def test_a_gap_is_given_up_on_when_enough_is_held() -> None:
    reassembly = Reassembly(patience_bytes=8)
    list(reassembly.feed(_segment(99, b"", begins=True)))
    assert list(reassembly.feed(_segment(100, b"abc"))) == [b"abc"]
    assert list(reassembly.feed(_segment(108, b"hijkl"))) == []
    assert list(reassembly.feed(_segment(113, b"mnop"))) == [
        Gap(num_bytes=5),
        b"hijkl",
        b"mnop",
    ]
    assert list(reassembly.feed(_segment(103, b"defgh"))) == [], "too late"


def test_a_stream_whose_beginning_was_not_seen_begins_with_a_gap() -> None:
    reassembly = Reassembly(patience_bytes=8)
    assert list(reassembly.feed(_segment(100, b"abc"))) == [Gap(num_bytes=0), b"abc"]


def test_a_first_packet_that_comes_again_does_not_begin_anew() -> None:
    reassembly = Reassembly(patience_bytes=8)
    list(reassembly.feed(_segment(99, b"", begins=True)))
    list(reassembly.feed(_segment(100, b"abc")))
    assert list(reassembly.feed(_segment(99, b"", begins=True))) == []
    assert list(reassembly.feed(_segment(103, b"d"))) == [b"d"]


# --- messages


def _data(slot: int, payload: bytes) -> bytes:
    return (
        struct.pack("<6Q", PREAMBLE_BYTES + len(payload), 1, slot, 0, len(payload), 0)
        + payload
    )


def _announcement(slot: int, length: int) -> bytes:
    return struct.pack("<6Q", PREAMBLE_BYTES, 2, slot, 0, length, 0)


def test_a_gap_in_a_message_leaves_a_hole_and_the_position_in_the_stream() -> None:
    framing = Framing()
    message = _data(5, b"0123456789")
    chunks = [message[:50], Gap(num_bytes=4), message[54:] + _data(6, b"x")]
    first, second = [each for chunk in chunks for each in framing.feed(chunk)]
    assert first.pieces == ((0, b"01"), (6, b"6789"))
    assert not first.is_whole
    assert (second.slot, second.is_whole, second.skipped_bytes) == (6, True, None)


def test_a_gap_over_a_preamble_is_counted() -> None:
    framing = Framing()
    stream = (
        _data(5, b"a" * 100)
        + _data(5, b"b" * 100)
        + _announcement(5, 100)
        + _data(5, b"c" * 100)
    )
    chunks = [stream[:120], Gap(num_bytes=60), stream[180:]]
    first, third = [each for chunk in chunks for each in framing.feed(chunk)]
    assert (first.is_whole, third.pieces) == (False, ((0, b"c" * 100),))
    assert third.skipped_bytes == 100 + PREAMBLE_BYTES + PREAMBLE_BYTES


@given(
    chunks=st.lists(
        st.binary(max_size=120) | st.builds(Gap, num_bytes=st.integers(0, 200)),
        max_size=12,
    )
)
def test_garbage_is_no_message(chunks: list[bytes | Gap]) -> None:
    framing = Framing()
    assert [each for chunk in chunks for each in framing.feed(chunk)] == []


@given(noise=st.binary(max_size=300), at=st.integers(0, 543))
def test_garbage_within_a_stream_is_never_accepted(noise: bytes, at: int) -> None:
    segments: list[TcpSegment | None] = [segment_of(frame) for frame in frames()]
    segment = segments[at]
    if segment and segment.payload and not segment.begins:
        segments[at] = replace(
            segment, payload=(noise + segment.payload)[: len(segment.payload)]
        )
    whole_iterations(watch(segments))  # asserts that results are the ranks' sums


# --- the ring


@given(
    num_bytes=st.integers(1, 40_000).map(lambda elements: 4 * elements),
    size=st.integers(2, 9),
)
def test_all_ranks_together_send_all_final_sums(num_bytes: int, size: int) -> None:
    ring = Ring(num_bytes=num_bytes, size=size)
    for is_final in (False, True):
        counts = [0] * (num_bytes // 4)
        for rank in range(size):
            for sent in ring.sends(rank):
                if sent.is_final is is_final:
                    for element in range(
                        sent.start // 4, (sent.start + sent.num_bytes) // 4
                    ):
                        counts[element] += 1
        assert set(counts) == {size - 1}


def test_large_buffers_are_cut_into_segments_of_a_mebibyte() -> None:
    ring = Ring(num_bytes=10 * 2**20 + 4, size=2)
    assert (ring.segments_per_rank, ring.segment_bytes) == (6, 873_816)
    assert sum(sent.num_bytes for sent in ring.sends(0) if sent.is_final) == 6 * 873_816


# --- operations


SENDS = Ring(num_bytes=120, size=2).sends(0)
"""Four messages: partial sums of 32 and 24 bytes, then final sums of 32 and 32."""


def _message(
    number: int, length: int, skipped_bytes: int | None = None, kind: int = 4
) -> FramedMessage:
    slot = (kind << 56) | (number << 24)
    return FramedMessage(
        slot=slot,
        length=length,
        pieces=((0, bytes(length)),),
        skipped_bytes=skipped_bytes,
    )


def _starts(
    messages: Sequence[FramedMessage], before: Sequence[RingSend] | None = None
) -> list[int] | None:
    located = locate_all(messages, SENDS, before)
    return None if located is None else [start for start, _ in located.final_sums()]


def test_final_sums_have_their_positions() -> None:
    assert [sent.num_bytes for sent in SENDS] == [32, 24, 32, 32]
    assert _starts([_message(1, length) for length in (32, 24, 32, 32)]) == [
        sent.start for sent in SENDS[2:]
    ]


@pytest.mark.parametrize("lengths", [(24,), (32, 32), (32, 24, 32, 32, 32), (28,)])
def test_messages_of_other_lengths_are_another_operation(
    lengths: Sequence[int],
) -> None:
    assert _starts([_message(1, length) for length in lengths]) is None


def test_the_position_after_a_loss_follows_from_the_lost_bytes() -> None:
    """Two messages and their announcements are lost."""
    lost = 24 + 32 + 2 * PREAMBLE_BYTES
    first = _message(1, 32)
    for announced in (0, 2):
        last = _message(1, 32, lost + announced * PREAMBLE_BYTES)
        assert _starts([first, last]) == [SENDS[3].start]
    assert _starts([first, _message(1, 32, UNKNOWN)]) == []
    assert _starts([first, _message(1, 32, lost + 1)]) == []


def test_a_loss_that_can_be_explained_in_two_ways_is_not() -> None:
    """96 bytes and a preamble are as many bytes as three announcements."""
    sends = Ring(num_bytes=4 * 96, size=2).sends(0)
    located = locate_all(
        [_message(1, 96), _message(1, 96, 3 * PREAMBLE_BYTES)], sends, None
    )
    assert located is not None
    assert len(located.messages) == 1
    assert located.left is None


def test_a_loss_between_operations_is_counted_from_the_one_before() -> None:
    lost = 32 + PREAMBLE_BYTES
    second = _message(2, 24, lost)
    assert _starts([second], before=None) == [], (
        "an unknown share belongs to the operation before"
    )
    located = locate_all([second], SENDS, ())
    assert located is not None
    assert [sent for sent, _ in located.messages] == [SENDS[1]]
    both = locate_all([_message(2, 24, lost + 32 + PREAMBLE_BYTES)], SENDS, SENDS[3:])
    assert both is not None
    assert [sent for sent, _ in both.messages] == [SENDS[1]]
    assert locate_all([_message(2, 32, 0)], SENDS, SENDS[3:]) == LocatedMessages(
        messages=(), left=None
    ), "of the one before"


def test_operations_whose_messages_alternate_are_dropped() -> None:
    record = StreamRecord()
    for number in (1, 2, 1, 3):
        record.add(_message(number, 32))
    assert record.operations() == [3]
    assert record.size_bytes == 32


def test_only_all_reduces_are_kept() -> None:
    record = StreamRecord()
    for kind in (2, 4, 7):
        record.add(_message(kind, 32, kind=kind))
    assert record.operations() == [4]


# --- marks


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_partial_mark_names_its_sender(size: int) -> None:
    """A rank sends to the rank before it in the ring.

    The first message has the sender's own contribution; each further message also has
    the contribution of one more rank behind the sender.
    """
    group = bytes(range(16))
    units = [mark_of(group, size, rank)[: 32 + size] for rank in range(size)]
    for sender in range(size):
        merged = units[sender]
        for behind in range(1, size):
            mark = find_mark(b"earlier" + _data(7, merged) + b"later")
            assert mark == StreamMark(group=group, size=size, rank=sender, start=7)
            merged = bytes(map(max, merged, units[(sender + behind) % size]))
        assert find_mark(_data(7, merged)) is None, "a whole mark is from any rank"


def test_each_message_of_a_mark_is_one_unit() -> None:
    for size in (2, 3, 5, 64):
        mark = mark_of(bytes(16), size, 1)
        assert {
            sent.num_bytes
            for sent in Ring(num_bytes=len(mark), size=size, element_bytes=1).sends(0)
        } == {32 + size}


@given(noise=st.binary(max_size=200), cut=st.integers(0, 120))
def test_garbage_is_no_mark(noise: bytes, cut: int) -> None:
    whole = _data(7, mark_of(bytes(16), 2, 1)[:34])
    assert find_mark(noise) is None
    assert find_mark(noise + whole[:cut]) is None or cut >= len(whole)
    assert find_mark(MAGIC + noise) is None


# --- the thread that captures


class Replay:
    """A port that gives the frames of a test, batch by batch.

    A batch that begins with an exception raises the exception.
    """

    def __init__(self, *batches: Sequence[bytes]) -> None:
        self.batches = list(batches)
        self.is_read = threading.Event()
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, timeout_s: float) -> list[bytes]:
        if self.may_read.wait(timeout_s) and self.batches:
            batch = list(self.batches.pop(0))
            if isinstance(batch[0], Exception):
                raise batch[0]
            return batch
        self.is_read.set()
        threading.Event().wait(0.001)  # a read of a quiet port waits, too
        return []

    def close(self) -> None:
        pass


def _capture(
    port: Replay, *, wait_s: float = 5.0, keep_iters: int = 2
) -> MirrorCapture:
    return MirrorCapture(port, Watcher(2), keep_iters=keep_iters, wait_s=wait_s)


def test_threads_that_wait_for_more_groups_than_are_kept_get_the_reason() -> None:
    port, groups = Replay(CAPTURED), range(70)
    port.may_read.clear()
    capture = _capture(port, wait_s=0.5)
    with ThreadPoolExecutor(len(groups)) as threads:
        asked = [
            threads.submit(capture.sums, replace(wanted(1), group=f"{group:032x}"))
            for group in groups
        ]
        errors = [each.exception() for each in asked]
    port.may_read.set()
    capture.close()
    assert {type(error) for error in errors} == {CheckpointLoadError}


def test_several_threads_get_the_same_sums_also_those_still_to_come() -> None:
    port = Replay(CAPTURED)
    port.may_read.clear()
    watcher = Watcher(2)
    capture = MirrorCapture(port, watcher, keep_iters=2, wait_s=5.0)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(capture.sums, wanted(1)) for _ in range(4)]
        port.may_read.set()
        for each in asked:
            assert [bytes(bucket) for bucket in each.result(20)] == reduced(1)
    assert [bytes(bucket) for bucket in capture.sums(wanted(1))] == reduced(1), "kept"
    capture.close()
    # nothing is left to wait for
    capture = MirrorCapture(Replay(), watcher, keep_iters=2, wait_s=0.0)
    with pytest.raises(CheckpointLoadError, match="incomplete"):
        capture.sums(wanted(0))
    capture.close()


def test_a_capture_without_the_group_says_that_this_is_no_mirror_port() -> None:
    capture = _capture(Replay(), wait_s=0.01)
    with pytest.raises(CheckpointLoadError, match="wanted a mirror port"):
        capture.sums(wanted(0))
    capture.close()


def test_an_incomplete_iteration_is_lost_for_all_that_ask() -> None:
    without = ([*CAPTURED[:lost], *CAPTURED[lost + 1 :]] for lost in _data_frames(0))
    left = next(
        frames for frames in without if missing_bytes(watch_frames(frames, 2), 1)
    )
    capture = _capture(Replay(left), wait_s=0.2)
    for _ in range(2):
        with pytest.raises(
            CheckpointLoadError, match="got an incomplete capture of 8800 bytes"
        ):
            capture.sums(wanted(1))
    capture.close()


def test_a_port_that_fails_fails_all_that_ask() -> None:
    capture = _capture(Replay([OSError("the port is gone")]))  # type: ignore[list-item]
    with pytest.raises(CheckpointLoadError, match="the port is gone"):
        capture.sums(wanted(0))
    capture.close()


# --- plans


def test_a_plan_is_read_as_it_was_written() -> None:
    offsets = (BucketOffset(group=0, bucket=1, start=3),)
    plan = Mirrored(groups=(wanted(1),), offsets=offsets)
    assert Mirrored.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("places", [[1, 0, 0]]),
        ("places", [[0, 2, 0]]),
        ("places", [[0, 0, -1]]),
        ("places", 3),
        ("groups", [{}]),
    ],
)
def test_a_plan_with_a_wrong_offset_is_refused(field: str, value: Any) -> None:
    plan = Mirrored(groups=(wanted(1),), offsets=()).to_json()
    with pytest.raises((ValueError, TypeError, KeyError)):
        Mirrored.from_json(plan | {field: value})


@pytest.mark.parametrize(
    "change",
    [{"size": 1}, {"dtype": "int8"}, {"buckets": ()}, {"first": 9}, {"group": "00"}],
)
def test_sums_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        replace(wanted(0), **change)


# --- gradients


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12))
def test_spans_are_the_set_of_their_numbers(added: list[tuple[int, int]]) -> None:
    spans, numbers = Spans(), set[int]()
    for start, length in added:
        if length:
            spans.add(start, start + length)
            numbers |= set(range(start, start + length))
    assert {
        n for start, end in spans.within(0, 60) for n in range(start, end)
    } == numbers
    assert all(spans.covers(num) == (set(range(num)) <= numbers) for num in range(60))


def test_a_gradient_is_complete_once_all_bytes_are_there_and_the_same() -> None:
    gradient = Gradient(8)
    gradient.put(4, b"efgh")
    assert not gradient.is_complete
    gradient.put(0, b"abcde")
    assert gradient.take() == b"abcdefgh"
    gradient.put(1, b"X")
    assert not gradient.is_complete


# --- the port


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"ckpt.mirror_interface: got 'nothing0', wanted one of .*\blo\b",
    ):
        MirrorPort("nothing0")


def test_a_process_without_the_privilege_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> socket.socket:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(
        ConfigError,
        match=(
            r"ckpt.capture=mirror: got a process without the privilege, .*CAP_NET_RAW"
        ),
    ):
        MirrorPort("lo")


def test_the_loopback_port_reads_each_frame_once() -> None:
    """A second copy of a frame would fill in a simulated loss of a capture.

    Both copies would have to be dropped.
    """
    try:
        port = MirrorPort("lo")
    except ConfigError as error:
        pytest.skip(str(error))
    contents = [
        b"read at the loopback interface" + bytes(range(number, 200))
        for number in range(20)
    ]
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.connect(server.getsockname())
        for content in contents:
            client.sendall(content)
        until_s = time.monotonic() + 10
        while contents[-1] not in seen and time.monotonic() < until_s:
            seen += [
                segment.payload
                for frame in port.read(1.0)
                if (segment := segment_of(frame))
            ]
    port.close()
    assert [each for each in seen if each in contents] == contents
