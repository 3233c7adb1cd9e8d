"""A longer run keeps the schedule and the samples with which the run began.

A run that begins from another run's checkpoint continues with the next sample.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from launcher.data import CorpusSize
from moe_ckpt.events import CourseChanged, IterationCommitted
from tests.harness.gloo.ranks import RankFailedError
from tests.harness.jobs.training import events_of, losses, train
from tests.scenarios import ROOT

DENSE = (
    "ckpt=dense",
    "ckpt.every_iters=2",
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
)
SHORT, LONG = "train.iterations=4", "train.iterations=8"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return settings that read the LICENSE's paragraphs as byte-token documents."""
    prefix = tmp_path_factory.mktemp("corpus") / "license"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for paragraph in (ROOT / "LICENSE").read_bytes().split(b"\n\n"):
        builder.add_document(
            cast("torch.Tensor", np.array(list(paragraph))), [len(paragraph)]
        )
    builder.finalize(f"{prefix}.idx")
    return (
        "data=megatron",
        f"data.path={prefix}",
        "model.vocab_size=256",
        "data.eval_fraction=0.3",
    )


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four iterations.

    The lengths of its schedule derive from the number of iterations.
    """
    folder = tmp_path_factory.mktemp("course") / "short"
    train(1, folder, *DENSE, SHORT)
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def learning_rates(run: Path) -> list[float]:
    return [event.learning_rate for event in events_of(run, IterationCommitted)]


def test_a_longer_run_keeps_the_schedule_with_which_it_began(
    short: Path, tmp_path: Path
) -> None:
    result = train(1, folder := copy_of(short, tmp_path), *DENSE, LONG)
    expected = train(1, tmp_path / "whole", *DENSE, LONG, "train.lr_decay_iters=4")
    assert result["digest"] == expected["digest"]
    assert learning_rates(folder) == learning_rates(tmp_path / "whole")
    [change] = events_of(folder, CourseChanged)
    assert (change.iteration, change.changed) == (4, [])
    assert change.kept == [
        "lr_decay_steps 4 (this start would have 8)",
        "wd_incr_steps 4 (this start would have 8)",
    ]


def test_a_new_schedule_is_asked_for_by_its_number(short: Path, tmp_path: Path) -> None:
    train(1, folder := copy_of(short, tmp_path), *DENSE, LONG, "train.lr_decay_iters=8")
    train(1, tmp_path / "whole", *DENSE, LONG)
    first, whole = learning_rates(short), learning_rates(tmp_path / "whole")
    assert learning_rates(folder) == first + whole[4:] != whole
    [change] = events_of(folder, CourseChanged)
    assert change.changed == [
        "train.lr_decay_iters: lr_decay_steps 4 becomes 8",
        "train.lr_decay_iters: wd_incr_steps 4 becomes 8",
    ]


def test_another_run_takes_other_settings_from_a_checkpoint_on(
    short: Path, tmp_path: Path
) -> None:
    other = (
        "train.iterations=6",
        "train.clip_grad=0.5",
        "train.lr=0.01",
        "train.min_lr=0.004",
    )
    train(1, tmp_path / "other", *DENSE, *other, f"train.resume={short}")
    [change] = events_of(tmp_path / "other", CourseChanged)
    assert change.changed == [
        "train.lr: 0.005 becomes 0.01",
        "train.min_lr: 0.0005 becomes 0.004",
        "train.clip_grad: 1.0 becomes 0.5",
    ]
    assert learning_rates(tmp_path / "other") == [0.004, 0.004], (
        "beyond the decay, which stays as it was"
    )


def test_another_run_goes_on_with_the_next_sample_whatever_its_batches(
    tmp_path: Path,
) -> None:
    """The learning rate is 0, so that a loss identifies the samples.

    Samples 32 to 47 are the samples of the third batch of 16.
    """
    still = (*DENSE, "train.lr=0", "train.min_lr=0")
    train(1, tmp_path / "small", *still, SHORT)
    train(
        1,
        tmp_path / "large",
        *still,
        LONG,
        "train.global_batch_size=16",
        f"train.resume={tmp_path / 'small'}",
    )
    train(1, tmp_path / "whole", *still, SHORT, "train.global_batch_size=16")
    shutil.rmtree(tmp_path / "large" / "checkpoints" / "iter_0000008")
    # again, from the run's own checkpoint: the run folder has the position of this
    # checkpoint in the data
    train(
        1,
        tmp_path / "large",
        *still,
        LONG,
        "train.global_batch_size=16",
        f"train.resume={tmp_path / 'small'}",
    )
    large, whole = losses(tmp_path / "large"), losses(tmp_path / "whole")
    assert [large[5], large[6]] == [whole[3], whole[4]]
    assert len(set(large.values())) == 4


def test_a_checkpoint_of_another_model_names_what_differs(
    short: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        RankFailedError, match=r"\n    model.moe_ffn_hidden_size: got 64, wanted 32\n"
    ):
        train(
            1,
            tmp_path / "other",
            *DENSE,
            LONG,
            f"train.resume={short}",
            "model.moe_ffn_hidden_size=64",
        )


def test_a_longer_run_reads_the_same_samples_of_a_corpus(
    corpus: tuple[str, ...], tmp_path: Path
) -> None:
    """Megatron shuffles all samples of a run together.

    The samples of a longer run would come in another order.
    """
    settings = (*DENSE, *corpus)
    train(1, folder := tmp_path / "run", *settings, SHORT)
    shutil.rmtree(folder / "checkpoints" / "iter_0000004")
    train(1, folder, *settings, LONG)
    # `losses` has compared iterations 3 and 4 of both starts
    assert losses(folder).keys() == set(range(1, 9))


def test_a_corpus_has_the_samples_of_another_run_and_of_its_own(
    corpus: tuple[str, ...], tmp_path: Path
) -> None:
    """The first run has read more samples than the second run would have by then.

    The second run has smaller batches.
    """
    still = (*DENSE, *corpus, "train.lr=0", "train.min_lr=0")
    train(1, tmp_path / "first", *still, SHORT, "train.global_batch_size=16")
    second = (*still, "train.global_batch_size=8", f"train.resume={tmp_path / 'first'}")
    train(1, tmp_path / "second", *second, "train.iterations=6")
    train(
        1,
        tmp_path / "third",
        *still,
        "train.iterations=5",
        "train.global_batch_size=16",
        f"train.resume={tmp_path}/first",
    )
    # samples 64 to 79: two batches of 8, or one batch of 16
    second_losses, third = losses(tmp_path / "second"), losses(tmp_path / "third")
    # sums of a few floats, exact in float64
    assert (second_losses[5] + second_losses[6]) / 2 == third[5]


@pytest.mark.parametrize(
    ("num_samples", "starts"),
    [
        (1, [0]),
        (32, [0]),
        (33, [0, 32]),
        (64, [0, 32]),
        (65, [0, 32, 64]),
        (999, [0, 32, 64, 128, 256, 512]),
    ],
)
def test_blocks_of_a_corpus_double_the_samples_so_far(
    num_samples: int, starts: list[int]
) -> None:
    assert CorpusSize(num_samples=num_samples, block=32).starts() == starts


def test_a_run_folder_inside_its_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes((ROOT / "LICENSE").read_bytes())
    with pytest.raises(
        RankFailedError,
        match=r"data.path: got '.*', wanted a folder without the run folder in it",
    ):
        train(1, tmp_path / "run", SHORT, "data=text", f"data.path={tmp_path}")
