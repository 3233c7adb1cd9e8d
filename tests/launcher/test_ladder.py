"""A source that passes every check and is no good all the same: the loss tells, and all ranks go one step down."""

from __future__ import annotations

import functools
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.config import Settings, compose_settings
from launcher.loop import StageRunner
from launcher.run import run
from moe_ckpt.adapters.megatron_durable import MegatronDurableState
from moe_ckpt.events import CheckpointSaved, LossNotFinite, Rejoined, StateResumed
from moe_ckpt.store.disk import MARKER
from moe_ckpt.store.local_disk import LocalDisk
from moe_ckpt.store.snapshot import SnapshotEngine
from moe_ckpt.types import Phase
from tests.elastic import ElasticJob
from tests.ranks import RankFailedError, rank_store, run_ranks
from tests.references import outcome_of, uninterrupted
from tests.training import Kill, KillingHooks, events_of, fast, train

TRAINING = ("train.iterations=12",)
GEMINI = ("ckpt.every_iters=3", "ckpt.durable_every_iters=4", "ckpt.async_save=false")


def _spoil(window_start: int) -> None:
    """Let rank 3's snapshot be NaN before anything of it is checksummed."""
    finish = SnapshotEngine._finish

    def finish_spoiled(self: SnapshotEngine, unsealed: Any) -> Any:
        header = unsealed.snapshot.header
        if (header.window_start, header.shard.global_rank) == (window_start, 3):
            unsealed.snapshot.payload.fill_(0xFF)
        return finish(self, unsealed)

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
        run_ranks(2, _save_a_bad_one_and_die, settings, tmp_path, math.nan)

    result = train(2, tmp_path, *dense, "train.iterations=8")

    (told,) = events_of(tmp_path, LossNotFinite)
    assert (told.iteration, Path(told.source.split(" ")[0]).name) == (5, "iter_0000004")
    assert [event.iteration for event in events_of(tmp_path, StateResumed)] == [4, 2]
    assert [event.iteration for event in events_of(tmp_path, CheckpointSaved)] == [2, 4, 4, 6, 8]
    assert result["digest_per_rank"] == uninterrupted(2, *model, "train.iterations=8").digest_per_rank


def _save_a_bad_one_and_die(settings: Settings, folder: Path, by: float) -> None:
    """Add to all weights as those after iteration 4 are saved; the next iteration is the last."""
    start_save = MegatronDurableState.start_save

    def start_bad_save(self: MegatronDurableState, directory: Path, iteration: int) -> None:
        if iteration == 4:
            for chunk in self._state.model:
                for parameter in chunk.parameters():
                    parameter.data.add_(by)
        start_save(self, directory, iteration)

    MegatronDurableState.start_save = start_bad_save
    kill = Kill(ranks=(0, 1), iteration=5, phase="start")
    run(settings, store=rank_store(), around_hooks=lambda hooks: KillingHooks(hooks, kill, folder))


def _make_four_wrong_and_tell_in_nine() -> None:
    """Let rank 3's snapshot at 4 be wrong in one bit, and its loss NaN when it first comes to 9; nobody kills it."""
    finish = SnapshotEngine._finish

    def finish_wrong(self: SnapshotEngine, unsealed: Any) -> Any:
        header = unsealed.snapshot.header
        if (header.window_start, header.shard.global_rank) == (4, 3):
            unsealed.snapshot.payload[0].bitwise_xor_(1)
        return finish(self, unsealed)

    SnapshotEngine._finish = finish_wrong
    _diverge_once(9, rank=3)


def _diverge_once(at_iteration: int, rank: int) -> None:
    """Let an iteration's loss be NaN by this rank when it first comes in its process."""
    train_on, seen = StageRunner.train_on, set[int]()

    def train_on_nothing(self: StageRunner, iteration: int) -> list[torch.Tensor]:
        losses = train_on(self, iteration)
        is_bad = (iteration, dist.get_rank()) == (at_iteration, rank) and iteration not in seen
        seen.add(iteration)
        return [loss * math.nan for loss in losses] if is_bad else losses

    StageRunner.train_on = train_on_nothing


