"""All-reduces of one stream: their messages, and the messages' positions in the result.

Pure. gloo numbers the collective operations of a process group, and each message names
its operation. So a loss never hides an iteration boundary: the messages after the loss
name the operation that they belong to. The number of a message within its operation is
the count of earlier messages. After a loss the number follows from the lost bytes,
which are messages of known lengths and announcements. If two numbers remain possible,
the rest of the operation counts as lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_ckpt.flowcheck.mirror.framing import PREAMBLE_BYTES, UNKNOWN, FramedMessage
from moe_ckpt.flowcheck.mirror.ring import RingSend

_PREFIX_SHIFT, _NUMBER_SHIFT, _NUMBER_MASK = 56, 24, 0xFFFFFFFF
_ALL_REDUCE = 4
_AHEAD = 4
"""Messages that either side may announce before sending: gloo's ring has two under way
in each direction.
"""


class StreamRecord:
    """All-reduces of one stream, by their numbers among the operations of the group.

    Attributes:
        size_bytes: Captured bytes of all recorded messages.
    """

    def __init__(self) -> None:
        self._messages: dict[int, list[FramedMessage]] = {}
        self._newest = -1
        self.size_bytes = 0

    def add(self, message: FramedMessage) -> None:
        """Add the next message of the stream.

        If the messages of two operations alternate, both operations are dropped: after
        a loss these messages could not be counted.
        """
        number = (message.slot >> _NUMBER_SHIFT) & _NUMBER_MASK
        if number < self._newest:
            for each in (number, self._newest):
                self._drop(each)
            return
        self._newest = number
        if message.slot >> _PREFIX_SHIFT == _ALL_REDUCE:
            self._messages.setdefault(number, []).append(message)
            self.size_bytes += _captured_bytes(message)

    def of(self, operation: int) -> Sequence[FramedMessage]:
        """Return the captured messages of an all-reduce, in order."""
        return self._messages.get(operation, ())

    def operations(self) -> list[int]:
        """Return the numbers of all all-reduces that have messages, in order."""
        return sorted(self._messages)

    def drop_up_to(self, operation: int) -> None:
        """Drop an operation and all earlier ones."""
        for each in [each for each in self._messages if each <= operation]:
            self._drop(each)

    def _drop(self, operation: int) -> None:
        self.size_bytes -= sum(map(_captured_bytes, self._messages.pop(operation, ())))


def _captured_bytes(message: FramedMessage) -> int:
    return sum(len(piece) for _, piece in message.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatedMessages:
    """Messages of an operation with their positions in the ring."""

    messages: tuple[tuple[RingSend, FramedMessage], ...]
    """Captured messages, each with its position in the ring."""

    left: tuple[RingSend, ...] | None
    """Messages of the ring after the last captured message; None if unknown."""

    def final_sums(self) -> Iterator[tuple[int, bytes]]:
        """Yield captured bytes of the result, each with its position in the result."""
        for sent, message in self.messages:
            if sent.is_final:
                for start, piece in message.pieces:
                    yield sent.start + start, piece


def locate_all(
    messages: Sequence[FramedMessage],
    sends: Sequence[RingSend],
    before: Sequence[RingSend] | None,
) -> LocatedMessages | None:
    """Return the positions of an operation's messages in the ring.

    Args:
        messages: Captured messages of the operation, in order.
        sends: Messages that the sender sends in the operation, in order.
        before: Messages of the preceding operation that were still to come; None if
            unknown.

    Returns:
        The positions; None if the captured messages are not those of `sends`.
    """
    located: list[tuple[RingSend, FramedMessage]] = []
    position: int | None = 0
    for number, message in enumerate(messages):
        if message.skipped_bytes is not None:
            earlier = before if number == 0 else ()
            position = _position_after(earlier, sends, position, message)
        if position is None:
            continue
        if position >= len(sends) or sends[position].num_bytes != message.length:
            return None
        located.append((sends[position], message))
        position += 1
    return LocatedMessages(
        messages=tuple(located),
        left=None if position is None else tuple(sends[position:]),
    )


def _position_after(
    before: Sequence[RingSend] | None,
    sends: Sequence[RingSend],
    position: int | None,
    message: FramedMessage,
) -> int | None:
    """Return the position of a message after lost bytes; None if it is uncertain."""
    if before is None or position is None or message.skipped_bytes in (None, UNKNOWN):
        return None
    ahead = [*before, *sends[position:]]
    fitting, left = [], message.skipped_bytes
    for number, sent in enumerate(ahead):
        most_announced = 2 * (number + _AHEAD)
        is_announced = (
            left % PREAMBLE_BYTES == 0 and 0 <= left <= most_announced * PREAMBLE_BYTES
        )
        if is_announced and sent.num_bytes == message.length:
            fitting.append(position + number - len(before))
        left -= PREAMBLE_BYTES + sent.num_bytes
    # a position below 0 would be in the operation before, whose number the message does
    # not have
    return fitting[0] if len(fitting) == 1 and fitting[0] >= 0 else None
