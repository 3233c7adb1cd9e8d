"""Attached loops have the samples and generators of a plain run, from any iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from torch.utils.data import DataLoader, TensorDataset

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations.consumed_samples import ReplayedSamples
from moe_ckpt.integrations.megatron_bridge_data import BridgeBatches
from moe_ckpt.integrations.megatron_lm_data import IterationBatches
from moe_ckpt.integrations.ms_swift_data import SwiftBatches

NUM_ITERS = 9
DATASET = list(range(99))
Readers = tuple[Iterator[Any], Iterator[Any]]


def cyclic(loader: Any) -> Iterator[Any]:
    """Yield the samples of a loader again and again."""
    while True:
        yield from loader


@dataclass(frozen=True)
class Bridge:
    """Megatron-Bridge's loop.

    Loaders start after the consumed samples. The loader of validation samples is
    endless.
    """

    changes: dict[str, Any]
    """Settings that differ from the default."""

    num_read = 4
    """Number of samples that an iteration reads."""

    @property
    def settings(self) -> Any:
        fine = {
            "eval_interval": 3,
            "eval_iters": 1,
            "start_eval_at_iter": None,
            "eval_global_batch_size": 2,
        }
        return SimpleNamespace(**fine | self.changes)

    @staticmethod
    def build(dataset: list[int], consumed: int, kind: str) -> DataLoader[int]:
        assert kind in ("single", "cyclic")
        return DataLoader(dataset[consumed:], batch_size=None)  # type: ignore[arg-type]

    def readers(self) -> Readers:
        return iter(self.build(DATASET, 0, "single")), cyclic(
            self.build(DATASET, 0, "cyclic")
        )

    def num_validated_after(self, iteration: int) -> int:
        """Return the number of samples of the evaluation after an iteration.

        The condition for an evaluation is that of Bridge's loop.
        """
        every, start = self.settings.eval_interval, self.settings.start_eval_at_iter
        is_due = (
            self.settings.eval_iters
            and every
            and (start is None or iteration >= start)
            and iteration % every == 0
        )
        return 2 if is_due else 0

    def batches(self) -> BridgeBatches:
        batches = BridgeBatches(self.build)
        for kind in ("single", "cyclic"):
            batches.build_loader(DATASET, 0, kind)
        batches.validates_as(self.settings)
        return batches


class Sampler:
    """Passes over micro-batches of one sample, in another order each time.

    Attributes:
        length: Number of micro-batches of a pass.
        consumed: Number of micro-batches of all passes so far.
    """

    def __init__(self, length: int) -> None:
        self.length, self.consumed = length, 0

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed
        for index in range(self.length):
            self.consumed += 1
            yield [(first + index * 3) % 97]


@dataclass(frozen=True)
class Swift:
    """ms-swift's loop, which reads the passes of its samplers one after another."""

    changes: dict[str, Any]
    """Settings that differ from the default."""

    num_read = 2
    """Number of micro-batches that an iteration reads."""

    @property
    def settings(self) -> Any:
        return SimpleNamespace(
            **{"eval_steps": 3, "eval_iters": 1, "num_microbatches": self.num_read}
            | self.changes
        )

    @staticmethod
    def create(dataset: Any, indices: Any) -> Any:
        return DataLoader(dataset, batch_sampler=indices)

    def loaders(self) -> tuple[Any, Any]:
        return self.create(DATASET, Sampler(5)), self.create(DATASET, Sampler(3))

    def readers(self) -> Readers:
        training, validating = self.loaders()
        return cyclic(training), cyclic(validating)

    def num_validated_after(self, iteration: int) -> int:
        every = self.settings.eval_steps
        return (
            self.settings.eval_iters * self.num_read
            if every and iteration % every == 0
            else 0
        )

    def batches(self) -> SwiftBatches:
        return SwiftBatches(self.create, self.settings, *self.loaders())


class MegatronLM(Bridge):
    """Megatron-LM's loop, which evaluates in the same iterations as Bridge's loop.

    Megatron-LM draws the seeds of both iterators before training.
    """

    @property
    def settings(self) -> Any:
        fine = {
            "dataloader_type": "single",
            "virtual_pipeline_model_parallel_size": None,
            "global_batch_size": 4,
        }
        return SimpleNamespace(**fine | vars(super().settings))

    def readers(self) -> Readers:
        return iter(self.build(DATASET, 0, "single")), iter(
            self.build(DATASET, 0, "single")
        )

    def batches(self) -> IterationBatches:  # type: ignore[override]
        training: Any = ModuleType("training")
        training.get_args = lambda: self.settings
        training.build_train_valid_test_datasets = lambda: (DATASET, DATASET, None)
        training.build_pretraining_data_loader = lambda dataset, consumed: self.build(
            dataset, consumed, "single"
        )
        batches = IterationBatches(training, keep_bytes=0)
        batches.build_datasets()
        return batches


