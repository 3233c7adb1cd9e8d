"""The tiny preset learns as it did when its losses were written down; another processor may round differently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.config import compose_settings
from launcher.run import run
from moe_ckpt.events import Evaluated, IterationCommitted
from tests.ranks import rank_store, run_ranks
from tests.training import LICENSE_AS_TEXT, events_of

GOLDEN = Path(__file__).with_name("golden_tiny.json")


def first_iterations_of_tiny(folder: Path, iterations: int) -> None:
    overrides = [f"train.iterations={iterations}", f"run.dir={folder}", "train.lr_decay_iters=200", *LICENSE_AS_TEXT]
    run(compose_settings([*overrides, "run.progress=none", "run.tensorboard=false"]), store=rank_store())


def test_tiny_learns_as_written_down(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    run_ranks(4, first_iterations_of_tiny, tmp_path, len(golden["losses"]), timeout_s=120)
    losses = [event.loss for event in events_of(tmp_path, IterationCommitted)]
    assert losses == pytest.approx(golden["losses"], abs=golden["tolerance"])
    assert [event.loss for event in events_of(tmp_path, Evaluated)] == pytest.approx(
        golden["eval_losses"], abs=golden["tolerance"]
    )
