"""The first promise: a run that was killed and resumed ends, bit for bit, where the uninterrupted one ends.

Compared are the digest of every rank's parameters, master weights, moments, step counts, buffers, loss scaler and RNG
states, and the loss of every iteration. Dropout is on throughout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_ckpt.events import CheckpointSkipped, IterationCommitted, StateResumed
from tests.ranks import RankFailedError
from tests.training import Kill, events_of, losses, train

DENSE = ("ckpt=dense", "ckpt.every_iters=2", "train.iterations=5")

VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "two processes": (2, ()),
    "eight processes": (8, ("train.global_batch_size=16",)),
    "four stages": (4, ("parallel.pp=4", "model.num_layers=4")),
    "fp32": (4, ("precision=fp32",)),
    "fp16 with skipped steps": (
        4,
        ("precision=fp16", "precision.initial_loss_scale=262144.0", "precision.loss_scale_hysteresis=1"),
    ),
    "fp16, every step skipped": (4, ("precision=fp16", "precision.initial_loss_scale=4294967296.0")),
    "fp16, every step skipped, optimizer not sharded": (
        4,
        ("precision=fp16", "precision.initial_loss_scale=4294967296.0", "train.distributed_optimizer=false"),
    ),
    "optimizer not sharded": (4, ("train.distributed_optimizer=false",)),
    "fp32, optimizer not sharded": (4, ("train.distributed_optimizer=false", "precision=fp32")),
    "aux-loss-free bias": (4, ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")),
    "global aux loss": (4, ("model.moe_balancing=global_aux_loss",)),
    "shared experts": (4, ("model.shared_expert_ffn_hidden_size=32",)),
    "no experts on the first stage": (4, ("model.num_dense_layers=1", "model.dense_ffn_hidden_size=64")),
    "tied embeddings": (4, ("model.tied_embeddings=true",)),
    "capacity": (4, ("model.moe_capacity_factor=1.0", "model.moe_pad_to_capacity=true")),
    "full recompute": (4, ("train.recompute=full",)),
    "no clipping": (4, ("train.clip_grad=0",)),
    "GPT style": (
        4,
        (
            "model.position_embedding=learned",
            "model.normalization=LayerNorm",
            "model.activation=gelu",
            "model.linear_bias=true",
        ),
    ),
    "dense model, tensor parallel": (4, ("model.num_experts=0", "parallel.ep=1", "parallel.tp=2")),
    "asynchronous save": (4, ("ckpt.async_save=true",)),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[int, float]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = train(4, folder, *DENSE)
    return result, losses(folder)


@pytest.mark.parametrize(("world_size", "overrides"), VARIANTS.values(), ids=VARIANTS.keys())
def test_resumed_run_equals_the_uninterrupted_one(world_size: int, overrides: tuple[str, ...], tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    expected = train(world_size, whole, *DENSE, "ckpt.keep=9", *overrides)
    shutil.copytree(whole, resumed)
    for later in ("iter_0000004", "iter_0000005"):
        shutil.rmtree(resumed / "checkpoints" / later)

    result = train(world_size, resumed, *DENSE, *overrides)

    assert [event.iteration for event in events_of(resumed, StateResumed)] == [2]
    assert result["digest_per_rank"] == expected["digest_per_rank"]
    assert result["eval_loss"] == expected["eval_loss"]
    assert losses(resumed) == losses(whole)


def test_fp16_variants_really_skip_steps(tmp_path: Path) -> None:
    some = VARIANTS["fp16 with skipped steps"][1]
    every = VARIANTS["fp16, every step skipped"][1]
    train(4, tmp_path / "some", "train.iterations=5", *some)
    train(4, tmp_path / "every", "train.iterations=5", *every)
    skipped = [event.skipped for event in events_of(tmp_path / "some", IterationCommitted)]
    assert skipped[0]
    assert not skipped[-1]
    assert all(event.skipped for event in events_of(tmp_path / "every", IterationCommitted))


def test_the_same_command_twice_ends_in_the_same_digest(tmp_path: Path, uninterrupted: tuple[dict, dict]) -> None:
    assert train(4, tmp_path, *DENSE)["digest_per_rank"] == uninterrupted[0]["digest_per_rank"]


def test_saving_does_not_change_training(tmp_path: Path, uninterrupted: tuple[dict, dict]) -> None:
    result = train(4, tmp_path, "ckpt=none", "train.iterations=5")
    assert result["digest_per_rank"] == uninterrupted[0]["digest_per_rank"]


@pytest.mark.parametrize(
    ("ranks", "iteration", "phase", "resumes_after"),
    [
        ((0, 1, 2, 3), 1, "gradients", None),  # before anything was saved: from the beginning
        ((0, 1, 2, 3), 3, "start", 2),
        ((0, 1, 2, 3), 3, "gradients", 2),
        ((0, 1, 2, 3), 4, "before-save", 2),
        ((0, 1, 2, 3), 4, "while-saving", 2),
        ((0, 1, 2, 3), 4, "after-save", 4),
        ((0, 1, 2, 3), 5, "after-save", 5),
        ((0,), 4, "while-saving", 2),
        ((3,), 3, "gradients", 2),
    ],
)
def test_killed_run_resumes_exactly(
    ranks: tuple[int, ...],
    iteration: int,
    phase: str,
    resumes_after: int | None,
    tmp_path: Path,
    uninterrupted: tuple[dict, dict[int, float]],
) -> None:
    with pytest.raises(RankFailedError, match="died"):
        train(4, tmp_path, *DENSE, kill=Kill(ranks=ranks, iteration=iteration, phase=phase))

    result = train(4, tmp_path, *DENSE)

    assert [event.iteration for event in events_of(tmp_path, StateResumed)] == (
        [resumes_after] if resumes_after else []
    )
    assert result["faults_survived"] == 1
    assert result["digest_per_rank"] == uninterrupted[0]["digest_per_rank"]
    unlogged = {iteration} if phase == "after-save" else set()  # died between its save and its event
    assert losses(tmp_path) == {i: loss for i, loss in uninterrupted[1].items() if i not in unlogged}
    torn = [event.source for event in events_of(tmp_path, CheckpointSkipped)]
    assert [Path(source).name for source in torn] == (["iter_0000004"] if phase == "while-saving" else [])
