"""From captured frames to gradients: results are the ranks' sums, or are not accepted."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.mirror.frames import Stream, TcpSegment, segment_of
from moe_ckpt.mirror.framing import PREAMBLE_BYTES, Framing
from moe_ckpt.mirror.gradients import Gradient, Spans
from moe_ckpt.mirror.ring import Ring, RingTracker
from moe_ckpt.mirror.tcp import Begin, Gap, Reassembly
from tests.mirror.captured import BUCKETS, ITERATIONS, NUM_RANKS, Mirror, frames, is_of_store, reduced

EVERYTHING = list(range(ITERATIONS))
STREAM = Stream(source=b"\x0a\x4d\x00\x01", source_port=1, target=b"\x0a\x4d\x00\x03", target_port=2)


@pytest.fixture(scope="module")
def captured() -> Sequence[bytes]:
    return frames()


# --- the committed capture


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (2, 0), (0, 1, 2)])
def test_two_captures_have_every_gradient(ranks: tuple[int, ...], captured: Sequence[bytes]) -> None:
    assert Mirror(*ranks).see_frames(captured).whole_iterations() == EVERYTHING


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_one_capture_lacks_a_share_of_each(rank: int, captured: Sequence[bytes]) -> None:
    mirror = Mirror(rank).see_frames(captured)
    assert mirror.whole_iterations() == []
    missing = 2 * Ring(num_bytes=BUCKETS[0], size=NUM_RANKS).segment_bytes
    there = mirror.collected.gradient(0)._there.within(0, BUCKETS[0])
    assert sum(end - start for start, end in there) == BUCKETS[0] - missing == BUCKETS[0] * 2 // 3


@given(seed=st.integers(0, 2**32), window=st.integers(2, 12))
def test_frames_may_come_in_another_order_and_twice(seed: int, window: int) -> None:
    generator = random.Random(seed)
    segments = [segment for frame in frames() if (segment := segment_of(frame))]
    again = [segment for segment in segments for _ in range(generator.choice((1, 1, 2)))]
    first, others = again[: len(again) // 20], again[len(again) // 20 :]  # connections begin in order
    shuffled = [
        segment
        for start in range(0, len(others), window)
        for segment in generator.sample(others[start : start + window], len(others[start : start + window]))
    ]
    begun = [segment for segment in shuffled if segment.begins]
    rest = [segment for segment in shuffled if not segment.begins]
    assert Mirror(0, 1).see([*first, *begun, *rest]).whole_iterations() == EVERYTHING


@given(seed=st.integers(0, 2**32), cuts=st.integers(1, 5))
def test_segments_may_be_cut_anywhere(seed: int, cuts: int) -> None:
    """Preambles come in pieces then, too."""
    generator = random.Random(seed)
    segments = [segment for frame in frames() if (segment := segment_of(frame))]
    pieces = [piece for segment in segments for piece in _cut(segment, cuts, generator)]
    assert Mirror(0, 1).see(pieces).whole_iterations() == EVERYTHING


def _cut(segment: TcpSegment, cuts: int, generator: random.Random) -> Iterable[TcpSegment]:
    if len(segment.payload) < cuts + 1:
        yield segment
        return
    places = [0, *sorted(generator.sample(range(1, len(segment.payload)), cuts)), len(segment.payload)]
    for start, end in pairwise(places):
        yield replace(segment, sequence=(segment.sequence + start) % 2**32, payload=segment.payload[start:end])


@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.003, 0.02, 0.2]), ranks=st.sampled_from([(0, 1), (0, 1, 2)]))
def test_what_is_lost_is_missing_and_nothing_else_is_taken_for_it(
    seed: int, loss: float, ranks: tuple[int, ...]
) -> None:
    """`whole_iterations` compares each complete iteration with the ranks' own sums."""
    generator = random.Random(seed)
    Mirror(*ranks).see_frames([frame for frame in frames() if generator.random() >= loss]).whole_iterations()


def _data_frames(captured: Sequence[bytes], rank: int) -> list[int]:
    """Return which frames carry sums from a rank to the one before it."""

    def has_sums(segment: TcpSegment | None) -> bool:
        if segment is None or len(segment.payload) <= 400:
            return False
        ends = (segment.stream.source[3] - 1, segment.stream.target[3] - 1)
        return ends == (rank, (rank - 1) % NUM_RANKS) and not is_of_store(segment)

    return [number for number, frame in enumerate(captured) if has_sums(segment_of(frame))]


def test_what_one_capture_has_lost_two_others_have(captured: Sequence[bytes]) -> None:
    losses = _data_frames(captured, 0)
    assert len(losses) > 30
    for lost in losses[::5]:
        left = [frame for number, frame in enumerate(captured) if number != lost]
        assert Mirror(0, 1, 2).see_frames(left).whole_iterations() == EVERYTHING, lost


