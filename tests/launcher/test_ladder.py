"""A source that passes every check and is no good all the same: the loss tells, and all ranks go one step down."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.config import Settings, compose_settings
from launcher.loop import StageRunner
from launcher.run import run
from moe_ckpt.adapters.megatron_durable import MegatronDurableState
from moe_ckpt.events import CheckpointSaved, LossNotFinite, Rejoined, StateResumed
from moe_ckpt.store.snapshot import SnapshotEngine, Taken
from moe_ckpt.types import Phase
from tests.elastic import ElasticJob, outcome_of, uninterrupted
from tests.ranks import RankFailedError, rank_store, run_ranks
from tests.training import Kill, KillingHooks, events_of, fast, train

TRAINING = ("train.iterations=12",)
GEMINI = ("ckpt.every_iters=3", "ckpt.durable_every_iters=4", "ckpt.async_save=false")


def _spoil(window_start: int) -> None:
    """Let rank 3's snapshot be NaN before anything of it is checksummed."""
    finish = SnapshotEngine._finish

    def finish_spoiled(self: SnapshotEngine, taken: Taken) -> Any:
        header = taken.snapshot.header
        if (header.window_start, header.shard.global_rank) == (window_start, 3):
            taken.snapshot.payload.fill_(0xFF)
        return finish(self, taken)

    SnapshotEngine._finish = finish_spoiled


def _diverge(at_iteration: int) -> None:
    """Let training itself lead to a loss that is NaN."""
    train_on = StageRunner.train_on

    def train_on_nothing(self: StageRunner, iteration: int) -> list[torch.Tensor]:
        losses = train_on(self, iteration)
        return [loss * math.nan for loss in losses] if iteration == at_iteration else losses

    StageRunner.train_on = train_on_nothing


@pytest.mark.parametrize(
    ("ckpt", "overrides", "places", "dies_in", "goes_on_after"),
    [
        ("gemini", GEMINI, ["host memory"], 8, 4),
        ("gemini", GEMINI, ["host memory"], 9, 8),
        ("gemini", (*GEMINI, "ckpt.disk_every_iters=3"), ["host memory", "local disk"], 8, 4),
        ("checkfreq", GEMINI, ["host memory", "local disk"], 8, 4),
    ],
    ids=["gemini", "gemini, a newer checkpoint", "gemini, on disk as well", "checkfreq"],
)
def test_a_snapshot_that_is_no_good_is_used_once(
    ckpt: str, overrides: tuple[str, ...], places: list[str], dies_in: int, goes_on_after: int, tmp_path: Path
) -> None:
    spoil = functools.partial(_spoil, 6)
    with ElasticJob(4, tmp_path, *TRAINING, *overrides, ckpt=ckpt, setup=spoil) as job:
        job.order(0, Phase.BACKWARD, iteration=dies_in)
        result = job.wait()
    assert [event.iteration for event in events_of(job.run, Rejoined, 1)] == [6]
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    sources, name = [f"{place} at iteration 6" for place in places], f"iter_{goes_on_after:07d}"
    for rank in range(4):
        told = events_of(job.run, LossNotFinite, rank)
        assert [(event.iteration, event.loss, event.source) for event in told] == [(7, "nan", s) for s in sources]
        resumed = events_of(job.run, StateResumed, rank)[-1]
        assert (Path(resumed.source).name, resumed.iteration) == (name, goes_on_after)
        assert f"{sources[-1]}: loss nan in iteration 7" in resumed.passed_over
    assert f"all ranks go on from {job.run}/checkpoints/{name} at iteration {goes_on_after}; passed over" in job.said()


def test_a_rank_dies_after_all_have_stepped_down(tmp_path: Path) -> None:
    """What it does not know others tell it."""
    overrides = (*TRAINING, *GEMINI, "ckpt.disk_every_iters=3")
    with ElasticJob(4, tmp_path, *overrides, ckpt="gemini", setup=functools.partial(_spoil, 6)) as job:
        job.order(0, Phase.BACKWARD, iteration=8)
        job.wait_until(1, 1)
        job.wait_for(lambda: len(events_of(job.run, LossNotFinite, 1)) == 2 or None, "two steps down")
        job.kill(2)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
    assert len(events_of(job.run, LossNotFinite, 1)) == 2


