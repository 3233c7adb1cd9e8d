"""The course of a run: settings of training, and the position in the data.

The position decides where in the data another run continues.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_ckpt.durable.course import FILE, Course, RunCourse, read_course, write_course
from moe_ckpt.errors import CheckpointLoadError, ConfigError
from tests.harness.threads.ranks import ThreadGroup, ThreadRanks

ALONE = ThreadRanks(0)
ALONE.use(ThreadGroup(1))
FIRST = Course(
    settings={"train.lr": 0.005, "data.path": "5 bytes, aa", "data.seed": None},
    samples_an_iteration=16,
)


def test_a_written_course_is_read_as_it_was(tmp_path: Path) -> None:
    write_course(tmp_path, FIRST)
    assert read_course(tmp_path) == FIRST
    assert read_course(tmp_path / "none") is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"settings": {}, "more": 1}', b"\xff" * 8]
)
def test_a_damaged_course_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointLoadError, match=FILE):
        read_course(tmp_path)


def test_changes_name_settings_that_came_went_or_are_other_ones() -> None:
    mine = Course(
        settings={"train.lr": 0.01, "data.path": "5 bytes, aa", "train.seed": 1}
    )
    changes = mine.changes_since(FIRST)
    assert [str(change) for change in changes] == [
        "train.lr: 0.005 becomes 0.01",
        "data.seed: None becomes nothing",
        "train.seed: nothing becomes 1",
    ]
    assert changes[0].as_error() == "train.lr: got 0.01, wanted 0.005"


def test_samples_are_counted_on_from_the_checkpoint_of_another_run(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write_course(
        first, Course(samples_an_iteration=16, began_after=4, began_samples=32)
    )

    course = RunCourse(second, {}, ALONE, samples_an_iteration=8)
    course.begin_from(first, 10)
    course.write()

    # a replacement, or a later start
    again = RunCourse(second, {}, ALONE, samples_an_iteration=8)
    assert again.course == course.course
    assert [again.course.consumed(done) for done in (10, 11)] == [
        32 + 6 * 16,
        32 + 6 * 16 + 8,
    ]


def test_a_start_that_loads_nothing_begins_with_the_first_sample(
    tmp_path: Path,
) -> None:
    write_course(
        tmp_path, Course(samples_an_iteration=8, began_after=10, began_samples=128)
    )
    course = RunCourse(tmp_path, {}, ALONE, samples_an_iteration=8)
    course.begin_anew()
    assert course.course.consumed(10) == 80


def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    first = {
        "train.lr": 0.005,
        "train.seed": 1,
        "train.clip_grad": 1.0,
        "threshold": math.inf,
    }
    RunCourse(tmp_path, first, ALONE).write()
    RunCourse(tmp_path, {**first, "train.clip_grad": 1}, ALONE).require_kept(
        for_replays=True
    )
    with pytest.raises(ConfigError) as refused:
        RunCourse(
            tmp_path, {**first, "train.lr": 0.01, "train.seed": 2}, ALONE
        ).require_kept(for_replays=False)
    said = str(refused.value).splitlines()
    assert said[1:3] == [
        "  train.lr: got 0.01, wanted 0.005",
        "  train.seed: got 2, wanted 1",
    ]


def test_a_whole_state_goes_on_with_other_settings_of_replays(tmp_path: Path) -> None:
    RunCourse(
        tmp_path, {}, ALONE, settings_of_replays={"train.micro_batch_size": 4}
    ).write()
    again = RunCourse(
        tmp_path, {}, ALONE, settings_of_replays={"train.micro_batch_size": 2}
    )
    assert again.require_kept(for_replays=False) == [
        "train.micro_batch_size: 4 becomes 2"
    ]
    with pytest.raises(
        ConfigError, match=r"\n  train.micro_batch_size: got 2, wanted 4\n"
    ):
        again.require_kept(for_replays=True)


@pytest.mark.parametrize(
    "value",
    [np.float64(0.1), np.int64(3), (1, 2), [torch.bfloat16], math.nan, Path("a"), {}],
)
def test_a_setting_of_any_type_is_the_same_setting_again(
    value: object, tmp_path: Path
) -> None:
    RunCourse(tmp_path, {"a": value, "b": 1}, ALONE).write()
    RunCourse(tmp_path, {"a": value, "b": 1}, ALONE).require_kept(for_replays=True)
    with pytest.raises(ConfigError, match=r"\n  b: got 2, wanted 1\n"):
        RunCourse(tmp_path, {"a": value, "b": 2}, ALONE).require_kept(for_replays=True)


def test_a_run_folder_of_an_older_version_names_no_settings(tmp_path: Path) -> None:
    RunCourse(tmp_path, {"train.lr": 0.01}, ALONE).require_kept(for_replays=True)