def test_a_capture_finds_its_place_again_after_a_loss(captured: Sequence[bytes]) -> None:
    """Of two captures each has a share that the other lacks: without the place, all after a loss were missing."""
    incomplete = 0
    for lost in _data_frames(captured, 0):
        left = [frame for number, frame in enumerate(captured) if number != lost]
        mirror = Mirror(0, 1).see_frames(left)
        missing = [_missing_bytes(mirror, operation) for operation in range(len(BUCKETS) * ITERATIONS)]
        incomplete += any(missing)
        assert all(each <= 2 * 1048 for each in missing), (lost, missing)
    assert incomplete


def _missing_bytes(mirror: Mirror, operation: int) -> int:
    """Return how many bytes of a result no capture has; all others are those of the ranks' sums."""
    gradient, (iteration, bucket) = mirror.collected.gradient(operation), divmod(operation, len(BUCKETS))
    spans = gradient._there.within(0, BUCKETS[bucket])
    for start, end in spans:
        assert gradient._bytes[start:end] == reduced(iteration)[bucket][start:end], (operation, start)
    assert not gradient.differs
    return BUCKETS[bucket] - sum(end - start for start, end in spans)


def test_bytes_that_differ_between_captures_are_not_accepted(captured: Sequence[bytes]) -> None:
    damaged = list(captured)
    number = _data_frames(captured, 1)[-2]
    damaged[number] = damaged[number][:-1] + bytes([damaged[number][-1] ^ 1])
    assert Mirror(0, 1, 2).see_frames(damaged).whole_iterations() == [0]


# --- frames


def test_other_traffic_is_no_segment(captured: Sequence[bytes]) -> None:
    frame = next(each for each in captured if (segment := segment_of(each)) and segment.payload)
    assert segment_of(frame[:12] + b"\x81\x00\x00\x07" + frame[12:]) == segment_of(frame), "a VLAN tag"
    short = frame[:12] + b"\x08\x06" + frame[14:]
    udp = frame[:23] + b"\x11" + frame[24:]
    fragment = frame[:20] + b"\x20\x00" + frame[22:]
    later_fragment = frame[:20] + b"\x00\x08" + frame[22:]
    version_6 = frame[:14] + b"\x65" + frame[15:]
    for other in (short, udp, fragment, later_fragment, version_6, b"", frame[:30], frame[:-1]):
        assert segment_of(other) is None


def test_padding_of_a_short_frame_is_no_payload(captured: Sequence[bytes]) -> None:
    frame = next(each for each in captured if (segment := segment_of(each)) and not segment.payload)
    assert segment_of(frame + bytes(6)) == segment_of(frame)


@given(frame=st.binary(max_size=200))
def test_no_frame_raises(frame: bytes) -> None:
    segment_of(frame)