def test_a_loss_that_training_itself_leads_to_takes_nobody_back_again_and_again(tmp_path: Path) -> None:
    checkpoints = ("ckpt.durable_every_iters=2", "ckpt.keep=3")
    overrides = (*TRAINING, *GEMINI, *checkpoints, "runtime.suspect_iters=4")
    with ElasticJob(4, tmp_path, *overrides, ckpt="gemini", setup=functools.partial(_diverge, 8)) as job:
        job.order(0, Phase.BACKWARD, iteration=7)
        result = job.wait()
    told = events_of(job.run, LossNotFinite, 1)
    six, four = "iter_0000006 at iteration 6", "iter_0000004 at iteration 4"
    assert [event.source.split("/")[-1] for event in told] == ["host memory at iteration 6", six, four], (
        "and not the one at 2"
    )
    assert told[-1].action == "training goes on as it is: nothing else leads elsewhere"
    assert result["digest_per_rank"] == uninterrupted(4, *TRAINING).digest_per_rank


def test_where_there_is_nothing_else_training_goes_on_and_says_so(tmp_path: Path) -> None:
    training = (*TRAINING, "ckpt.every_iters=3")
    with ElasticJob(4, tmp_path, *training, ckpt="gemini", setup=functools.partial(_diverge, 8)) as job:
        job.order(0, Phase.BACKWARD, iteration=7)
        result = job.wait()
    (told,) = events_of(job.run, LossNotFinite, 1)
    assert told.action == "training goes on as it is: nothing else leads elsewhere"
    assert result["digest_per_rank"] == uninterrupted(4, *TRAINING).digest_per_rank


def test_long_after_a_load_the_loss_is_training_s_own(tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, *TRAINING, *GEMINI, ckpt="gemini", setup=functools.partial(_diverge, 9)) as job:
        job.order(0, Phase.BACKWARD, iteration=7)
        job.wait()
    assert len(events_of(job.run, Rejoined, 1)) == 1
    assert not events_of(job.run, LossNotFinite, 1)


@pytest.mark.parametrize("model", [(), ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")])
def test_a_checkpoint_that_is_no_good_is_used_once_without_guards_too(model: tuple[str, ...], tmp_path: Path) -> None:
    dense = (*model, "ckpt=dense", "ckpt.every_iters=2")
    settings = compose_settings((*fast(*dense, "train.iterations=8"), f"run.dir={tmp_path}"))
    with pytest.raises(RankFailedError):
        run_ranks(2, _save_a_bad_one_and_die, settings, tmp_path)

    result = train(2, tmp_path, *dense, "train.iterations=8")

    (told,) = events_of(tmp_path, LossNotFinite)
    assert (told.iteration, Path(told.source.split(" ")[0]).name) == (5, "iter_0000004")
    assert [event.iteration for event in events_of(tmp_path, StateResumed)] == [4, 2]
    assert [event.iteration for event in events_of(tmp_path, CheckpointSaved)] == [2, 4, 4, 6, 8]
    assert result["digest_per_rank"] == uninterrupted(2, *model, "train.iterations=8").digest_per_rank


def _save_a_bad_one_and_die(settings: Settings, folder: Path) -> None:
    start_save = MegatronDurableState.start_save

    def start_bad_save(self: MegatronDurableState, directory: Path, iteration: int) -> None:
        if iteration == 4:
            for chunk in self._state.model:
                for parameter in chunk.parameters():
                    parameter.data.fill_(math.nan)
        start_save(self, directory, iteration)

    MegatronDurableState.start_save = start_bad_save
    kill = Kill(ranks=(0, 1), iteration=5, phase="start")
    run(settings, store=rank_store(), around_hooks=lambda hooks: KillingHooks(hooks, kill, folder))
