"""A .bin/.idx corpus trains through Megatron's dataset, and resumes exactly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from moe_ckpt.events import StateResumed
from tests.harness.gloo.ranks import RankFailedError
from tests.harness.jobs.training import events_of, losses, train
from tests.scenarios import ROOT

DENSE = ("ckpt=dense", "ckpt.every_iters=2", "train.iterations=4")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path prefix of a corpus: the LICENSE's paragraphs as byte-token documents."""
    prefix = tmp_path_factory.mktemp("corpus") / "license"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for paragraph in (ROOT / "LICENSE").read_bytes().split(b"\n\n"):
        builder.add_document(
            cast("torch.Tensor", np.array(list(paragraph))), [len(paragraph)]
        )
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_a_corpus_trains_and_resumes_exactly(corpus: Path, tmp_path: Path) -> None:
    settings = (
        *DENSE,
        "data=megatron",
        f"data.path={corpus}",
        "model.vocab_size=256",
        "data.eval_fraction=0.3",
    )
    expected = train(4, tmp_path / "whole", *settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "iter_0000004")

    result = train(4, tmp_path / "resumed", *settings)

    assert [
        event.iteration for event in events_of(tmp_path / "resumed", StateResumed)
    ] == [2]
    assert result["digest_per_rank"] == expected["digest_per_rank"]
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert expected["loss"] < losses(tmp_path / "whole")[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.path=/nowhere/x", "model.vocab_size=256"),
            "data.path: got '/nowhere/x', wanted the prefix of a .bin",
        ),
        (("data.path=CORPUS",), "model.vocab_size: got 'auto', wanted a number"),
        (
            ("data.path=CORPUS", "model.vocab_size=256", "data.eval_fraction=0.0001"),
            "data.eval_fraction",
        ),
    ],
)
def test_bad_corpus_settings_are_clear_errors(
    overrides: tuple[str, ...], message: str, corpus: Path, tmp_path: Path
) -> None:
    settings = [setting.replace("CORPUS", str(corpus)) for setting in overrides]
    with pytest.raises(RankFailedError) as failure:
        train(1, tmp_path, "train.iterations=2", "data=megatron", *settings)
    assert message in str(failure.value)