@given(data=st.data())
def test_a_damaged_frame_raises_nothing(data: st.DataObject) -> None:
    frame = bytearray(data.draw(st.sampled_from(frames())))
    for place in data.draw(st.lists(st.integers(0, len(frame) - 1), max_size=8)):
        frame[place] = data.draw(st.integers(0, 255))
    segment_of(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


# --- streams


def _segment(sequence: int, payload: bytes, **flags: bool) -> TcpSegment:
    return TcpSegment(stream=STREAM, sequence=sequence % 2**32, payload=payload, **flags)


@given(start=st.sampled_from([0, 2**31 - 3, 2**32 - 4]), seed=st.integers(0, 2**32), num_bytes=st.integers(1, 60))
def test_a_stream_is_put_in_order_across_the_end_of_the_numbers(start: int, seed: int, num_bytes: int) -> None:
    generator = random.Random(seed)
    content = bytes(range(num_bytes))
    reassembly = Reassembly(patience_bytes=10**6)
    assert list(reassembly.feed(_segment(start - 1, b"", begins=True, opens=True))) == [Begin(opened=True)]
    found = b""
    starts = [*range(0, num_bytes, 3), *(generator.randrange(num_bytes) for _ in range(20))]
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
    assert list(reassembly.feed(_segment(113, b"mnop"))) == [Gap(num_bytes=5), b"hijkl", b"mnop"]
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
    return struct.pack("<6Q", PREAMBLE_BYTES + len(payload), 1, slot, 0, len(payload), 0) + payload


def _announcement(slot: int, length: int) -> bytes:
    return struct.pack("<6Q", PREAMBLE_BYTES, 2, slot, 0, length, 0)


def test_a_gap_in_a_message_leaves_a_hole_and_the_place_in_the_stream() -> None:
    framing = Framing()
    message = _data(5, b"0123456789")
    chunks = [message[:50], Gap(num_bytes=4), message[54:] + _data(6, b"x")]
    first, second = [each for chunk in chunks for each in framing.feed(chunk)]
    assert first.pieces == ((0, b"01"), (6, b"6789"))
    assert not first.is_whole
    assert (second.slot, second.is_whole, second.skipped_bytes) == (6, True, None)


def test_a_gap_over_a_preamble_is_counted() -> None:
    framing = Framing()
    stream = _data(5, b"a" * 100) + _data(5, b"b" * 100) + _announcement(5, 100) + _data(5, b"c" * 100)
    chunks = [stream[:120], Gap(num_bytes=60), stream[180:]]
    first, third = [each for chunk in chunks for each in framing.feed(chunk)]
    assert (first.is_whole, third.pieces) == (False, ((0, b"c" * 100),))
    assert third.skipped_bytes == 100 + PREAMBLE_BYTES + PREAMBLE_BYTES


@given(chunks=st.lists(st.binary(max_size=120) | st.builds(Gap, num_bytes=st.integers(0, 200)), max_size=12))
def test_garbage_is_no_message(chunks: list[bytes | Gap]) -> None:
    framing = Framing()
    assert [each for chunk in chunks for each in framing.feed(chunk)] == []


@given(noise=st.binary(max_size=300), at=st.integers(0, 543))
def test_garbage_within_a_stream_is_never_accepted(noise: bytes, at: int) -> None:
    segments: list[TcpSegment | None] = [segment_of(frame) for frame in frames()]
    segment = segments[at]
    if segment and segment.payload and not segment.begins:
        segments[at] = replace(segment, payload=(noise + segment.payload)[: len(segment.payload)])
    mirror = Mirror(0, 1, 2).see(segments)
    mirror.whole_iterations()  # compares them with the ranks' sums


# --- the ring


@given(num_bytes=st.integers(1, 40_000).map(lambda elements: 4 * elements), size=st.integers(2, 9))
def test_all_ranks_together_send_all_final_sums(num_bytes: int, size: int) -> None:
    ring = Ring(num_bytes=num_bytes, size=size)
    for is_final in (False, True):
        counts = [0] * (num_bytes // 4)
        for rank in range(size):
            for sent in ring.sends(rank):
                if sent.is_final is is_final:
                    for element in range(sent.start // 4, (sent.start + sent.num_bytes) // 4):
                        counts[element] += 1
        assert set(counts) == {size - 1}


def test_large_buffers_are_cut_into_segments_of_a_mebibyte() -> None:
    ring = Ring(num_bytes=10 * 2**20 + 4, size=2)
    assert (ring.segments_per_rank, ring.segment_bytes) == (6, 873_816)
    assert sum(sent.num_bytes for sent in ring.sends(0) if sent.is_final) == 6 * 873_816


def test_the_count_begins_anew_with_each_operation() -> None:
    """By Algorithm 1 as printed the second layer's first message would be one of the first layer's all-gather."""
    tracker = RingTracker([120, 240], size=2, rank=0)
    places = [tracker.place(slot, length) for slot, length in [(1, 32), (1, 24), (1, 32), (1, 32)] + [(2, 60)] * 4]
    assert [place and (place.operation, place.sent.is_final) for place in places] == [
        (0, False),
        (0, False),
        (0, True),
        (0, True),
        (1, False),
        (1, False),
        (1, True),
        (1, True),
    ]


def test_other_operations_of_the_group_are_passed_over() -> None:
    tracker = RingTracker([120], size=2, rank=1)
    assert [tracker.place(slot, 4) for slot in (1, 2, 3)] == [None] * 3
    assert tracker.place(4, 32) is not None
    assert tracker.place(5, 4) is None, "while another is under way"
    assert tracker.place(4, 24) is None, "of this length there is none at this place"
    assert tracker.place(4, 32) is None, "the place is lost"


def test_after_a_loss_between_operations_the_iteration_is_lost() -> None:
    tracker = RingTracker([120], size=2, rank=1)
    assert tracker.place(7, 32, 500) is None, "its beginning may be lost"
    assert tracker.place(8, 32) is None, "this may be of another iteration"
    tracker.resume(3)
    place = tracker.place(9, 32)
    assert place is not None
    assert place.operation == 3


def test_a_loss_that_can_be_explained_in_two_ways_is_not() -> None:
    """Messages of 432 bytes take as much as ten announcements."""
    tracker = RingTracker([4 * 432], size=2, rank=0)
    assert tracker.place(1, 432) is not None
    assert tracker.place(1, 432, 480) is None


# --- gradients


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12))
def test_spans_are_the_set_of_their_numbers(added: list[tuple[int, int]]) -> None:
    spans, numbers = Spans(), set[int]()
    for start, length in added:
        if length:
            spans.add(start, start + length)
            numbers |= set(range(start, start + length))
    assert {n for start, end in spans.within(0, 60) for n in range(start, end)} == numbers
    assert spans.covers(7) == (set(range(7)) == numbers)


def test_a_gradient_is_complete_once_all_bytes_are_there_and_the_same() -> None:
    gradient = Gradient(8)
    gradient.put(4, b"efgh")
    assert not gradient.is_complete
    gradient.put(0, b"abcde")
    assert gradient.to_bytes() == b"abcdefgh"
    gradient.put(1, b"X")
    assert not gradient.is_complete