@pytest.mark.parametrize("ckpt", ["gemini", "checkfreq"])
def test_what_was_saved_since_a_load_that_was_no_good_is_not_used(ckpt: str, tmp_path: Path) -> None:
    """In 9 there are later ones in memory, in a checkpoint and, of checkfreq, on disks. A rank dies after the load."""
    overrides = ("ckpt.every_iters=2", "ckpt.durable_every_iters=3", "ckpt.async_save=false", "runtime.suspect_iters=5")
    setup = _make_four_wrong_and_tell_in_nine
    with ElasticJob(4, tmp_path, *TRAINING, *overrides, ckpt=ckpt, setup=setup) as job:
        job.order(0, Phase.BACKWARD, iteration=6)
        job.order(2, Phase.REDUCE, iteration=4, skip=1)
        result = job.wait()
    assert job.orders_obeyed == 2
    assert result["digest_per_rank"] == uninterrupted(4, *TRAINING).digest_per_rank
    assert [event.iteration for event in events_of(job.run, Rejoined, 1)] == [4, 3]
    (told,) = events_of(job.run, LossNotFinite, 1)
    assert (told.iteration, told.source) == (9, "host memory at iteration 4")
    assert told.action == f"back to {job.run}/checkpoints/iter_0000003 at iteration 3"
    (resumed,) = events_of(job.run, StateResumed, 1)
    not_trusted = [reason.split(" at ")[0] for reason in resumed.passed_over if reason.endswith(": not trusted")]
    on_disk = ["local disk"] if ckpt == "checkfreq" else []
    assert sorted(not_trusted) == sorted([f"{job.run}/checkpoints/iter_0000006", *on_disk])


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_what_was_saved_since_a_load_is_not_used_without_guards_either(asynchronous: str, tmp_path: Path) -> None:
    dense = ("ckpt=dense", "ckpt.every_iters=2", "ckpt.keep=3", "train.iterations=8", f"run.dir={tmp_path}")
    with pytest.raises(RankFailedError):
        run_ranks(2, _save_a_bad_one_and_die, compose_settings(fast(*dense)), tmp_path, 1e-3)

    again = compose_settings(fast(*dense, "runtime.suspect_iters=3", f"ckpt.async_save={asynchronous}"))
    result = run_ranks(2, _tell_in_seven, again)[0]

    assert [event.iteration for event in events_of(tmp_path, StateResumed)] == [4, 2]
    assert [event.iteration for event in events_of(tmp_path, CheckpointSaved)] == [2, 4, 6, 4, 6, 8]
    assert result["digest_per_rank"] == uninterrupted(2, "train.iterations=8").digest_per_rank


def _tell_in_seven(settings: Settings) -> dict[str, Any]:
    _diverge_once(7, rank=1)
    return run(settings, store=rank_store())


def _die_while_loading(owner: type, name: str, marker: Path) -> None:
    """Let rank 3's loss be NaN in iteration 7, until rank 2 dies in its first load; a checkpoint is no more then."""
    load, train_on = getattr(owner, name), StageRunner.train_on

    def load_or_die(self: Any, source: Any, *arguments: Any) -> Any:
        if dist.get_rank() == 2 and not marker.exists():
            marker.touch()
            if owner is MegatronDurableState:
                (source / MARKER).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return load(self, source, *arguments)

    def train_on_nothing(self: StageRunner, iteration: int) -> list[torch.Tensor]:
        is_bad = (iteration, dist.get_rank()) == (7, 3) and not marker.exists()
        return [loss * math.nan if is_bad else loss for loss in train_on(self, iteration)]

    setattr(owner, name, load_or_die)
    StageRunner.train_on = train_on_nothing


@pytest.mark.parametrize(
    ("owner", "name", "overrides", "back_to", "loaded"),
    [
        (MegatronDurableState, "load", (*GEMINI, "ckpt.replicas=0"), [6, 6], []),
        (LocalDisk, "restore", ("ckpt.every_iters=3", "ckpt.disk_every_iters=3"), [6, 3], ["local disk"]),
    ],
    ids=["a checkpoint", "a local disk"],
)
def test_a_rank_dies_while_all_step_down(
    owner: type, name: str, overrides: tuple[str, ...], back_to: list[int], loaded: list[str], tmp_path: Path
) -> None:
    """Until a checkpoint is loaded memory is as it was, and serves where that is lost; a disk goes through memory."""
    setup = functools.partial(_die_while_loading, owner, name, tmp_path / "died")
    with ElasticJob(4, tmp_path, *TRAINING, *overrides, ckpt="gemini", setup=setup) as job:
        job.order(0, Phase.BACKWARD, iteration=7)
        result = job.wait()
    assert [event.iteration for event in events_of(job.run, Rejoined, 1)] == back_to
    assert [event.source for event in events_of(job.run, StateResumed, 1)] == loaded
    assert outcome_of(job.run, result) == uninterrupted(4, *TRAINING)