Loop = Bridge | Swift
STARTS = ({}, {"start_eval_at_iter": 4}, {"start_eval_at_iter": 6})
LOOPS = [
    *map(Bridge, (*STARTS, {"eval_iters": 0}, {"eval_interval": None})),
    *map(MegatronLM, (*STARTS, {"eval_iters": 0}, {"eval_interval": None})),
    *map(
        Swift,
        (
            {},
            {"eval_iters": 3},
            {"eval_iters": 0},
            {"eval_steps": None},
            {"eval_steps": 1},
        ),
    ),
]
Iteration = tuple[list[int], list[int], torch.Tensor, torch.Tensor]


@pytest.fixture(params=LOOPS, ids=repr)
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    """Initialize Megatron's global calculator of batch sizes, and yield a loop."""
    calculator.init_num_microbatches_calculator(0, None, Bridge.num_read, 1, 1)
    yield request.param
    calculator.destroy_num_microbatches_calculator()


def read(samples: Any, count: int) -> list[int]:
    return [int(next(samples)) for _ in range(count)]


def plain_run(loop: Loop) -> list[Iteration]:
    """Run a loop without an attachment.

    Returns:
        For each iteration: the training samples, the samples of the evaluation after
        the iteration, and the states of the generator before and after the iteration.
    """
    torch.manual_seed(7)
    training, validating = loop.readers()
    done: list[Iteration] = []
    before = torch.get_rng_state()
    for iteration in range(1, NUM_ITERS + 1):
        samples = read(training, loop.num_read)
        torch.rand(3)
        after = torch.get_rng_state()
        done.append(
            (
                samples,
                read(validating, loop.num_validated_after(iteration)),
                before,
                after,
            )
        )
        before = after  # a snapshot is taken before the evaluation
    return done


@pytest.mark.parametrize("done", range(NUM_ITERS))
def test_iterations_read_and_draw_as_in_a_plain_run(loop: Loop, done: int) -> None:
    wanted, batches = plain_run(loop), loop.batches()
    torch.set_rng_state(wanted[done][2])
    training, validating = batches.training_after(done), batches.validation_after(done)
    for iteration, (samples, validated, _, after) in enumerate(
        wanted[done:], start=done + 1
    ):
        batches.draw_seeds(iteration)
        assert read(training, loop.num_read) == samples
        torch.rand(3)
        assert torch.equal(torch.get_rng_state(), after), iteration
        assert read(validating, len(validated)) == validated


def test_replays_read_and_draw_as_in_a_plain_run(loop: Loop) -> None:
    wanted, batches = plain_run(loop), loop.batches()
    replayed = ReplayedSamples(batches.training_after)
    for iteration in (3, 4, 5, 4, 7):
        samples, _, before, after = wanted[iteration - 1]
        torch.set_rng_state(before)
        batches.draw_seeds(iteration)
        with replayed.of(iteration) as training:
            assert read(training, loop.num_read) == samples
        torch.rand(3)
        assert torch.equal(torch.get_rng_state(), after), iteration


class Numbers:
    """An external iterator over samples in order, or shuffled by torch's generator."""

    def __init__(self, shuffle: bool) -> None:
        self.loader = iter(
            DataLoader(TensorDataset(torch.arange(40)), batch_size=1, shuffle=shuffle)
        )

    def __next__(self) -> Any:
        return next(self.loader)


class StatefulNumbers(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def external(
    train: Callable[[], Any], valid: Callable[[], Any], *, tries: bool = True
) -> IterationBatches:
    """Return the batches of external iterators.

    Args:
        train: Opens the training iterator.
        valid: Opens the validation iterator.
        tries: Whether the iterators are first tried in other processes.
    """
    settings = {
        "dataloader_type": "external",
        "virtual_pipeline_model_parallel_size": None,
    }
    training: Any = ModuleType("training")
    training.get_args = lambda: SimpleNamespace(**settings)
    training.build_train_valid_test_datasets = lambda: (train(), valid(), None)
    batches = IterationBatches(training, keep_bytes=1 << 20, tries_iterators=tries)
    batches.build_datasets()
    return batches


ORDERED, SHUFFLED = partial(Numbers, shuffle=False), partial(Numbers, shuffle=True)


def test_external_iterators_that_a_new_process_repeats_are_fine() -> None:
    """An iterator that reads no data is accepted, too.

    A replacement opens iterators without a trial: a difference appears only later.
    """
    external(ORDERED, ORDERED)
    external(ORDERED, lambda: None)
    external(partial(StatefulNumbers, shuffle=True), ORDERED)
    external(SHUFFLED, SHUFFLED, tries=False)


@pytest.mark.parametrize(
    ("train", "valid"),
    [(SHUFFLED, ORDERED), (ORDERED, SHUFFLED), (SHUFFLED, lambda: None)],
)
def test_an_external_iterator_that_shuffles_by_the_process_is_refused(
    train: Any, valid: Any
) -> None:
    """The test forks, because the check compares the reads of new processes."""
    with pytest.raises(
        ConfigError,
        match=(
            r"^--dataloader-type external: got 'other micro-batches in another process'"
        ),
    ):
        external(train, valid)
