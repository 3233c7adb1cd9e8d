"""The log of sent tensors: order, lifetime of copies, usable range, bounded memory."""

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
from moe_ckpt.snapshot.boundary_log import BoundaryLog, Direction
from moe_ckpt.snapshot.copier import HostCopier
from tests.snapshot.copiers import finish, held, held_until_waited_for
from tests.snapshot.samples import pool

ACTIVATION, GRADIENT = Direction.ACTIVATION, Direction.GRADIENT
NUM_BYTES = 24  # size of each logged tensor


class Written:
    """A log with its copier and its buffers."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.copier = HostCopier()
        self.buffers = pool(limit_bytes)
        self.log = BoundaryLog(self.copier, self.buffers)

    def write(self, *iterations: int, activations: int = 1, gradients: int = 1) -> None:
        """Log iterations with these numbers of tensors in each direction.

        Each tensor holds its iteration, its direction and its number.
        """
        for iteration in iterations:
            self.log.begin(iteration)
            for direction, count in ((ACTIVATION, activations), (GRADIENT, gradients)):
                for number in range(count):
                    self.log.record(direction, content(iteration, direction, number))
            self.log.end()

    def usable_from(self, last: int) -> int:
        """Return the first iteration from which the log is usable up to `last`.

        The log is verified once all of it is copied.
        """
        finish(self.copier)
        self.log.drop_damaged(1, last)
        return self.log.complete_from(last)

    def read(
        self, iteration: int, direction: Direction = ACTIVATION
    ) -> list[list[int]]:
        return [
            sent.view(torch.int64).tolist()
            for sent in self.log.sent(iteration, direction)
        ]

    def damage(self, iteration: int, direction: Direction, number: int = -1) -> None:
        self.log.sent(iteration, direction)[number][-1] ^= 1


@pytest.fixture
def written() -> Iterator[Written]:
    written = Written()
    yield written
    written.copier.close()


def content(iteration: int, direction: Direction, number: int) -> torch.Tensor:
    return torch.tensor([iteration, list(Direction).index(direction), number])


@given(
    sent=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(Direction), st.integers(-99, 99)),
        max_size=40,
    )
)
def test_any_order_of_sending_is_kept_by_iteration_and_direction(
    sent: list[tuple[int, Direction, int]],
) -> None:
    written = Written()
    for iteration in range(1, 5):
        written.log.begin(iteration)
        for _, direction, value in (entry for entry in sent if entry[0] == iteration):
            written.log.record(direction, torch.tensor([value]))
    for iteration in range(1, 5):
        for direction in Direction:
            wanted = [
                [value] for at, to, value in sent if (at, to) == (iteration, direction)
            ]
            assert written.read(iteration, direction) == wanted
    assert written.log.size_bytes == 8 * len(sent)
    written.log.clear()
    assert written.buffers.in_use_bytes == 0
    written.copier.close()


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
def test_the_bytes_of_any_tensor_are_logged(
    written: Written, tensor: torch.Tensor
) -> None:
    written.log.begin(1)
    written.log.record(GRADIENT, tensor)
    (sent,) = written.log.sent(1, GRADIENT)
    assert sent.dtype == torch.uint8
    assert torch.equal(sent.view(tensor.dtype).view(tensor.shape), tensor)
    assert written.log.size_bytes == tensor.numel() * tensor.element_size()
    assert written.usable_from(1) == 1


def test_nothing_is_logged_outside_an_iteration(written: Written) -> None:
    log = written.log
    log.record(ACTIVATION, torch.ones(1))
    log.end()
    log.record(ACTIVATION, torch.ones(1))
    assert (log.size_bytes, written.buffers.total_bytes, log.spent_s) == (0, 0, 0.0)
    written.write(3)
    log.record(ACTIVATION, torch.ones(1))
    log.record(GRADIENT, torch.ones(1))
    assert (written.read(3), written.read(3, GRADIENT)) == ([[3, 0, 0]], [[3, 1, 0]])
    assert written.buffers.in_use_bytes == 2 * NUM_BYTES


def test_a_pass_that_came_to_nothing_is_replaced(written: Written) -> None:
    log = written.log
    written.write(1)
    log.begin(2)
    for direction in Direction:
        log.record(direction, torch.full((50,), 9))
    log.begin(2)
    assert written.buffers.in_use_bytes == 2 * NUM_BYTES
    log.record(ACTIVATION, content(2, ACTIVATION, 0))
    log.end()
    assert (written.read(2), written.read(2, GRADIENT), written.read(1, GRADIENT)) == (
        [[2, 0, 0]],
        [],
        [[1, 1, 0]],
    )
    assert log.size_bytes == 3 * NUM_BYTES


def test_an_iteration_without_room_is_a_gap_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written = Written(limit_bytes=5 * NUM_BYTES)
    with caplog.at_level(logging.WARNING):
        written.write(1, 2, 3)
    assert (
        "boundary log: iteration 3 is not logged, training goes on: host memory"
        in caplog.text
    )
    assert written.buffers.in_use_bytes == written.log.size_bytes == 4 * NUM_BYTES
    assert (written.usable_from(3), written.usable_from(2)) == (4, 1)
    written.copier.close()


def test_an_iteration_that_is_not_logged_is_named(written: Written) -> None:
    with pytest.raises(
        CheckpointLoadError, match=r"^boundary log: no iteration 4, got an empty log$"
    ):
        written.log.sent(4, ACTIVATION)
    written.write(7, 5, 6)
    with pytest.raises(
        CheckpointLoadError, match=r"^boundary log: no iteration 4, got 5 to 7$"
    ):
        written.log.sent(4, GRADIENT)


def test_clearing_drops_everything_and_ends_the_iteration(written: Written) -> None:
    log = written.log
    written.write(1)
    log.begin(2)
    log.record(ACTIVATION, torch.ones(10))
    log.clear()
    log.record(ACTIVATION, torch.ones(10))
    assert written.buffers.in_use_bytes == log.size_bytes == 0
    with pytest.raises(CheckpointLoadError, match="an empty log"):
        log.sent(2, ACTIVATION)
    written.write(3)
    assert written.read(3) == [[3, 0, 0]]


def test_old_iterations_are_dropped_and_their_memory_is_used_again(
    written: Written,
) -> None:
    log, kept, num_bytes = written.log, 4, 6 * NUM_BYTES
    for iteration in range(1, 40):
        written.write(iteration, activations=3, gradients=3)
        assert (
            log.size_bytes
            == written.buffers.in_use_bytes
            == min(iteration, kept) * num_bytes
        )
        log.drop_up_to(iteration - kept + 1)
        assert (
            log.size_bytes
            == written.buffers.in_use_bytes
            == min(iteration, kept - 1) * num_bytes
        )
        assert written.buffers.total_bytes <= kept * num_bytes
    assert written.read(37, GRADIENT) == [[37, 1, 0], [37, 1, 1], [37, 1, 2]]
    with pytest.raises(CheckpointLoadError):
        log.sent(36, ACTIVATION)
    log.drop_up_to(100)
    assert log.size_bytes == written.buffers.in_use_bytes == 0


def test_a_recorded_tensor_may_be_freed_or_given_another_storage(
    written: Written,
) -> None:
    log, swapped, freed = written.log, torch.arange(5000), torch.arange(5000) + 1
    source = weakref.ref(freed)
    with held(written.copier):
        log.begin(1)
        log.record(ACTIVATION, swapped)
        log.record(ACTIVATION, freed)
        # Megatron does the same to an output after sending
        swapped.data = torch.empty(1)
        del freed
        gc.collect()
        assert source() is None
        reused = [torch.zeros(5000, dtype=torch.int64) for _ in range(10)]
    assert written.read(1) == [list(range(5000)), list(range(1, 5001))]
    assert written.usable_from(1) == 1
    assert len(reused) == 10


def test_reading_and_judging_wait_for_the_copy(written: Written) -> None:
    with held_until_waited_for(written.copier) as waited:
        written.write(1)
        assert not waited.is_set()
        assert written.read(1, GRADIENT) == [[1, 1, 0]]
        assert waited.is_set()
    with held_until_waited_for(written.copier):
        written.write(2)
        assert written.log.complete_from(2) == 1


@pytest.mark.parametrize("drop", ["drop_up_to", "begin", "clear"])
def test_a_buffer_is_given_back_only_when_its_copy_is_done(
    written: Written, drop: str
) -> None:
    with held_until_waited_for(written.copier) as waited:
        written.write(1)
        getattr(written.log, drop)(*(() if drop == "clear" else (1,)))
        assert waited.is_set()
        assert written.buffers.in_use_bytes == 0


@pytest.mark.parametrize(
    ("logged", "last", "first"),
    [
        ([], 9, 10),
        ([5, 6, 7], 7, 5),
        ([5, 6, 7], 5, 5),
        ([5, 6, 7], 8, 9),  # iteration 8 is missing
        ([5, 6, 7], 4, 5),
        ([6, 3, 5], 6, 5),  # a gap: iteration 4
        ([1, 2, 3], 3, 1),
    ],
)
def test_a_log_can_be_used_back_to_the_first_gap(
    written: Written, logged: list[int], last: int, first: int
) -> None:
    written.write(*logged)
    assert written.usable_from(last) == first


def test_an_iteration_in_which_nothing_was_sent_is_no_gap(written: Written) -> None:
    written.write(1)
    written.write(2, activations=0, gradients=0)
    written.write(3)
    assert written.usable_from(3) == 1


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("number", [0, 2])
def test_a_log_can_be_used_back_to_the_first_damage(
    written: Written,
    direction: Direction,
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    written.write(1, 2, 3, 4, 5, activations=3, gradients=3)
    # waits for all checksums: damage before the checksum cannot be found
    assert written.usable_from(5) == 1
    written.damage(3, direction, number)
    with caplog.at_level(logging.WARNING):
        assert written.usable_from(5) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "boundary log: iteration 3 is damaged (checksum)"
    ]
    assert (written.usable_from(2), written.usable_from(3)) == (1, 4)
    written.damage(5, direction, number)
    assert written.usable_from(5) == 6
    written.write(5)
    assert written.usable_from(5) == 4
    written.write(3)
    assert written.usable_from(5) == 1, "what is logged again is whole again"


def test_only_a_range_is_read(written: Written) -> None:
    written.write(1, 2, 3)
    for iteration in (1, 3):
        written.damage(iteration, ACTIVATION)
    finish(written.copier)
    assert (written.log.drop_damaged(2, 2), written.log.complete_from(3)) == (False, 1)
    assert (written.log.drop_damaged(2, 3), written.log.complete_from(3)) == (True, 4)
    assert written.log.complete_from(2) == 1


def test_the_rest_of_a_buffer_that_is_too_large_is_not_of_the_log(
    written: Written,
) -> None:
    written.buffers.release(written.buffers.acquire(1000))
    written.write(1, activations=1, gradients=0)
    assert (written.buffers.total_bytes, written.log.size_bytes) == (1000, NUM_BYTES)
    assert written.read(1) == [[1, 0, 0]]
    (sent,) = written.log.sent(1, ACTIVATION)
    sent.as_strided((1000,), (1,))[NUM_BYTES:] = 0xFF
    assert written.usable_from(1) == 1
