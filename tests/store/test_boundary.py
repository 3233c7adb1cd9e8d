"""The log of what a stage sent: order, lifetime of copies, what can be used, and that memory does not grow."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.store.boundary import BoundaryLog, Direction
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.memory import HostBuffers, PrivateMemory
from tests.properties import examples
from tests.store.test_copier import WAIT_S, held, held_until_waited_for

ACTIVATION, GRADIENT = Direction.ACTIVATION, Direction.GRADIENT


class Logging:
    """A log with all that it needs."""

    def __init__(self) -> None:
        self.copier = HostCopier()
        self.buffers = HostBuffers(PrivateMemory(pinned=False))
        self.log = BoundaryLog(self.copier, self.buffers)

    def write(self, iteration: int, activations: int = 1, gradients: int = 1) -> None:
        """Log an iteration in which so many tensors went each way; each holds its iteration and number."""
        self.log.begin(iteration)
        for direction, count in ((ACTIVATION, activations), (GRADIENT, gradients)):
            for number in range(count):
                self.log.record(direction, content(iteration, direction, number))
        self.log.end()

    def usable_from(self, last: int) -> int:
        """Judge the log once all of it is copied."""
        self.copier.then(lambda: None).result(WAIT_S)
        return self.log.usable_from(last)


@pytest.fixture
def logging_() -> Iterator[Logging]:
    parts = Logging()
    yield parts
    parts.copier.close()


def content(iteration: int, direction: Direction, number: int) -> torch.Tensor:
    return torch.tensor([iteration, list(Direction).index(direction), number])


def read(log: BoundaryLog, iteration: int, direction: Direction) -> list[list[int]]:
    return [sent.view(torch.int64).tolist() for sent in log.sent(iteration, direction)]


def damage(log: BoundaryLog, iteration: int, direction: Direction, number: int = -1) -> None:
    log.sent(iteration, direction)[number][-1] ^= 1


# Order


def test_each_direction_keeps_the_order_of_sending(logging_: Logging) -> None:
    log = logging_.log
    log.begin(7)
    for direction, number in [(ACTIVATION, 0), (ACTIVATION, 1), (GRADIENT, 0), (ACTIVATION, 2), (GRADIENT, 1)]:
        log.record(direction, content(7, direction, number))
    log.end()
    assert read(log, 7, ACTIVATION) == [[7, 0, 0], [7, 0, 1], [7, 0, 2]]
    assert read(log, 7, GRADIENT) == [[7, 1, 0], [7, 1, 1]]


@given(sent=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(Direction), st.integers(-99, 99)), max_size=40))
@examples(50)
def test_any_order_of_sending_is_kept_by_iteration_and_direction(sent: list[tuple[int, Direction, int]]) -> None:
    parts = Logging()
    for iteration in range(1, 5):
        parts.log.begin(iteration)
        for _, direction, value in (entry for entry in sent if entry[0] == iteration):
            parts.log.record(direction, torch.tensor([value]))
    for iteration in range(1, 5):
        for direction in Direction:
            wanted = [[value] for at, to, value in sent if (at, to) == (iteration, direction)]
            assert read(parts.log, iteration, direction) == wanted
    assert parts.log.size_bytes == 8 * len(sent)
    parts.log.clear()
    assert parts.buffers.in_use_bytes == 0
    parts.copier.close()


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.randn(3, 5).to(torch.bfloat16), id="bf16"),
        pytest.param(torch.randn(3, 5).t(), id="not contiguous"),
        pytest.param(torch.randn(4, 4)[:, 1:3], id="a slice"),
        pytest.param(torch.tensor(2.5), id="a scalar"),
        pytest.param(torch.tensor([True, False]), id="bool"),
        pytest.param(torch.empty(0, 4), id="empty"),
        pytest.param(torch.randn(3, requires_grad=True), id="with gradient"),
    ],
)
def test_the_bytes_of_any_tensor_are_logged(logging_: Logging, tensor: torch.Tensor) -> None:
    logging_.log.begin(1)
    logging_.log.record(GRADIENT, tensor)
    (sent,) = logging_.log.sent(1, GRADIENT)
    assert sent.dtype == torch.uint8
    assert torch.equal(sent.view(tensor.dtype).view(tensor.shape), tensor)
    assert logging_.log.size_bytes == tensor.numel() * tensor.element_size()
    assert logging_.usable_from(1) == 1


# What is logged


def test_nothing_is_logged_outside_an_iteration(logging_: Logging) -> None:
    log = logging_.log
    log.record(ACTIVATION, torch.ones(1))
    log.end()
    log.record(ACTIVATION, torch.ones(1))
    assert (log.size_bytes, logging_.buffers.total_bytes, log.spent_s) == (0, 0, 0.0)
    logging_.write(3)
    log.record(ACTIVATION, torch.ones(1))
    log.record(GRADIENT, torch.ones(1))
    assert read(log, 3, ACTIVATION) == [[3, 0, 0]]
    assert read(log, 3, GRADIENT) == [[3, 1, 0]]
    assert logging_.buffers.in_use_bytes == 48


def test_an_iteration_that_begins_ends_the_one_before(logging_: Logging) -> None:
    log = logging_.log
    log.begin(1)
    log.begin(2)
    log.record(ACTIVATION, content(2, ACTIVATION, 0))
    assert read(log, 1, ACTIVATION) == []
    assert read(log, 2, ACTIVATION) == [[2, 0, 0]]


def test_a_pass_that_came_to_nothing_is_replaced(logging_: Logging) -> None:
    log = logging_.log
    logging_.write(1)
    log.begin(2)
    log.record(ACTIVATION, torch.full((50,), 9))
    log.record(GRADIENT, torch.full((50,), 9))
    log.begin(2)
    assert logging_.buffers.in_use_bytes == 48
    log.record(ACTIVATION, content(2, ACTIVATION, 0))
    log.end()
    assert read(log, 2, ACTIVATION) == [[2, 0, 0]]
    assert read(log, 2, GRADIENT) == []
    assert read(log, 1, GRADIENT) == [[1, 1, 0]]
    assert log.size_bytes == 72


def test_an_iteration_that_is_not_logged_is_named(logging_: Logging) -> None:
    with pytest.raises(CheckpointLoadError, match=r"^boundary log: no iteration 4, got an empty log$"):
        logging_.log.sent(4, ACTIVATION)
    for iteration in (7, 5, 6):
        logging_.write(iteration)
    with pytest.raises(CheckpointLoadError, match=r"^boundary log: no iteration 4, got 5 to 7$"):
        logging_.log.sent(4, GRADIENT)


def test_old_iterations_are_dropped_with_their_memory(logging_: Logging) -> None:
    log = logging_.log
    for iteration in range(1, 6):
        logging_.write(iteration)
    log.drop_up_to(0)
    assert logging_.buffers.in_use_bytes == log.size_bytes == 5 * 48
    log.drop_up_to(3)
    assert logging_.buffers.in_use_bytes == log.size_bytes == 2 * 48
    with pytest.raises(CheckpointLoadError):
        log.sent(3, ACTIVATION)
    assert [read(log, iteration, GRADIENT) for iteration in (4, 5)] == [[[4, 1, 0]], [[5, 1, 0]]]
    log.drop_up_to(9)
    log.drop_up_to(9)
    assert logging_.buffers.in_use_bytes == log.size_bytes == 0


def test_clearing_drops_everything_and_ends_the_iteration(logging_: Logging) -> None:
    log = logging_.log
    logging_.write(1)
    log.begin(2)
    log.record(ACTIVATION, torch.ones(10))
    log.clear()
    log.record(ACTIVATION, torch.ones(10))
    assert logging_.buffers.in_use_bytes == log.size_bytes == 0
    with pytest.raises(CheckpointLoadError, match="an empty log"):
        log.sent(2, ACTIVATION)
    logging_.write(3)
    assert read(log, 3, ACTIVATION) == [[3, 0, 0]]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_500_iterations_use_the_memory_of_the_first(logging_: Logging, micro_batches: int) -> None:
    log, kept = logging_.log, 4
    most_bytes = 0
    for iteration in range(1, 501):
        log.begin(iteration)
        for _ in range(micro_batches):
            log.record(ACTIVATION, torch.full((5000,), iteration))
            log.record(GRADIENT, torch.full((5000,), -iteration))
        log.end()
        if iteration == kept:
            most_bytes = logging_.buffers.total_bytes
        assert log.size_bytes == min(iteration, kept) * micro_batches * 80_000
        log.drop_up_to(iteration - kept + 1)
    assert logging_.buffers.total_bytes == most_bytes == kept * micro_batches * 80_000
    assert int(log.sent(500, GRADIENT)[-1].view(torch.int64)[-1]) == -500


# While it is copied


def test_a_tensor_may_be_freed_or_given_another_storage_once_it_is_recorded(logging_: Logging) -> None:
    log, swapped, freed = logging_.log, torch.arange(5000), torch.arange(5000) + 1
    source = weakref.ref(freed)
    with held(logging_.copier):
        log.begin(1)
        log.record(ACTIVATION, swapped)
        log.record(ACTIVATION, freed)
        swapped.data = torch.empty(1)  # what Megatron does to an output that it has sent
        del freed
        gc.collect()
        assert source() is None
        reused = [torch.zeros(5000, dtype=torch.int64) for _ in range(10)]
    first, second = log.sent(1, ACTIVATION)
    assert torch.equal(first.view(torch.int64), torch.arange(5000))
    assert torch.equal(second.view(torch.int64), torch.arange(5000) + 1)
    assert logging_.usable_from(1) == 1
    assert len(reused) == 10


def test_reading_waits_for_the_copy(logging_: Logging) -> None:
    with held_until_waited_for(logging_.copier) as waited:
        logging_.write(1)
        assert not waited.is_set()
        assert read(logging_.log, 1, GRADIENT) == [[1, 1, 0]]
        assert waited.is_set()


@pytest.mark.parametrize("drop", ["drop_up_to", "begin", "clear"])
def test_a_buffer_is_given_back_only_when_its_copy_is_done(logging_: Logging, drop: str) -> None:
    log = logging_.log
    with held_until_waited_for(logging_.copier) as waited:
        logging_.write(1)
        {"drop_up_to": lambda: log.drop_up_to(1), "begin": lambda: log.begin(1), "clear": log.clear}[drop]()
        assert waited.is_set()
        assert logging_.buffers.in_use_bytes == 0


# What can be used


@pytest.mark.parametrize(
    ("logged", "last", "first"),
    [
        ([], 0, 1),
        ([], 9, 10),
        ([5, 6, 7], 7, 5),
        ([5, 6, 7], 6, 5),
        ([5, 6, 7], 5, 5),
        ([5, 6, 7], 8, 9),  # the last is missing
        ([5, 6, 7], 4, 5),
        ([3, 5, 6], 6, 5),  # a gap
        ([6, 3, 5], 6, 5),
        ([1, 2, 3], 3, 1),
    ],
)
def test_a_log_can_be_used_back_to_the_first_gap(logging_: Logging, logged: list[int], last: int, first: int) -> None:
    for iteration in logged:
        logging_.write(iteration)
    assert logging_.usable_from(last) == first


def test_an_iteration_in_which_nothing_was_sent_is_no_gap(logging_: Logging) -> None:
    logging_.write(1)
    logging_.write(2, activations=0, gradients=0)
    logging_.write(3)
    assert logging_.usable_from(3) == 1


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_log_can_be_used_back_to_the_first_damage(
    logging_: Logging, direction: Direction, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in range(1, 6):
        logging_.write(iteration, activations=3, gradients=3)
    assert logging_.usable_from(5) == 1  # with all checksums: damage before that cannot be found
    damage(logging_.log, 3, direction, number)
    with caplog.at_level(logging.WARNING):
        assert logging_.usable_from(5) == 4
    assert [record.getMessage() for record in caplog.records] == ["boundary log: iteration 3 is damaged (checksum)"]
    assert logging_.usable_from(2) == 1
    assert logging_.usable_from(3) == 4
    damage(logging_.log, 5, direction, number)
    assert logging_.usable_from(5) == 6
    damage(logging_.log, 5, direction, number)  # the bit is as it was
    assert logging_.usable_from(5) == 4


def test_an_iteration_that_is_logged_again_is_whole_again(logging_: Logging) -> None:
    for iteration in (1, 2, 3):
        logging_.write(iteration)
    damage(logging_.log, 2, ACTIVATION)
    assert logging_.usable_from(3) == 3
    logging_.write(2)
    assert logging_.usable_from(3) == 1


def test_what_is_left_of_a_buffer_that_is_too_large_is_not_of_the_log(logging_: Logging) -> None:
    logging_.buffers.release(logging_.buffers.acquire(1000))
    logging_.write(1, activations=1, gradients=0)
    assert logging_.buffers.total_bytes == 1000
    assert logging_.log.size_bytes == 24
    assert read(logging_.log, 1, ACTIVATION) == [[1, 0, 0]]
    (sent,) = logging_.log.sent(1, ACTIVATION)
    sent.as_strided((1000,), (1,))[24:] = 0xFF
    assert logging_.usable_from(1) == 1


def test_judging_waits_for_the_copy(logging_: Logging) -> None:
    with held_until_waited_for(logging_.copier):
        logging_.write(1)
        assert logging_.log.usable_from(1) == 1
