"""An iterator is tried in new processes before training begins.

The tests fork, as the check itself does: the subject of the tests is whether a new
process reads the same micro-batches.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import children_of
from moe_ckpt.megatron.repeatable import require_repeatable_reads

DATA = TensorDataset(torch.arange(40))
SETTING = "--dataloader-type external"


def epochs(**options: Any) -> Iterator[Any]:
    """Yield from an ordinary loader, which is opened again for each epoch."""
    loader = DataLoader(DATA, batch_size=4, **options)
    while True:
        yield from loader


def ordered() -> Iterator[Any]:
    return epochs()


def shuffled_by_a_seed() -> Iterator[Any]:
    return epochs(shuffle=True, generator=torch.Generator().manual_seed(3))


def short() -> Iterator[Any]:
    return iter([{"tokens": torch.ones(2)}])


def shuffled() -> Iterator[Any]:
    return epochs(shuffle=True)


def shuffled_by_python() -> Iterator[Any]:
    numbers = list(range(40))
    random.shuffle(numbers)
    return iter([torch.tensor(number) for number in numbers])


def shuffled_by_numpy() -> Iterator[Any]:
    return iter([torch.tensor(number) for number in np.random.permutation(40).tolist()])


def seeded_by_the_system() -> Iterator[Any]:
    generator = random.Random(os.urandom(8))
    return (torch.tensor(generator.random()) for _ in itertools.count())


def named_by_the_process() -> Iterator[Any]:
    return (torch.tensor([number, os.getpid()]) for number in itertools.count())


@pytest.mark.parametrize("open_iterator", [ordered, shuffled_by_a_seed, short])
def test_an_order_of_its_own_is_fine(
    open_iterator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    require_repeatable_reads(open_iterator, SETTING)
    assert caplog.records == [], "it was tried"


@pytest.mark.parametrize(
    "open_iterator",
    [
        shuffled,
        shuffled_by_python,
        shuffled_by_numpy,
        seeded_by_the_system,
        named_by_the_process,
    ],
)
def test_an_order_of_the_process_is_one_error(open_iterator: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            rf"^{SETTING}: got 'other micro-batches in another process', wanted the sa"
        ),
    ):
        require_repeatable_reads(open_iterator, SETTING)


def generators() -> list[Any]:
    of_numpy: Any = np.random.get_state(legacy=False)
    return [
        torch.get_rng_state().tolist(),
        of_numpy["state"]["key"].tolist(),
        random.getstate(),
    ]


def test_this_process_is_as_before(tmp_path: Path) -> None:
    """The check keeps generators, file positions and connections of this process."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(100)))
    opened: list[Any] = []

    def from_file() -> Iterator[Any]:
        file = path.open("rb", buffering=0)
        opened.append(file)
        return (torch.tensor(list(file.read(4))) for _ in itertools.count())

    mine, left, right = from_file(), *socket.socketpair()
    next(mine)
    before = generators()

    def careless() -> Iterator[Any]:
        left.send(b"x")
        return from_file()

    with left, right:
        require_repeatable_reads(from_file, SETTING)
        require_repeatable_reads(careless, SETTING)
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            right.recv(1)
    assert next(mine).tolist() == [4, 5, 6, 7]
    assert generators() == before
    assert len(opened) == 1
    opened[0].close()


def test_an_iterator_that_cannot_be_tried_is_let_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lock that another thread holds is never released in a fork.

    The other reasons are an error and the death of the fork.
    """
    lock = threading.Lock()

    def waits() -> Iterator[Any]:
        lock.acquire()
        return ordered()

    def fails() -> Iterator[Any]:
        raise RuntimeError("no GPU in a fork")

    def dies() -> Iterator[Any]:
        os._exit(3)

    with lock:
        require_repeatable_reads(waits, SETTING, deadline_s=0.3)
    require_repeatable_reads(fails, SETTING)
    require_repeatable_reads(dies, SETTING)
    reasons = [
        record.message.rpartition("was not tried: ")[2] for record in caplog.records
    ]
    assert reasons == [
        "no answer in 0.3 s",
        "RuntimeError: no GPU in a fork",
        "its process died",
    ]


def test_its_processes_end_and_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def loud() -> Iterator[Any]:
        os.write(1, b"opened")
        return ordered()

    before = children_of(os.getpid())
    require_repeatable_reads(loud, SETTING)
    assert children_of(os.getpid()) == before
    assert capfd.readouterr().out == ""
