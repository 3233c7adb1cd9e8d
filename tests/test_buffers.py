"""Three buffers: timelines, and any order of events against what is in the buffers."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moe_ckpt.buffers import BufferStatus, TripleBuffer

SNAPSHOT, PERSIST, RECOVERY = BufferStatus.SNAPSHOT, BufferStatus.PERSIST, BufferStatus.RECOVERY


def test_a_snapshot_is_persisted_and_then_recovered_from() -> None:
    buffers = TripleBuffer()
    assert buffers.statuses == (SNAPSHOT, SNAPSHOT, SNAPSHOT)
    assert buffers.start_snapshot() == 0
    assert buffers.statuses == (SNAPSHOT, SNAPSHOT, SNAPSHOT)
    assert buffers.recovery is None
    assert buffers.finish_snapshot() == 0
    assert buffers.statuses == (PERSIST, SNAPSHOT, SNAPSHOT)
    assert buffers.finish_persist() is None
    assert buffers.statuses == (RECOVERY, SNAPSHOT, SNAPSHOT)
    assert buffers.recovery == 0


def test_the_next_one_to_be_persisted_takes_the_place_of_the_recovery_buffer() -> None:
    buffers = TripleBuffer()
    for expected in (0, 1, 0):
        assert buffers.start_snapshot() == expected
        assert buffers.finish_snapshot() == expected
        assert buffers.statuses[expected] is PERSIST
        buffers.finish_persist()
        assert buffers.recovery == expected
        assert buffers.statuses.count(SNAPSHOT) == 2


def test_of_snapshots_that_wait_storage_gets_the_newest() -> None:
    """The timeline of the module's docstring."""
    buffers = TripleBuffer()
    assert (buffers.start_snapshot(), buffers.finish_snapshot()) == (0, 0)
    assert (buffers.start_snapshot(), buffers.finish_snapshot()) == (1, None)
    assert (buffers.start_snapshot(), buffers.finish_snapshot()) == (2, None)
    assert buffers.start_snapshot() == 1
    assert buffers.finish_persist() == 2
    assert buffers.statuses == (RECOVERY, SNAPSHOT, PERSIST)
    assert buffers.finish_snapshot() is None
    assert buffers.finish_persist() == 1
    assert buffers.statuses == (SNAPSHOT, PERSIST, RECOVERY)


def test_a_waiting_snapshot_is_written_over_where_no_other_buffer_is_left() -> None:
    buffers = TripleBuffer()
    buffers.start_snapshot()
    buffers.finish_snapshot()
    buffers.finish_persist()
    assert (buffers.start_snapshot(), buffers.finish_snapshot()) == (1, 1)
    assert (buffers.start_snapshot(), buffers.finish_snapshot()) == (2, None)
    assert buffers.start_snapshot() == 2
    assert buffers.finish_persist() is None, "a buffer is persisted that is being written"
    assert buffers.finish_snapshot() == 2


def test_failures_leave_recovery_as_it_was() -> None:
    buffers = TripleBuffer()
    buffers.start_snapshot()
    buffers.finish_snapshot()
    buffers.finish_persist()
    buffers.start_snapshot()
    buffers.abandon_snapshot()
    assert (buffers.start_snapshot(), buffers.finish_snapshot()) == (1, 1)
    assert (buffers.start_snapshot(), buffers.finish_snapshot()) == (2, None)
    assert buffers.abandon_persist() == 2
    assert buffers.statuses == (RECOVERY, SNAPSHOT, PERSIST)
    assert buffers.abandon_persist() is None
    assert buffers.recovery == 0


@pytest.mark.parametrize("call", ["finish_snapshot", "abandon_snapshot", "finish_persist", "abandon_persist"])
def test_what_has_not_begun_cannot_end(call: str) -> None:
    with pytest.raises(AssertionError):
        getattr(TripleBuffer(), call)()


def test_two_snapshots_at_a_time_are_our_own_bug() -> None:
    buffers = TripleBuffer()
    buffers.start_snapshot()
    with pytest.raises(AssertionError):
        buffers.start_snapshot()


class AnyOrder(RuleBasedStateMachine):
    """Snapshots and persisting, ending or failing in any order; `content` is the number of a complete snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = TripleBuffer()
        self.content: list[int | None] = [None, None, None]
        self.writing: int | None = None
        self.persisting: int | None = None
        self.stored: int | None = None
        self.num_complete = 0
        self.waiting: int | None = None

    def takes(self, chosen: int | None) -> None:
        if chosen is None:
            assert self.persisting is not None or self.waiting is None, "storage is free and a snapshot waits"
            return
        assert self.persisting is None
        assert self.content[chosen] == self.waiting, "storage gets something else than the newest that is complete"
        self.persisting, self.waiting = chosen, None

    @precondition(lambda self: self.writing is None)
    @rule()
    def start_snapshot(self) -> None:
        chosen = self.buffers.start_snapshot()
        assert chosen not in (self.persisting, self.buffers.recovery)
        if self.waiting is not None and self.content[chosen] == self.waiting:
            assert None not in (self.persisting, self.buffers.recovery), "written over with another buffer free"
            self.waiting = None
        self.content[chosen], self.writing = None, chosen

    @precondition(lambda self: self.writing is not None)
    @rule()
    def finish_snapshot(self) -> None:
        assert self.writing is not None
        self.num_complete += 1
        self.content[self.writing] = self.waiting = self.num_complete
        self.writing = None
        self.takes(self.buffers.finish_snapshot())

    @precondition(lambda self: self.writing is not None)
    @rule()
    def abandon_snapshot(self) -> None:
        self.writing = None
        self.buffers.abandon_snapshot()

    @precondition(lambda self: self.persisting is not None)
    @rule()
    def finish_persist(self) -> None:
        assert self.persisting is not None
        newest = self.content[self.persisting]
        assert newest is not None
        assert self.stored is None or newest > self.stored
        self.stored, self.persisting = newest, None
        self.takes(self.buffers.finish_persist())

    @precondition(lambda self: self.persisting is not None)
    @rule()
    def abandon_persist(self) -> None:
        self.persisting = None
        self.takes(self.buffers.abandon_persist())

    @invariant()
    def one_is_persisted_and_one_recovered_from(self) -> None:
        statuses = self.buffers.statuses
        assert [buffer for buffer in range(3) if statuses[buffer] is PERSIST] == (
            [] if self.persisting is None else [self.persisting]
        )
        assert statuses.count(RECOVERY) == (self.stored is not None)
        assert SNAPSHOT in statuses

    @invariant()
    def what_is_recovered_from_is_whole_and_the_latest_in_storage(self) -> None:
        recovery = self.buffers.recovery
        assert (recovery is None) == (self.stored is None)
        if recovery is not None:
            assert self.content[recovery] == self.stored
            assert recovery not in (self.writing, self.persisting)
        assert self.writing is None or self.writing != self.persisting


TestAnyOrder = AnyOrder.TestCase
